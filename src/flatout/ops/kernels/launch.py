"""Shared by kernels that stream through memory: numbers of programs, warps and rows; column sums; scaling."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version


def columns_of(width: int) -> tuple[int, int, int]:
    """(columns in a block, rows at once, warps) for a kernel that holds whole rows in registers.

    One warp takes 1,024 values. If a row fits one warp, no warp waits for another: on an H200 the largest gain of all.
    """
    block = int(triton.next_power_of_2(width))
    rows = max(1, 4096 // block)
    return block, rows, min(16, max(1, block * rows // 1024))


def programs_for(rows: int, device: torch.device) -> int:
    """Programs for a kernel in which each program sums over a share of the rows: a few per multiprocessor."""
    return max(1, min(4 * multiprocessors(device), rows))


def share_of(rows: int, programs: int, at_once: int) -> int:
    """Rows of each program, a multiple of those that it takes at once."""
    return int(triton.cdiv(triton.cdiv(rows, programs), at_once)) * at_once


def exact_products(x: Tensor) -> bool:
    """Whether products of a kernel are in fp32. Triton's interpreter cannot multiply narrower types."""
    return x.dtype == torch.float32 or not x.is_cuda


def dense(x: Tensor) -> Tensor:
    """x, copied if its last axis is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x_BHTD: Tensor | None) -> tuple[int, int, int]:
    """Strides of all axes but the last, zeros for None."""
    return (0, 0, 0) if x_BHTD is None else (x_BHTD.stride(0), x_BHTD.stride(1), x_BHTD.stride(2))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on a CPU, where Triton's interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _fold(partial_ptr, total_ptr, programs, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask, 0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), inside)


def fold(partial: Tensor) -> Tensor:
    """partial.sum(0) of the programs' fp32 sums; torch's own sum is slow for such shapes."""
    programs, *shape = partial.shape
    columns = partial.numel() // programs
    total = torch.empty(shape, dtype=torch.float32, device=partial.device)
    _fold[(triton.cdiv(columns, 32),)](partial, total, programs, columns, ROWS=64, BLOCK=32, num_warps=4)
    return total


@triton.jit
def _scale(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < count, 0.0).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), place < count)


def scale_in_place(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor for a dense tensor and a scalar on the device; torch takes four times as long."""
    count, block = x.numel(), 4096
    _scale[(triton.cdiv(count, block),)](x, factor, count, BLOCK=block, num_warps=8)
    increment_version(x)  # torch does not notice writes of our kernels
    return x
