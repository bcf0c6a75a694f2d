"""All adapters of a model into their joined weights (ops/lora.py), by one kernel instead of hundreds of small copies.

A part is a piece of the flat tensor, its factor, and where it goes. The table of parts is made once and lies on the
device; places are addresses, because every joined weight is a buffer of its own. Whoever moves one makes a new table.

Shape legend: P parts, 5 numbers of each: place in the flat tensor, rows, columns, address, stride from row to row.
"""

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@triton.jit
def _spread(flat_ptr, table_ptr, scales_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    table_ptr += part * 5
    first = tl.load(table_ptr)
    rows, columns = tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    address, stride = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    if KIND == 0:
        out_ptr = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        out_ptr = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == 2:
        out_ptr = address.to(tl.pointer_type(tl.float16))
    else:
        out_ptr = address.to(tl.pointer_type(tl.float64))
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < rows * columns
    values = tl.load(flat_ptr + first + place, mask, 0.0) * tl.load(scales_ptr + part)
    out = (place // columns) * stride + place % columns
    tl.store(out_ptr + out, values.to(out_ptr.dtype.element_ty), mask)


@dataclasses.dataclass(frozen=True)
class SpreadPart:
    first: int  # in the flat tensor
    place: Tensor  # [rows, columns], rows may be apart
    scale: float


class Spreading:
    """Where the parts of a flat fp32 tensor go, all of one type."""

    def __init__(self, flat: Tensor, parts: Sequence[SpreadPart]) -> None:
        rows = [[p.first, *p.place.shape, p.place.data_ptr(), p.place.stride(0)] for p in parts]
        assert all(p.place.stride(1) == 1 for p in parts)
        self.kind = _KINDS[parts[0].place.dtype]
        self.table_P5 = torch.tensor(rows, dtype=torch.int64, device=flat.device)
        self.scales_P = torch.tensor([p.scale for p in parts], dtype=torch.float32, device=flat.device)
        self.grid = (len(parts), triton.cdiv(max(p.place.numel() for p in parts), _BLOCK))

    def __call__(self, flat: Tensor) -> None:
        _spread[self.grid](flat, self.table_P5, self.scales_P, KIND=self.kind, BLOCK=_BLOCK, num_warps=4)
