"""Does a thousand steps of everything at once end where the plain trainer ends? One JSON line per case.

    python benchmarks/long_parity.py DATA_FOLDER COMMIT [CASE ...] >> benchmarks/long_parity.jsonl

GPT-2 124M, 1,000 steps of 8,192 tokens, the same data, seed and global batch in every case. `baseline` is the guides'
trainer (fp32, two sequences at a time, everything by hand), `full` what Flatout chooses by itself, `again` the same
with another order of additions (half the micro-batch), which shows how far two runs drift apart by rounding alone.
"""

import json
import statistics
import sys
import tempfile

import torch

import flatout
from flatout.config.load import load_config
from flatout.records import EvalRecord, RunInfo, StepRecord
from flatout.tuning.rungs import BASELINE, as_words

PLAN = ["train.steps=1000", "train.batch_tokens=8192", "optim.learning_rate=6e-4", "optim.warmup=100",
        "eval.every=250", "eval.sample_tokens=0", "checkpoint.every=0"]  # fmt: skip
CASES: dict[str, list[str]] = {
    "baseline": as_words(BASELINE),
    "full": ["speed.micro_batch=8"],
    "again": ["speed.micro_batch=4"],
    "fp32-residual": ["speed.micro_batch=8", "speed.residual=fp32"],
    "fp8-head": ["speed.micro_batch=8", "speed.fp8=[head]"],
    "fp8-mlp": ["speed.micro_batch=8", "speed.fp8=[up, down]"],
    "fp8-all": ["speed.micro_batch=8", "speed.fp8=[qkv, out, up, down, head]"],
    "8bit": ["speed.micro_batch=8", "speed.optimizer_state=8bit"],
}


def main() -> None:
    data, commit, *cases = sys.argv[1:]
    for case in cases or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            words = [f"data.folder={data}", f"output.folder={folder}/run", *PLAN, *CASES[case]]
            records = list(flatout.train(load_config("gpt2-124m", words)))
        info = next(record for record in records if isinstance(record, RunInfo))
        steps = [record for record in records if isinstance(record, StepRecord)]
        row = {
            "case": case,
            "commit": commit,
            "device": info.device,
            "torch": torch.__version__,
            "features": {feature.name: feature.used for feature in info.features},
            "steps": len(steps),
            "batch_tokens": info.batch_tokens,
            "val_losses": [round(record.loss, 5) for record in records if isinstance(record, EvalRecord)],
            "last_100_mean": round(statistics.fmean(record.loss for record in steps[-100:]), 5),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
