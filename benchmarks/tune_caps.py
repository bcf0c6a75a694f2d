"""What `flatout tune` finds under memory caps, held against an exhaustive search and against 200 training steps.

The exhaustive search runs once per preset, without a cap: its best under a cap is the fastest trial whose peak leaves
the margin there, and both rates come from that search. Where tune moves moments to the host it runs again under that
cap, and both rates are those of whole steps: an update on the host is too uneven for anything shorter.

    python benchmarks/tune_caps.py PRESET CAP... [--batch-tokens N] [--steps N] [--no-exhaustive | --known FILE]

PRESET is gpt2-124m or gpt2-350m, a CAP is in GiB or `none`. One JSON line per cap goes to stdout and is added to
benchmarks/tune_caps.jsonl by hand. Needs a CUDA device. Each line holds: the choice, its tokens/s and peak, trials and
seconds of the search, the best of the exhaustive search and the share of it that the choice reaches, and the speed,
peak and out-of-memory notices of the training run. Training happens under the same cap. `--known` takes the trials of
the search without a cap from such a line, where the caps do not fit into one sitting.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("caps", nargs="+")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-exhaustive", action="store_true")
    parser.add_argument("--known", type=Path)
    words = parser.parse_args()
    if words.known is not None:
        lines = [json.loads(line) for line in words.known.read_text(encoding="utf-8").splitlines()]
        every = next(line["exhaustive"] for line in lines if line.get("cap_gib") is None and "exhaustive" in line)
        _EVERYTHING[None] = [Tried(*trial) for trial in every], None
    for cap in words.caps:
        row = one_cap(words.preset, None if cap == "none" else float(cap), words)
        print(json.dumps(row), flush=True)


class Tried(NamedTuple):
    """What this file asks of a trial."""

    micro_batch: int
    checkpointing: str
    loss: str
    status: str
    tokens_per_second: float | None
    peak_bytes: int | None
    loss_chunk: int
    optimizer_offload: bool
    cuda_graphs: bool


def one_cap(preset: str, cap: float | None, words: argparse.Namespace) -> dict:
    import torch

    from flatout import api
    from flatout.config.load import load_config
    from flatout.errors import UserError
    from flatout.records import TuneResult
    from flatout.tuning.search import MARGIN

    def say(text: str) -> None:
        print(f"{preset} {cap}: {text}", file=sys.stderr, flush=True)

    loaded = load_config(preset, [f"train.batch_tokens={words.batch_tokens}"])
    row: dict = {"preset": preset, "cap_gib": cap, "batch_tokens": words.batch_tokens, "torch": torch.__version__}
    try:
        *rows, result = list(api.tune(loaded, memory=cap))
    except UserError as error:
        return {**row, "error": str(error)}
    assert isinstance(result, TuneResult)
    chosen = result.chosen
    row |= {
        "device": result.device,
        "words": result.words,
        "tokens_per_second": chosen.tokens_per_second,
        "peak_gib": None if chosen.peak_bytes is None else chosen.peak_bytes / 2**30,
        "confirmed": result.confirmed,
        "trials": [[r.micro_batch, r.checkpointing, r.loss, r.status, r.tokens_per_second] for r in rows],  # pyright: ignore
        "seconds": result.seconds,
        "ended": result.ended,
    }
    say(f"{' '.join(result.words)}: {chosen.tokens_per_second:,.0f} tokens/s in {result.seconds:.0f} s")
    if not words.no_exhaustive:
        limit = max((1 - MARGIN) * (cap or 0.0) * 2**30, chosen.peak_bytes or 0)
        every, theirs = everything(loaded, cap if chosen.optimizer_offload else None)
        fits = [r for r in every if r.status == "fits" and (cap is None or (r.peak_bytes or 0) <= limit)]
        best = theirs if chosen.optimizer_offload else max(fits, key=lambda r: r.tokens_per_second or 0.0)
        names = ("micro_batch", "checkpointing", "loss", "loss_chunk", "optimizer_offload")
        same = [r for r in [best, *fits] if all(getattr(r, name) == getattr(chosen, name) for name in names)]
        mine = chosen.tokens_per_second if chosen.optimizer_offload or not same else same[0].tokens_per_second
        row |= {
            "best": [best.micro_batch, best.checkpointing, best.loss, best.tokens_per_second],
            "share_of_best": 1.0 if same and same[0] is best else (mine or 0.0) / (best.tokens_per_second or 1.0),
            "exhaustive_trials": len(every),
        }
        if cap is None:
            row["exhaustive"] = [[getattr(trial, name) for name in Tried._fields] for trial in every]
        say(f"{row['share_of_best']:.3f} of the best of {len(every)} trials")
    if words.steps:
        row |= train(preset, cap, result, words)
        say(f"{words.steps} steps at {row['trained_tokens_per_second']:,.0f} tokens/s, notices {row['out_of_memory']}")
    return row


_EVERYTHING: dict[float | None, tuple[list[Any], Any]] = {}


def everything(loaded: Any, cap: float | None) -> tuple[list[Any], Any]:
    """(the rows of an exhaustive search under a cap, its choice by whole steps); made once."""
    from flatout import api

    if cap not in _EVERYTHING:
        began = time.perf_counter()
        found: list[Any] = list(api.tune(loaded, memory=cap, exhaustive=True, seconds=500))
        rows = found[:-1]
        _EVERYTHING[cap] = rows, found[-1].chosen
        seconds = time.perf_counter() - began
        print(f"exhaustive search under {cap}: {len(rows)} trials, {seconds:.0f} s", file=sys.stderr)
        for r in rows:
            words = f"{r.micro_batch} {r.checkpointing} {r.loss} {r.status}{' graphs' if r.cuda_graphs else ''}"
            print(f"  {words} {r.tokens_per_second or 0:,.0f} {(r.peak_bytes or 0) / 2**30:.2f}", file=sys.stderr)
    return _EVERYTHING[cap]


def train(preset: str, cap: float | None, result, words: argparse.Namespace) -> dict:
    import torch

    import flatout
    from flatout.config.load import load_config
    from flatout.records import NoticeRecord, StepRecord

    limit = [] if cap is None else [f"speed.memory_limit={cap}"]
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        place = [f"output.folder={Path(folder) / 'run'}", f"data.folder={Path(folder) / 'data'}"]
        more = ["data.source=shakespeare", f"train.steps={words.steps}", "eval.every=100", "eval.sample_tokens=32",
                "eval.tokens=65536", "optim.warmup=9", f"train.batch_tokens={words.batch_tokens}"]  # fmt: skip
        records = list(flatout.train(load_config(preset, [*more, *place, *limit, *result.words])))
    steps = [record for record in records if isinstance(record, StepRecord)]
    return {
        "trained_steps": len(steps),
        "trained_tokens_per_second": statistics.median(r.tokens_per_second or 0.0 for r in steps[5:] or steps),
        "trained_peak_gib": max(record.memory_bytes or 0 for record in steps) / 2**30,
        "out_of_memory": [r.message for r in records if isinstance(r, NoticeRecord) and "out of memory" in r.message],
        "last_loss": steps[-1].loss,
    }


if __name__ == "__main__":
    main()
