"""Several documents packed in one row: their layout, and causal attention within each of them.

Lengths of documents are known on the host, so all arguments of kernels (bounds, the longest document, positions, tokens
with labels) are made there, once per micro-batch, without waiting for the device. A document is a run of equal numbers
in a row; padding (-1) is one more document, whose results are not used. With a `Room` all sizes come from short lists,
and unused entries are empty, so that recorded passes can be replayed with other documents.

    reference   written out, with the mask in memory
    sdpa        torch's attention with that mask: any device, any type
    flash       torch's FlashAttention-2 over bounds: no mask, no work between documents
    fa4         FlashAttention-4 over bounds

Contract: a token's result depends on its own document only: bit for bit in the kernels that use bounds, and up to
rounding compared with the document alone in a row.

Shape legend: B rows, T tokens of a row, N = B·T, E documents, H query heads, G key/value heads, D head size, L labels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ops.attention import capped_attention, trial_inputs, varlen_attention, window_mask
from flatout.ops.reference import IGNORED, attention_reference

BY_BOUNDS = ("flash", "fa4")
_STEP = 128  # the longest document and the number of labels are rounded up to this, so that shapes repeat
_TOKENS = 256  # the smallest joined row, and the smallest difference between two lengths
_ROWS_PER_OCTAVE = 16  # lengths of joined rows per power of two: at most a sixteenth is padding
_SHARES = 8  # the number of labels is rounded up to such a part of a row
_FULL = 0.95  # rows filled to this share are not joined
Part = tuple[Tensor, Tensor, "DocumentLayout"]  # tokens, targets and where documents lie


@dataclasses.dataclass(frozen=True)
class Room:
    """Sizes that are the same in all steps of a run, so that recorded and compiled code sees few shapes.

    `joined`: the rows of a micro-batch become one row without the padding between them, for kernels that use bounds.
    Its length comes from a short list. Rows that single documents fill are not joined.
    """

    documents: int  # largest number of documents in a step
    reach: int  # tokens of the longest document
    joined: bool

    @property
    def longest(self) -> int:
        """Length of the longest document as kernels get it, rounded up."""
        return _rounded(self.reach, _STEP)

    def bounds(self, rows: int, tokens: int) -> int:
        """Number of bounds of a layout: for the largest number of documents, and for pieces of padding."""
        padding = -(-_gap(tokens) // self.longest) if self.joined else rows
        return self.documents + padding + 1


def joined_length(tokens: int) -> int:
    """The length of a joined row for `tokens` tokens."""
    length = _rounded(max(1, tokens), _TOKENS)
    return _rounded(length, _gap(length))


def _gap(length: int) -> int:
    """The difference between possible lengths of joined rows, near this length."""
    return max(_TOKENS, 2 ** ((length - 1).bit_length() - 1) // _ROWS_PER_OCTAVE)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """A batch of packed rows on the host, which is cut into micro-batches.

    Without `room` every micro-batch has the sizes that it needs.
    """

    tokens_BT: npt.NDArray[np.int64]
    documents_BT: npt.NDArray[np.int32]  # -1 is padding
    targets_BT: npt.NDArray[np.int64]
    room: Room | None = None
    stands_in: bool = False  # a dummy batch, for a process without samples in this step: its tokens do not count
    _parts: dict[tuple[int, int], Part] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens without padding."""
        return 0 if self.stands_in else int(np.count_nonzero(self.documents_BT >= 0))

    def cuts(self, micro_batch: int) -> list[slice]:
        """The rows of each micro-batch: about equal numbers, at most `micro_batch`."""
        rows = len(self.documents_BT)
        count = -(-rows // micro_batch)
        ends = [rows * number // count for number in range(count + 1)]
        return [slice(first, end) for first, end in itertools.pairwise(ends)]

    def prepare(self, micro_batch: int, *, pin: bool) -> None:
        """Makes all parts ahead of their use; `pin`: in pinned memory, for asynchronous copies."""
        for rows in self.cuts(micro_batch):
            made = self._made(rows)
            self._parts[rows.start, rows.stop] = _each(Tensor.pin_memory, made) if pin else made

    def part(self, rows: slice, device: torch.device) -> Part:
        """Tokens, targets and layout of some rows."""
        first, end, _ = rows.indices(len(self.documents_BT))
        made = self._parts.get((first, end))
        if made is None:
            made = self._made(slice(first, end))
            made = _each(Tensor.pin_memory, made) if device.type == "cuda" else made
        return made if device.type == "cpu" else _each(lambda x: x.to(device, non_blocking=True), made)

    def places(self, micro_batch: int) -> int:
        """Tokens that the device processes, padding included."""
        return sum(self._joined_length(rows) or self.documents_BT[rows].size for rows in self.cuts(micro_batch))

    def _joined_length(self, rows: slice) -> int | None:
        """The length of the joined row, or None if the rows are not joined."""
        if self.room is None or not self.room.joined:
            return None
        documents = self.documents_BT[rows]
        length = joined_length(int(np.count_nonzero(documents >= 0)))
        alone = int(documents.max()) == 0  # numbers begin with 0 in each row
        return None if alone and length >= _FULL * documents.size else length

    def _made(self, rows: slice) -> Part:
        tokens, targets, documents = self.tokens_BT[rows], self.targets_BT[rows], self.documents_BT[rows]
        room, length = self.room, self._joined_length(rows)
        if room is not None and length is not None:
            tokens, targets, documents = _joined(tokens, targets, documents, length, room.longest)
        elif room is not None:
            room = dataclasses.replace(room, joined=False)
        layout = lay_out(documents, targets, torch.device("cpu"), room)
        return torch.from_numpy(tokens), torch.from_numpy(targets), layout


def _each(function: Callable[[Tensor], Tensor], part: Part) -> Part:
    tokens, targets, layout = part
    return function(tokens), function(targets), layout.each(function)


def _joined(
    tokens_BT: npt.NDArray[np.int64],
    targets_BT: npt.NDArray[np.int64],
    documents_BT: npt.NDArray[np.int32],
    length: int,
    longest: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The same documents in one row, with padding at the end in pieces of at most `longest` tokens."""
    inside = documents_BT >= 0
    # Numbers start at 0 in each row, but neighbours in the joined row need different ones.
    numbers = documents_BT + np.arange(len(documents_BT), dtype=np.int32)[:, None] * documents_BT.shape[1]
    count = int(np.count_nonzero(inside))
    tokens_T, targets_T = np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    documents_T = np.empty(length, dtype=np.int32)
    tokens_T[:count], targets_T[:count], documents_T[:count] = tokens_BT[inside], targets_BT[inside], numbers[inside]
    documents_T[count:] = -1 - np.arange(length - count) // longest
    return tokens_T[None], targets_T[None], documents_T[None]


@dataclasses.dataclass(frozen=True)
class DocumentLayout:
    """The layout of documents in packed rows, made by `lay_out`; tensors are on the device.

    To replay a recorded pass with other documents, copy their tensors into those of the recording; `sizes` must agree.
    """

    documents_BT: Tensor  # int32: a number for each document of the batch
    positions_BT: Tensor  # int64, from 0 in each document; 0 in padding, which may be longer than a context
    bounds_E: Tensor  # int32, E + 1 of them, over all rows one after the other; empty documents may follow
    longest: int  # at least the length of the longest document, padding included
    reach: int  # positions needed: the length of the longest document, without padding
    labelled_L: Tensor | None  # int64: indices of tokens with a label, filled up with a token without one
    alone: bool = False  # each row has one document followed by padding, so plain causal attention is the same

    @functools.cached_property
    def in_one_row(self) -> "DocumentLayout":
        """The same documents with all rows joined to one."""
        flat = {"documents_BT": self.documents_BT.flatten()[None], "positions_BT": self.positions_BT.flatten()[None]}
        return dataclasses.replace(self, **flat, alone=self.alone and len(self.documents_BT) == 1)

    @property
    def visible_B1TS(self) -> Tensor:
        """The mask, for kernels that need one; made once for all layers."""
        # A compiler cannot trace the Python cache, and shares the mask between layers by itself.
        return document_mask(self.documents_BT)[:, None] if torch.compiler.is_compiling() else self._kept_mask

    @functools.cached_property
    def _kept_mask(self) -> Tensor:
        return document_mask(self.documents_BT)[:, None]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors: what differs between layouts of the same sizes."""
        return tuple(value for value in self._values().values() if isinstance(value, Tensor))

    @property
    def sizes(self) -> tuple[object, ...]:
        """All that the launch of kernels depends on."""
        values = self._values()
        values.pop("reach")  # only the host uses it
        return tuple(value.shape if isinstance(value, Tensor) else value for value in values.values())

    def each(self, function: Callable[[Tensor], Tensor]) -> "DocumentLayout":
        """The layout with `function` applied to every tensor."""
        tensors = {name: value for name, value in self._values().items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **{name: function(value) for name, value in tensors.items()})

    def _values(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _added(self) -> dict[tuple[torch.dtype, int | None], Tensor]:
        return {}

    def added_B1TS(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The mask, of a window or of whole documents, as values to add to scores. From a boolean mask torch would make
        these in every layer and save them all for backward."""
        kind = dtype, window
        if kind not in self._added:
            visible = _near(self.visible_B1TS, window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._added[kind] = zeros.masked_fill_(~visible, float("-inf"))
        return self._added[kind]


def lay_out(
    documents_BT: npt.NDArray[np.int32],
    targets_BT: npt.NDArray[np.int64] | None,
    device: torch.device,
    room: Room | None = None,
) -> DocumentLayout:
    """The layout of rows in which a document is a run of one number.

    With targets it includes the tokens with labels, and the head works on these only. They are padded with a token
    without a label. If there is no such token, or padding makes them as many as all tokens, the head works on all.
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
    longest, reach, unit = int(lengths.max()), int(positions.max()) + 1, _STEP
    if room is not None:
        if reach > room.reach or (room.joined and longest > room.longest):
            raise ValueError(f"a document of {max(reach, longest)} tokens where {room.reach} are the most")
        empty = room.bounds(rows, rows * length) - len(bounds)
        if empty < 0:
            raise ValueError(f"{len(bounds) - 1} documents where a step has {room.documents}")
        bounds = np.append(bounds, np.full(empty, rows * length))
        longest, reach = room.longest if room.joined else length, room.reach
        unit = max(_STEP, _rounded(-(-rows * length // _SHARES), _STEP // 2))

    def there(values: npt.NDArray[np.generic], kind: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(kind)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    labelled = None if targets_BT is None else _places(targets_BT.reshape(-1), unit)
    return DocumentLayout(
        documents_BT=there(numbers.reshape(rows, length), torch.int32),
        positions_BT=there(positions.reshape(rows, length), torch.int64),
        bounds_E=there(bounds, torch.int32),
        longest=longest,
        reach=reach,
        labelled_L=None if labelled is None else there(labelled, torch.int64),
        alone=_alone(documents_BT),
    )


def _alone(documents_BT: npt.NDArray[np.int32]) -> bool:
    real_BT = documents_BT >= 0
    same_BT = (documents_BT == documents_BT[:, :1]) | ~real_BT
    return bool(same_BT.all() and real_BT[:, 0].all() and (real_BT[:, 1:] <= real_BT[:, :-1]).all())


def _places(targets_N: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.int64] | None:
    with_label = np.flatnonzero(targets_N != IGNORED)
    without = np.flatnonzero(targets_N == IGNORED)
    places = _rounded(max(1, len(with_label)), unit)
    if places >= len(targets_N):
        return None
    return np.append(with_label, np.full(places - len(with_label), without[0]))


def document_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    layout: DocumentLayout,
    *,
    backend: str,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention of every token to itself and those before it in its document, or to the last `window` of these."""
    window = None if window is None or window >= layout.longest else window
    if cap is not None:
        return capped_attention(q_BHTD, k_BGTD, v_BGTD, _near(layout.visible_B1TS, window), cap)
    if backend in BY_BOUNDS:
        longest = _rounded(layout.longest, _STEP)
        return varlen_attention(q_BHTD, k_BGTD, v_BGTD, layout.bounds_E, longest, kernel=backend, window=window)
    if backend == "reference":
        return attention_reference(q_BHTD, k_BGTD, v_BGTD, visible=_near(layout.visible_B1TS, window))
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    if torch.compiler.is_compiling():
        mask_B1TS = _near(layout.visible_B1TS, window)
    else:
        kind = q_BHTD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_BHTD.dtype
        mask_B1TS = layout.added_B1TS(dtype, window)
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, attn_mask=mask_B1TS, enable_gqa=grouped)


def document_failure(
    backend: str, device: torch.device, dtype: torch.dtype, *, heads: int, groups: int, size: int
) -> str | None:
    """Why this kernel cannot train packed documents here, or None. It is tried on three documents, both passes."""
    lengths = (70, 1, 185)
    layout = lay_out(np.repeat(np.arange(3, dtype=np.int32), lengths)[None], None, device)
    parts = trial_inputs(device, dtype, heads, groups, size, sum(lengths))
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
    except Exception as error:  # noqa: BLE001 - any error of the kernel is the reason
        return f"{backend} failed in packed documents: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    return None


def document_mask(documents_BT: Tensor) -> Tensor:
    """True where token t sees token s: [B, T, S]."""
    length = documents_BT.shape[1]
    earlier_TS = torch.ones(length, length, dtype=torch.bool, device=documents_BT.device).tril()
    return (documents_BT[:, :, None] == documents_BT[:, None, :]) & earlier_TS


def _near(visible_B1TS: Tensor, window: int | None) -> Tensor:
    if window is None:
        return visible_B1TS
    length = visible_B1TS.shape[-1]
    return visible_B1TS & window_mask(length, length, window, visible_B1TS.device)
