"""Causal attention kernels on this machine, forward and backward, as JSON lines.

    python benchmarks/attention.py COMMIT [BACKEND ...] >> benchmarks/attention.jsonl

Protocol: 65,536 tokens in bf16, queries, keys and values as views of one buffer, as the model has them; the gradient
comes in as the next product leaves it. Microseconds are the device's, the mean of a burst after three calls to warm up.
`first_seconds` holds whatever a backend compiles. `differences` are those of the result and of the three gradients from
cuDNN's, the largest one each.
"""

import json
import sys
import time
import warnings

import torch
from torch import Tensor

from flatout.ops.attention import causal_attention

TOKENS = 65536
SHAPES = [(12, 12, 64), (16, 16, 128), (16, 4, 128)]  # query heads, key/value heads, head size
POSITIONS = [1024, 2048, 4096, 8192, 32768]
BACKENDS = ["cudnn", "flash", "fa4", "cudnn+fa4"]


def microseconds(call, count: int) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / count * 1000, 1)


def measure(backend: str, whole: Tensor, gradient: Tensor, heads: int, groups: int) -> tuple[dict, list[Tensor]]:
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in whole.split([heads, groups, groups], dim=2))

    def forward() -> Tensor:
        return causal_attention(q, k, v, backend=backend)

    def both() -> list[Tensor]:
        y = forward().transpose(1, 2).flatten(2)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), gradient)]

    began = time.perf_counter()
    values = both()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    count = 20 if whole.shape[1] < 8192 else 5
    with torch.no_grad():
        alone = microseconds(forward, count)
    row = {"forward_us": alone, "both_us": microseconds(both, count), "first_seconds": round(first, 1)}
    return row, values


def main() -> None:
    warnings.simplefilter("ignore")
    commit, *backends = sys.argv[1:]
    for heads, groups, size in SHAPES:
        for positions in POSITIONS:
            shape = (TOKENS // positions, positions)
            whole = torch.randn(*shape, heads + 2 * groups, size, device="cuda", dtype=torch.bfloat16)
            gradient = torch.randn(*shape, heads * size, device="cuda", dtype=torch.bfloat16)
            expected: list[Tensor] | None = None
            for backend in backends or BACKENDS:
                where = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
                what = {"backend": backend, "heads": heads, "groups": groups, "size": size, "positions": positions}
                try:
                    row, values = measure(backend, whole, gradient, heads, groups)
                    expected = expected or values
                    pairs = zip(values, expected, strict=True)
                    row["differences"] = [round(float((a - b).abs().max()), 4) for a, b in pairs]
                except Exception as error:  # noqa: BLE001 - a backend that cannot is a row too
                    row = {"failed": f"{type(error).__name__}: {error}"[:200]}
                print(json.dumps({**what, **row, **where}), flush=True)


if __name__ == "__main__":
    main()
