"""The choice of the next token, on the device and without a sort.

A row's candidates are those whose logits reach a threshold: the highest that top-k, top-p and min-p ask for. Every
threshold is found by bisection over the values that fp32 has, in their order. The token is the candidate with the
largest `logit / temperature + noise` (Gumbel noise: the result has the softmax's probabilities).

Random numbers are a hash of (seed, number of the token in its text, token id), so a text depends on its own seed only,
on no other row and on no order. `choose` has a form in torch and one in Triton (ops/kernels/sample.py), with the same
numbers.

Shape legend: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

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

    def assign(self, row: int, sampling: Sampling, number: int, text: Sequence[int]) -> None:
        """The next token of this row is the text's `number`-th."""
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        floats = [sampling.temperature, top_p, sampling.min_p or 0.0, sampling.repetition_penalty]
        self.floats_B4[row] = torch.tensor(floats)
        # A seed is any whole number; the hash reads its lower 64 bits.
        seed = (sampling.seed + 2**63) % 2**64 - 2**63
        self.whole_B3[row] = torch.tensor([sampling.top_k or 0, seed, number], dtype=torch.int64)
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
    temperature_B, top_p_B, min_p_B, penalty_B = rules.floats_B4.unbind(1)
    top_k_B, seed_B, number_B = rules.whole_B3.unbind(1)
    x_BV = logits_BV.float()
    if rules.seen_BV is not None:
        factor_BV = torch.where(x_BV > 0, 1.0 / penalty_B[:, None], penalty_B[:, None])
        x_BV = torch.where(rules.seen_BV, x_BV * factor_BV, x_BV)
    best_B = x_BV.amax(dim=1)
    greedy_B = temperature_B == 0.0
    tokens = x_BV.argmax(dim=1)
    if not bool(greedy_B.all()):
        # The largest becomes 0, so that no temperature overflows.
        scaled_BV = (x_BV - best_B[:, None]) / torch.where(greedy_B, 1.0, temperature_B)[:, None]
        kept_BV = scaled_BV >= _threshold(scaled_BV, top_k_B, top_p_B, min_p_B)[:, None]
        score_BV = scaled_BV + noise(seed_B, number_B, scaled_BV.shape[1])
        drawn = score_BV.masked_fill(~kept_BV, -torch.inf).argmax(dim=1)
        tokens = torch.where(greedy_B, tokens, drawn)
    tokens_B.copy_(torch.where(torch.isfinite(best_B), tokens, -1))
    number_B += 1
    if rules.seen_BV is not None:
        rules.seen_BV.scatter_(1, tokens_B.clamp(min=0)[:, None], True)


def _threshold(scaled_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """The lowest value of a candidate in every row; the largest value is 0."""
    lowest_B = torch.where(min_p_B > 0.0, min_p_B.clamp(min=1e-37).log(), -torch.inf)
    vocab = scaled_BV.shape[1]
    if bool(((top_k_B > 0) & (top_k_B < vocab)).any()):
        wanted_B = torch.where(top_k_B > 0, top_k_B, vocab).clamp(max=vocab)
        found_B = _bisected(scaled_BV, lambda x_B: (scaled_BV >= x_B[:, None]).sum(1) >= wanted_B)
        lowest_B = torch.maximum(lowest_B, torch.where(wanted_B < vocab, found_B, -torch.inf))
    if bool((top_p_B < 1.0).any()):
        mass_BV = scaled_BV.exp().masked_fill(scaled_BV < lowest_B[:, None], 0.0)
        wanted_B = top_p_B * mass_BV.sum(1)
        found_B = _bisected(
            scaled_BV, lambda x_B: mass_BV.masked_fill(scaled_BV < x_B[:, None], 0.0).sum(1) >= wanted_B
        )
        lowest_B = torch.maximum(lowest_B, torch.where(top_p_B < 1.0, found_B, -torch.inf))
    return lowest_B.clamp(max=0.0)


def _bisected(scaled_BV: Tensor, enough) -> Tensor:
    """The largest value of which `enough` is true, in every row; it is of the lowest value, and of none above 0."""
    low_B = _ordered(scaled_BV.amin(1))
    high_B = torch.ones_like(low_B)  # just above 0.0
    for _ in range(32):
        middle_B = low_B + (high_B - low_B) // 2
        reached_B = enough(_value(middle_B))
        low_B = torch.where(reached_B, middle_B, low_B)
        high_B = torch.where(reached_B, high_B, middle_B)
    return _value(low_B)


def _ordered(x_B: Tensor) -> Tensor:
    """Whole numbers in the order of the fp32 values."""
    bits_B = x_B.view(torch.int32).to(torch.int64)
    return torch.where(bits_B < 0, -(bits_B & 0x7FFFFFFF), bits_B)


def _value(ordered_B: Tensor) -> Tensor:
    size_B = ordered_B.abs().to(torch.int32).view(torch.float32)
    return torch.where(ordered_B < 0, -size_B, size_B)


def noise(seed_B: Tensor, number_B: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [B, V] of the `number`-th token of texts with these seeds."""
    key_B = _mixed(_mixed(_mixed(seed_B & _LOW) ^ ((seed_B >> 32) & _LOW)) ^ (number_B & _LOW))
    token_V = torch.arange(vocab, device=seed_B.device)
    hashed_BV = _mixed(key_B[:, None] ^ _mixed(token_V + 1)[None, :])
    uniform_BV = ((hashed_BV >> 8).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform_BV))


_LOW = 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits: every bit of the input changes about half of the output's."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
