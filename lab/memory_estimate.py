"""Peak memory of a training step, estimated and measured, over families, micro-batches and switches.

    python lab/memory_estimate.py [--compile] >> lab/memory_estimate.jsonl     (needs a CUDA device)

Each row: what ran and the measured peak of torch's allocator over three full steps, in bytes; on the error output the
estimate as a share of it. A unit test holds `estimate_memory` against these rows, so the estimate is kept true on
machines without a GPU as well. All cases run in one process, each with a run of its own that is freed afterwards;
compiled ones, which take half a minute each, only with --compile.
"""

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

# (preset, sequences at once, switches)
CASES = [
    ("gpt2-124m", 8, ["kernels=triton"]),
    ("gpt2-124m", 64, ["kernels=triton"]),
    ("gpt2-124m", 64, ["kernels=triton", "checkpointing=selective"]),
    ("gpt2-124m", 64, ["kernels=triton", "checkpointing=full"]),
    ("gpt2-124m", 32, ["kernels=triton", "residual=fp32"]),
    ("gpt2-124m", 16, ["kernels=triton", "loss=plain"]),
    ("gpt2-124m", 32, ["kernels=triton", "loss=chunked"]),
    ("gpt2-124m", 32, ["kernels=triton", "precision=fp32"]),
    ("gpt2-124m", 4, ["kernels=triton", "optimizer_state=8bit", "loss_chunk=2048"]),
    ("gpt2-124m", 4, ["kernels=triton", "optimizer_offload=true", "loss_chunk=2048", "checkpointing=full"]),
    ("gpt-124m", 32, ["kernels=triton"]),
    ("gpt-124m", 32, ["kernels=triton", "checkpointing=full"]),
    ("gpt2-350m", 16, ["kernels=triton", "checkpointing=selective"]),
    ("gpt2-124m", 32, ["kernels=torch", "compile=off", "loss=fused"]),
    ("gpt2-124m", 32, ["kernels=torch", "compile=off", "loss=chunked", "checkpointing=selective"]),
]
COMPILED = [
    ("gpt2-124m", 32, ["kernels=torch", "compile=default", "loss=plain"]),
    ("gpt2-124m", 32, ["kernels=torch", "compile=default", "loss=plain", "checkpointing=full"]),
    ("gpt-124m", 32, ["kernels=torch", "compile=default", "loss=plain"]),
]


def measure_case(preset: str, micro_batch: int, switches: list[str], scratch: Path) -> dict:
    import torch

    from flatout.config.load import load_config
    from flatout.tuning.measure import Steps, borrowed_run, summary_of
    from flatout.tuning.practice_data import practice_data

    words = [
        "train.steps=3", f"speed.micro_batch={micro_batch}", f"train.batch_tokens={2 * micro_batch * 1024}",
        "eval.tokens=1024", *(f"speed.{switch}" for switch in switches),
    ]  # fmt: skip
    loaded = load_config(preset, words)
    folder = scratch / loaded.config.data.tokenizer
    if not folder.exists():
        folder.mkdir()
        data, _ = practice_data(loaded, folder)
        (folder / "data.json").write_text(data.model_dump_json())
    data = loaded.config.data.model_validate_json((folder / "data.json").read_text())
    loaded = dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))
    with borrowed_run(loaded) as run:
        with Steps(run) as steps:
            result = summary_of(run, steps.take(1), steps.take(2))
        speed = run.speed
        row = {
            "preset": preset,
            "compile": speed.compile,
            "precision": speed.precision,
            "checkpointing": speed.execution.checkpointing,
            "micro_batch": micro_batch,
            "measured": result.peak_bytes,
            "execution": dataclasses.asdict(speed.execution),
            "optimizer_state": speed.optimizer_state,
            "optimizer_offload": speed.optimizer_offload,
            "cuda_graphs": speed.cuda_graphs,
            "device": speed.device.name,
            "torch": torch.__version__,
        }
        held = result.peak_bytes or math.nan
        share, peak = run.plan.memory.total / held, held / 2**30
        print(f"{share:6.3f} of {peak:6.2f} GiB: {preset} {micro_batch} {' '.join(switches)}", file=sys.stderr)
        return row


def main() -> None:
    from flatout.errors import UserError

    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES + (COMPILED if "--compile" in sys.argv[1:] else []):
            try:
                print(json.dumps({**measure_case(*case, Path(folder)), "commit": commit}), flush=True)
            except UserError as error:  # a switch this device cannot have, or out of memory: the others go on
                print(f"left out {case}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
