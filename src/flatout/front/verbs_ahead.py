"""The verbs estimate, plan and doctor: what a run will take and whether it would work, before it is started.

Contract: as in `flatout.cli`. Nothing is written but the picture that `plan --plot` names; `plan` measures nothing and
needs no GPU. A run that does not fit is shown with the table of what would, and ends with the error and exit code 5.
For the doctor a mistake in the config is a finding among others, so that the rest is checked too; mistakes in the
options are errors as everywhere. It works without torch, and with a broken one. Its exit code is 0 when nothing is bad
(warnings are allowed), 2 for the machine or the config, 3 for data, 5 for memory or disk. With --json there is one JSON
object a line, findings first and a summary last, and nothing else on stdout.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import flatout
from flatout.config.sizes import SIZED
from flatout.errors import ResourceError, UsageError
from flatout.front.output import Line, add_overwrite, ended_by_signals, picture_target
from flatout.front.verbs_training import told_by_one
from flatout.front.words import Parser, add_config, load_any, load_pretraining, one_line, quoted
from flatout.launch import launch
from flatout.tuning.cluster import CARDS, FAILURE_HOURS, GB, LLAMAS, Card, card_here, card_named, llama_words

if TYPE_CHECKING:
    from flatout.finding import Finding
    from flatout.records import BenchRow
    from flatout.tuning.many_gpus import Rate


# --- estimate ---------------------------------------------------------------------------------------------------------


def estimate(words: list[str]) -> int:
    parser = Parser(
        "estimate",
        "Time, memory, disk, energy and cost of a run, from a short timed piece of it. Trains nothing that is kept.",
    )
    add_config(parser)
    parser.number("--price", 0, 1e6, metavar="PER_HOUR", help="what an hour of the machine costs, in any currency")
    parser.number(
        "--seconds",
        0.1,
        3600.0,
        default=15.0,
        help="time training steps for this long; default 15. Evaluation, sample and checkpoint come on top",
    )
    parser.flag("--no-probe", "build and time nothing: sizes and counts only")
    parser.flag("--json", "print one JSON line instead of the sheet")
    parsed = parser.parse_words(words)
    loaded = load_any(parsed)
    began = time.perf_counter()
    import flatout.front.training

    imported = time.perf_counter() - began
    from flatout.observe.sheets import print_sheet

    line, asked = Line(), {"price": parsed.price, "seconds": parsed.seconds, "probe": not parsed.no_probe}
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = flatout.estimate(loaded, **asked, imported=imported, notice=lambda what: line.show(f"{what} ..."))
    if parsed.json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_sheet(result.sheet())
    if result.problem:
        raise ResourceError(f"this run does not fit as it is: {result.problem}", result.way_out)
    return 0


# --- plan -------------------------------------------------------------------------------------------------------------


MOST = 2**20  # GPUs
LLAMAS_STAND_ON, SMALL = "gpt-124m", "modern"  # presets for a --size without a config


def plan(words: list[str]) -> int:
    parsed = _parser().parse_words(words)
    counts = _counts(parsed.gpus)
    picture = None if parsed.plot is None else picture_target(Path(parsed.plot), "--plot", overwrite=parsed.overwrite)
    named = None if parsed.gpu is None else (parsed.gpu, card_named(parsed.gpu))
    size: str | None = parsed.size
    llama = None if size is None or size.lower() not in LLAMAS else size.lower()
    if llama and parsed.config not in SIZED:
        parsed.size = None
        parsed.overrides = llama_words(llama, parsed.overrides, batch=not parsed.config_given) + parsed.overrides
        parsed.config = parsed.config if parsed.config_given else LLAMAS_STAND_ON
    elif size is not None:
        parsed.config = parsed.config if parsed.config_given else SMALL
        size = f"{parsed.config} {size}"
    loaded = load_pretraining(parsed, "plan")
    if llama and loaded.size is not None:
        raise UsageError(f"--size {size} is a Llama's, and {parsed.config} has its own sizes", "leave the config out")
    name, card = named or card_here() or ("h100", CARDS["h100"])
    from flatout.observe.sheets import draw_picture, print_sheet
    from flatout.tuning.cluster import Cluster
    from flatout.tuning.many_gpus import on_card, planned_parameters
    from flatout.tuning.many_gpus import plan as look

    before, loaded = len(loaded.notices), on_card(loaded, card)
    for notice in loaded.notices[before:]:
        print(f"note: {one_line(notice)}", file=sys.stderr)

    cluster = Cluster(
        card=card,
        per_host=parsed.per_host,
        inside=card.inside if parsed.intra is None else parsed.intra * GB,
        across=card.across if parsed.inter is None else parsed.inter * GB,
    )
    rate = _rate(parsed, name, card, planned_parameters(loaded))
    told = {"disk": parsed.disk * GB, "restart": parsed.restart, "failure_hours": parsed.failure_hours}
    result = dataclasses.replace(look(loaded, cluster, rate, counts, **told), size=size)
    if parsed.json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_sheet(result.sheet())
    if picture is not None:
        draw_picture(result.picture(), picture, overwrite=parsed.overwrite)
        if not parsed.json:
            print(f"drew {picture}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Memory, communication, step time, checkpoints and interruptions of a run on many GPUs, for data parallel, "
        "FSDP2 and hybrid sharding. Measures nothing and needs no GPU.",
    )
    add_config(parser, size=f"; a Llama of {', '.join(LLAMAS)}")
    parser.add_argument(
        "--gpus", default="1..8", metavar="A..B", help="8..64 (doubling), or a list: 8,24; default 1..8"
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"the card: {', '.join(CARDS)}; default this machine's, or h100")
    parser.number("--per-host", 1, 1024, default=8, help="GPUs of a host; default 8")
    parser.number("--intra", 0.01, 1e5, metavar="GB/S", help="what a collective reaches inside a host, for each GPU")
    parser.number("--inter", 0.001, 1e5, metavar="GB/S", help="what it reaches between hosts, for each GPU")
    parser.number("--rate", 1.0, 1e9, metavar="TOKENS/S", help="of one GPU with this model; default: from --mfu")
    parser.number("--mfu", 0.01, 1.0, help="share of the peak rate; default: rows of `flatout bench` here, else known")
    parser.number("--disk", 0.001, 1e4, default=2.0, metavar="GB/S", help="what each host writes; default 2")
    parser.number("--restart", 0.0, 1e6, default=300.0, metavar="SECONDS", help="after an interruption; default 300")
    hours = f"GPU-hours between interruptions; default {FAILURE_HOURS:,.0f} (Llama 3 405B)"
    parser.number("--failure-hours", 1.0, 1e12, default=FAILURE_HOURS, metavar="HOURS", help=hours)
    parser.add_argument("--plot", metavar="FILE", help="draw it to this PNG or SVG file")
    add_overwrite(parser)
    parser.flag("--json", "print one JSON line instead of the tables")
    return parser


def _counts(text: str) -> list[int]:
    """8..64 is 8, 16, 32, 64; a list is what it says."""
    if found := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", text, re.ASCII):
        low, high = int(found[1]), int(found[2])
        counts = [low * 2**power for power in range(21) if 0 < low * 2**power <= high]
    elif re.fullmatch(r"\d{1,7}(,\d{1,7}){0,31}", text, re.ASCII):
        counts = sorted({int(word) for word in text.split(",")})
    else:
        counts = []
    if not counts or not 1 <= counts[0] <= counts[-1] <= MOST:
        raise UsageError(f"--gpus {quoted(text)} names no numbers of GPUs", "write 8..64, or a list such as 8,16,24")
    return counts


def _rate(parsed: argparse.Namespace, name: str, card: Card, parameters: int) -> "Rate":
    """How fast one GPU is: as told, as measured here, or as known of the card."""
    from flatout.tuning.many_gpus import Rate

    if parsed.rate is not None and parsed.mfu is not None:
        raise UsageError("--rate and --mfu say the same thing twice", "leave one of them out")
    if parsed.rate is not None:
        return Rate(tokens_per_second=parsed.rate, source="as told by --rate")
    if parsed.mfu is not None:
        return Rate(mfu=parsed.mfu, source="as told by --mfu")
    measured = max(_measured(name, parameters), key=lambda found: found[1].mfu or 0.0, default=None)
    if measured is not None:
        path, row = measured
        return Rate(mfu=row.mfu, source=f"measured here: rung {row.rung} of {row.config} in {path}")
    if card.mfu is None:
        raise UsageError(
            f"nobody has told us what share of its peak rate {card.name} reaches in training",
            "give --rate, tokens/s of one GPU with this model, or --mfu such as 0.4; `flatout bench` there measures it",
        )
    return Rate(mfu=card.mfu, source=card.mfu_source)


def _measured(name: str, parameters: int) -> "Iterator[tuple[Path, BenchRow]]":
    """Rows of `flatout bench` in its usual place, of this card and a model that is not much smaller.

    A small model keeps a card less busy, up to some hundred million parameters.
    """
    from flatout.records import bench_row_from_json

    for path in sorted(Path("bench").glob("*/bench.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = bench_row_from_json(line)
            except ValueError:  # another version's, or torn: `flatout bench` tells of it
                continue
            large = row.parameters >= min(parameters / 4, 1e8)
            if row.status == "green" and row.mfu and large and name.upper() in row.device.upper():
                yield path, row


# --- doctor -----------------------------------------------------------------------------------------------------------


# A mark that reads without colour, and the colour that helps where there is one.
_MARKS = {"ok": ("ok", "32"), "note": ("note", "36"), "warn": ("WARN", "33"), "bad": ("BAD", "31")}
_TITLES = {
    "machine": "Machine",
    "gpu": "GPU",
    "kernels": "Functional checks",
    "environment": "Environment variables",
    "disk": "Disk",
    "data": "Data",
    "config": "Config",
    "memory": "Memory and speed",
    "ranks": "Several GPUs",
}
_NAME_WIDTH = 20
_ARROW = "        -> "


def doctor(words: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Check machine, data and config before training: what was found, whether it is fine, and what to do about it.",
    )
    add_config(parser)
    parser.number("--gpus", 1, 4096, help="check for so many ranks; under torchrun, its own number")
    parser.flag("--quick", "leave out what takes seconds, such as compiling")
    parser.flag("--json", "print findings as JSON lines")
    launched = launch()

    def checked() -> argparse.Namespace:
        parsed = parser.parse_words(words)
        if launched is not None and parsed.gpus not in (None, launched.size):
            raise UsageError(f"--gpus {parsed.gpus}, but {launched.size} processes were started", "leave --gpus out")
        return parsed

    parsed = told_by_one(checked)
    from flatout.diagnose.examine import attend
    from flatout.finding import exit_code

    if launched is not None and launched.rank:
        attend(launched, parsed.config, parsed.overrides, parsed.size)
        return 0
    printer = _Printer(as_json=parsed.json)
    findings: list[Finding] = []
    how = {"hardware": parsed.hardware, "size": parsed.size, "quick": parsed.quick, "progress": printer.progress}
    how |= {"gpus": parsed.gpus, "launched": launched}
    with ended_by_signals(printer.stopped):
        for finding in flatout.doctor(parsed.config, parsed.overrides, **how):
            findings.append(finding)
            printer.finding(finding)
        printer.end(findings, exit_code(findings))
    return exit_code(findings)


class _Printer:
    """Findings to the terminal as they come, or as JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.area = ""
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        # A line that is wiped away again: only where somebody watches.
        self.line = Line(watched=not as_json and sys.stdout.isatty())

    def progress(self, text: str) -> None:
        self.line.show(f"  ... {text}")

    def stopped(self) -> str:
        self.line.close()
        return "the checks above were made, the rest was not"

    def finding(self, finding: "Finding") -> None:
        if self.as_json:
            print(json.dumps({"type": "finding", **dataclasses.asdict(finding)}, ensure_ascii=False), flush=True)
            return
        self.line.close()
        if finding.area != self.area:
            print(f"{'' if not self.area else chr(10)}{self._styled(_TITLES[finding.area], '1')}")
            self.area = finding.area
        print(
            f"  {self._mark(finding.status)}  {_clean(finding.name):<{_NAME_WIDTH}}  {_clean(finding.found)}",
            flush=True,
        )

    def end(self, findings: "list[Finding]", code: int) -> None:
        counts = Counter(finding.status for finding in findings)
        if self.as_json:
            summary = {status: counts[status] for status in _MARKS}
            print(json.dumps({"type": "doctor", "checks": len(findings), **summary, "exit_code": code}), flush=True)
            return
        self.line.close()
        worth = [one for one in findings if one.status in ("ok", "note") and one.advice]
        self._section("Worth knowing", worth)
        self._section("Warnings: it works, but not well", [one for one in findings if one.status == "warn"])
        self._section("Problems: training would not work", [one for one in findings if one.status == "bad"])
        whole = not any(one.unchecked for one in findings)
        print(f"\n{self._styled(_summary(counts, len(findings), whole=whole), '1')}")

    def _section(self, title: str, findings: "list[Finding]") -> None:
        if not findings:
            return
        print(f"\n{self._styled(title, '1')}")
        for finding in findings:
            head = f"{_TITLES[finding.area]}, {_clean(finding.name)}: {_clean(finding.found)}"
            advice = _clean(finding.advice)
            for text, first, others in ((head, f"  {self._mark(finding.status)}  ", ""), (advice, _ARROW, "   ")):
                lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
                for number, line in enumerate(lines):
                    print(f"{first if number == 0 else f'        {others}'}{line}")

    def _mark(self, status: str) -> str:
        word, colour = _MARKS[status]
        return self._styled(f"{word:<4}", colour)

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def _summary(counts: Counter[str], checks: int, *, whole: bool) -> str:
    def count(status: str, one: str, many: str) -> str:
        return f"{counts[status]} {one if counts[status] == 1 else many}"

    if counts["bad"]:
        found = f"{count('bad', 'problem', 'problems')}, {count('warn', 'warning', 'warnings')}"
        return f"{checks} checks: {found}. Mend the problems first; they stand last in the list."
    if counts["warn"]:
        found = f"{count('warn', 'warning', 'warnings')}, no problems"
        if not whole:
            return f"{checks} checks: {found}; not everything was checked."
        return f"{checks} checks: {found}. Training works; the warnings say what it would waste."
    if not whole:
        return f"{checks} checks, nothing wrong found; not everything was checked."
    return f"{checks} checks, all fine."


def _clean(text: str) -> str:
    """One line without control characters: paths and values come from the user's files."""
    from flatout.observe.human import printable

    return printable(" ".join(text.split()))
