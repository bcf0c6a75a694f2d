"""How many programs, warps and rows a kernel that streams through memory should have."""

import functools

import torch
import triton


def columns_of(width: int) -> tuple[int, int, int]:
    """(columns in a block, rows at once, warps) for a kernel that holds whole rows in registers.

    About 2,048 values at once keep enough loads in flight without spilling.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, 2048 // block)
    return block, rows, min(16, max(4, block * rows // 512))


def programs_for(rows: int, at_once: int, device: torch.device) -> int:
    """Programs for a kernel whose every program sums over its share of rows: a few per multiprocessor, none idle."""
    return max(1, min(8 * multiprocessors(device), triton.cdiv(rows, at_once)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
