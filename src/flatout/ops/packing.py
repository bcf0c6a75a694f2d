"""Queries, keys and values, or their gradients, side by side in one buffer: who finds them so need not copy them.

Shape legend: B batch, T positions, H heads of one part, A heads of all parts, D head size.
"""

from collections.abc import Sequence

from torch import Tensor


def packed(parts_BTHD: Sequence[Tensor]) -> Tensor | None:
    """The [B, T, A, D] buffer of which these are all the heads in their order, or None where they lie otherwise."""
    batch, positions, _, size = parts_BTHD[0].shape
    heads = sum(part.shape[2] for part in parts_BTHD)
    stride = (positions * heads * size, heads * size, size, 1)
    memory = parts_BTHD[0].untyped_storage().data_ptr()
    start = place = parts_BTHD[0].storage_offset()
    for part in parts_BTHD:
        if (part.stride(), part.storage_offset(), part.untyped_storage().data_ptr()) != (stride, place, memory):
            return None
        place += part.shape[2] * size
    return parts_BTHD[0].as_strided((batch, positions, heads, size), stride, start)
