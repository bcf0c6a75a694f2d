"""Values of a config, and where each comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SourceKind = Literal["default", "family", "preset", "size", "hardware", "file", "override", "python"]


@dataclass(frozen=True)
class Source:
    """Where a value was written: `where` is for people, such as `preset gpt2-124m`, `my.yaml:12`, `command line`."""

    kind: SourceKind
    where: str

    @property
    def by_user(self) -> bool:
        """Whether the user wrote it, in a file, on the command line or in Python; the rest comes with Flatout."""
        return self.kind in ("file", "override", "python")


DEFAULT = Source("default", "default")
IN_PYTHON = Source("python", "")  # a `RunConfig` made by a program, which has no lines to name


@dataclass(frozen=True)
class Setting:
    """A value and its source; `lines` says for each value inside a list, by path, on which line of a file it stands."""

    value: Any
    source: Source
    lines: Mapping[str, str] = field(default_factory=dict)


Layer = dict[str, Setting]  # by dotted path
