"""What is asked for and what there is to read: from a config to numbered parts, and to positions in a stream.

The parts of a corpus are numbered in the order of its text. Cutting depends on names and sizes only, so a prepare that
starts again finds the same parts under the same numbers. A stream goes through the parts of a source in laps; a
`Position` names a part by its lap, a file and a count of parts from that file on, so that resuming there neither reads
nor tokenizes what came before. Only a file that cannot be cut is read again up to there; a hub dataset has a position
of its own.

Contract: parts come in order, each about 4 MiB of input (16 where one document or parquet row group is longer), and
never span two sources. What cannot be cut (a large compressed file, a large JSON array, a hub dataset) is read in this
process and handed on as documents; `Done` notes how many parts such a file gave, so that it is not read again. Sizes
are those of the text: a part whose compressed files hold a thousand times their bytes would not fit into memory.

"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

from flatout.config.schema import CleanConfig, DataConfig
from flatout.config.sections import SourceConfig
from flatout.config.sizes import learned_vocab
from flatout.corpus.clean import CleanRules, load_rules
from flatout.corpus.document import Document, InputFile, Problem, ReadOptions, Slice, shown
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import FoundFiles, but_read, find_files, slices_of, text_bytes, unread_text
from flatout.corpus.streams import PIECE
from flatout.data.part import LIMITS, NONE_TAKEN, CorpusPart, Count, Limits, Recipe, judged
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.rows import human_bytes

PART_BYTES = 2**22
# A compressed file is left to one worker up to this much text; crawl files, which come in great numbers, always are.
_WHOLE_TEXT = 2**25
CUTTING = 2  # of compressed files: positions in parts that an earlier version cut are others
_MOST_SLICES = 4096
_MOST_HASHED = 2**26
_MOST_DOCUMENTS = 50_000
# What of the `data` section decides the result of preparing; the tokenizer is in the manifest under its fingerprint.
DECISIVE = (
    "source",
    "validation",
    "format",
    "field",
    "document_start",
    "invalid_utf8",
    "split",
    "unknown_characters",
)


@dataclass(frozen=True)
class Request:
    """A dataset as it was asked for."""

    data: DataConfig
    clean: CleanConfig
    rules: CleanRules

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources in order; the last is the validation source where there is one."""
        source = self.data.source
        listed: list[str | SourceConfig] = source if isinstance(source, list) else [] if source is None else [source]
        plain = [SourceConfig(path=item) if isinstance(item, str) else item for item in listed]
        return (*plain, *([] if self.data.val_source is None else [SourceConfig(path=self.data.val_source)]))

    @property
    def options(self) -> ReadOptions:
        """How sources are read."""
        data = self.data
        names = (data.field,) if isinstance(data.field, str) else tuple(data.field)
        return ReadOptions(names, data.document_start, data.invalid_utf8)

    def limits(self, source: int) -> Limits | None:
        """The most that is taken of a source; validation text has `eval.tokens` instead."""
        validation = self.data.val_source is not None and source == len(self.sources) - 1
        return None if validation else limits_of(self.data)

    def settings(self, source_bytes: int, source_sha256: str | None) -> dict[str, Any]:
        """What the manifest keeps of the request and of what it found."""
        data = self.data.model_dump(mode="json")
        limits = {name: data[name] for name in LIMITS if data[name] is not None}
        chosen = {name: data[name] for name in DECISIVE} | limits
        if learned_vocab(self.data.tokenizer) is not None:  # which its fingerprint does not contain
            chosen["tokenizer"] = self.data.tokenizer
        return {**chosen, "clean": self.rules.to_json(), "source_bytes": source_bytes, "source_sha256": source_sha256}


def request_of(data: DataConfig, clean: CleanConfig | None = None) -> Request:
    """The request that two sections of a config make."""
    clean = clean or CleanConfig()
    return Request(data, clean, load_rules(clean))


