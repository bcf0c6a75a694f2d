"""Instruction files to samples: rows, conversations, text, tokens with labels, and those that are held out.

Idea: a few hundred rows at a time go through all of it; the library that tokenizes works on them side by side. What
comes out is kept in memory and handed to `samples`, which keeps it in a folder.

Contract: the result is a pure function of source, template, tokenizer and settings, of which the folder keeps a hash. A
folder that was made from the same is used as it is; another one is made anew, and the reason is told. Nothing is lost
in silence: rows that could not be used are listed, samples that were cut or dropped are counted. A dataset in which
nothing would be learned, or many of whose rows are bad, is refused.

The held-out split goes by a hash of a conversation's text, so that the same conversation is never in both, wherever
it stands in the file, and more rows do not move those that are there.

Trap: a sample ends with its last labelled token. One of n tokens has n - 1 places at which something is predicted, so
one of context + 1 tokens fits.

What is counted while rows become samples, in words, and what to do about it.

Idea: a template may leave out, change or split what a row says, and so may the context. Each of it is counted in
`masking` and `make_samples`, kept in the manifest of the samples, and told at the start of a run and by the doctor.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import InputFile, Problem, Row, shown
from flatout.corpus.readers import read_rows
from flatout.corpus.sources import find_files
from flatout.data.chat_template import ChatTemplate
from flatout.data.conversations import LOOK_AT, Conversation, RowReading, choose_reading, conversation_of
from flatout.data.masking import Rendered, TrainOn, render, tokenize
from flatout.data.samples import VERSION, Samples, SampleSet, check_target, open_samples, why_not, write_samples
from flatout.data.tokenizer import Ids, ModelTokenizer, token_dtype
from flatout.errors import ConfigError, DataError, many
from flatout.files import hash_file
from flatout.records import PrepareProgress

# What is counted, in the order in which it is of interest.
COUNTS: Mapping[str, str] = {
    "rows": "rows that were read",
    "rows_not_used": "rows that could not be used, with the reason of each in problems.jsonl beside the samples",
    "turns": "assistant turns that are learned",
    "turns_apart": "turns in samples of their own, since the template writes them differently later on",
    "prompts_apart": "turns that do not begin as the template's prompt does",
    "turns_without_end_token": "turns that end without a special token, so that only text tells a model to stop",
    "contents_changed": "turns that the template does not write as they stand in the file",
    "contents_left_out": "messages that the template leaves out",
    "reasoning_left_out": "turns whose reasoning the template leaves out",
    "tools_left_out": "rows with tools that the template does not mention",
    "turns_unlabelled": "turns of which no token begins inside",
    "straddling": "tokens across the border of a turn",
    "empty_answers": "empty assistant turns",
    "special_in_content": "rows whose own text spells a special token",
    "truncated": "samples cut to the context",
    "labels_cut": "labelled tokens that were cut away",
    "dropped_labels_cut": "samples dropped since all their labels were cut away",
    "dropped_unlabelled": "samples dropped since no token of them is labelled",
    "longest": "tokens of the longest sample before it was cut",
}


# What to do about those that need not be what was meant.
ADVICE: Mapping[str, str] = {
    "turns_apart": "set chat.train_on=last if only last answers are to be learned",
    "prompts_apart": "chat ends its prompt differently from what is learned; set chat.template to change that",
    "contents_changed": "compare the preview with the rows; chat.template selects another template",
    "contents_left_out": "put their text into a system or user message, or set chat.template to one that writes them",
    "reasoning_left_out": "write it into the content, as the model should write it, or set chat.template",
    "tools_left_out": "set chat.template to one that writes tools, or leave them out of the rows",
    "straddling": "they are learned only if they begin inside; begin and end answers without white space",
    "empty_answers": "the model learns to end such a turn at once; leave them out, or mark them with train: false",
}


def count_told(name: str, count: int) -> str:
    """A count with the words that say what it is of."""
    what, comma, more = COUNTS[name].partition(",")
    if count == 1:
        what = " ".join(_OF_ONE.get(word, word) for word in what.split())
    return f"{count:,} {what}{comma}{more}"


_OF_ONE = {
    "rows": "row", "turns": "turn", "samples": "sample", "messages": "message", "tokens": "token",
    "were": "was", "are": "is", "end": "ends", "do": "does", "their": "its", "them": "it",
}  # fmt: skip


_SEED = 0  # of the hash that rows are held out by: the same rows whatever the seed of the run
_CHUNK = 512
_CHUNK_CHARACTERS = 2**21  # the library that tokenizes takes 130 bytes for each
# A row is rendered and tokenized whole, which takes 150 bytes for each of its characters. One with more than these is
# longer than any context; natural text has about 4 characters a token.
_ROW_CHARACTERS, _ROW_CHARACTERS_A_TOKEN = 2**20, 32
_MOST_BAD = 0.2  # the share of rows that may be unusable before the dataset is refused
# Folders of samples are known by these, too.
_FORMER_SETTINGS = {"val_rows": None, "seed": _SEED, "most_bad": _MOST_BAD, "too_long": "truncate", "format": "auto"}
_ROWS = ("json", "jsonl", "csv", "tsv", "parquet")

Progress = Callable[[PrepareProgress], None]


@dataclass(frozen=True)
class SampleRequest:
    """What samples are made of. Held out are about `val_fraction` of the rows, or those of `val_source`.

    `limit` is the setting that `context` comes from, for messages alone.
    """

    source: str
    context: int
    val_source: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "assistant"
    val_fraction: float = 0.0
    limit: str = "model.context"


def prepare_samples(
    request: SampleRequest,
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
    folder: str | Path,
    progress: Progress | None = None,
) -> SampleSet:
    """The samples that `request` asks for, in `folder`: those that are there, or made anew where they do not fit.

    The process that renders the template has ended afterwards.
    """
    try:
        target, train_files, val_files, key = _asked(request, tokenizer, template, folder)
        why = why_not(target, key)
        if not why:
            return open_samples(target)
        maker = _Maker(request, tokenizer, template, progress, [*train_files, *val_files])
        train = maker.read(train_files, request.source)
        held_out = None if request.val_source is None else maker.read(val_files, request.val_source)
        splits = _split(train, request.val_fraction) if held_out is None else {"train": train, "val": held_out}
        for name, made in splits.items():
            _check_learnable(made, name, request, maker)
        maker.tell("merging")
        arrays = {name: _arrays(made, token_dtype(tokenizer.vocab)) for name, made in splits.items()}
        write_samples(target, key, arrays, maker.told(), maker.problems, tokenizer, template)
        return dataclasses.replace(open_samples(target), made=why)
    finally:
        if template is not None:
            template.release()


def why_made(
    request: SampleRequest, tokenizer: ModelTokenizer, template: ChatTemplate | None, folder: str | Path
) -> str:
    """Why `prepare_samples` would make samples now; nothing where those that it is asked for are there."""
    target, _, _, key = _asked(request, tokenizer, template, folder)
    return why_not(target, key)


def _asked(
    request: SampleRequest, tokenizer: ModelTokenizer, template: ChatTemplate | None, folder: str | Path
) -> tuple[Path, list[InputFile], list[InputFile], dict[str, Any]]:
    """(folder, files to train on, files to evaluate on, what samples made of them are known by)"""
    if not 0.0 <= request.val_fraction < 1.0:
        raise ConfigError(
            f"chat.validation is {request.val_fraction}", "give a share from 0 up to, but not including, 1"
        )
    target = Path(folder).resolve()
    train_files = row_files(request.source, "chat.source")
    val_files = [] if request.val_source is None else row_files(request.val_source, "chat.validation")
    settings = dataclasses.asdict(request)
    del settings["source"], settings["val_source"]  # content counts, not where it lies
    del settings["limit"]  # the number counts
    key = {
        "version": VERSION,
        "settings": {**_FORMER_SETTINGS, **settings},
        "source": [[file.format, hash_file(Path(file.path))] for file in train_files],
        "val_source": [[file.format, hash_file(Path(file.path))] for file in val_files],
        "tokenizer": tokenizer.fingerprint,
        "template": None if template is None else template.fingerprint,
    }
    check_target(target)
    return target, train_files, val_files, key


def row_files(source: str, field: str) -> list[InputFile]:
    """The files of rows that a source means; `field` is the setting that names it."""
    rows = "give .jsonl, .json, .csv, .tsv or .parquet files"
    try:
        found = find_files(source)
    except DataError as error:  # its hint is about text
        raise DataError(error.message, f"check {field}: {rows}, or a folder of them") from error
    if found.problems:
        first = found.problems[0]
        raise DataError(f"{first.file}: {first.message}", "mend the source, or leave the file out")
    for file in found.files:
        if file.format not in _ROWS:
            raise DataError(
                f"{file.name} holds no rows of instructions: its format is {file.format}",
                f"{rows}; text for pretraining goes to `flatout train`",
            )
    return list(found.files)


@final
@dataclass(frozen=True, eq=False)
class _Made:
    """Samples with the number of the conversation each is of, and for each conversation a hash of its text."""

    samples: list[tuple[Ids, npt.NDArray[np.bool_], int]]  # ids, labels, conversation
    hashes: list[int]

    def chosen(self, which: npt.NDArray[np.bool_]) -> "_Made":
        """The samples of the conversations that are chosen."""
        return _Made([sample for sample in self.samples if which[sample[2]]], self.hashes)


@final
class _Maker:
    """Reads sources into samples, and counts what happens on the way."""

    def __init__(
        self,
        request: SampleRequest,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None,
        progress: Progress | None,
        files: list[InputFile],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.readings: list[RowReading] = []
        self._request = request
        self._tokenizer = tokenizer
        self._template = template
        self._progress = progress
        self._told = PrepareProgress("reading", 0, len(files), 0, sum(file.bytes for file in files), 0, 0, 0)
        self._bytes = 0  # of the file that is being read
        self._pending: list[tuple[int, Rendered]] = []  # with the number of the conversation; not tokenized yet
        self._most = max(_ROW_CHARACTERS, _ROW_CHARACTERS_A_TOKEN * request.context)
        # Hardly any text holds one of these, so that most need not be searched for hundreds of tokens.
        self._special_beginnings = {text[:2] for text in tokenizer.special_texts}

    def read(self, files: list[InputFile], source: str) -> _Made:
        made = _Made([], [])
        rows_before, problems_before = self.counts["rows"], len(self.problems)
        stream = iter(itertools.chain.from_iterable(self._rows(file) for file in files))
        head = list(itertools.islice(stream, LOOK_AT))
        first = [row for _, row in head if isinstance(row, Row)]
        if first:
            reading = choose_reading(self._request.fields, first, source)
            self.readings.append(reading)
            characters = 0
            for file, row in itertools.chain(head, stream):
                said = row if isinstance(row, Problem) else conversation_of(row, reading, file.name)
                characters += self._note(said) if isinstance(said, Problem) else self._take(said, made)
                if len(self._pending) >= _CHUNK or characters > _CHUNK_CHARACTERS:
                    self._flush(made)
                    characters = 0
            self._flush(made)
        else:
            for _, row in head:
                if isinstance(row, Problem):
                    self._note(row)
        self._check_share(source, self.counts["rows"] - rows_before, self.problems[problems_before:], bool(made.hashes))
        return made

    def _rows(self, file: InputFile) -> Iterator[tuple[InputFile, Row | Problem]]:
        def watch(position: int) -> None:
            self._bytes = position

        for row in read_rows(file, watch=watch):
            if isinstance(row, Problem):
                _check_readable(file, row)
            elif (size := _characters(row.value)) > self._most:
                message = f"the row has {size:,} characters; the limit for this context is {self._most:,}"
                row = Problem(file.name, row.place, "too-long", message, records=1)
            yield file, row
        self._told = self._told.plus(files=1, bytes=file.bytes)
        self._bytes = 0

    def _take(self, row: Conversation, made: _Made) -> int:
        """Renders a row, and returns how many characters that gives."""
        counts: Counter[str] = Counter()
        rendered = render(row, self._template, self._request.train_on, self._tokenizer.special_texts, counts)
        if isinstance(rendered, Problem):
            return self._note(rendered)
        if rendered[-1].bare and self._tokenizer.end_of_text is None:
            raise DataError(
                "the tokenizer names no end-of-text token, so that a model could never learn to stop",
                "name an eos_token in tokenizer_config.json, or use a chat template with an end of turn of its own",
            )
        self.counts["rows"] += 1
        self.counts.update(counts)
        self.counts["special_in_content"] += self._spells_special(row)
        self._pending += [(len(made.hashes), sample) for sample in rendered]
        made.hashes.append(_hash_of(rendered[-1].text))
        return sum(len(sample.text) for sample in rendered)

    def _spells_special(self, row: Conversation) -> bool:
        """Whether what somebody said spells a special token: it becomes that token, as in every other program."""
        said = [message["content"] for message in row.messages] or [row.prompt or "", row.completion or ""]
        return any(
            any(beginning in text for beginning in self._special_beginnings)
            and any(token in text for token in self._tokenizer.special_texts)
            for text in said
        )

    def _note(self, problem: Problem) -> int:
        """Lists a row that cannot be used, which gives no text."""
        self.problems.append(problem)
        self.counts["rows"] += problem.records
        self.counts["rows_not_used"] += problem.records
        return 0

    def _flush(self, made: _Made) -> None:
        most, pending = self._request.context + 1, self._pending
        tokenized = tokenize([sample for _, sample in pending], self._tokenizer, self.counts)
        for (owner, _), (ids, labelled) in zip(pending, tokenized, strict=True):
            if not labelled.any():
                self.counts["dropped_unlabelled"] += 1
                continue
            # What comes after the last label is not predicted, and nothing that is predicted sees it.
            last = int(np.flatnonzero(labelled)[-1]) + 1
            ids, labelled = ids[:last], labelled[:last]
            self.counts["longest"] = max(self.counts["longest"], len(ids))
            if len(ids) > most:
                self.counts["truncated"] += 1
                self.counts["labels_cut"] += int(np.count_nonzero(labelled[most:]))
                ids, labelled = ids[:most], labelled[:most]
                if not labelled.any():
                    self.counts["dropped_labels_cut"] += 1
                    continue
            made.samples.append((ids, labelled, owner))
            self.counts["tokens"] += len(ids)
        pending.clear()
        self.tell("reading")

    def tell(self, phase: str) -> None:
        if self._progress is not None:
            read = min(self._told.bytes + self._bytes, self._told.total_bytes)
            counts = {"documents": self.counts["rows"], "tokens": self.counts["tokens"]}
            told = dataclasses.replace(self._told, phase=phase, bytes=read, problems=len(self.problems), **counts)
            self._progress(told)

    def told(self) -> dict[str, Any]:
        """What the manifest keeps of how the samples were made."""
        kinds = Counter(problem.kind for problem in self.problems)
        return {
            "reading": [dataclasses.asdict(reading) for reading in self.readings],
            "counts": {name: int(self.counts[name]) for name in COUNTS},
            "problems": {"all": len(self.problems), **dict(sorted(kinds.items()))},
        }

    def _check_share(self, source: str, rows: int, problems: list[Problem], any_left: bool) -> None:
        if any_left and sum(problem.records for problem in problems) <= _MOST_BAD * rows:
            return
        if not problems:
            raise DataError(f"{shown(source)} has no rows", "give a file with at least one row")
        first, bad = problems[0], sum(problem.records for problem in problems)
        what = (
            f"{bad:,} of {many(rows, 'row')} of {shown(source)} cannot be used"
            if rows
            else f"{shown(source)} cannot be read"
        )
        kinds = Counter(problem.kind for problem in problems)
        others = ", ".join(f"{count:,} of {kind}" for kind, count in kinds.most_common(4)) if len(kinds) > 1 else ""
        kind = "no-template" if first.kind == "template" and self._template is None else first.kind
        raise DataError(
            f"{what}; the first: {first.told}{f' (problems: {others})' if others else ''}",
            _HINTS.get(kind, "mend the rows, or set chat.fields"),
        )


def _check_readable(file: InputFile, problem: Problem) -> None:
    """Refuse a file that breaks off: how many rows are missing is not known. A bad row among good ones is no such."""
    broken = ("truncated", "compression", "checksum", "bomb", "format")
    if problem.records and problem.kind not in broken and not (file.format == "json" and problem.kind != "not-utf8"):
        return
    hint = "fetch or write the file again: it cannot be read to its end"
    raise DataError(problem.told, _HINTS[problem.kind] if problem.kind in ("json", "truncated") else hint)


_HINTS = {
    "json": "one JSON value on each line is .jsonl, one list of all rows is .json: check the name and the content",
    "truncated": "the file ends too early: fetch or write it again",
    "role": "rename the role in the file to one of those known; chat.fields maps names of columns, not what they hold",
    "template": "look at the order of the roles, or set chat.template to another one: chatml, plain, or a file",
    "no-template": "set chat.template to model, chatml, plain or a file; none is for rows without turns",
    "turns": "give rows with an assistant turn to learn, or set chat.train_on=all",
    "field": "map the columns that the file has with chat.fields",
    "empty": "leave empty rows out",
}


def _characters(value: object) -> int:
    """The characters of all texts in a row, and one for each value in it."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += 1
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return total


