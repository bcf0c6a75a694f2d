"""How many programs, warps and rows a kernel that streams through memory should have."""

import functools

import torch
import triton


def columns_of(width: int, at_once: int | None = None) -> tuple[int, int, int]:
    """(columns in a block, rows at once, warps) for a kernel that holds whole rows in registers.

    One warp takes 1,024 values: with a row of its own it never waits for another warp, which on an H200 was worth more
    than anything else.
    """
    block = triton.next_power_of_2(width)
    rows = at_once or max(1, 4096 // block)
    return block, rows, min(16, max(1, block * rows // 1024))


def programs_for(rows: int, at_once: int, device: torch.device) -> int:
    """Programs for a kernel whose every program sums over its share of rows: a few per multiprocessor, none idle."""
    return max(1, min(8 * multiprocessors(device), triton.cdiv(rows, at_once)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
