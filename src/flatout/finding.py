"""What is found about a run, its data or a machine, in one form: how bad it is, what it is, what to do about it.

`resolve` and the data make findings about a run. `train` prints them before the first step, and the doctor prints them
among its own about machine and data. What refuses a run is an error, and `finding_of` makes a finding of it. No torch
here.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from flatout.errors import UserError

# bad: training refuses or surely fails. warn: it works, and wastes time or does not do what was asked for. note: worth
# knowing.
Status = Literal["ok", "note", "warn", "bad"]
# In the order they are shown, and the exit code that a bad one of them means.
AREAS: Mapping[str, int] = {
    "machine": 2,
    "gpu": 2,
    "kernels": 2,
    "environment": 2,
    "disk": 5,
    "data": 3,
    "config": 2,
    "memory": 5,
    "ranks": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: what was found, whether that is fine, and otherwise what to do, in sentences."""

    area: str
    name: str
    status: Status
    found: str
    advice: str = ""
    unchecked: bool = False  # something was not checked, so the summary may not say that all is fine


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that is looked at; its methods are the findings that can come of it."""

    area: str
    name: str

    def finding(self, status: Status, found: str, advice: str = "") -> Finding:
        return Finding(area=self.area, name=self.name, status=status, found=found, advice=advice)

    def ok(self, found: str, advice: str = "") -> Finding:
        return self.finding("ok", found, advice)

    def note(self, found: str, advice: str = "") -> Finding:
        return self.finding("note", found, advice)

    def warn(self, found: str, advice: str = "") -> Finding:
        return self.finding("warn", found, advice)

    def bad(self, found: str, advice: str = "") -> Finding:
        return self.finding("bad", found, advice)

    def warn_if(self, wrong: bool, found: str, advice: str) -> Finding:
        return self.warn(found, advice) if wrong else self.ok(found)


def unchecked(area: str, found: str, advice: str = "") -> Finding:
    """Tells what was not looked at."""
    return Finding(area=area, name="the rest", status="note", found=found, advice=advice, unchecked=True)


def finding_of(error: UserError, area: str, name: str = "refused") -> Finding:
    """An error that training would end with, as a finding named after the setting to change; its exit code says where
    it belongs."""
    if AREAS.get(area) != error.exit_code:
        area = {2: "config", 3: "data", 5: "disk"}.get(error.exit_code, area)
    return Check(area, error.setting or name).bad(error.message, sentence(error.hint))


def sentence(text: str) -> str:
    """A hint, which begins small and has no end, as a sentence."""
    text = text.strip()
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing is bad; else that of the first area, in the order a run would meet them: 2, then 3, then 5."""
    return min((AREAS[finding.area] for finding in findings if finding.status == "bad"), default=0)
