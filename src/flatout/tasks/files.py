"""Tasks from files: JSON lines, also compressed by gzip, with a question in every line.

    {"query": "Question: ...", "choices": ["one", "two"], "gold": 1}
    {"context": "The man opened the", "continuation": "door"}
    {"context_options": ["As the tree", "As the cat"], "continuation": "fell asleep", "gold": 1}

A line of the first form is answered by the choice that is likeliest after the query, of the third by the context under
which the continuation is likeliest. The second is answered where the continuation is greedy. A query whose last line
begins with "Question:" is followed by "Answer:" in a line of its own, as in the prompts of lm-evaluation-harness.
"""

import gzip
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import DataError, UsageError, quoted
from flatout.files import parse_json

SUFFIXES = (".jsonl", ".jsonl.gz")
_MOST_LINE = 2**24
_FORMS = (
    'write {"query": ..., "choices": [...], "gold": 0}, {"context": ..., "continuation": ...} or '
    '{"context_options": [...], "continuation": ..., "gold": 0} in each line'
)

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A line of a task: contexts with their continuations, and which is right."""

    pairs: tuple[Pair, ...]
    gold: int | None  # None: the only one, where it is greedy
    choices: tuple[str, ...] = ()  # what stands for the pairs in accuracies by length

    @property
    def solved(self) -> str:
        """With its answer, as an example for others."""
        return "".join(self.pairs[self.gold or 0])


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    questions: tuple[Question, ...]
    shots: int = 0
    seed: int = 0
    limit: int | None = None  # questions asked, the first ones; all are taken for examples

    @property
    def asked(self) -> tuple[Question, ...]:
        return self.questions[: self.limit]

    def pairs(self) -> list[Pair]:
        """What a model is asked, in order: each question after examples that were drawn for it alone."""
        return [
            (examples + context, continuation)
            for number, question in enumerate(self.asked)
            for examples in [self._examples(number)]
            for context, continuation in question.pairs
        ]

    def _examples(self, number: int) -> str:
        if not self.shots:
            return ""
        drawn = random.Random(f"{self.seed} {number}").sample(range(len(self.questions) - 1), self.shots)
        others = (self.questions[place + (place >= number)].solved for place in drawn)
        return "".join(f"{solved}\n\n" for solved in others)


def find_tasks(
    words: Sequence[str], folder: Path | None = None, *, shots: int = 0, limit: int | None = None, seed: int = 0
) -> tuple[list[Task], list[str]]:
    """The tasks that words name: files, folders of files, or files in `folder`; and the names that are none of these.

    Names are those of files without their ending.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{quoted(str(folder))} is not a folder", "name the folder that task files lie in")
    paths, names = [], []
    for word in words:
        found = list(_files_of(word, folder))
        paths += found
        names += [] if found else [word]
    tasks = {}
    for path in dict.fromkeys(paths):
        name = path.name[: path.name.index(".jsonl")]
        if name in tasks:
            raise UsageError(f"two of the tasks are called {name}", "rename one of the files")
        tasks[name] = Task(name=name, questions=read_questions(path), shots=shots, seed=seed, limit=limit)
        if len(tasks[name].questions) <= shots:
            count = len(tasks[name].questions)
            raise UsageError(f"{path} has {count} questions, too few for {shots} examples", "ask for fewer shots")
    return list(tasks.values()), names


def _files_of(word: str, folder: Path | None) -> Iterator[Path]:
    path = Path(word)
    if path.is_dir() and word:
        found = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES))
        if not found:
            raise UsageError(f"{path} holds no tasks", "a task is a file that ends in .jsonl or .jsonl.gz")
        yield from found
    elif word.endswith(SUFFIXES):
        yield path if path.is_file() or folder is None else folder / word
    elif "/" in word:  # no task of the harness is called so
        raise UsageError(f"{quoted(word)} is neither a task file nor a folder of them", "name one that is there")
    elif folder is not None:
        yield from (one for suffix in SUFFIXES if (one := folder / f"{word}{suffix}").is_file())


def read_questions(path: Path) -> tuple[Question, ...]:
    """The questions of a file; an error names the line that is none."""
    found: list[Question] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number in range(1, 2**40):
                line = file.readline(_MOST_LINE)
                if not line:
                    break
                if line.strip():
                    found.append(_question(line, f"{path}, line {number}"))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"the task file {path} cannot be read: {reason}", "name a file of JSON lines") from error
    if not found:
        raise DataError(f"the task file {path} is empty", _FORMS)
    return tuple(found)


def _question(line: bytes, where: str) -> Question:
    try:
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        raise DataError("the line is no JSON", _FORMS, where=where) from None
    row = row if isinstance(row, dict) else {}
    if "query" in row:
        query = _text(row, "query", where).rstrip()
        asks = query.rpartition("\n")[2].startswith("Question:")
        choices = _texts(row, "choices", where)
        context = f"{query}\nAnswer:" if asks else query
        pairs = tuple((context, f" {choice}") for choice in choices)
        return Question(pairs=pairs, gold=_gold(row, len(pairs), where), choices=choices)
    if "context_options" in row:
        continuation = f" {_text(row, 'continuation', where)}"
        pairs = tuple((context, continuation) for context in _texts(row, "context_options", where))
        return Question(pairs=pairs, gold=_gold(row, len(pairs), where))
    if "context" in row:
        pair = (_text(row, "context", where).rstrip(), f" {_text(row, 'continuation', where)}")
        return Question(pairs=(pair,), gold=None)
    raise DataError("the line has neither query, context nor context_options", _FORMS, where=where)


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or (field != "query" and not value.strip()):
        raise DataError(f"{field} is {_shown(value)}, which is no text", _FORMS, where=where)
    return value if field in ("query", "context") else value.strip()


def _texts(row: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    values = row.get(field)
    good = isinstance(values, list) and all(isinstance(one, str) and one.strip() for one in values)
    if not isinstance(values, list) or not good or len(values) < 2:
        raise DataError(f"{field} is {_shown(values)}, not a list of two texts or more", _FORMS, where=where)
    return tuple(value.strip() for value in values)


def _gold(row: dict[str, Any], count: int, where: str) -> int:
    gold = row.get("gold")
    if type(gold) is not int or not 0 <= gold < count:
        raise DataError(f"gold is {_shown(gold)}, not a number from 0 to {count - 1}", _FORMS, where=where)
    return gold


def _shown(value: Any) -> str:
    return "missing" if value is None else quoted(str(value)[:80])
