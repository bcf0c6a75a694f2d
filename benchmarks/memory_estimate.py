"""Peak memory of a training step, estimated and measured, over families, micro-batches and switches.

    python benchmarks/memory_estimate.py >> benchmarks/memory_estimate.jsonl     (needs a CUDA device)

Each row: what ran and the measured peak of torch's allocator over three full steps, in bytes. A unit test holds
`estimate_memory` against these rows, so the estimate is kept true on machines without a GPU as well.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = [
    (preset, compiled, precision, checkpointing, micro_batch)
    for preset in ("gpt2-124m", "gpt-124m")
    for compiled, precision in (("on", "bf16"), ("off", "bf16"), ("off", "fp32"))
    for checkpointing, micro_batch in (("none", 8), ("none", 32), ("full", 32))
]


def measure(preset: str, compiled: str, precision: str, checkpointing: str, micro_batch: int) -> dict:
    import torch

    import flatout
    from flatout.config.load import load_config
    from flatout.records import RunInfo, StepRecord

    words = [
        "data.source=shakespeare", "data.folder=null", "train.steps=3", "eval.tokens=1024", "eval.sample_tokens=0",
        f"speed.micro_batch={micro_batch}", f"train.batch_tokens={2 * micro_batch * 1024}",
        f"speed.compile={compiled}", f"speed.precision={precision}", f"speed.checkpointing={checkpointing}",
    ]  # fmt: skip
    records = list(flatout.train(load_config(preset, words)))
    info = records[0]
    assert isinstance(info, RunInfo)
    return {
        "preset": preset,
        "compile": compiled,
        "precision": precision,
        "checkpointing": checkpointing,
        "micro_batch": micro_batch,
        "measured": max(r.memory_bytes or 0 for r in records if isinstance(r, StepRecord)),
        "device": info.device,
        "torch": torch.__version__,
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(*sys.argv[1:5], int(sys.argv[5]))))  # pyright: ignore[reportCallIssue]
        return
    script = Path(__file__).resolve()
    paths = os.pathsep.join(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    with tempfile.TemporaryDirectory() as folder:  # a process a case: nothing of one is left in the next
        for case in CASES:
            words = [sys.executable, str(script), *map(str, case)]
            done = subprocess.run(
                words, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
            )
            line = (done.stdout.strip().splitlines() or [""])[-1]
            print(line if done.returncode == 0 else json.dumps({"case": case, "error": done.stderr[-300:]}), flush=True)


if __name__ == "__main__":
    main()
