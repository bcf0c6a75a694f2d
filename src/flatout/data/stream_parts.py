"""The parts of a source that is streamed, in order, from any place on.

Idea: an epoch is one or more laps over each source, and a lap goes through the parts that `plan` cuts. A `Position`
names a part by its lap, a file and a count of parts from that file on, so that whoever goes on there neither reads nor
tokenizes what came before. Only a file that cannot be cut, and is to be gone on with in its middle, is read again up to
there; a hub dataset knows its own place.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast, final

from flatout.corpus.document import Document, InputFile, Problem, ReadOptions
from flatout.data.limits import NONE_TAKEN, Count, Limits
from flatout.data.part import Part
from flatout.data.plan import Done, Inputs, parts_of

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
    """Takes the first parts for done, and notes where files end that had to be read from their beginning."""

    def __init__(self, parts: int) -> None:
        self.ended: int | None = None
        self._parts = parts

    def has(self, number: int, source: int) -> bool:
        return number < self._parts

    def note(self, file: int, parts: int) -> None:
        self.ended = file


def parts_of_lap(
    files: tuple[InputFile, ...], options: ReadOptions, start: Position
) -> Iterator[tuple[Position, Part]]:
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
) -> Iterator[tuple[Position, Part]]:
    """Parts are counted from the last file on that had to be read in one go, so that none is read again to skip it."""
    done = _Started(skipped)
    first, counted = base, 0
    for item in parts_of(Inputs(files, (), {}), options, done):
        number = item.number if isinstance(item, Part) else item
        if done.ended is not None:
            first, counted, done.ended = base + done.ended + 1, number, None
        if isinstance(item, Part):
            yield Position(file=first, part=number - counted), item


def _parts_of_hub(
    index: int, file: InputFile, options: ReadOptions, number: int, state: dict[str, Any] | None
) -> Iterator[tuple[Position, Part]]:
    from flatout.corpus.tables import HubStream

    skipped = 0 if state is not None else number
    number -= skipped
    stream = HubStream(file.path, options, file.name)
    if state is not None:
        stream.load_state_dict(state)
    batch: list[Document | Problem] = []
    characters = 0
    with contextlib.closing(cast(Generator[Document | Problem], iter(stream))) as items:
        for item in items:
            batch.append(item)
            characters += len(item.text) if isinstance(item, Document) else 0
            if characters >= _HUB_CHARACTERS or len(batch) >= _HUB_DOCUMENTS:
                following = stream.state_dict()
                if number >= skipped:
                    part = Part(number, file.source, documents=tuple(batch), file=file.name)
                    yield Position(file=index, part=number, hub=state), part
                number, batch, characters, state = number + 1, [], 0, following
        if number >= skipped:
            part = Part(number, file.source, documents=tuple(batch), file=file.name, files=1)
            yield Position(file=index, part=number, hub=state), part
