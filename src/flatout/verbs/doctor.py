"""The verb doctor: words in, `flatout.api.doctor` called, a line for each check and advice for each problem out.

Contract: as in `flatout.cli`, with one difference: a mistake in the config is a finding among others, so that the rest
is checked too; mistakes in the options are errors as everywhere. Works without torch, and with a broken one. The exit
code is 0 when nothing is bad (warnings are allowed), 2 for the machine or the config, 3 for data, 5 for memory or disk.
With --json there is one JSON object a line, findings first and a summary last, and nothing else on stdout.
"""

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.launch import launch
from flatout.verbs.launching import told_by_one
from flatout.verbs.measuring import Line, ended_by_signals
from flatout.words import Parser, add_config

if TYPE_CHECKING:
    from flatout.finding import Finding

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
    from flatout import api
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
        for finding in api.doctor(parsed.config, parsed.overrides, **how):
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
