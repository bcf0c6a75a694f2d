"""Why records of the input could not be used: problems grouped by file and cause, with the settings that mend them.

Idea: a file whose rows lack the field has a problem for each row, and one cause. A cause counts records, as the report
of a dataset does, so that all numbers in a message are of the same thing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.corpus.document import Problem
from flatout.errors import many

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
        """Where it is, what, and which field these records have: `mend_of` tells the setting that fits all files."""
        first = self.first
        if max(self.count, self.records) <= 1:
            return f"{first.told}{f'; it has the field {first.instead}' if first.instead else ''}"
        instead = f"; these rows have the field {first.instead}" if first.instead else ""
        place = f", the first in {first.place}" if first.place else ""
        count = many(self.records, "record") if self.records else many(self.count, "place")
        return f"{first.file}: {count}{place}: {first.message}{instead}"


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


def names_to_read(causes: Iterable[Cause], fields: Sequence[str] = ()) -> list[str]:
    """`fields` with the names that read records which lack them; nothing if no such name is known."""
    names = dict.fromkeys([*fields, *(cause.first.instead for cause in causes if cause.first.instead)])
    return list(names) if len(names) > len(fields) else []


def mend_of(causes: Sequence[Cause], fields: Sequence[str] = ()) -> str:
    """What to set or do so that the records can be used. `fields` are those that some records have."""
    mends: dict[str, None] = {}
    if names := names_to_read(causes, fields):
        # In quotes, since brackets mean something to a shell.
        setting = f"data.field={names[0]}" if len(names) == 1 else f"'data.field=[{','.join(names)}]'"
        count = sum(cause.records for cause in causes if cause.first.instead)
        mends[f"{setting} reads {count:,} of them" if count else f"set {setting}"] = None
    for cause in causes:
        if not cause.first.instead and not (names and cause.first.kind == "field"):
            mends[_OTHER_MENDS.get(cause.first.kind, "mend the input")] = None
    return "; ".join(list(mends)[:3])
