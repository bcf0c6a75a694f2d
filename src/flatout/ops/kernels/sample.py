"""The choice of the next token in one kernel; generation/sampling.py has the rules, and the same in torch.

One program draws for a row. Where the vocabulary fits its registers (65,536 ids) it is read once; else each step of the
bisection reads it again, from the cache of the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.decode import _wait, starts_early

_MOST = 65_536  # ids that a program keeps in registers


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _value(ordered):
    size = tl.where(ordered < 0, -ordered, ordered).to(tl.float32, bitcast=True)
    return tl.where(ordered < 0, -size, size)


@triton.jit
def _read(logits_ptr, seen_ptr, at, inside, penalty, SEEN: tl.constexpr):
    x = tl.load(logits_ptr + at, inside, -float("inf")).to(tl.float32)
    if SEEN:
        seen = tl.load(seen_ptr + at, inside, 0) != 0
        x = tl.where(seen, tl.where(x > 0, x / penalty, x * penalty), x)
    return x


@triton.jit
def _sample(
    logits_ptr, floats_ptr, whole_ptr, seen_ptr, tokens_ptr, vocab, stride, seen_stride, SEEN: tl.constexpr,
    BLOCK: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    id = tl.arange(0, BLOCK)
    logits_ptr += row * stride
    seen_ptr += row * seen_stride
    _wait(EARLY)
    temperature, top_p = tl.load(floats_ptr + row * 4), tl.load(floats_ptr + row * 4 + 1)
    min_p, penalty = tl.load(floats_ptr + row * 4 + 2), tl.load(floats_ptr + row * 4 + 3)
    top_k = tl.load(whole_ptr + row * 3)
    seed = tl.load(whole_ptr + row * 3 + 1)
    number = tl.load(whole_ptr + row * 3 + 2)

    kept = _read(logits_ptr, seen_ptr, id, id < vocab, penalty, SEEN)
    best, token = tl.max(kept, 0, return_indices=True)
    least = tl.min(tl.where(id < vocab, kept, float("inf")), 0)
    broken = tl.sum((kept != kept).to(tl.int32), 0)
    if not ONCE:
        for start in range(BLOCK, vocab, BLOCK):
            x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
            found, where = tl.max(x, 0, return_indices=True)
            token = tl.where(found > best, start + where, token)
            best = tl.maximum(best, found)
            least = tl.minimum(least, tl.min(tl.where(start + id < vocab, x, float("inf")), 0))
            broken += tl.sum((x != x).to(tl.int32), 0)

    if temperature > 0.0:
        kept = (kept - best) / temperature
        lowest = -float("inf")
        if min_p > 0.0:
            lowest = tl.log(tl.maximum(min_p, 1e-37))
        # the order of fp32 values as whole numbers
        bits = ((least - best) / temperature).to(tl.int32, bitcast=True)
        bottom = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits).to(tl.int64)
        if (top_k > 0) & (top_k < vocab):
            low, high = bottom, tl.full((), 1, tl.int64)
            for _ in range(32):
                middle = low + ((high - low) >> 1)
                value = _value(middle.to(tl.int32))
                count = tl.sum((kept >= value).to(tl.int32), 0)
                if not ONCE:
                    for start in range(BLOCK, vocab, BLOCK):
                        x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                        count += tl.sum(((x - best) / temperature >= value).to(tl.int32), 0)
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle)
            lowest = tl.maximum(lowest, _value(low.to(tl.int32)))
        if top_p < 1.0:
            wanted = tl.sum(tl.where(kept >= lowest, tl.exp(kept), 0.0), 0)
            if not ONCE:
                for start in range(BLOCK, vocab, BLOCK):
                    x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                    x = (x - best) / temperature
                    wanted += tl.sum(tl.where(x >= lowest, tl.exp(x), 0.0), 0)
            wanted *= top_p
            low, high = bottom, tl.full((), 1, tl.int64)
            for _ in range(32):
                middle = low + ((high - low) >> 1)
                value = tl.maximum(_value(middle.to(tl.int32)), lowest)
                mass = tl.sum(tl.where(kept >= value, tl.exp(kept), 0.0), 0)
                if not ONCE:
                    for start in range(BLOCK, vocab, BLOCK):
                        x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                        x = (x - best) / temperature
                        mass += tl.sum(tl.where(x >= value, tl.exp(x), 0.0), 0)
                low = tl.where(mass >= wanted, middle, low)
                high = tl.where(mass >= wanted, high, middle)
            lowest = tl.maximum(lowest, _value(low.to(tl.int32)))
        lowest = tl.minimum(lowest, 0.0)

        key = _mixed(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)
        key = _mixed(_mixed(key) ^ number.to(tl.uint32))
        top = -float("inf")
        for start in range(0, vocab, BLOCK):
            x = kept
            if not ONCE:
                x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                x = (x - best) / temperature
            hashed = _mixed(key ^ _mixed((start + id + 1).to(tl.uint32)))
            uniform = ((hashed >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
            score = tl.where(x >= lowest, x - tl.log(-tl.log(uniform)), -float("inf"))
            found, where = tl.max(score, 0, return_indices=True)
            token = tl.where(found > top, start + where, token)
            top = tl.maximum(top, found)
    finite = (broken == 0) & (best > -float("inf")) & (best < float("inf"))
    tl.store(tokens_ptr + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(whole_ptr + row * 3 + 2, number + 1)
    if SEEN:
        tl.store(seen_ptr + token, 1)


def sample(logits_BV: Tensor, floats_B4: Tensor, whole_B3: Tensor, seen_BV: Tensor | None, tokens_B: Tensor) -> None:
    """As `choose` in generation/sampling.py."""
    rows, vocab = logits_BV.shape
    block = min(_MOST, int(triton.next_power_of_2(vocab)))
    early = starts_early(logits_BV.device)
    seen = tokens_B if seen_BV is None else seen_BV.view(torch.uint8)
    _sample[(rows,)](
        logits_BV, floats_B4, whole_B3, seen, tokens_B, vocab, logits_BV.stride(0), seen.stride(0),
        SEEN=seen_BV is not None, BLOCK=block, ONCE=vocab <= block, EARLY=early,
        num_warps=32 if block > 16_384 else 16 if block > 4096 else 4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
