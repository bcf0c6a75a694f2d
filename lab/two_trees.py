"""Training steps of two trees of this project in turns on one device, as JSON lines: what a change costs.

    python lab/two_trees.py [--data FOLDER] OLD NEW OLD_COMMIT NEW_COMMIT [CASE ...]

OLD and NEW are folders with `src` and `lab`, such as git worktrees. Each case runs in two
processes, one a tree.
They set up and warm up one after the other, because tuned products are chosen by their times; then they take turns, so
that only one of them has the device. A row has the medians of both, the ratio new to old, and the peak memory of each.
`speed_ratio` is the median over pairs of turns, one of each tree; `interval` is its 95% interval, by counting pairs.
Pretraining cases are the real loader and the real step of a preset on the bundled text; LoRA cases are those of each
tree's own `finetune.py`. Losses of the first steps stand in the row: with the same seed and data they say whether both
trees still compute the same.
Presets with sizes go by how often text is read: `--data FOLDER` has them read shards of more text.
`--small` is for a try on a CPU.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LONG = ["train.batch_tokens=131072", "speed.micro_batch=2"]
TOY = ["model.layers=2", "model.width=64", "model.heads=4", "model.context=128", "train.batch_tokens=512"]
PRESETS: dict[str, tuple[str, list[str], int]] = {  # preset, words, steps in a turn
    "124m": ("gpt2-124m", [], 1),
    "350m": ("gpt2-350m", ["speed.micro_batch=64"], 1),
    "record-60m": ("record", ["--size=60m", "train.batch_tokens=49152"], 6),
    "modern-124m": ("modern", ["--size=124m", "train.batch_tokens=65536"], 4),
    "small-32k": ("small-32k", LONG, 2),
    "small-32k-hybrid": ("small-32k-hybrid", LONG, 2),
    "small-32k-eigenstate": ("small-32k-eigenstate", LONG, 2),
}
LORA = ("lora-full", "lora-mixed")
WARM_UP, TURNS = 5, 24
OUTSIDE = 6  # of 24 ratios on each side of an interval that has the true median in 97.7% of all cases


class Worker:
    """A process that has set a case up, and steps on request."""

    def __init__(self, tree: Path, case: str, how: list[str]) -> None:
        own = [str(tree / name) for name in ("src", "lab")]
        path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--worker", case, *how]
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("a worker ended early: its error is above")

    def ask(self, word: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(case: str, old: Path, new: Path, how: list[str]) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    ready: dict[str, Any] = {}
    try:
        for name, tree in (("old", old), ("new", new)):
            workers[name] = Worker(tree, case, how)
            ready[name] = workers[name].answer()
        taken: dict[str, list[float]] = {"old": [], "new": []}
        ratios: list[float] = []
        for turn in range(TURNS):
            rates = {}
            for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                rates[name] = workers[name].ask("step")["rates"]
                taken[name] += rates[name]
            ratios.append(statistics.median(rates["new"]) / statistics.median(rates["old"]))
        ends = {name: worker.ask("end") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.end()
    middle = {name: statistics.median(rates) for name, rates in taken.items()}
    low, *_, high = sorted(ratios)[OUTSIDE:-OUTSIDE]
    return {
        "case": case,
        **{f"{name}_tokens_per_second": round(middle[name]) for name in middle},
        "speed_ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        **{f"{name}_spread": round(spread(rates) / middle[name], 4) for name, rates in taken.items()},
        "steps": len(taken["old"]),
        **{f"{name}_peak_gib": end["peak_gib"] for name, end in ends.items()},
        **{f"{name}_losses": answer["losses"] for name, answer in ready.items()},
    }


def spread(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


# --- inside a worker --------------------------------------------------------------------------------------------------


def work(case: str, data: str | None, *, small: bool) -> None:
    import torch

    sys.path.remove(str(Path(__file__).resolve().parent))  # `finetune` is to be the tree's own
    cuda = torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        built = lora(case, stack, small=small) if case in LORA else pretraining(case, data, stack, small=small)
        take, peak, losses, count = built
        gc.collect()
        say({"losses": losses})
        for line in sys.stdin:
            if line.strip() == "end":
                say({"peak_gib": round(peak() / 2**30, 3)})
                return
            rates = []
            for _ in range(count):
                if cuda:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                tokens = take()
                if cuda:
                    torch.cuda.synchronize()
                rates.append(tokens / (time.perf_counter() - began))
            say({"rates": rates})


Case = tuple[Callable[[], int], Callable[[], int | None], list[float], int]


def pretraining(case: str, data: str | None, stack: contextlib.ExitStack, *, small: bool) -> Case:
    from flatout.config.load import load_config
    from flatout.tuning.measure import Steps, borrowed_run

    preset, words, count = PRESETS[case]
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    steps = WARM_UP + TURNS * count
    text = ["data.source=shakespeare", f"data.folder={folder}/data"]
    if data is not None and any(word.startswith("--size=") for word in words):
        text = ["data.source=null", f"data.folder={data}"]
    plan = [*text, "data.tokenizer=gpt2", f"train.steps={steps}", "train.tokens=null", "train.epochs=null"]
    plan.append(f"output.folder={folder}/run")
    size = next((word.partition("=")[2] for word in words if word.startswith("--size=")), None)
    words = [word for word in words if not word.startswith("--")]
    loaded = load_config(preset, [*plan, *words, *(TOY if small else [])], size=size)
    run = stack.enter_context(borrowed_run(loaded))
    stepping = stack.enter_context(Steps(run))
    losses = [round(report.loss, 5) for report in stepping.take(WARM_UP)]

    def take() -> int:
        stepping.take(1)
        return loaded.config.train.batch_tokens

    return take, run.peak_memory_bytes, losses, count


def lora(case: str, stack: contextlib.ExitStack, *, small: bool) -> Case:
    import finetune
    import torch

    torch.manual_seed(0)
    how = {"mixed": case == "lora-mixed", "small": small}
    config = finetune.our_config([], **how)
    step, speed = finetune.our_step(config, **how)
    losses = []
    for _ in range(3):  # every shape comes, and is recorded where graphs are used
        with finetune.batches_of(config, speed, **how) as loader:
            losses += [float(step(batch.tokens, batch.targets, batch.packed)[0]) for batch in loader]

    def epochs() -> Iterator[Any]:
        while True:
            with finetune.batches_of(config, speed, **how) as loader:
                yield from loader

    feed = epochs()

    def take() -> int:
        batch = next(feed)
        step(batch.tokens, batch.targets, batch.packed)
        assert batch.packed is not None
        return batch.packed.tokens

    def peak() -> int:
        if not torch.cuda.is_available():
            return 0
        held = getattr(step.graph, "held_bytes", 0)  # in no peak of torch's
        return max(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() + held)

    return take, peak, [round(loss, 5) for loss in losses[:WARM_UP]], 5


def say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="OLD NEW OLD_COMMIT NEW_COMMIT [CASE ...]")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.worker:
        work(parsed.worker, parsed.data, small=parsed.small)
        return
    known = [*PRESETS, *LORA]
    cases = parsed.words[4:] or known
    if len(parsed.words) < 4 or any(case not in known for case in cases):
        sys.exit(
            f"error: two folders, two commits and perhaps cases are needed\nhint: the cases are {', '.join(known)}"
        )
    old, new, old_commit, new_commit = parsed.words[:4]
    how = [*(["--small"] if parsed.small else []), *([f"--data={parsed.data}"] if parsed.data else [])]
    for case in cases:
        try:
            row = compare(case, Path(old).resolve(), Path(new).resolve(), how)
        except RuntimeError as error:
            row = {"case": case, "error": str(error)}
        say({"old": old_commit, "new": new_commit, **row})


if __name__ == "__main__":
    main()
