"""Why records of the input could not be used: problems grouped by file and cause, with the settings that mend them.

Idea: a file whose rows lack the field has a problem for each row, and one cause. A cause counts records, as the report
of a dataset does, so that all numbers in a message are of the same thing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.config.suggest import close_matches
from flatout.corpus.document import Problem
from flatout.corpus.fields import USUAL
from flatout.errors import many

_OTHER_MENDS: Mapping[str, str] = {
    "field": "set data.field to where the text is",
    "binary": "take binary files out of the source",
}
_NEAR = 0.85  # how alike a field that was asked for and one that is there are, where the first is a slip of the pen
_LISTED = 3  # causes of one kind
_KINDS = 6


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


def lines_of(causes: Sequence[Cause]) -> list[str]:
    """Causes to be listed: the first few of each kind and how many more there are, so that none hides the others."""
    kinds: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        kinds.setdefault((cause.first.kind, cause.first.instead), []).append(cause)
    lines: list[str] = []
    for alike in list(kinds.values())[:_KINDS]:
        lines += [cause.told for cause in alike[:_LISTED]]
        lines += _counted(alike[_LISTED:], " with the same problem")
    others = [cause for alike in list(kinds.values())[_KINDS:] for cause in alike]
    return [*lines, *_counted(others, "")]


def _counted(causes: Sequence[Cause], which: str) -> list[str]:
    if not causes:
        return []
    files, records = len({cause.first.file for cause in causes}), sum(cause.records for cause in causes)
    count = f"{many(records, 'more record')} of {many(files, 'file')}" if records else many(files, "more file")
    return [f"... and {count}{which}"]


def names_to_read(causes: Iterable[Cause], fields: Sequence[str] = ()) -> list[str]:
    """`fields` with the names that read records which lack them; nothing if no such name is known.

    A field that is nearly one of those names, and no usual one, was a slip and is left out.
    """
    others = [cause.first.instead for cause in causes if cause.first.instead]
    meant = [field for field in fields if field in USUAL or not close_matches(field, others, _NEAR)]
    return list(dict.fromkeys([*meant, *others])) if set(others) - set(fields) else []


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
            is_encoding = cause.first.kind == "not-utf8"
            mends[encoding_mend(causes) if is_encoding else _OTHER_MENDS.get(cause.first.kind, "mend the input")] = None
    return "; ".join(list(mends)[:3])


def encoding_mend(causes: Iterable[Cause]) -> str:
    """What to do about text that is not UTF-8, and what the setting that reads it costs; nothing where all is."""
    files = list(dict.fromkeys(cause.first.file for cause in causes if cause.first.kind == "not-utf8"))
    if not files:
        return ""
    which = f"{files[0]} and {many(len(files) - 1, 'more file')}" if len(files) > 1 else files[0]
    return (
        f"convert {which} to UTF-8 (from latin-1: `iconv -f latin1 -t utf-8`), or data.invalid_utf8=replace loses "
        "those letters"
    )
