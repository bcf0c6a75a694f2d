"""The verbs estimate and doctor: what a run will take and whether it would work, before it is started.

Contract: as in `flatout.cli`. Nothing is written but the picture that `estimate --plot` names; `estimate --gpus`
measures nothing and needs no GPU. A run that does not fit is shown, and ends with the error and exit
code 5. For the doctor a mistake in the config is a finding among others, so that the rest is checked
too; mistakes in the options are errors as everywhere. It works without torch, and with a broken one. Its exit code is 0
when nothing is bad (warnings are allowed), 2 for the machine or the config, 3 for data, 5 for memory or disk. With
--json there is one JSON object a line, findings first and a summary last, and nothing else on stdout.
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
from pathlib import Path
from typing import TYPE_CHECKING

import flatout
from flatout.config.sizes import SIZED
from flatout.errors import ResourceError, UsageError, many, quoted
from flatout.front.configs import load_any, load_pretraining, print_notices
from flatout.front.output import Line, ended_by_signals, picture_target
from flatout.tuning.cluster import LLAMAS, llama_words

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.finding import Finding
    from flatout.tuning.many_gpus import PlanResult


# --- estimate ---------------------------------------------------------------------------------------------------------


def estimate(parsed: argparse.Namespace) -> int:
    if parsed.gpus is not None:
        return _estimate_on_many(parsed)
    for name in (*ON_MANY_GPUS, "plot"):
        if getattr(parsed, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} goes with --gpus", f"add --gpus 8, or leave {option} out")
    loaded = load_any(parsed)
    began = time.perf_counter()
    import flatout.front.training

    imported = time.perf_counter() - began
    from flatout.observe.sheets import print_sheet

    asked = {name: getattr(parsed, name) for name in ("price", "seconds") if getattr(parsed, name) is not None}
    line, asked["probe"] = Line(), not parsed.no_probe
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = flatout.estimate(loaded, **asked, imported=imported, notice=lambda what: line.show(f"{what} ..."))
    if parsed.json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_sheet(result.sheet())
    if result.problem:
        raise ResourceError(f"this run does not fit as it is: {result.problem}", result.way_out)
    return 0


# --- estimate --gpus --------------------------------------------------------------------------------------------------


MOST = 2**20  # GPUs
ON_MANY_GPUS = ("gpu", "per_host", "intra", "inter", "rate", "mfu")
LLAMAS_STAND_ON, SMALL = "gpt-124m", "modern"  # presets for a --size without a config


def _estimate_on_many(parsed: argparse.Namespace) -> int:
    """Memory, communication and time of a run on many GPUs. Measures nothing and needs no GPU."""
    if parsed.seconds is not None:
        raise UsageError("--seconds times real steps, and with --gpus nothing is measured", "leave one of them out")
    counts = _counts(parsed.gpus)
    picture = None if parsed.plot is None else picture_target(Path(parsed.plot), "--plot", overwrite=parsed.overwrite)
    size: str | None = parsed.size
    llama = None if size is None or size.lower() not in LLAMAS else size.lower()
    if llama and parsed.config not in SIZED:
        parsed.size = None
        parsed.overrides = llama_words(llama, parsed.overrides, batch=not parsed.config_given) + parsed.overrides
        parsed.config = parsed.config if parsed.config_given else LLAMAS_STAND_ON
    elif size is not None:
        parsed.config = parsed.config if parsed.config_given else SMALL
        size = f"{parsed.config} {size}"
    parsed.verb = "estimate --gpus"
    loaded = load_pretraining(parsed)
    if llama and loaded.size is not None:
        raise UsageError(f"--size {size} is a Llama's, and {parsed.config} has its own sizes", "leave the config out")
    from flatout.observe.sheets import draw_picture, print_sheet

    asked = {name: getattr(parsed, name) for name in ON_MANY_GPUS if getattr(parsed, name) is not None}
    result = dataclasses.replace(
        flatout.plan(loaded, counts, notice=lambda one: print_notices([one]), **asked), size=size
    )
    costs = [] if parsed.price is None else _costs(result, loaded, parsed.price)
    if parsed.json:
        body = result.to_json() | ({"costs": costs} if costs else {})
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_sheet(result.sheet())
        for row in costs:
            print(f"{row['gpus']:,} GPUs: {row['tokens']:,} tokens in {row['hours']:,.1f} h for {row['cost']:,.2f}")
    if picture is not None:
        draw_picture(result.picture(), picture, overwrite=parsed.overwrite)
        if not parsed.json:
            print(f"drew {picture}")
    return 0


def _costs(result: "PlanResult", loaded: "LoadedConfig", price: float) -> list[dict[str, float]]:
    """What the run costs on each number of GPUs; without a length, 1B tokens of it."""
    train, rows = loaded.config.train, []
    tokens = train.tokens or (train.steps or 0) * train.batch_tokens or 10**9
    for row in (row for row in result.rows if row.auto and row.tokens_per_second):
        hours = tokens / (3600 * row.gpus * (row.tokens_per_second or 0))
        rows.append({"gpus": row.gpus, "tokens": tokens, "hours": hours, "cost": hours * row.gpus * price})
    return rows


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


def doctor(parsed: argparse.Namespace) -> int:
    from flatout.finding import exit_code

    printer = _Printer(as_json=parsed.json)
    findings: list[Finding] = []
    how = {"hardware": parsed.hardware, "size": parsed.size, "quick": parsed.quick, "gpus": parsed.gpus}
    with ended_by_signals(printer.stopped):
        for finding in flatout.doctor(parsed.config, parsed.overrides, **how, progress=printer.progress):
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
    problems, warnings = many(counts["bad"], "problem"), many(counts["warn"], "warning")
    if counts["bad"]:
        return f"{checks} checks: {problems}, {warnings}. Mend the problems first; they stand last in the list."
    if counts["warn"]:
        rest = ". Training works; the warnings say what it would waste" if whole else "; not everything was checked"
        return f"{checks} checks: {warnings}, no problems{rest}."
    return f"{checks} checks, {'all fine' if whole else 'nothing wrong found; not everything was checked'}."


def _clean(text: str) -> str:
    """One line without control characters: paths and values come from the user's files."""
    from flatout.observe.human import printable

    return printable(" ".join(text.split()))
