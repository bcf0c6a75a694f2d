"""How many threads torch computes with on a CPU (`speed.threads`).

Threads that share a product wait for the last of them. Where others use the cores too, the last one waits for a core,
and two threads can be many times slower than one. So the number is tried, on products and attention of this model, and
the cores that others use meanwhile are left to them.
Trap: sums are split over threads, so another number of threads changes the last bits of a result.
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from flatout.config.schema import ModelConfig
from flatout.cores import ThreadTrial, candidates, core_clock, core_use, whole_cores
from flatout.device import cpu_threads
from flatout.model.layers import mlp_width_of

_PIECE_FLOPS = 3e8  # some milliseconds of one core
_FEWEST, _MOST = 3, 9  # turns
_SECONDS, _TOO_LONG = 0.4, 1.5  # for all turns, and for as few as there may be
# Width, MLP, heads, their size, context: of a small model, where nobody says which, and of the largest that is tried.
_SHAPE, _LARGEST = (128, 512, 4, 32, 128), (512, 2048, 8, 128, 1024)


@functools.cache  # rungs and trials of one process are to be compared: they all get the same number
def try_threads(width: int, mlp: int, heads: int, size: int, context: int) -> ThreadTrial:
    """Times a piece of training with 1, 2, 4 ... threads up to the cores there are, in turns."""
    cores, seconds = whole_cores(), dict[int, list[float]]()
    piece = _piece(width, mlp, heads, size, context)
    before, began = core_clock(), time.perf_counter()
    waiting = candidates(cores)
    for turn in range(_MOST):
        for count in waiting:
            with cpu_threads(count):
                piece()  # starts the threads
                started = time.perf_counter()
                piece()
                seconds.setdefault(count, []).append(time.perf_counter() - started)
        best = min(min(times) for times in seconds.values())
        # Those that are far behind twice only take time.
        waiting = [count for count in waiting if turn < 1 or min(seconds[count]) < 2 * best]
        if time.perf_counter() - began > (_SECONDS if turn + 1 >= _FEWEST else _TOO_LONG):
            break
    used = core_use(before, core_clock())
    medians = {count: statistics.median(times) for count, times in seconds.items()}
    return ThreadTrial(seconds=medians, cores=cores, others=None if used is None else used.others)


def shape_of(model: ModelConfig | None) -> tuple[int, ...]:
    """What `try_threads` is asked of a model, or of a small one; those that are larger behave like the largest."""
    if model is None:
        return _SHAPE
    shape = model.width, mlp_width_of(model), model.heads, model.size, model.context
    return tuple(min(own, most) for own, most in zip(shape, _LARGEST, strict=True))


def _piece(width: int, mlp: int, heads: int, size: int, context: int) -> Callable[[], None]:
    """An MLP and attention, forward and backward, of as many tokens as take some milliseconds."""
    tokens = int(_PIECE_FLOPS / (12 * width * mlp))
    tokens = max(64, min(tokens, 4096))
    rows, length = max(1, tokens // context), min(context, tokens)

    def filled(*shape: int) -> torch.Tensor:  # what is multiplied plays no part, and no random stream is touched
        return torch.full(shape, 0.01, requires_grad=True)

    x, up, down = filled(tokens, width), filled(width, mlp), filled(mlp, width)
    q_BHTD, k_BHTD, v_BHTD = (filled(rows, heads, length, size) for _ in range(3))

    def piece() -> None:
        out = functional.gelu(x @ up) @ down
        attended = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        (out.sum() + attended.sum()).backward()
        for tensor in (x, up, down, q_BHTD, k_BHTD, v_BHTD):
            tensor.grad = None

    return piece
