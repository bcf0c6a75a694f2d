"""Why records of the input could not be used: problems grouped by file and cause, with the setting that mends each.

Idea: a file whose rows lack the field has a problem for each row, and one cause. A cause counts records, as the report
of a dataset does, so that all numbers in a message are of the same thing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.corpus.document import Problem

_OTHER_MENDS: Mapping[str, str] = {
    "field": "set data.field to where the text is",
    "not-utf8": "data.invalid_utf8=replace reads what is not UTF-8, and data.invalid_utf8=skip leaves it out",
    "binary": "take binary files out of the source",
}


@dataclass(frozen=True)
class Cause:
    """One kind of problem in one file: the first of them, how many there are, and the records lost by all."""

    first: Problem
    count: int
    records: int

    @property
    def told(self) -> str:
        """Where it is, what, and which setting reads these records."""
        first = self.first
        if max(self.count, self.records) <= 1:
            return f"{first.told}{f'; data.field={first.instead} reads it' if first.instead else ''}"
        setting = f"; data.field={first.instead} reads them" if first.instead else ""
        place = f", the first in {first.place}" if first.place else ""
        many = f"{self.records:,} records" if self.records else f"{self.count:,} places"
        return f"{first.file}: {many}{place}: {first.message}{setting}"


def cause_of(problem: Problem) -> Cause:
    """The cause of one problem."""
    return Cause(problem, 1, problem.records)


def causes_of(problems: Iterable[Problem]) -> list[Cause]:
    """The causes of problems, those with the most records first."""
    found: dict[tuple[str, str, str], Cause] = {}
    for problem in problems:
        key = (problem.file, problem.kind, problem.instead)
        if (cause := found.get(key)) is None:
            found[key] = cause_of(problem)
        else:
            found[key] = replace(cause, count=cause.count + 1, records=cause.records + problem.records)
    return sorted(found.values(), key=lambda cause: -cause.records)


def field_setting(causes: Iterable[Cause], fields: Sequence[str] = ()) -> str:
    """The `data.field=...` that reads records which lack the field, beside `fields`; nothing if none is known."""
    names = dict.fromkeys([*fields, *(cause.first.instead for cause in causes if cause.first.instead)])
    if len(names) == len(fields):
        return ""
    # In quotes, since brackets mean something to a shell.
    return f"data.field={next(iter(names))}" if len(names) == 1 else f"'data.field=[{','.join(names)}]'"


def mend_of(causes: Sequence[Cause], fields: Sequence[str] = ()) -> str:
    """What to set or do so that the records can be used. `fields` are those that some records have."""
    mends: dict[str, None] = {}
    if setting := field_setting(causes, fields):
        count = sum(cause.records for cause in causes if cause.first.instead)
        mends[f"{setting} reads {count:,} of them" if count else f"set {setting}"] = None
    for cause in causes:
        if not cause.first.instead and not (setting and cause.first.kind == "field"):
            mends[_OTHER_MENDS.get(cause.first.kind, "mend the input")] = None
    return "; ".join(list(mends)[:3])
