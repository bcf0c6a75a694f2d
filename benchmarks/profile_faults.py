"""Does `flatout profile` name the right bottleneck? One healthy run and four with one deliberate fault each.

    python benchmarks/profile_faults.py [PRESET] [--data FOLDER] [--out FOLDER] [--only NAME,NAME] [WORDS ...]

Each case is a real run of the preset (default gpt2-124m) on one CUDA device, on its prepared data or on random tokens.
The table says what was expected and what was found, with the figures that decided; the exit code is 1 if any differ.
With --out, the files of every case stay there. Another preset, WORDS and a CPU are for trying the script out: there a
fault need not be one.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from flatout.config.load import load_config
from flatout.diagnose.profile import ProfileReport, fitted, profile_run
from flatout.engine.setup import Run
from flatout.observe.measured.profile_page import as_markdown, page_of
from flatout.tuning.measure import borrowed_run
from flatout.tuning.practice_data import practice_data

TORCH = ["speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off"]
# Name, what must be found, the words that make it so, and the loader's delay in healthy steps. The device works while
# the loader sleeps, so a delay of one step would hardly show.
CASES: tuple[tuple[str, str, list[str], float], ...] = (
    ("healthy", "compute-bound", ["train.batch_tokens=65536"], 0.0),
    ("tiny micro-batch", "launch-bound", [*TORCH, "speed.micro_batch=1", "train.batch_tokens=8192"], 0.0),
    ("no compile", "memory-bound", [*TORCH, "train.batch_tokens=65536"], 0.0),
    ("slow loader", "data-bound", ["speed.loader=host", "speed.workers=0", "train.batch_tokens=65536"], 2.0),
    ("fp32", "compute-bound", ["speed.precision=fp32", "train.batch_tokens=65536"], 0.0),
)


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


def profiled(preset: str, words: list[str], data: list[str], seconds: float, folder: Path) -> ProfileReport:
    loaded = load_config(preset, [*words, *data])  # the last word wins
    with tempfile.TemporaryDirectory() as scratch:
        section, described = practice_data(loaded.config, Path(scratch))
        with borrowed_run(fitted(loaded, section, None)) as run:
            fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
            slow = SlowRun(**fields, seconds=seconds) if seconds else run
            return profile_run(slow, folder, data=described)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset", nargs="?", default="gpt2-124m")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parsed, words = parser.parse_known_args()
    data = [*words, *([f"data.folder={parsed.data}"] if parsed.data else [])]
    names = [name.strip() for name in parsed.only.split(",") if name.strip()]
    wrong, healthy_seconds = 0, 0.1
    titles = "".join(f"{title:>7}" for title in ("busy", "data", "host", "moves", "MFU"))
    print(f"{'case':<18}{'expected':<15}{'found':<15}{'step ms':>9}{titles}", flush=True)
    for name, expected, case, factor in CASES:
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if parsed.out is None else parsed.out / name.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            report = profiled(parsed.preset, case, data, factor * healthy_seconds, folder)
            page = as_markdown(page_of(dataclasses.asdict(report), str(folder)))
            (folder / "reading.md").write_text(page, encoding="utf-8")
        if name == "healthy":
            healthy_seconds = report.step_seconds
        found = report.verdict.bottleneck
        wrong += found != expected
        print(f"{name:<18}{expected:<15}{found:<15}{figures(report)}{'' if found == expected else '   WRONG'}")
        print(f"    {report.verdict.sentence}")
        for advice in report.verdict.advice:
            print(f"    try {advice.words or '-'}: {advice.why}", flush=True)
    print("every bottleneck was named" if not wrong else f"{wrong} of them were not named")
    return 1 if wrong else 0


def figures(report: ProfileReport) -> str:
    step, total = report.step_seconds, sum(report.seconds_by_kind.values()) or 1.0
    computes = sum(report.seconds_by_kind.get(kind, 0.0) for kind in ("matrix products", "attention", "unknown"))
    shares = [report.busy_seconds, report.idle_for_data_seconds, report.idle_for_host_seconds]
    mfu = "-" if report.mfu is None else f"{report.mfu:.1%}"
    return (
        f"{1000 * step:>9.1f}"
        + "".join(f"{part / step:>7.0%}" for part in shares)
        + f"{1 - computes / total:>7.0%}{mfu:>7}"
    )


if __name__ == "__main__":
    sys.exit(main())