def _hash_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(_SEED).encode("ascii"))
    return int.from_bytes(digest.digest(), "big")


def _split(made: _Made, val_fraction: float) -> dict[str, _Made]:
    """Some conversations held out, by their hashes. Where rows are few, at least one is on either side."""
    if val_fraction == 0.0 or not made.samples:
        return {"train": made}
    hashes = np.array(made.hashes, dtype=np.uint64)
    used = np.unique(hashes[[owner for *_, owner in made.samples]])
    if len(used) < 2:
        raise DataError(
            "there are fewer than two different conversations, of which one cannot be held out",
            "give more rows, or name a file to evaluate on in chat.validation",
        )
    within = int(np.searchsorted(used, np.uint64(min(int(val_fraction * 2.0**64), 2**64 - 1))))
    border = used[min(max(within, 1), len(used) - 1) - 1]
    held_out = hashes <= border
    return {"train": made.chosen(~held_out), "val": made.chosen(held_out)}


def _check_learnable(made: _Made, split: str, request: SampleRequest, maker: _Maker) -> None:
    if made.samples:
        return
    counts = maker.counts
    which = "" if split == "train" else " of the rows that are held out"
    if counts["dropped_labels_cut"]:
        most = "the context of" if request.limit == "model.context" else f"{request.limit}, which is"
        raise DataError(
            f"nothing{which} is left to learn: every sample is longer than {most} {many(request.context, 'token')} "
            f"(the longest has {counts['longest']:,}) and what it teaches lies behind the cut",
            f"raise {request.limit}, or shorten the prompts",
        )
    raise DataError(
        f"nothing{which} is left to learn: no token of {many(counts['rows'], 'row')} is labelled",
        "look at a sample with its template: does it show what the assistant says, and does chat.train_on fit?",
    )


def _arrays(made: _Made, dtype: np.dtype[Any]) -> Samples:
    ids, labelled, _ = zip(*made.samples, strict=True)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return Samples(np.concatenate(ids).astype(dtype), np.concatenate(labelled), offsets)
