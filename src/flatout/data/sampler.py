"""Which windows of the token stream a step reads, as a pure function of (seed, position).

Idea: cut the stream into windows, number them, and let a keyed permutation of the numbers be the shuffle. Position p of
the run lies in epoch p // windows, and reads the window that the epoch's permutation gives for p % windows. There is
no list to shuffle or to save, so resuming at any step, at any world size, needs nothing but the step number.

Contract: within an epoch every window comes exactly once; every epoch has its own order; the mapping depends on nothing
but (windows, seed, position) and is the same on every machine and with every numpy. Positions stay below 2**62.

The permutation is a Feistel network: split a number into two halves and let each round exchange them while adding a
keyed hash of one half to the other, which can be undone and hence is a bijection on a power of four. Results outside
the range are put through again until they fall inside ("cycle walking"), which keeps it a bijection on any range.

Trap: a window is context + 1 tokens, since the last input needs a target. At stride == context neighbours therefore
share one token, as target of the one and input of the next, and every token but the first is a target once per epoch.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from flatout.corpus.near import mixed

Numbers = npt.NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# One key to add in each round, as a column beside a row of epochs.
_ROUND_KEYS = np.array([[number * _GOLDEN & _MASK] for number in range(1, _ROUNDS + 1)], dtype=np.uint64)


def window_count(tokens: int, context: int, stride: int) -> int:
    """How many windows of context + 1 tokens start at a multiple of `stride` and fit, the last full one included."""
    if context < 1 or stride < 1 or tokens < 0:
        raise ValueError(f"no windows of context {context} and stride {stride} in {tokens} tokens")
    return 0 if tokens < context + 1 else (tokens - context - 1) // stride + 1


def remainder(tokens: int, context: int, stride: int) -> int:
    """How many tokens are in no window, neither as input nor as target: the tail, and gaps of a wider stride."""
    windows = window_count(tokens, context, stride)
    return tokens - (windows - 1) * min(stride, context + 1) - (context + 1) if windows else tokens


@final
@dataclass(frozen=True)
class WindowOrder:
    """The order in which windows are read: a new permutation of all of them in every epoch."""

    windows: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= 2**62:
            raise ValueError(f"an order needs 1 to 2**62 windows, not {self.windows}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"a seed is between 0 and 2**64 - 1, not {self.seed}")

    def indices(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """The windows for positions `position` to `position + count - 1`, across epochs where need be."""
        if position < 0 or count < 0 or position + count > 2**62:
            raise ValueError(f"no positions {position} to {position + count}")
        positions = np.arange(position, position + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.windows))
        # The hashes that every round begins with depend on the epoch alone. A batch that spans many short epochs is as
        # fast as any other: each of its positions looks its own up.
        first, last = position // self.windows, max(position, position + count - 1) // self.windows
        keys = mixed(np.arange(first, last + 1, dtype=np.uint64) ^ mixed(np.array([self.seed ^ _GOLDEN], np.uint64)))
        # Mixing the key by itself first keeps nearby keys from meeting nearby values in the same hash.
        rounds = mixed(keys + _ROUND_KEYS)
        which = epochs - np.uint64(first)
        # Below three bits the network has too few round functions: some orders of a few windows came up 1.3 times as
        # often as others. From three bits on, all orders of 2 to 6 windows pass a chi-square test.
        half_bits = max(3, ((self.windows - 1).bit_length() + 1) // 2)
        values = _permuted(values, rounds, which, half_bits)
        outside = np.flatnonzero(values >= np.uint64(self.windows))
        while outside.size:
            again = _permuted(values[outside], rounds, which[outside], half_bits)
            values[outside] = again
            outside = outside[again >= np.uint64(self.windows)]
        return values.astype(np.int64)


def _permuted(values: Numbers, rounds: Numbers, which: Numbers, half_bits: int) -> Numbers:
    """A bijection on 0 .. 4**half_bits - 1, another one for every column of `rounds`."""
    shift, mask = np.array(half_bits, dtype=np.uint64), np.array(2**half_bits - 1, dtype=np.uint64)
    left, right = values >> shift, values & mask
    for keys in rounds:
        left, right = right, left ^ (mixed(keys[which] ^ right) & mask)
    return left << shift | right
