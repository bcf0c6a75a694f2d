"""What transformer, hybrid and eigenstate models learn from the same tokens at a long context, as JSON lines.

    python benchmarks/long_learning.py DATA_FOLDER COMMIT [CASE ...] [--context N] [--tokens N] \\
        >> benchmarks/long_learning.jsonl
    python benchmarks/long_learning.py --picture benchmarks/long_learning.jsonl OUT.png

The presets small-32k, small-32k-hybrid and small-32k-eigenstate, whose parameters differ by 1.1% at most, with the
same data, seed, batch (131,072 tokens), rate and schedule. DATA_FOLDER is a corpus prepared with GPT-2's tokenizer.
A row has the curve of the validation loss: tokens trained on, seconds of training (evaluations are not timed, nor is
what comes before the first step), loss. The validation text and its windows are the same for everybody.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = {"transformer": "small-32k", "hybrid": "small-32k-hybrid", "eigenstate": "small-32k-eigenstate"}
BATCH = 131_072
EVALUATIONS = 12
CONTEXT, TOKENS = 8192, 26_000_000


def learned(case: str, data: str, asked: argparse.Namespace) -> dict[str, Any]:
    import flatout
    from flatout.config.load import load_config
    from flatout.records import EvalRecord, RunInfo, StepRecord

    steps = -(-asked.tokens // BATCH)
    plan = [
        f"data.folder={data}", f"model.context={asked.context}", f"train.batch_tokens={BATCH}", f"train.steps={steps}",
        "train.tokens=null", f"optim.learning_rate={asked.rate}", f"optim.warmup={max(1, steps // 10)}",
        f"speed.micro_batch={max(1, BATCH // asked.context)}", f"eval.every={max(1, steps // EVALUATIONS)}",
        "eval.tokens=1048576", "eval.sample_tokens=0", "checkpoint.every=0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = [*plan, *asked.words, f"output.folder={folder}/run"]
        seconds, tokens, curve, rates, info = 0.0, 0, [], [], None
        for record in flatout.train(load_config(CASES[case], words)):
            if isinstance(record, RunInfo):
                info = record
            elif isinstance(record, StepRecord):
                seconds, tokens = seconds + record.seconds, record.tokens
                rates.append(record.tokens_per_second)
            elif isinstance(record, EvalRecord):
                curve.append([tokens, round(seconds, 2), round(record.loss, 4)])
                print(f"{case}: {tokens:,} tokens, {seconds:.1f} s, {record.loss:.4f}", file=sys.stderr, flush=True)
    assert info is not None
    return {
        "device": info.device,
        "parameters": info.parameters,
        "context": asked.context,
        "rate": asked.rate,
        "features": {feature.name: feature.used for feature in info.features},
        "tokens_per_second": round(sorted(rates)[len(rates) // 2]),
        "curve": curve,
    }


def picture(rows: Path, out: Path) -> None:
    """The last row of each case: loss over tokens, and over seconds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    last = {row["case"]: row for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines())}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for (case, row), color in zip(last.items(), ["#4269d0", "#efb118", "#ff725c"], strict=False):
        tokens, seconds, losses = zip(*row["curve"], strict=True)
        rate = f"{case}, {row['parameters'] / 1e6:.1f}M, {row['tokens_per_second']:,} tokens/s"
        axes[0].plot([count / 1e6 for count in tokens], losses, marker="o", markersize=3, color=color, label=rate)
        axes[1].plot(seconds, losses, marker="o", markersize=3, color=color, label=case)
    context = next(iter(last.values()))["context"]
    axes[0].set(xlabel="million tokens", ylabel="validation loss", title=f"Same tokens, context {context:,}")
    axes[1].set(xlabel="seconds of training", title="Same seconds")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs="+", metavar="DATA_FOLDER COMMIT [CASE ...]")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--words", nargs="*", default=[], help="settings, as model.layers=2")
    parser.add_argument("--picture", action="store_true")
    asked = parser.parse_intermixed_args()
    if asked.picture:
        picture(Path(asked.places[0]), Path(asked.places[1]))
        return
    data, commit, *cases = asked.places
    for case in cases or CASES:
        print(json.dumps({"case": case, "commit": commit, **learned(case, data, asked)}), flush=True)


if __name__ == "__main__":
    main()
