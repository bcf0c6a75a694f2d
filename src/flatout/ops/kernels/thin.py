"""Gradients of a layer's adapters: thin products over many tokens, added to what is there.

    dA += s · gᵀ x          [R, I]           g = dy B
    dB += dyᵀ u             [O_p, R_p]       u = s · x Aᵀ, for each part p

Two ways, one result. By cuBLAS, one product for A and one for each part of B. Or all of them by one kernel of ours,
which reads x and dy once, in strips of columns, each by several programs that add their shares up atomically. Which is
faster depends on how well the library splits the long sum, so the first call of each shape tries both. Atomic additions
come in any order: where torch is told to be deterministic, cuBLAS does it.

Shape legend: N tokens, I inputs, O outputs, R ranks of all parts, P parts, T tiles; rows may be apart.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.cublaslt import milliseconds
from flatout.ops.kernels.launch import multiprocessors
from flatout.ops.lora import LoraLayout, wide_product

_COLUMNS, _ROWS, _WARPS, _STAGES = 128, 64, 4, 3
_MOST_RANKS = 64  # of a tile
_TRIALS = 3


@triton.jit
def _gradients(
    x_ptr, g_ptr, dy_ptr, u_ptr, out_ptr, table_ptr, scales_ptr, rows, share, x_stride, dy_stride, u_stride,
    EXACT: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    table_ptr += tile * 8
    of_b = tl.load(table_ptr) == 1
    column, columns = tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    first, rank = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    if ALIGNED:  # a number from memory could be any, and loads would be of one value each
        column, columns = tl.multiple_of(column, 8), tl.multiple_of(columns, 8)
        first, rank = tl.multiple_of(first, 8), tl.multiple_of(rank, 8)
    # One loop for both, since each loop would have shared memory of its own.
    data_ptr, data_stride = tl.where(of_b, dy_ptr, x_ptr), tl.where(of_b, dy_stride, x_stride)
    thin_ptr, thin_stride = tl.where(of_b, u_ptr, g_ptr) + first, tl.where(of_b, u_stride, dy_stride)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    lane, ranks = column + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    total = tl.zeros((COLUMNS, RANKS), tl.float32)
    for at in range(start, end, ROWS):
        row = at + tl.arange(0, ROWS)
        alive, place = (row < end)[:, None], row.to(tl.int64)[:, None]
        data = tl.load(data_ptr + place * data_stride + lane[None, :], alive & (lane < columns)[None, :], 0.0)
        thin = tl.load(thin_ptr + place * thin_stride + ranks[None, :], alive & (ranks < rank)[None, :], 0.0)
        if EXACT:
            total += tl.dot(tl.trans(data.to(tl.float32)), thin.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(tl.trans(data), thin)
    out_ptr += tl.load(table_ptr + 5)
    place = lane[:, None] * tl.load(table_ptr + 6) + ranks[None, :] * tl.load(table_ptr + 7)
    total *= tl.load(scales_ptr + tile)
    tl.atomic_add(out_ptr + place, total, (lane < columns)[:, None] & (ranks < rank)[None, :], sem="relaxed")


@functools.lru_cache(maxsize=4096)
def _tiles(
    layout: LoraLayout, inputs: int, places: tuple[int, ...], device: torch.device, of_b: bool
) -> tuple[Tensor, Tensor, int, int, bool]:
    """(table [T, 8], scales [T], ranks of the widest, T, whether all begins and ends at multiples of 8).

    `places` are those of the gradients, in elements from A's on. Without inputs there are no tiles of A.
    """
    rows: list[list[int]] = []
    scales: list[float] = []

    def strips(of_b: int, first: int, end: int, low: int, high: int, place: int, steps: tuple[int, int], scale: float):
        """Columns from `first` to `end` of x or dy, with the ranks from `low` to `high` of g or u."""
        for rank in range(low, high, _MOST_RANKS):
            many = min(_MOST_RANKS, high - rank)
            begin = place + (rank - low) * steps[1] - first * steps[0]
            rows.extend(
                [of_b, column, end, rank, many, begin, *steps] for column in range(first, end, _COLUMNS)
            )  # fmt: skip
            scales.extend([scale] * (len(rows) - len(scales)))

    begin = 0
    spans = layout.spans
    for index, part in enumerate(layout.parts if inputs else ()):  # ranks of equal scale share a reading of x
        last = index + 1 == len(layout.parts)
        if last or layout.parts[index + 1].scale != part.scale:
            low, high = spans[begin].start, spans[index].stop
            strips(0, 0, inputs, low, high, places[0] + low * inputs, (1, inputs), part.scale)
            begin = index + 1
    for part, span, place in zip(layout.parts, spans, places[1:], strict=True) if of_b else ():
        strips(1, part.first, part.span.stop, span.start, span.stop, place, (part.rank, 1), 1.0)
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    widest, aligned = max(row[4] for row in rows), not any(number % 8 for row in rows for number in row[1:5])
    return table, torch.tensor(scales, dtype=torch.float32, device=device), widest, len(rows), aligned


def by_our_kernel(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """Adds to gradients in fp32, each of them dense."""
    size, device, rows = totals[0].element_size(), dy_NJ.device, dy_NJ.shape[0]
    places = tuple((total.data_ptr() - totals[0].data_ptr()) // size for total in totals)
    inputs = 0 if x_NI is None else x_NI.shape[1]
    table, scales, widest, tiles, aligned = _tiles(layout, inputs, places, device, u_NR is not None)
    x_NI, u_NR = dy_NJ if x_NI is None else x_NI, dy_NJ if u_NR is None else u_NR  # one that no tile reads
    shares = max(1, min(triton.cdiv(rows, 4 * _ROWS), triton.cdiv(6 * multiprocessors(device), tiles)))
    share = triton.cdiv(triton.cdiv(rows, shares), _ROWS) * _ROWS
    exact = dy_NJ.dtype == torch.float32 or not dy_NJ.is_cuda  # Triton's interpreter multiplies nothing narrower
    _gradients[(tiles, triton.cdiv(rows, share))](
        x_NI, dy_NJ[:, layout.outputs :], dy_NJ, u_NR, totals[0], table, scales, rows, share, x_NI.stride(0),
        dy_NJ.stride(0), u_NR.stride(0), EXACT=exact, ALIGNED=aligned, COLUMNS=_COLUMNS, ROWS=_ROWS,
        RANKS=max(16, triton.next_power_of_2(widest)), num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def by_products(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """The same by torch's products."""
    g_RN, (da_RI, *db) = dy_NJ[:, layout.outputs :].t(), totals
    scales = {part.scale for part in layout.parts}
    if x_NI is not None and len(scales) == 1:
        _add(da_RI, g_RN, x_NI, scales.pop())
    elif x_NI is not None:
        for part, span in zip(layout.parts, layout.spans, strict=True):
            _add(da_RI[span], g_RN[span], x_NI, part.scale)
    if u_NR is not None:
        for total, part, span in zip(db, layout.parts, layout.spans, strict=True):
            _add(total, dy_NJ[:, part.span].t(), u_NR[:, span], 1.0)