@dataclass(frozen=True)
class Inputs(FoundFiles):
    """What was found of all sources together."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def most_parts(self) -> int:
        """About as many parts as there can be: more workers would have nothing to do."""
        if any(file.format == "hub" for file in self.files):
            return 1024
        return sum(1 + file.bytes * (1 if file.compression == "none" else 8) // PART_BYTES for file in self.files)

    def digest(self) -> str | None:
        """SHA-256 of all files, by which a change of the same size is noticed; None where that would take long."""
        if self.bytes > _MOST_HASHED or any(not os.path.isfile(file.path) for file in self.files):
            return None
        total = hashlib.sha256()
        try:
            for file in self.files:
                with open(file.path, "rb") as content:
                    total.update(hashlib.file_digest(content, "sha256").digest())
        except OSError:
            return None
        return total.hexdigest()

    def stamps(self) -> list[list[Any]]:
        """Size and time of change of every file, by which a changed input is noticed."""
        return [[file.path, file.format, file.compression, file.source, *_stamp(file)] for file in self.files]


def find_inputs(request: Request) -> Inputs:
    """List the files of a request."""
    if not request.sources:
        raise DataError("data.source is not set", "set data.source to a text file or folder")
    listed: list[FoundFiles] = []
    for number, source in enumerate(request.sources):
        form = source.format or request.data.format
        listed.append(find_files(source.path, format=form, number=number))
    listed = but_read(listed, [source.path for source in request.sources])
    for source, found in zip(request.sources, listed, strict=True):
        if found.mostly_unknown:
            raise DataError(
                f"most of the folder {shown(source.path)} would be passed over, which has {found.summary}",
                "set data.format=text to read every file as text, whatever its name (source code is text too), or set "
                "data.source to the files that you want",
            )
    return Inputs(
        tuple(file for found in listed for file in found.files),
        tuple(problem for found in listed for problem in found.problems),
        {path: kind for found in listed for path, kind in found.left.items()},
    )


def how_to_read(source: object, passed_over: Mapping[str, int]) -> str:
    """How to read files that were passed over and may hold text; empty where there are none."""
    types = unread_text(passed_over)
    if not types or not isinstance(source, str):
        return ""
    named = " and ".join([", ".join(types[:3]), *(["others"] if len(types) > 3 else [])])
    several = sum(passed_over[type] for type in types) > 3
    what, place = ("a file or a folder of them", "FILE-OR-FOLDER") if several else ("such a file", "FILE")
    return (
        f"among these, {named} may hold text; to read {what} too, name it: "
        f"'data.source=[{source}, {{path: {Path(source) / place}, format: text}}]'"
    )


class Done:
    """The finished parts of a prepare that was stopped; here there are none."""

    def has(self, number: int, source: int) -> bool:
        """Whether the result of that part is there; where limits end sources, its number may be another source's."""
        return False

    def parts_of(self, file: int) -> int | None:
        """How many parts the file of that number gave, if it has been read to its end."""
        return None

    def note(self, file: int, parts: int) -> None:
        """Keep in mind that a file has been read to its end and gave that many parts."""


def parts_of(
    inputs: Inputs, options: ReadOptions, done: Done, *, source: int | None = None, first: int = 0
) -> Iterator[CorpusPart | int]:
    """The parts that are still to be done, in order, and the numbers of those that are done.

    Numbers begin with `first`. `source` asks for the parts of one source alone.
    """
    number = first
    waiting: list[Slice] = []
    size = text = 0

    def group(files: int) -> CorpusPart:
        nonlocal number, size, text, waiting
        part = CorpusPart(number, waiting[0].file.source, tuple(waiting), bytes=size, files=files)
        number, size, text, waiting = number + 1, 0, 0, []
        return part

    ended = 0  # files that end in the group
    for index, file in enumerate(inputs.files):
        if source is not None and file.source != source:
            continue
        slices = slices_of(file, _slice_bytes(file, options))
        whole = file.bytes if slices is None or file.format == "warc" else text_bytes(file, _WHOLE_TEXT)
        if file.compression != "none" and whole > _WHOLE_TEXT:
            slices = None
        if waiting and (slices is None or waiting[0].file.source != file.source):
            yield _unless_done(group(ended), done)
            ended = 0
        if slices is None:
            for part in _read_here(file, index, options, number, done):
                number += 1
                yield part
            continue
        for position, piece in enumerate(slices):
            share, held = (
                total * (position + 1) // len(slices) - total * position // len(slices) for total in (file.bytes, whole)
            )
            # A share of a row group is a part by itself: on disk it may be a hundredth of what it holds.
            alone = waiting and (piece.shares > 1 or waiting[-1].shares > 1)
            if waiting and (alone or text + held > PART_BYTES or len(waiting) >= _MOST_SLICES):
                yield _unless_done(group(ended), done)
                ended = 0
            waiting.append(piece)
            size, text = size + share, text + held
            ended += position + 1 == len(slices)
    if waiting:
        yield _unless_done(group(ended), done)


def _slice_bytes(file: InputFile, options: ReadOptions) -> int:
    # A text that is one document is cut into pieces at fixed places; between them there is nothing to begin with.
    return PIECE if file.format == "text" and options.document_start is None else PART_BYTES


