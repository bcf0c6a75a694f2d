"""Whether data keeps a GPU busy: training steps fed from the device, from disk, packed, and from a stream.

    python benchmarks/feeding.py PREPARED_FOLDER STREAM_SOURCE COMMIT >> benchmarks/feeding.jsonl

Protocol: gpt2-124m, full training steps of 131,072 tokens, compiled, bf16; 60 steps, of which the first 10 are left
out; median seconds of a step by the device's own clock, from the end of one step to the end of the next, so waiting
for data counts. The prepared corpus on the device is the reference: it never waits.
"""

import json
import statistics
import sys
import tempfile

import flatout
from flatout.config.load import load_config
from flatout.records import RunInfo, StepRecord

WAYS = {
    "device": ["speed.loader=device"],
    "host, 1 thread": ["speed.loader=host", "speed.workers=1"],
    "host, best fit": ["speed.loader=host", "speed.workers=1", "data.packing=best_fit"],
    "stream": ["data.streaming=true", "eval.tokens=65536"],
}


def main() -> None:
    prepared, source, commit = sys.argv[1:4]
    for way, words in WAYS.items():
        place = [f"data.source={source}"] if way == "stream" else [f"data.folder={prepared}", "data.source=null"]
        with tempfile.TemporaryDirectory() as folder:
            common = [
                "train.batch_tokens=131072", "train.steps=60", "optim.warmup=10", "eval.every=0",
                "eval.tokens=65536", "eval.sample_tokens=0", "checkpoint.every=0", "data.split=document",
                "data.validation=0.02", f"output.folder={folder}/run",
            ]  # fmt: skip
            records = list(flatout.train(load_config("gpt2-124m", [*common, *place, *words])))
        info = next(record for record in records if isinstance(record, RunInfo))
        steps = [record for record in records if isinstance(record, StepRecord)]
        timed = [record.seconds for record in steps[10:]]
        row = {
            "benchmark": "feeding",
            "way": way,
            "commit": commit,
            "device": info.device,
            "torch": info.torch,
            "tokens_per_second": round(info.batch_tokens / statistics.median(timed)),
            "mean_tokens_per_second": round(info.batch_tokens / statistics.mean(timed)),
            "slowest_step": round(max(timed), 4),
            "losses": [round(steps[0].loss, 4), round(steps[-1].loss, 4)],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
