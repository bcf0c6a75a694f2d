"""Several documents in one row: where each lies, and causal attention that stays inside it.

Idea: whoever packs documents knows their lengths on the host, so everything a kernel asks for (bounds, the longest,
positions, which tokens have labels) is made there, once per micro-batch, and nobody waits for the device. A document
is a run of equal numbers in a row; padding (-1) is one more document that nobody reads.

    reference   written out, with the mask in memory
    sdpa        torch's attention with that mask: any device, any type
    flash       torch's FlashAttention-2 over bounds: no mask, no work between documents
    fa4         FlashAttention-4 over bounds

Contract: a token's result depends on its own document only, bit for bit in the kernels that go by bounds, and to
rounding against the document alone in its row.

Shape legend: B rows, T tokens of a row, N = B·T, E documents, H query heads, G key/value heads, D head size, L labels.
"""

import dataclasses
import functools
import inspect

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.flash_attention_4 import fa4_kernels
from flatout.ops.reference import IGNORED, attention_reference

BY_BOUNDS = ("flash", "fa4")
_STEP = 128  # what kernels hear of the longest document and of labels is rounded up to this: shapes come again


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """What the host knows of a batch of packed rows, before it is cut into micro-batches."""

    documents_BT: npt.NDArray[np.int32]  # -1 is padding
    targets_BT: npt.NDArray[np.int64]

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int(np.count_nonzero(self.documents_BT >= 0))

    def layout(self, rows: slice, device: torch.device) -> "Layout":
        return lay_out(self.documents_BT[rows], self.targets_BT[rows], device)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where documents lie in packed rows. Made by `lay_out`; tensors are on the device."""

    documents_BT: Tensor  # int32: each document of the batch has a number of its own
    positions_BT: Tensor  # int64, from 0 in each document; 0 in padding, which may be longer than a context
    bounds_E: Tensor  # int32, E + 1 of them, over all rows one after the other
    longest: int  # tokens of the longest document, padding included
    reach: int  # positions that are needed: tokens of the longest document that is none
    labelled_L: Tensor | None  # int64: tokens with a label, and one without for each place that is left over
    alone: bool = False  # each row has one document, and padding after it: plain causal attention does as well
    tight: "Tight | None" = None  # the same documents without padding, where that is shorter

    @functools.cached_property
    def in_one_row(self) -> "Layout":
        """The same documents with all rows joined to one."""
        flat = {"documents_BT": self.documents_BT.flatten()[None], "positions_BT": self.positions_BT.flatten()[None]}
        return dataclasses.replace(self, **flat)

    @functools.cached_property
    def visible_B1TS(self) -> Tensor:
        """The mask, for kernels that need one; made once for all layers."""
        return document_mask(self.documents_BT)[:, None]


@dataclasses.dataclass(frozen=True)
class Tight:
    """Packed rows as one row without padding, but for what fills it up to a length that comes again."""

    places_N: Tensor  # int64: where its tokens are in the rows
    layout: Layout

    def take(self, x_BT: Tensor) -> Tensor:
        return x_BT.flatten().index_select(0, self.places_N)[None]


def lay_out(
    documents_BT: npt.NDArray[np.int32],
    targets_BT: npt.NDArray[np.int64] | None,
    device: torch.device,
    *,
    tighten: bool = True,
) -> Layout:
    """The layout of rows in which a document is a run of one number. `tighten` looks for a shorter row as well.

    With targets, the places of labels come along: the head then works on these alone. They are padded with a token that
    has no label, so where every token has one, or there are as many places as tokens, there is nothing to select.
    """
    rows, length = documents_BT.shape
    begins = np.ones((rows, length), dtype=bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts = np.flatnonzero(begins.reshape(-1))
    bounds = np.append(starts, rows * length)
    lengths = np.diff(bounds)
    inside = documents_BT.reshape(-1) >= 0
    positions = np.where(inside, np.arange(rows * length) - np.repeat(starts, lengths), 0)
    numbers = np.repeat(np.arange(len(starts)), lengths)

    def there(values: npt.NDArray[np.generic], kind: torch.dtype) -> Tensor:
        return _there(values, kind, device)

    labelled = None if targets_BT is None else _places(targets_BT.reshape(-1))
    return Layout(
        documents_BT=there(numbers.reshape(rows, length), torch.int32),
        positions_BT=there(positions.reshape(rows, length), torch.int64),
        bounds_E=there(bounds, torch.int32),
        longest=int(lengths.max()),
        reach=int(positions.max()) + 1,
        labelled_L=None if labelled is None else there(labelled, torch.int64),
        alone=_alone(documents_BT),
        tight=_tight(np.where(inside, numbers, -1), targets_BT, device) if tighten else None,
    )


def _tight(
    numbers_N: npt.NDArray[np.int64], targets_BT: npt.NDArray[np.int64] | None, device: torch.device
) -> Tight | None:
    real, padding = np.flatnonzero(numbers_N >= 0), np.flatnonzero(numbers_N < 0)
    count = -(-len(real) // _STEP) * _STEP
    if not 0 < count < len(numbers_N):
        return None
    places = np.append(real, np.full(count - len(real), padding[0]))
    targets = None if targets_BT is None else targets_BT.reshape(-1)[places][None]
    layout = lay_out(numbers_N[places][None].astype(np.int32), targets, device, tighten=False)
    return Tight(_there(places, torch.int64, device), layout)


def _there(values: npt.NDArray[np.generic], kind: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(kind)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _alone(documents_BT: npt.NDArray[np.int32]) -> bool:
    real_BT = documents_BT >= 0
    same_BT = (documents_BT == documents_BT[:, :1]) | ~real_BT
    return bool(same_BT.all() and real_BT[:, 0].all() and (real_BT[:, 1:] <= real_BT[:, :-1]).all())


def _places(targets_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    with_label = np.flatnonzero(targets_N != IGNORED)
    without = np.flatnonzero(targets_N == IGNORED)
    places = -(-max(1, len(with_label)) // _STEP) * _STEP
    if places >= len(targets_N):
        return None
    return np.append(with_label, np.full(places - len(with_label), without[0]))


def document_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, layout: Layout, *, backend: str) -> Tensor:
    """Attention of every token to those before it in its document."""
    if backend in BY_BOUNDS:
        q_NHD, k_NGD, v_NGD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD))
        attend = _flash if backend == "flash" else _FlashAttention4.apply
        y_NHD = attend(q_NHD, k_NGD, v_NGD, layout.bounds_E, -(-layout.longest // _STEP) * _STEP)
        return y_NHD.view(q_BHTD.shape[0], q_BHTD.shape[2], *y_NHD.shape[1:]).transpose(1, 2)  # pyright: ignore
    if backend == "reference":
        return attention_reference(q_BHTD, k_BGTD, v_BGTD, visible=layout.visible_B1TS)
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, attn_mask=layout.visible_B1TS, enable_gqa=grouped)


def document_failure(
    backend: str, device: torch.device, dtype: torch.dtype, *, heads: int, groups: int, size: int
) -> str | None:
    """Why this kernel cannot train packed documents here, or None. It is tried, forward and backward, on three."""
    lengths = (70, 1, 185)
    layout = lay_out(np.repeat(np.arange(3, dtype=np.int32), lengths)[None], None, device)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, sum(lengths), heads + 2 * groups, size, generator=generator).to(device, dtype)
    parts = [part.transpose(1, 2) for part in whole.split([heads, groups, groups], dim=2)]
    try:
        results = []
        for way, kind in ((backend, dtype), ("reference", torch.float32)):
            inputs = [part.detach().to(kind).requires_grad_() for part in parts]
            y_BHTD = document_attention(inputs[0], inputs[1], inputs[2], layout, backend=way)
            results.append([y_BHTD, *torch.autograd.grad(y_BHTD.float().square().sum(), inputs)])
        for mine, theirs in zip(*results, strict=True):
            difference = float((mine.float() - theirs).abs().max())
            if not difference <= 0.03 * (1 + float(theirs.abs().max())):
                return f"{backend} is {difference:.2g} away from the reference in packed documents"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a foreign kernel raises is the reason we are looking for
        return f"{backend} failed in packed documents: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    return None


def document_mask(documents_BT: Tensor) -> Tensor:
    """True where token t may look at token s: [B, T, S]."""
    length = documents_BT.shape[1]
    earlier_TS = torch.ones(length, length, dtype=torch.bool, device=documents_BT.device).tril()
    return (documents_BT[:, :, None] == documents_BT[:, None, :]) & earlier_TS


def _flash(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bounds_E: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads as they come; later ones want to be asked for it.
    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters and q_NHD.shape[1] != k_NGD.shape[1]
    how = {"window_size": (-1, 0), **({"enable_gqa": True} if asked else {})}
    return varlen_attn(q_NHD, k_NGD, v_NGD, bounds_E, bounds_E, longest, longest, **how)  # pyright: ignore


class _FlashAttention4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_NHD, k_NGD, v_NGD, bounds_E, longest):
        how = {"cu_seqlens_q": bounds_E, "cu_seqlens_k": bounds_E, "max_seqlen_q": longest, "max_seqlen_k": longest}
        y_NHD, lse = fa4_kernels()[0](q_NHD, k_NGD, v_NGD, causal=True, return_lse=True, **how)[:2]
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, y_NHD, lse)
        ctx.how = how
        return y_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_NHD):
        *parts, y_NHD, lse = ctx.saved_tensors
        gradients = fa4_kernels()[1](*parts, y_NHD, dy_NHD.contiguous(), lse, causal=True, **ctx.how)
        return *gradients[:3], None, None