def _unless_done(part: CorpusPart, done: Done) -> CorpusPart | int:
    return part.number if done.has(part.number, part.source) else part


def _read_here(file: InputFile, index: int, options: ReadOptions, first: int, done: Done) -> Iterator[CorpusPart | int]:
    """The parts of a file that only one process can read, cut by the size of their texts."""
    known = done.parts_of(index)
    if known is not None and all(done.has(number, file.source) for number in range(first, first + known)):
        yield from range(first, first + known)
        return
    number, position, reported = first, 0, 0

    def watch(now: int) -> None:
        nonlocal position
        position = now

    for batch, last in _batches(read_slice(Slice(file), options, watch=watch), PART_BYTES, _MOST_DOCUMENTS):
        size = max(file.bytes - reported, 0) if last else position - reported
        part = CorpusPart(number, file.source, documents=batch, file=file.name, bytes=size, files=int(last))
        yield _unless_done(part, done)
        number, reported = number + 1, position
    done.note(index, number - first)


def _batches(
    items: Iterable[Document | Problem], most_characters: int, most_items: int
) -> Iterator[tuple[tuple[Document | Problem, ...], bool]]:
    """Documents and problems for a part, and whether they are the last, which may be none."""
    batch: list[Document | Problem] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.text) if isinstance(item, Document) else 0
        if characters >= most_characters or len(batch) >= most_items:
            yield tuple(batch), False
            batch, characters = [], 0
    yield tuple(batch), True


def documents_of(
    request: Request, inputs: Inputs, sources: Iterable[int] | None = None
) -> Iterator[Document | Problem]:
    """Every document that is kept, up to the limits of its source, and every problem on the way, one by one.

    Used before there is a tokenizer: tokens are counted as characters, so a first document that has too many of them
    may still be taken. `sources` asks for some sources alone.
    """
    recipe = Recipe(request.options, request.rules)
    for source in range(len(request.sources)) if sources is None else sources:
        limits, count, rejected = request.limits(source), NONE_TAKEN, False
        parts = parts_of(inputs, request.options, Done(), source=source)
        for item in (item for part in parts if isinstance(part, CorpusPart) for _, item in judged(recipe, part)):
            if isinstance(item, Problem):
                yield item
                continue
            rejected = item.rejected is not None or (rejected and not item.begins)
            if rejected or not item.text:
                continue
            size = len(item.text.encode("utf-8", "surrogatepass"))
            before, count = count, (count[0] + item.begins, count[1] + len(item.text) + item.ends, count[2] + size)
            if limits is None or not limits.exceeded(count):
                yield item
                continue
            if limits.exceeded((count[0], 0, 0)):
                break
            if item.divisible or not (item.begins and item.ends):
                yield replace(item, text=limits.first_characters(item.text, before))
            elif not before[0]:
                limits.check(before, limits.exceeded((1, 0, size)), request.sources[source].path)
                yield item
            break


def find_part(inputs: Inputs, options: ReadOptions, number: int, source: int, first: int) -> CorpusPart:
    """The part of that number, cut anew; `first` is the number of the first part of its source."""
    for part in parts_of(inputs, options, Done(), source=source, first=first):
        if isinstance(part, CorpusPart) and part.number == number:
            return part
    raise DataError("the source has become shorter while it was read", "prepare it again when nothing writes to it")


def _stamp(file: InputFile) -> tuple[int, int]:
    if file.format == "hub":
        return 0, 0
    size, time = size_and_time(file.path)
    return (file.bytes if os.path.isdir(file.path) else size), time


