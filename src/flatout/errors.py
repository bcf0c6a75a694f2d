"""Errors a user can fix.

Each one says what happened (with the value) and what to do about it; the command line prints exactly two lines,
`error:` and `hint:`, and exits with the class's code. Anything that is not a `UserError` is our bug and keeps its
traceback.
"""

from pathlib import Path

# The project's addresses, reserved names until they are decided. The same stand in pyproject.toml and CITATION.cff.
REPOSITORY = "https://flatout.example/repository"
SITE = "https://flatout.example"


def page(name: str) -> str:
    """Where a page of the documentation is: in an installed wheel, or in the repository."""
    installed = Path(__file__).parent / "docs" / name
    return str(installed) if installed.exists() else f"docs/{name}"


class UserError(Exception):
    """Something the user can mend: `what` is wrong, and `hint` is the way out.

    `where` says where it was written, and the whole `message` begins with it. `setting` is the path of the one to
    change, where it is known.
    """

    exit_code = 2

    def __init__(self, what: str, hint: str, *, where: str = "", setting: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = " ".join(what.split()), " ".join(hint.split())
        self.where, self.setting = where, setting

    @property
    def message(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str], dict[str, str]]:
        return type(self), (self.what, self.hint), vars(self)  # so that it can cross from a worker process


class UsageError(UserError):
    """A command line that cannot be understood."""


class ConfigError(UserError):
    """A config value that is unknown, mistyped, out of range or in conflict with another."""


class AdapterError(ConfigError):
    """Adapters that cannot be had; `setting` is the one that asks for them."""

    def __init__(self, what: str, hint: str, setting: str = "lora.targets", *, where: str = "") -> None:
        super().__init__(what, hint, where=where, setting=setting)


class UnevenError(ConfigError):
    """Steps that processes cannot share evenly."""


class HardwareError(UserError):
    """This machine cannot do what was asked."""


class DataError(UserError):
    """Text, shards or a tokenizer that are missing, damaged or do not fit."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to something else."""

    exit_code = 3


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


class DivergedError(UserError):
    """Training produced non-finite values and was stopped before they could reach the weights."""

    exit_code = 4


class DriftError(UserError):
    """Ranks that should have the same weights do not."""

    exit_code = 4


class ResourceError(UserError):
    """Out of memory or disk."""

    exit_code = 5


class FullDiskError(ResourceError):
    """A disk without space, or a quota that is used up: room may be made."""


class DeviceMemoryError(ResourceError):
    """Out of the device's memory."""


class DoesNotFitError(DeviceMemoryError):
    """A step that by its estimate needs more memory than the device has."""


def many(count: float, noun: str) -> str:
    """A count with its noun: `1 step`, `2 steps`, `0.5 minutes`."""
    text = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{text} {noun}{'' if text == '1' else 's'}"


def in_gib(size: float) -> str:
    """Bytes of memory or disk: `12.0 GiB`, `74 MiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def quoted(word: str) -> str:
    """A word of the user's as a message shows it."""
    return repr(word if len(word) <= 80 else word[:77] + "...")


def first_line(error: object, most: int = 200) -> str:
    """An error's first line that says something, not longer than fits a terminal."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return line if len(line) <= most else line[: most - 1] + "…"
