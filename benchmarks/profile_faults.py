"""Does `flatout profile` name the right bottleneck? One healthy run and four with one deliberate fault each.

    python benchmarks/profile_faults.py [CASE ...] [A.B=C ...] [--preset P] [--data FOLDER] [--steps N] [--out FOLDER]

Each case is a real run of the preset (default gpt2-124m) on one CUDA device, on its prepared data or on random tokens.
CASES are names out of `CASES` or patterns of them (no-*); none means all. A case needs no other one to have run.
One JSON line per case comes as soon as it is done: what was expected and found, with the figures that decided. A case
that fails is a line with `error`, and the next one follows. The same for people is on the error output. The exit code
is 1 if any was not named. With --out, the files of every case stay there. Another preset, settings (A.B=C) and a CPU
are for trying the script out: there a fault need not be one.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from flatout.config.load import load_config
from flatout.engine.run import Run
from flatout.observe.measured.profile_page import as_markdown, page_of
from flatout.tuning.measure import WARMUP, Steps, borrowed_run
from flatout.tuning.practice_data import practice_config
from flatout.tuning.profile import ProfileReport, fitted, profile_run
from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of


@dataclasses.dataclass(frozen=True)
class Case:
    """What must be found, the words that make it so, and the loader's delay in steps of the same run without it.

    The device works while the loader sleeps, so a delay of one step would hardly show.
    """

    expected: str
    words: list[str]
    delay: float = 0.0


TORCH = ["speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off"]
HOST = ["speed.loader=host", "speed.workers=0"]
CASES = {
    "healthy": Case("compute-bound", ["train.batch_tokens=65536"]),
    "tiny-micro-batch": Case("launch-bound", [*TORCH, "speed.micro_batch=1", "train.batch_tokens=8192"]),
    "no-compile": Case("memory-bound", [*TORCH, "train.batch_tokens=65536"]),
    "slow-loader": Case("data-bound", [*HOST, "train.batch_tokens=65536"], delay=2.0),
    "fp32": Case("compute-bound", ["speed.precision=fp32", "train.batch_tokens=65536"]),
}


class SlowLoader:
    """Batches of another loader, each later by `seconds`: a disk that cannot follow."""

    def __init__(self, loader: Any, seconds: float) -> None:
        self.loader, self.seconds = loader, seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            time.sleep(self.seconds)
            yield batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowRun(Run):
    seconds: float

    def batches(self, first_step: int, position: dict[str, Any] | None = None) -> Any:
        return SlowLoader(super().batches(first_step, position), self.seconds)


def slowed(run: Run, delay: float) -> SlowRun:
    """The run with a loader that is late by `delay` of its steps, which are timed for it."""
    with Steps(run) as steps:
        steps.take(WARMUP)
        seconds = statistics.median(report.seconds for report in steps.take(WARMUP))
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return SlowRun(**fields, seconds=delay * seconds)


def profiled(preset: str, case: Case, settings: list[str], steps: int | None, folder: Path) -> ProfileReport:
    loaded = load_config(preset, [*case.words, *settings])  # the last word wins
    with tempfile.TemporaryDirectory() as scratch:
        practice, described = practice_config(loaded, Path(scratch))
        with borrowed_run(fitted(practice, steps)) as run:
            measured = slowed(run, case.delay) if case.delay else run
            return profile_run(measured, folder, steps=steps, data=described)


def row_of(name: str, preset: str, settings: list[str], steps: int | None, out: Path | None) -> dict[str, Any]:
    """The JSON line of a case; an error is one too."""
    case, began = CASES[name], time.perf_counter()
    row: dict[str, Any] = {"case": name, "expected": case.expected, "found": None, "right": False}
    asked = {"preset": preset, "words": [*case.words, *settings]}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if out is None else out / name
            folder.mkdir(parents=True, exist_ok=True)
            report = profiled(preset, case, settings, steps, folder)
            page = as_markdown(page_of(dataclasses.asdict(report), str(folder)))
            (folder / "reading.md").write_text(page, encoding="utf-8")
        found = report.verdict.bottleneck
        row |= {"found": found, "right": found == case.expected, **asked, **figures(report)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases still have something to say
        traceback.print_exc()
        row |= {"error": f"{type(error).__name__}: {error}", **asked}
    return {**row, "wall_seconds": round(time.perf_counter() - began, 1)}


def figures(report: ProfileReport) -> dict[str, Any]:
    step, total = report.step_seconds, sum(report.seconds_by_kind.values()) or 1.0
    computes = sum(report.seconds_by_kind.get(kind, 0.0) for kind in ("matrix products", "attention", "unknown"))
    return {
        "step_ms": round(1000 * step, 2),
        "profiled_step_ms": round(1000 * report.profiled_step_seconds, 2),
        "busy": round(report.busy_seconds / step, 3),
        "data": round(report.idle_for_data_seconds / step, 3),
        "host": round(report.idle_for_host_seconds / step, 3),
        "moves": round(1 - computes / total, 3),
        "mfu": None if report.mfu is None else round(report.mfu, 4),
        "kernels_per_step": report.kernels_per_step,
        "kernel_us": round(1e6 * report.mean_kernel_seconds, 2),
        "ms_by_kind": {kind: round(1000 * seconds, 3) for kind, seconds in report.seconds_by_kind.items()},
        "sentence": report.verdict.sentence,
        "advice": [advice.words or advice.why for advice in report.verdict.advice],
        "used": dict(report.used),
        "device": report.device,
        "torch": report.torch,
    }


def shown(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['case']:<18}{row['expected']:<15}{row['found'] or '-':<15}"
    if "error" in row:
        return f"{head}{row['error']}"
    shares = "".join(f"{row[name]:>7.0%}" for name in ("busy", "data", "host", "moves"))
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    lines = [f"{head}{row['step_ms']:>9.1f}{shares}{mfu:>7}{'' if row['right'] else '   WRONG'}", row["sentence"]]
    return "\n    ".join([*lines, *(f"try {advice}" for advice in row["advice"])])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", metavar="CASE or A.B=C", help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, help="steps under the profiler")
    parsed = parser.parse_intermixed_args()
    settings = [word for word in parsed.words if "=" in word]
    settings += [f"data.folder={parsed.data}"] if parsed.data else []
    asked = [word for word in parsed.words if "=" not in word]
    for pattern in asked:
        if not fnmatch.filter(CASES, pattern):
            parser.error(f"no case {pattern!r}; there are {', '.join(CASES)}")
    names = [name for name in CASES if not asked or any(fnmatch.fnmatch(name, pattern) for pattern in asked)]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    titles = "".join(f"{title:>7}" for title in ("busy", "data", "host", "moves", "MFU"))
    print(f"{'case':<18}{'expected':<15}{'found':<15}{'step ms':>9}{titles}", file=sys.stderr)
    right = 0
    try:
        with terminated_like_interrupted():
            for name in names:
                row = row_of(name, parsed.preset, settings, parsed.steps, parsed.out)
                print(json.dumps({**row, "commit": commit}, ensure_ascii=False), flush=True)
                print(shown(row), file=sys.stderr, flush=True)
                right += row["right"]
    except KeyboardInterrupt as stopped:
        print(f"{word_of(stopped)}; the cases above are done, the others are not", file=sys.stderr)
        return exit_code_of(stopped)
    print(f"{right} of {len(names)} bottlenecks were named", file=sys.stderr)
    return 0 if right == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