def size_and_time(path: str) -> tuple[int, int]:
    """Size and time of change of a file; -1 where it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def check_free(folder: Path, inputs: Inputs, bytes_per_token: int, subword: bool, limited: bool) -> None:
    """Refuse to begin where the parts and the shards that come from them cannot fit.

    What a limit leaves of the input is not known before it is read.
    """
    if limited:
        return
    packed = [file.compression != "none" or file.format == "parquet" for file in inputs.files]
    text = sum(file.bytes * (4 if small else 1) for file, small in zip(inputs.files, packed, strict=True))
    tokens = text // 3 if subword else text
    need = 2 * tokens * bytes_per_token
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ResourceError(
            f"the disk of {shown(folder.parent)} has {human_bytes(free)} free, and preparing "
            f"{human_bytes(inputs.bytes)} of input needs about {human_bytes(need)}",
            "free some space, or set data.folder to another disk",
        )


def limits_of(data: DataConfig) -> Limits | None:
    """The limits that a config sets on each of its sources, if it does."""
    most = (data.max_documents, data.max_tokens, data.max_bytes)
    return None if most == (None, None, None) else Limits(most)


# Hub datasets are read by this process, so we use smaller parts: the first one is ready sooner.
_HUB_CHARACTERS = 2**22
_HUB_DOCUMENTS = 20_000


@final
@dataclass(frozen=True)
class Position:
    """Where a part begins: the epoch, the lap over a source in it, and in that the part, counted from a file on.

    `tokens` and `problems` are how many came before it. `joins` says that the row ends inside a document, `rejected`
    that the document which may go on here is rejected. `hub` is the state of a hub dataset at this place, `taken` what
    of the lap counts towards the limits of its source.
    """

    epoch: int = 0
    lap: int = 0
    file: int = 0
    part: int = 0
    tokens: int = 0
    problems: int = 0
    joins: bool = False
    rejected: bool = False
    hub: dict[str, Any] | None = None
    taken: Count = NONE_TAKEN

    def __post_init__(self) -> None:
        documents, tokens, size = self.taken  # a list where it comes from JSON
        object.__setattr__(self, "taken", (documents, tokens, size))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def begins_epoch(self) -> bool:
        return not (self.lap or self.file or self.part)


@dataclass(frozen=True)
class Lap:
    """One reading of one source; with a weight above 1 an epoch has several."""

    copy: int
    weight: float
    files: tuple[InputFile, ...]
    limits: Limits | None = None


@final
class _Started(Done):
    """Counts the first parts as done, and notes where files end that had to be read from their beginning."""

    def __init__(self, parts: int) -> None:
        self.ended: int | None = None
        self._parts = parts

    def has(self, number: int, source: int) -> bool:
        return number < self._parts

    def note(self, file: int, parts: int) -> None:
        self.ended = file


def parts_of_lap(
    files: tuple[InputFile, ...], options: ReadOptions, start: Position
) -> Iterator[tuple[Position, CorpusPart]]:
    """The parts of a lap from `start` on; of the positions only file, part and hub are filled in."""
    file, part, hub = start.file, start.part, start.hub
    while file < len(files):
        if files[file].format == "hub":
            yield from _parts_of_hub(file, files[file], options, part, hub)
            stop = file + 1
        else:
            stop = next((n for n in range(file, len(files)) if files[n].format == "hub"), len(files))
            yield from _parts_of_files(file, files[file:stop], options, part)
        file, part, hub = stop, 0, None


def _parts_of_files(
    base: int, files: tuple[InputFile, ...], options: ReadOptions, skipped: int
) -> Iterator[tuple[Position, CorpusPart]]:
    """Parts are counted from the last file that had to be read in one go, so that none is read again to skip it."""
    done = _Started(skipped)
    first, counted = base, 0
    for item in parts_of(Inputs(files, (), {}), options, done):
        number = item.number if isinstance(item, CorpusPart) else item
        if done.ended is not None:
            first, counted, done.ended = base + done.ended + 1, number, None
        if isinstance(item, CorpusPart):
            yield Position(file=first, part=number - counted), item


def _parts_of_hub(
    index: int, file: InputFile, options: ReadOptions, number: int, state: dict[str, Any] | None
) -> Iterator[tuple[Position, CorpusPart]]:
    from flatout.corpus.arrow import HubStream

    skipped = 0 if state is not None else number
    number -= skipped
    stream = HubStream(file.path, options, file.name)
    if state is not None:
        stream.load_state_dict(state)
    with contextlib.closing(cast(Generator[Document | Problem], iter(stream))) as items:
        for batch, last in _batches(items, _HUB_CHARACTERS, _HUB_DOCUMENTS):
            following = stream.state_dict()
            if number >= skipped:
                part = CorpusPart(number, file.source, documents=batch, file=file.name, files=int(last))
                yield Position(file=index, part=number, hub=state), part
            number, state = number + 1, following


_PREPARE = "prepare the source instead: leave out data.streaming"


def check_streamable(data: DataConfig, clean: CleanConfig) -> None:
    """Refuses settings that need the whole text."""
    found = next((rule for rule in clean.drop if rule in ("exact_duplicates", "near_duplicates")), None)
    if found is not None:
        raise ConfigError(f"clean.drop=[{found}] needs the whole corpus, and data.streaming does not hold it", _PREPARE)
    if data.tokenizer == "char" or learned_vocab(data.tokenizer) is not None:
        raise ConfigError(
            f"the tokenizer `{data.tokenizer}` is made from the whole corpus, "
            "and data.streaming reads it only as it trains",
            "set data.tokenizer to bytes, gpt2 or a tokenizer.json, such as that of a prepared dataset",
        )
