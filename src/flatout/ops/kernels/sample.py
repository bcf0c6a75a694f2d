"""The choice of the next token in two kernels; generation/sampling.py has the rules, and the same in torch.

The first finds the largest logits of a row, side by side. In the second one program draws for a row: each step of a
search reads the row again, and asks at three places at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.decode import _wait, starts_early

_MOST = 16_384  # ids that a program reads at once
_CHUNK = 2048  # of which a program finds the largest


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _value(ordered):
    ordered = tl.minimum(ordered, 1).to(tl.int32)  # no value is above 0
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
def _scan(
    logits_ptr, floats_ptr, seen_ptr, ends_ptr, found_ptr, vocab, stride, seen_stride, SEEN: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Largest and smallest logit of a chunk, its token, and how many are no numbers."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    _wait(EARLY)
    penalty = tl.load(floats_ptr + row * 4 + 3)
    x = _read(logits_ptr + row * stride, seen_ptr + row * seen_stride, at, at < vocab, penalty, SEEN)
    best, where = tl.max(x, 0, return_indices=True)
    out = (row * tl.num_programs(1) + chunk) * 2
    tl.store(ends_ptr + out, best)
    tl.store(ends_ptr + out + 1, tl.min(tl.where(at < vocab, x, float("inf")), 0))
    tl.store(found_ptr + out, chunk * BLOCK + where)
    tl.store(found_ptr + out + 1, tl.sum((x != x).to(tl.int32), 0))


@triton.jit
def _sample(
    logits_ptr, floats_ptr, whole_ptr, seen_ptr, ends_ptr, found_ptr, tokens_ptr, vocab, stride, seen_stride, chunks,
    SEEN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
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

    each = tl.arange(0, CHUNKS)
    of_chunk, alive = (row * chunks + each) * 2, each < chunks
    best, winner = tl.max(tl.load(ends_ptr + of_chunk, alive, -float("inf")), 0, return_indices=True)
    least = tl.min(tl.load(ends_ptr + of_chunk + 1, alive, float("inf")), 0)
    token = tl.load(found_ptr + (row * chunks + winner) * 2)
    broken = tl.sum(tl.load(found_ptr + of_chunk + 1, alive, 0), 0)

    if temperature > 0.0:
        lowest = -float("inf")
        if min_p > 0.0:
            lowest = tl.log(tl.maximum(min_p, 1e-37))
        # the order of fp32 values as whole numbers
        bits = ((least - best) / temperature).to(tl.int32, bitcast=True)
        bottom = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits).to(tl.int64)
        if (top_k > 0) & (top_k < vocab):
            # Of each quarter of the range: do its values and those above hold enough? The range shrinks to a quarter.
            low, size = bottom, (1 - bottom + 3) // 4
            for _ in range(16):
                one, two, three = _value(low + size), _value(low + 2 * size), _value(low + 3 * size)
                first, second, third = 0, 0, 0
                for start in range(0, vocab, BLOCK):
                    x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                    x = (x - best) / temperature
                    first += tl.sum((x >= one).to(tl.int32), 0)
                    second += tl.sum((x >= two).to(tl.int32), 0)
                    third += tl.sum((x >= three).to(tl.int32), 0)
                reached = (first >= top_k).to(tl.int64) + (second >= top_k).to(tl.int64) + (third >= top_k).to(tl.int64)
                low += reached * size
                size = (size + 3) // 4
            lowest = tl.maximum(lowest, _value(low))
        if top_p < 1.0:
            wanted = 0.0
            for start in range(0, vocab, BLOCK):
                x = (_read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN) - best) / temperature
                wanted += tl.sum(tl.where(x >= lowest, tl.exp(x), 0.0), 0)
            wanted *= top_p
            low, size = bottom, (1 - bottom + 3) // 4
            for _ in range(16):
                one = tl.maximum(_value(low + size), lowest)
                two = tl.maximum(_value(low + 2 * size), lowest)
                three = tl.maximum(_value(low + 3 * size), lowest)
                first, second, third = 0.0, 0.0, 0.0
                for start in range(0, vocab, BLOCK):
                    x = _read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN)
                    x = (x - best) / temperature
                    mass = tl.exp(x)
                    first += tl.sum(tl.where(x >= one, mass, 0.0), 0)
                    second += tl.sum(tl.where(x >= two, mass, 0.0), 0)
                    third += tl.sum(tl.where(x >= three, mass, 0.0), 0)
                reached = (first >= wanted).to(tl.int64) + (second >= wanted).to(tl.int64)
                low += (reached + (third >= wanted).to(tl.int64)) * size
                size = (size + 3) // 4
            lowest = tl.maximum(lowest, _value(low))
        lowest = tl.minimum(lowest, 0.0)

        key = _mixed(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)
        key = _mixed(_mixed(key) ^ number.to(tl.uint32))
        top = -float("inf")
        for start in range(0, vocab, BLOCK):
            x = (_read(logits_ptr, seen_ptr, start + id, start + id < vocab, penalty, SEEN) - best) / temperature
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
    block, device, early = (
        min(_MOST, int(triton.next_power_of_2(vocab))),
        logits_BV.device,
        starts_early(logits_BV.device),
    )
    chunks = triton.cdiv(vocab, _CHUNK)
    ends_BC2 = torch.empty(rows, chunks, 2, device=device)
    found_BC2 = torch.empty(rows, chunks, 2, dtype=torch.int32, device=device)
    seen = tokens_B if seen_BV is None else seen_BV.view(torch.uint8)
    launch = {"SEEN": seen_BV is not None, "EARLY": early} | ({"launch_pdl": True} if early else {})
    sizes = (vocab, logits_BV.stride(0), seen.stride(0))
    _scan[(rows, chunks)](logits_BV, floats_B4, seen, ends_BC2, found_BC2, *sizes, BLOCK=_CHUNK, **launch)
    _sample[(rows,)](
        logits_BV, floats_B4, whole_B3, seen, ends_BC2, found_BC2, tokens_B, *sizes, chunks, BLOCK=block,
        CHUNKS=max(2, int(triton.next_power_of_2(chunks))),
        num_warps=32 if block > 8192 else 8 if block > 1024 else 4, **launch,
    )  # fmt: skip
