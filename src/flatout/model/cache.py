"""The cache of decoding: keys and values (or states) of every layer, and each row's length.

Contract: lengths and positions are tensors on the device, one per row. While all rows have the same length
(`Cache.level`), the host knows it too, and attention reads only the filled part of the cache. Otherwise attention uses
masks made on the device: rows of different lengths are decoded together, each as if it were alone, and no shape depends
on a length, so that a pass can be recorded. The first tokens (an empty cache) use the kernels for training.

Shape legend: B batch, T positions of this call, S positions of a cache, H query heads, G key/value heads, D head size.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.ops.attention import causal_attention, masked_attention


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Positions of the tokens of a pass with a cache."""

    positions_BT: Tensor
    fresh: bool  # the cache is empty
    filled: int | None  # filled positions of every row, with these tokens; None if only the device knows
    reach: int | None  # at least the filled positions of the longest row; None if only the device knows
    # made once for all layers
    slots: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    masks: dict[tuple[int, int | None], Tensor] = dataclasses.field(default_factory=dict)

    @property
    def places(self) -> slice | Tensor:
        """The positions; a slice if the host knows them."""
        length = self.positions_BT.shape[1]
        return self.positions_BT if self.filled is None else slice(self.filled - length, self.filled)


class LayerCache:
    """Keys and values of one layer: a ring buffer for all positions, or for as many as a window has."""

    def __init__(
        self, batch: int, groups: int, places: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k_BGSD = torch.zeros(batch, groups, places, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)
        self.done_BG = torch.zeros(batch, groups, dtype=torch.int32, device=device)  # of the kernels for decoding
        self.places = places

    def tensors(self) -> list[Tensor]:
        return [self.k_BGSD, self.v_BGSD]

    def write(self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding) -> None:
        """Stores keys and values; of more tokens than there are places, the last ones."""
        count = k_BGTD.shape[2]
        first = self.places if decoding.filled is None else (decoding.filled - count) % self.places
        if first + count <= self.places:  # contiguous places that the host knows
            self.k_BGSD[:, :, first : first + count] = k_BGTD.detach()
            self.v_BGSD[:, :, first : first + count] = v_BGTD.detach()
            return
        if self.places not in decoding.slots:
            decoding.slots[self.places] = (decoding.positions_BT[:, -self.places :] % self.places)[:, None, :, None]
        slots_B1T1 = decoding.slots[self.places]
        for kept_BGSD, x_BGTD in ((self.k_BGSD, k_BGTD), (self.v_BGSD, v_BGTD)):
            last_BGTD = x_BGTD[:, :, -self.places :].detach().to(kept_BGSD.dtype)
            kept_BGSD.scatter_(2, slots_B1T1.expand_as(last_BGTD), last_BGTD)

    def extend(
        self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All keys and values including the new ones, and the mask [B, T, S]; None: everything is visible."""
        filled, one = min(decoding.reach or self.places, self.places), k_BGTD.shape[2] == 1
        # One new token takes a free place, or that of a token outside every window. Several new tokens in a window may
        # overwrite keys that the first of them still see, so they are written after they were used.
        apart = window == self.places and not one
        if not apart:
            self.write(k_BGTD, v_BGTD, decoding)
        k_BGSD, v_BGSD = self.k_BGSD[:, :, :filled], self.v_BGSD[:, :, :filled]
        if apart:
            k_BGSD = torch.cat([k_BGSD, k_BGTD.to(k_BGSD.dtype)], dim=2)
            v_BGSD = torch.cat([v_BGSD, v_BGTD.to(v_BGSD.dtype)], dim=2)
            self.write(k_BGTD, v_BGTD, decoding)
        if one and decoding.filled is not None and window in (None, self.places):
            return k_BGSD, v_BGSD, None
        kind = self.places, window
        if kind not in decoding.masks:
            positions_BT = decoding.positions_BT
            last_B1 = positions_BT[:, :1] - 1 if apart else positions_BT[:, -1:]
            # the latest position stored in each place; below 0 if it is empty
            keys_BS = last_B1 - (last_B1 - torch.arange(filled, device=last_B1.device)) % self.places
            keys_BS = torch.cat([keys_BS, positions_BT], dim=1) if apart else keys_BS
            back_BTS = positions_BT[:, :, None] - keys_BS[:, None, :]
            seen_BTS = (back_BTS >= 0) & (keys_BS >= 0)[:, None, :]
            decoding.masks[kind] = seen_BTS if window is None else seen_BTS & (back_BTS < window)
        return k_BGSD, v_BGSD, decoding.masks[kind]

    def attend(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        decoding: Decoding,
        *,
        backend: str,
        window: int | None,
        cap: float | None = None,
    ) -> Tensor:
        """Attention of the new positions to themselves and to the cache, which is extended."""
        if decoding.fresh:
            self.write(k_BGTD, v_BGTD, decoding)
            return causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=backend, window=window, cap=cap)
        k_BGSD, v_BGSD, mask_BTS = self.extend(k_BGTD, v_BGTD, decoding, window)
        return masked_attention(q_BHTD, k_BGSD, v_BGSD, mask_BTS, cap)


class EigenstateCache:
    """The states of one layer. Its size is constant."""

    def __init__(self, batch: int, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """`dtype`: the type of products."""
        wide = torch.promote_types(dtype, torch.float32)
        self.state_BC = torch.zeros(batch, channels, dtype=wide, device=device)

    def tensors(self) -> list[Tensor]:
        return [self.state_BC]


class Cache:
    """The caches of all layers, and how many positions of each row are filled."""

    def __init__(self, layers: list[LayerCache | EigenstateCache], batch: int, room: int, device: torch.device) -> None:
        self.layers = layers
        self.room = room
        self.most = 0  # filled positions of every row, or at least those of the longest; 0 if only the device knows
        self.level = True  # all rows have the same length; set to False to join unequal rows, or to record a pass
        self.kernels = False  # single tokens go through the kernels for decoding, which need rows that are not level
        # Takes the calls of a pass in NumPy (model/row_operations.py); None: a pass in torch
        self.calls: list[Callable[[], Any]] | None = None
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.last_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # the last token of each row

    def tensors(self) -> list[Tensor]:
        return [*(x for layer in self.layers for x in layer.tensors()), self.length_B, self.last_B1]

    def rows(self, first: int, count: int, *, level: bool) -> "Cache":
        """Some rows, sharing their memory; `level`: as rows to begin anew."""
        part = copy.copy(self)
        part.level, part.most = level, 0
        part.length_B, part.last_B1 = self.length_B[first : first + count], self.last_B1[first : first + count]
        part.layers = []
        for layer in self.layers:
            own = copy.copy(layer)
            for name, x in vars(layer).items():
                if isinstance(x, Tensor):
                    setattr(own, name, x[first : first + count])
            part.layers.append(own)
        return part

    @torch.no_grad()
    def clear(self) -> None:
        """Begins all rows anew. Keys and values stay, unseen."""
        for layer in self.layers:
            if isinstance(layer, EigenstateCache):
                layer.state_BC.zero_()
        self.length_B.zero_()
        self.most = 0

    @torch.no_grad()
    def start_at(self, position: int, before: int) -> None:
        """All rows go on after `position` positions, of which the last holds the token `before`."""
        self.most = position
        self.length_B.fill_(position)
        self.last_B1.fill_(before)

    @torch.no_grad()
    def end_at(self, length_B: Tensor, last_B1: Tensor) -> None:
        """Each row has this many positions, and this last token: what is behind them stays unseen."""
        self.length_B.copy_(length_B)
        self.last_B1.copy_(last_B1)

    def begin(self, length: int) -> Decoding:
        """For a pass over the next `length` positions."""
        steps_T = torch.arange(length, device=self.length_B.device)
        filled = self.most + length if self.level else None
        reach = self.most + length if self.most else None
        return Decoding(self.length_B[:, None] + steps_T, fresh=filled == length, filled=filled, reach=reach)

    def advance(self, tokens_BT: Tensor) -> None:
        """Moves on after a pass over these tokens."""
        length = tokens_BT.shape[1]
        self.most += length if self.level or self.most else 0
        self.length_B += length
        self.last_B1.copy_(tokens_BT[:, -1:])


@torch.no_grad()
def swap_rows(tensors: list[Tensor], one: int, other: int) -> None:
    """Exchanges two rows of each tensor, with three calls for all of a type."""
    for dtype in {x.dtype for x in tensors}:
        first, second = ([x[row] for x in tensors if x.dtype is dtype] for row in (one, other))
        kept = [torch.empty_like(x) for x in first]
        for targets, sources in ((kept, first), (first, second), (second, kept)):
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
