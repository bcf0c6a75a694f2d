"""Where each millisecond of a training step goes: kernels by kind, against the least time their work could take.

    python benchmarks/step_profile.py DATA_FOLDER COMMIT PRESET [WORDS ...] >> benchmarks/step_profile.jsonl

One micro-batch of 64 x 1024 tokens, forward, backward and update, four steps under torch's profiler after six without.
Floors: matrix products at 791 TFLOP/s (a large bf16 product on this chip), attention at the same rate with causality
counted once, everything else at 4.27 TB/s (a device copy) for the fewest bytes it must move.
"""

import json
import sys

import torch

from flatout.config.load import load_config
from flatout.engine.run import Run
from flatout.model.count import parameter_count
from flatout.resolve.resolve import planned

PRODUCT_RATE, COPY_RATE = 791e12, 4.27e12
KINDS = (
    ("attention", ("cudnn", "flash", "sdpa")),
    ("products", ("nvjet", "gemm", "cutlass", "splitKreduce", "Lt")),
    ("loss", ("_rows",)),
    ("optimizer", ("FusedOptimizer", "FusedAdam", "multi_tensor_apply", "lpnorm")),
    ("our kernels", ("_forward", "_backward", "_pack", "_fold", "_scale", "_round", "_maxima")),
)


def main() -> None:
    data, commit, preset, *words = sys.argv[1:]
    plan = [f"data.folder={data}", "train.steps=40", "train.batch_tokens=65536", "output.folder=unused"]
    run = Run(planned(load_config(preset, [*plan, *words])))
    with run.batches(0) as loader:
        batch = next(iter(loader))
        for _ in range(6):
            run.step(batch.tokens, batch.targets)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                run.step(batch.tokens, batch.targets)
            torch.cuda.synchronize()
    kernels = [(row.key, row.self_device_time_total / 4000, row.count / 4) for row in profile.key_averages()]
    sums: dict[str, float] = {}
    for name, milliseconds, _ in kernels:
        kind = next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "the rest")
        sums[kind] = sums.get(kind, 0.0) + milliseconds
    largest = sorted(kernels, key=lambda kernel: -kernel[1])[:30]
    row = {
        "preset": preset,
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "words": words,
        "milliseconds": round(sum(sums.values()), 2),
        "by_kind": {kind: round(value, 2) for kind, value in sorted(sums.items(), key=lambda item: -item[1])},
        "floors": {kind: round(value, 2) for kind, value in floors(run).items()},
        "kernels": [[name[:90], round(milliseconds, 3), count] for name, milliseconds, count in largest],
    }
    print(json.dumps(row))


def floors(run) -> dict[str, float]:
    """Least milliseconds of each kind, from sizes alone."""
    model, vocab = run.plan.model, run.model.vocab
    tokens, width, layers = run.speed.micro_batch * model.context, model.width, model.layers
    parameters = parameter_count(model, vocab)
    products = 6 * tokens * (parameters - model.context * width)
    attention = 3.5 * 4 * run.speed.micro_batch * model.context**2 / 2 * width * layers
    cell = 2 if run.speed.execution.residual == "bf16" else 4
    row = tokens * width
    forward = row * 2 * (2 * cell + 4)  # two norms with their additions; gelu can ride along with a product
    backward = row * (2 * (3 * cell + 2 + (2 if cell == 4 else 0)) + 3 * 8 + 6)  # norms, gelu, sums over packed heads
    return {
        "products": 1e3 * products / PRODUCT_RATE,
        "attention": 1e3 * attention / PRODUCT_RATE,
        "our kernels": 1e3 * layers * (forward + backward) / COPY_RATE,
        "loss": 1e3 * tokens * vocab * 4 / COPY_RATE,
        "optimizer": 1e3 * parameters * 28 / COPY_RATE,
    }


if __name__ == "__main__":
    main()
