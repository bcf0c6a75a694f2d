"""The choice of the next token.

A row's candidates are those whose logits reach a threshold: the highest that top-k, top-p and min-p ask for. The token
is the candidate with the largest `logit / temperature + noise` (Gumbel noise: the result has the softmax's
probabilities).

Random numbers are a hash of (seed, number of the token in its text, token id), so a text depends on its own seed only,
on no other row and on no order. `choose` has a form in NumPy and one in Triton (ops/kernels/sample.py), with the same
numbers. The Triton form runs on the device without a sort: it finds a threshold by bisection over the values of fp32.

Shape legend: B rows, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the likeliest; every limit leaves at least one candidate."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # logits of tokens in the text so far are divided by it, or multiplied below 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Rules:
    """The sampling of every row, on the device."""

    floats_B4: Tensor  # temperature, top_p, min_p, repetition penalty
    whole_B3: Tensor  # top_k (0: all), seed, number of the next token in its text
    seen_BV: Tensor | None = None  # tokens in the text so far; None where no row has a penalty

    @classmethod
    def room(cls, rows: int, device: torch.device, vocab: int | None = None) -> "Rules":
        """`vocab`: with room for penalties."""
        return cls(
            torch.zeros(rows, 4, device=device),
            torch.zeros(rows, 3, dtype=torch.int64, device=device),
            None if vocab is None else torch.zeros(rows, vocab, dtype=torch.bool, device=device),
        )

    def rows(self, first: int, count: int) -> "Rules":
        """Some rows, sharing their memory."""
        part = slice(first, first + count)
        return Rules(self.floats_B4[part], self.whole_B3[part], None if self.seen_BV is None else self.seen_BV[part])

    def tensors(self) -> list[Tensor]:
        return [self.floats_B4, self.whole_B3, *([] if self.seen_BV is None else [self.seen_BV])]

    def assign(self, row: int, sampling: Sampling, number: int, text: Sequence[int]) -> None:
        """The next token of this row is the text's `number`-th."""
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        floats = [sampling.temperature, top_p, sampling.min_p or 0.0, sampling.repetition_penalty]
        self.floats_B4[row].copy_(torch.tensor(floats), non_blocking=True)
        # A seed is any whole number; the hash reads its lower 64 bits.
        seed = (sampling.seed + 2**63) % 2**64 - 2**63
        whole = torch.tensor([sampling.top_k or 0, seed, number], dtype=torch.int64)
        self.whole_B3[row].copy_(whole, non_blocking=True)
        if self.seen_BV is not None:
            self.seen_BV[row] = False
            if sampling.repetition_penalty != 1.0:
                ids = torch.tensor(sorted(set(text)), device=self.seen_BV.device)
                self.seen_BV[row, ids[ids < self.seen_BV.shape[1]]] = True


@torch.no_grad()
def choose(logits_BV: Tensor, rules: Rules, tokens_B: Tensor, *, kernels: bool = False) -> None:
    """Draws a token of every row into `tokens_B` and counts it; -1 where the logits are not finite."""
    if kernels:
        from flatout.ops.kernels.sample import sample

        sample(logits_BV, rules.floats_B4, rules.whole_B3, rules.seen_BV, tokens_B)
        return
    settings, whole = rules.floats_B4.tolist(), rules.whole_B3.tolist()  # lists: quicker for a few rows
    temperature_B1, _, _, penalty_B1 = np.array(settings, np.float32).T[:, :, None]
    x_BV = logits_BV.float().cpu().numpy()
    seen_BV = rules.seen_BV if any(penalty != 1.0 for *_, penalty in settings) else None
    with np.errstate(all="ignore"):
        if seen_BV is not None:
            factor_BV = np.where(x_BV > 0, 1.0 / penalty_B1, penalty_B1)
            x_BV = np.where(seen_BV.cpu().numpy(), x_BV * factor_BV, x_BV)
        best_B1 = np.maximum.reduce(x_BV, axis=1, keepdims=True)
        found_B = x_BV.argmax(axis=1)
        if any(temperature for temperature, *_ in settings):
            greedy_B1 = temperature_B1 == 0.0
            score_BV = x_BV - best_B1  # the largest becomes 0, so that no temperature overflows
            score_BV /= np.where(greedy_B1, np.float32(1.0), temperature_B1)
            hidden_BV, limits = None, [(top_k, *row[1:3]) for (top_k, *_), row in zip(whole, settings, strict=True)]
            if any(limit != (0, 1.0, 0.0) for limit in limits):
                lowest = [[_threshold(row_V, *limit)] for row_V, limit in zip(score_BV, limits, strict=True)]
                hidden_BV = score_BV < np.array(lowest, np.float32)
            score_BV += noise([_key(seed, number) for _, seed, number in whole], score_BV.shape[1])
            if hidden_BV is not None:
                score_BV[hidden_BV] = -np.inf
            found_B = np.where(greedy_B1[:, 0], found_B, score_BV.argmax(axis=1))
        tokens_B.copy_(torch.from_numpy(np.where(np.isfinite(best_B1[:, 0]), found_B, -1)))
    rules.whole_B3.select(1, 2).add_(1)
    if seen_BV is not None:
        seen_BV.scatter_(1, tokens_B.clamp(min=0)[:, None], True)


def _threshold(scaled_V: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The lowest value of a candidate; the largest value is 0."""
    lowest = np.log(np.float32(max(min_p, 1e-37))) if min_p > 0.0 else -np.inf
    if 0 < top_k < len(scaled_V) or top_p < 1.0:
        falling_V = np.sort(scaled_V)[::-1]
        if 0 < top_k < len(scaled_V):
            lowest = max(lowest, falling_V[top_k - 1])
        if top_p < 1.0:
            mass_V = np.exp(falling_V[: np.count_nonzero(falling_V >= lowest)]).cumsum(dtype=np.float64)
            if len(mass_V):
                lowest = max(lowest, falling_V[mass_V.searchsorted(top_p * mass_V[-1])])
    return min(lowest, 0.0)


def noise(keys: Sequence[int], vocab: int) -> np.ndarray:
    """Gumbel noise [B, V] of tokens with these keys."""
    hashed_BV = _mixed(np.array(keys, np.uint32)[:, None] ^ _hashed_ids(vocab))
    noise_BV = (hashed_BV >> 8).astype(np.float32)
    noise_BV += np.float32(0.5)
    noise_BV *= np.float32(2.0**-24)
    np.negative(np.log(noise_BV, noise_BV), noise_BV)
    return np.negative(np.log(noise_BV, noise_BV), noise_BV)


def _key(seed: int, number: int) -> int:
    """The hash of a text's seed and the number of a token in it."""
    x = 0
    for part in (seed, seed >> 32, number):
        x ^= part & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        x ^= x >> 16
    return x


@functools.lru_cache(maxsize=1)
def _hashed_ids(vocab: int) -> np.ndarray:
    return _mixed(np.arange(1, vocab + 1, dtype=np.uint32))


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 32 bits: every bit of the input changes about half of the output's."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
