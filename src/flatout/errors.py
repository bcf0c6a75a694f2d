"""Errors a user can fix.

Each one says what happened (with the value) and what to do about it; the command line prints exactly two lines,
`error:` and `hint:`, and exits with the class's code. Anything that is not a `UserError` is our bug and keeps its
traceback.
"""


class UserError(Exception):
    """Something the user can mend; `message` says what is wrong, `hint` the way out."""

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return type(self), (self.message, self.hint)  # so that it can cross from a worker process


class UsageError(UserError):
    """A command line that cannot be understood."""


class ConfigError(UserError):
    """A config value that is unknown, mistyped, out of range or in conflict with another."""


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
    """A disk without space, or a quota that is used up: somebody may make room."""


class DoesNotFitError(ResourceError):
    """A step that by its estimate needs more memory than the device has."""


def many(count: float, noun: str) -> str:
    """A count with its noun: `1 step`, `2 steps`, `0.5 minutes`."""
    text = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{text} {noun}{'' if text == '1' else 's'}"


def quoted(word: str) -> str:
    """A word of the user's as a message shows it."""
    return repr(word if len(word) <= 80 else word[:77] + "...")
