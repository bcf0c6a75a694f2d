"""What decoding carries from token to token: keys and values of attention, layer by layer, and each row's length.

Contract: lengths and positions are tensors on the device, one of each row, and no shape depends on them, so rows of
different lengths go on together, each as if it were alone. The host knows only how many positions the longest row may
have. Keys lie where their position says. A query looks at the whole cache through a mask of positions; the first tokens
of all look at each other alone, by the kernels for training.
Trap: of a row with padding after its tokens, keys of the padding are written too. Nobody looks at them before the
tokens that take their places. A window has no such places to spare: there padding goes to a slot that nobody reads.

Shape legend: B batch, T positions of this call, S positions of a cache, H query heads, G key/value heads, D head size.
"""

import dataclasses

import torch
from torch import Tensor

from flatout.ops.attention import causal_attention, masked_attention


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Where the tokens of a pass with a cache are."""

    positions_BT: Tensor
    counts_B: Tensor | None  # tokens of each row, what follows them is padding; None: all are tokens
    fresh: bool  # nothing came before
    masks: dict[tuple[int, int | None], Tensor] = dataclasses.field(default_factory=dict)  # made once for all layers

    @property
    def real_BT(self) -> Tensor:
        """True for tokens that are no padding."""
        steps_T = torch.arange(self.positions_BT.shape[1], device=self.positions_BT.device)
        counts_B = steps_T.new_full((1,), len(steps_T)) if self.counts_B is None else self.counts_B
        return (steps_T < counts_B[:, None]).expand_as(self.positions_BT)


class LayerCache:
    """Keys and values of one layer, as many as will come."""

    def __init__(
        self, batch: int, groups: int, positions: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k_BGSD = torch.zeros(batch, groups, positions, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)

    def write(self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding) -> None:
        _scatter(self, k_BGTD, v_BGTD, decoding.positions_BT)

    def extend(
        self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All keys and values with the new ones among them, and who sees which: [B, T, S]."""
        self.write(k_BGTD, v_BGTD, decoding)
        kind = self.k_BGSD.shape[2], window
        if kind not in decoding.masks:
            positions_S = torch.arange(self.k_BGSD.shape[2], device=self.k_BGSD.device)
            decoding.masks[kind] = _visible(decoding.positions_BT, positions_S[None], window)
        return self.k_BGSD, self.v_BGSD, decoding.masks[kind]


class WindowCache:
    """Keys and values of a layer that looks back over a window: a ring of that size, however long the text."""

    def __init__(
        self, batch: int, groups: int, window: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window = window
        # One slot more, for what is not to be kept.
        self.k_BGSD = torch.zeros(batch, groups, window + 1, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)
        self.positions_BS = torch.full((batch, window + 1), -1, dtype=torch.int64, device=device)  # -1: empty

    def write(self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding) -> None:
        """Keeps the last tokens of each row, at most a window of them."""
        positions_BT, real_BT = decoding.positions_BT, decoding.real_BT
        last_B1 = torch.where(real_BT, positions_BT, -1).amax(1, keepdim=True)
        kept_BT = real_BT & (positions_BT > last_B1 - self.window)
        slots_BT = torch.where(kept_BT, positions_BT % self.window, self.window)
        _scatter(self, k_BGTD, v_BGTD, slots_BT)
        self.positions_BS.scatter_(1, slots_BT, torch.where(kept_BT, positions_BT, -1))

    def extend(
        self, k_BGTD: Tensor, v_BGTD: Tensor, decoding: Decoding, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in the ring and the new ones, and who sees which: [B, T, S]."""
        if k_BGTD.shape[2] == 1 and decoding.counts_B is None:  # it takes the place of one that nobody sees any more
            self.write(k_BGTD, v_BGTD, decoding)
            k_BGSD, v_BGSD, positions_BS = self.k_BGSD, self.v_BGSD, self.positions_BS
        else:
            k_BGSD = torch.cat([self.k_BGSD, k_BGTD.to(self.k_BGSD.dtype)], dim=2)
            v_BGSD = torch.cat([self.v_BGSD, v_BGTD.to(self.v_BGSD.dtype)], dim=2)
            new_BT = torch.where(decoding.real_BT, decoding.positions_BT, -1)
            positions_BS = torch.cat([self.positions_BS, new_BT], dim=1)
            self.write(k_BGTD, v_BGTD, decoding)
        return k_BGSD, v_BGSD, _visible(decoding.positions_BT, positions_BS, window)


class EigenstateCache:
    """The states of one layer, and what its filters look back at. Nothing grows."""

    def __init__(
        self, batch: int, channels: int, convolved: int, averaged: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """`convolved` and `averaged` are the positions that filters look back; `dtype` is that of the products."""
        wide = torch.promote_types(dtype, torch.float32)
        self.state_BC = torch.zeros(batch, channels, dtype=wide, device=device)
        self.convolved_BSC = torch.zeros(batch, convolved, channels, dtype=dtype, device=device)
        self.averaged_BSC = torch.zeros(batch, averaged, channels, dtype=dtype, device=device)


LayersCache = LayerCache | WindowCache | EigenstateCache


def _scatter(cache: LayerCache | WindowCache, k_BGTD: Tensor, v_BGTD: Tensor, places_BT: Tensor) -> None:
    places_BGTD = places_BT[:, None, :, None].expand_as(k_BGTD)
    cache.k_BGSD.scatter_(2, places_BGTD, k_BGTD.detach().to(cache.k_BGSD.dtype))
    cache.v_BGSD.scatter_(2, places_BGTD, v_BGTD.detach().to(cache.v_BGSD.dtype))


def _visible(queries_BT: Tensor, keys_BS: Tensor, window: int | None) -> Tensor:
    """True where a query may look at a key; keys at a position below 0 are none. Padding may look at whatever."""
    back_BTS = queries_BT[:, :, None] - keys_BS[:, None, :]
    seen_BTS = (back_BTS >= 0) & (keys_BS >= 0)[:, None, :]
    return seen_BTS if window is None else seen_BTS & (back_BTS < window)


class Cache:
    """The caches of all layers, and how many positions of each row are filled."""

    def __init__(self, layers: list[LayersCache], batch: int, room: int, device: torch.device) -> None:
        self.layers = layers
        self.room = room
        self.most = 0  # positions that the longest row may have filled, as far as the host knows
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self, length: int, counts_B: Tensor | None) -> Decoding:
        """For a pass over so many positions more, of which `counts_B` are tokens."""
        steps_T = torch.arange(length, device=self.length_B.device)
        return Decoding(self.length_B[:, None] + steps_T, counts_B, fresh=self.most == 0)

    def advance(self, length: int, counts_B: Tensor | None) -> None:
        self.most += length
        self.length_B += length if counts_B is None else counts_B


def cached_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    cache: LayerCache | WindowCache,
    decoding: Decoding,
    *,
    backend: str,
    window: int | None,
) -> Tensor:
    """Attention of the new positions to themselves and to what the cache has of their row; they come to it."""
    if decoding.fresh:
        cache.write(k_BGTD, v_BGTD, decoding)
        return causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=backend, window=window)
    k_BGSD, v_BGSD, visible_BTS = cache.extend(k_BGTD, v_BGTD, decoding, window)
    return masked_attention(q_BHTD, k_BGSD, v_BGSD, visible_BTS)
