"""Whether `flatout tune lr` finds a good rate: its choice over seeds, and full runs with it against a grid of rates.

    python benchmarks/lr_finder.py [CONFIG] [SECTION.FIELD=VALUE ...] [--seeds N] [--grid RATE,...] >> lr_finder.jsonl

Rows: `choice` (one range test: seed, every suggestion, seconds), `run` (a whole run: rate, seed, validation loss), and
`summary`: how far the choices of the seeds lie apart, and how much worse than the best rate of the grid the loss
with the first seed's choice is. Without words it is the shakespeare preset with ten seeds and seven rates. A rate is
that of the matrices, with which all others are scaled. On the error output the summary in words. A run of the grid is
trained with the first seed, so all of them see the same data.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRID = "2.5e-3,5e-3,1e-2,2e-2,4e-2,8e-2,1.6e-1"  # of Muon


def final_loss(config: str, words: list[str], rate: float, folder: Path) -> dict:
    from flatout import api
    from flatout.config.load import load_config
    from flatout.errors import DivergedError
    from flatout.records import EvalRecord

    quiet = ["eval.every=0", "eval.sample_tokens=0", "checkpoint.every=0"]
    optim = load_config(config, words).config.optim
    rates = optim.scaled_rates(rate / next(iter(optim.rates.values())))
    words = [*words, *quiet, *(f"{path}={value!r}" for path, value in rates.items()), f"output.folder={folder}"]
    began, loss = time.perf_counter(), None
    try:
        for record in api.train(load_config(config, words)):
            loss = record.loss if isinstance(record, EvalRecord) else loss
    except DivergedError as error:
        print(f"rate {rate:g}: {error.message}", file=sys.stderr)
    return {"type": "run", "rate": rate, "loss": loss, "seconds": time.perf_counter() - began}


def main() -> None:
    from flatout import api
    from flatout.config.load import load_config
    from flatout.tuning.lr_range import find_rate

    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="shakespeare")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--grid", default=GRID)
    parser.add_argument("--steps", type=int, default=100, help="of a range test")
    parsed = parser.parse_args()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    first = load_config(parsed.config, parsed.words).config.train.seed
    facts = {"config": parsed.config, "words": parsed.words, "commit": commit}
    with tempfile.TemporaryDirectory() as scratch:
        words = [*parsed.words, f"data.folder={Path(scratch) / 'data'}"]
        api.prepare(load_config(parsed.config, words))
        choices = []
        for seed in range(first, first + parsed.seeds):
            found = find_rate(load_config(parsed.config, [*words, f"train.seed={seed}"]), steps=parsed.steps)
            choices.append(found.rate)
            suggestions = {one.name: one.rate for one in found.reading.suggestions}
            row = {"type": "choice", "seed": seed, "rate": found.rate, "suggestions": suggestions}
            print(json.dumps({**row, "ended": found.ended, "seconds": found.seconds, **facts}), flush=True)
        runs = []
        for number, rate in enumerate([choices[0], *map(float, parsed.grid.split(","))] if parsed.grid else []):
            runs.append(final_loss(parsed.config, words, rate, Path(scratch) / f"run-{number}"))
            print(json.dumps({**runs[-1], "chosen": number == 0, **facts}), flush=True)
    losses = [run["loss"] for run in runs[1:] if run["loss"] is not None]
    summary = {
        "type": "summary",
        "choice": choices[0],
        "spread": max(choices) / min(choices),
        "loss": runs[0]["loss"] if runs else None,
        "best_of_grid": min(losses, default=None),
        "over_best": runs[0]["loss"] / min(losses) - 1 if losses and runs[0]["loss"] is not None else None,
        **facts,
    }
    print(json.dumps(summary), flush=True)
    over = "" if summary["over_best"] is None else f"; {summary['over_best']:+.2%} over the best of the grid"
    print(f"choice {choices[0]:g}, seeds a factor of {summary['spread']:.2f} apart{over}", file=sys.stderr)


if __name__ == "__main__":
    main()
