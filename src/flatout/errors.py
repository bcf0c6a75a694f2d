"""Errors a user can fix.

Each one says what happened (with the value) and what to do about it; the command line prints exactly two lines,
`error:` and `hint:`, and exits with the class's code. Anything that is not a `UserError` is our bug and keeps its
traceback.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can mend; `message` says what is wrong, `hint` the way out."""

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"


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


class DivergedError(UserError):
    """Training produced non-finite values and was stopped before they could reach the weights."""

    exit_code = 4


class ResourceError(UserError):
    """Out of memory or disk."""

    exit_code = 5


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns a full, read-only or failing disk into an error that says what is safe and what to do."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        number, reason = _disk_reason(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "free some space; finished checkpoints are intact, go on with --resume auto"
        elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = (
                "make it writable or choose another folder; finished checkpoints are intact, go on with --resume auto"
            )
        else:
            hint = "check the disk; finished checkpoints are intact, go on with --resume auto"
        raise ResourceError(f"could not write {what}: {reason}", hint) from error


def _disk_reason(error: Exception) -> tuple[int | None, str]:
    """(errno, words). safetensors wraps the operating system's error in a type of its own and keeps only its text."""
    if isinstance(error, OSError):
        return error.errno, error.strerror or str(error)
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else None
    return number, os.strerror(number) if number is not None else str(error)
