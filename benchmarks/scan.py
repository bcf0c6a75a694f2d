"""The scan of the eigenstate mixer on this machine, forward and backward, as JSON lines.

    python benchmarks/scan.py COMMIT [--chunks] >> benchmarks/scan.jsonl

Protocol: the gradient of the states comes in dense, as a product leaves it. Milliseconds are the device's, the mean of
a burst after three calls to warm up: `forward_ms` and `both_ms` as Python launches the kernels, `replayed_...` with the
launches recorded in a CUDA graph, as a training step has them. `moved` is what the passes read and write, `floor` what
any scan must: x, states, gradient, states again, gradient of x, once each, and λ with its gradient where it depends on
the input. Shares are of the bandwidth that a copy of 2 GiB reaches here. `error` is that of the states against torch's
operations in float64, relative to their size, as root mean squares. `--chunks` tries other chunks than the chosen one.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from flatout.ops.kernels.scan import chunk_and_block
from flatout.ops.scan import scan

MAIN = (4, 32768, 128)  # rows, positions, channels
SHAPES: list[tuple[int, int, int]] = [
    MAIN,
    (2, 32768, 128),
    (1, 32768, 128),
    (1, 131072, 128),
    (2, 32768, 768),
    (16, 2048, 256),
    (4, 32768, 160),
]
KINDS = ["fixed", "documents", "decay", "decay+phase"]  # what of λ depends on the input, or where it is 0
BURST = 50


def milliseconds(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(BURST):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / BURST


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1000


def eigenvalues(shape: tuple[int, int, int], kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, positions, channels = shape
    whole, one = (batch, positions, channels), (channels,)
    log_decay = -(32768.0 ** -torch.rand(whole if "decay" in kind else one, device="cuda"))
    phase = 3.0 * torch.rand(whole if "phase" in kind else one, device="cuda")
    begins = torch.rand(batch, positions, device="cuda") < 1e-3 if kind == "documents" else None
    return log_decay.requires_grad_(), phase.requires_grad_(), begins


def error_of(h_BTC: Tensor, x_BTC: Tensor, log_decay: Tensor, phase: Tensor, begins_BT: Tensor | None) -> float:
    """Of the first row, which is enough and fits anywhere."""
    x, log_decay, phase = ((v[:1] if v.dim() == 3 else v).detach().double() for v in (x_BTC, log_decay, phase))
    exact = scan(x, log_decay, phase, begins_BT=None if begins_BT is None else begins_BT[:1], chunk=64)[0]
    return float((h_BTC[:1].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def measure(shape: tuple[int, int, int], dtype: torch.dtype, kind: str, chunk: int | None, rate: float) -> dict:
    batch, positions, channels = shape
    x, gradient = (torch.randn(batch, positions, 2 * channels, device="cuda").to(dtype) for _ in range(2))
    x.requires_grad_()
    log_decay, phase, begins = eigenvalues(shape, kind)

    def forward() -> Tensor:
        return scan(x, log_decay, phase, begins_BT=begins, path="triton", chunk=chunk)[0]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (x, log_decay, phase), gradient)

    with torch.no_grad():
        row = {"forward_ms": milliseconds(forward), "replayed_forward_ms": milliseconds(recorded(forward))}
        row["error"] = error_of(forward(), x, log_decay, phase, begins)
    row |= {"both_ms": milliseconds(both), "replayed_both_ms": milliseconds(recorded(both))}
    states = x.numel() * x.element_size()
    varying = sum(value.numel() * value.element_size() for value in (log_decay, phase) if value.dim() == 3)
    moved_forward, moved = 3 * states + 2 * varying, 7 * states + 5 * varying
    row["forward_share"] = moved_forward / rate / row["replayed_forward_ms"] * 1000
    row["both_share"] = moved / rate / row["replayed_both_ms"] * 1000
    row |= {"floor_forward_ms": (2 * states + varying) / rate * 1000}
    row |= {"floor_both_ms": (5 * states + 3 * varying) / rate * 1000}
    return {**{name: float(f"{value:.4g}") for name, value in row.items()}, "moved_bytes": moved}


def main() -> None:
    commit, *words = sys.argv[1:]
    rate = bandwidth()
    where = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    where["copy_bytes_per_second"] = float(f"{rate:.4g}")
    tries: list[tuple[tuple[int, int, int], torch.dtype, str, int | None]]
    tries = [(shape, dtype, "fixed", None) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)]
    tries += [(MAIN, torch.bfloat16, kind, None) for kind in KINDS[1:]]
    if "--chunks" in words:
        tries += [(shape, torch.bfloat16, "fixed", chunk) for shape in SHAPES for chunk in (16, 32, 64, 128, 256, 512)]
    for shape, dtype, kind, chunk in tries:
        used = chunk or chunk_and_block(*shape, torch.device("cuda"))[0]
        names = dict(zip(("batch", "positions", "channels"), shape, strict=True))
        what = {**names, "dtype": str(dtype).removeprefix("torch."), "eigenvalues": kind, "chunk": used}
        print(json.dumps({**what, **measure(shape, dtype, kind, chunk, rate), **where}), flush=True)


if __name__ == "__main__":
    main()
