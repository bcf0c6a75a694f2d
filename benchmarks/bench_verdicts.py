"""Whether `flatout bench` can be fooled by other work: the same rungs twice under a changing load, and once without.

    python benchmarks/bench_verdicts.py [CONFIG] [A.B=C ...] [--rungs A,B] [--seconds N] > rows.jsonl

The load is one process for each core, each of which is busy or idle for 0.1 to 8 seconds at a time, at random. A row
has what one bench says of one rung. The last row compares the three: `differ` names the rungs that both loaded benches
have a verdict on, and not the same; `contradict` those where a loaded bench and the one without load have; `worth`
those that are worth more than 10% without load, and `missed` those of them that did not get that verdict under load.
Too noisy to tell is no verdict; `open` names rungs of which a bench said that.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import flatout
from flatout.records import BenchRow
from flatout.tuning.compare import NOISY
from flatout.tuning.plan import commit_of

RUNGS = "fused-qkv,sdpa,micro-batch,fused-adamw,pad-vocab,loader-thread,full-again"
SHOWN = ("rung", "status", "against", "gain", "gain_low", "gain_high", "error", "verdict", "pairs", "spread", "load")
WORTH = 0.1


def burn(seed: str) -> None:
    """Busy or idle by turns, until whoever started it has ended."""
    rng, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        busy = rng.random() < 0.5
        until = time.monotonic() + rng.choice((0.2, 0.5, 1, 2, 4, 8)) * rng.uniform(0.5, 1)
        while time.monotonic() < until:
            if busy:
                sum(range(100_000))
            else:
                time.sleep(0.05)


@contextlib.contextmanager
def load(seed: int) -> Iterator[None]:
    command = [sys.executable, __file__, "--burn"]
    burning = [subprocess.Popen([*command, f"{seed} {core}"]) for core in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in burning:
            process.terminate()
            process.wait()


def measured(name: str, words: argparse.Namespace) -> dict[str, BenchRow]:
    config = flatout.load_config(words.words[0] if words.words else "shakespeare-char", words.words[1:])
    rows: dict[str, BenchRow] = {}
    for row in flatout.bench(config, rungs=words.rungs.split(","), seconds=words.seconds):
        rows[row.rung] = row
        shown = {field: getattr(row, field) for field in SHOWN}
        facts = {"device": row.device, "torch": row.torch, "tokens": row.batch_tokens, "parameters": row.parameters}
        commit = commit_of(Path(flatout.__file__).parent)
        print(json.dumps({"bench": name, **shown, **facts, "commit": commit}), flush=True)
    return rows


def compared(benches: Mapping[str, Mapping[str, BenchRow]]) -> dict[str, list[str]]:
    quiet = benches["quiet"]
    busy = [rows for name, rows in benches.items() if name != "quiet"]

    def disagree(one: Mapping[str, BenchRow], other: Mapping[str, BenchRow]) -> set[str]:
        both = [name for name in one if name in other and one[name].verdict and other[name].verdict]
        verdicts = {name: {one[name].verdict, other[name].verdict} for name in both}
        return {name for name, said in verdicts.items() if len(said) > 1 and NOISY not in said}

    differ = set().union(*(disagree(*pair) for pair in itertools.combinations(busy, 2)))
    contradict = set().union(*(disagree(rows, quiet) for rows in busy))
    worth = [name for name, row in quiet.items() if row.gain and not 1 / (1 + WORTH) < row.gain < 1 + WORTH]
    missed = {name for name in worth for rows in busy if name in rows and rows[name].verdict != quiet[name].verdict}
    open_ = {name for rows in benches.values() for name, row in rows.items() if row.verdict == NOISY}
    found = {"differ": differ, "contradict": contradict, "worth": worth, "missed": missed, "open": open_}
    return {name: sorted(rungs) for name, rungs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CONFIG A.B=C")
    parser.add_argument("--rungs", default=RUNGS)
    parser.add_argument("--seconds", type=float, help="of each bench, as in `flatout bench`")
    parser.add_argument("--burn", metavar="SEED", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.burn is not None:
        burn(parsed.burn)
        return
    benches: dict[str, dict[str, BenchRow]] = {}
    for seed in (1, 2):
        with load(seed):
            benches[f"load {seed}"] = measured(f"load {seed}", parsed)
    benches["quiet"] = measured("quiet", parsed)
    print(json.dumps({"bench": "compared", **compared(benches)}), flush=True)


if __name__ == "__main__":
    main()