def _add(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale · left @ right, summed in the type of the total, which is fp32 or wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.add_(wide_product(left, right), alpha=scale)


@functools.cache
def _chosen(
    layout: LoraLayout, inputs: int, size: int, dtype: torch.dtype, device: torch.device, of_b: bool
) -> list[Callable[..., None]]:
    """The faster way for a layer and about so many rows, once it is known."""
    return []


def add_adapter_gradients(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """Adds the gradients of A and of the parts of B to `totals`; g lies in the columns of `dy_NJ` after the outputs.

    Without x there is none of A, and g need not be there; without u there is none of B.
    """
    values = (dy_NJ, x_NI, u_NR, layout)
    dense = all(total.is_contiguous() and total.dtype == torch.float32 for total in totals)
    if not dy_NJ.is_cuda or not dense or torch.are_deterministic_algorithms_enabled():
        by_products(totals, *values)
        return
    inputs, size = 0 if x_NI is None else x_NI.shape[1], dy_NJ.shape[0].bit_length()
    chosen = _chosen(layout, inputs, size, dy_NJ.dtype, dy_NJ.device, u_NR is not None)
    if not chosen:
        if torch.cuda.is_current_stream_capturing():  # nothing can be timed now
            by_products(totals, *values)
            return
        spare = [torch.zeros_like(total) for total in totals]
        ways = (by_products, by_our_kernel)
        chosen.append(min(ways, key=lambda way: milliseconds(way, (spare, *values), _TRIALS)))
    chosen[0](totals, *values)
