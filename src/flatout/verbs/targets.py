"""Files that measuring verbs are asked to write: looked at before anything is measured, and again when it is written.

Contract: an existing config file is replaced only if `tune` wrote it and nobody has edited it since, a picture only if
it carries our mark; `--overwrite` is the user's word that another one may go. Links are never followed. Looking leaves
nothing behind.
"""

import os
from pathlib import Path

from flatout.errors import UsageError
from flatout.files import check_folder_writable, check_replaceable, disk_errors, write_whole
from flatout.words import Parser, quoted

CONFIGS, PICTURES = (".yaml", ".yml"), (".png", ".svg")


def add_overwrite(parser: Parser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="also replace files that flatout did not write")


def config_target(path: Path, option: str = "--out", *, overwrite: bool = False) -> Path:
    """The path, if a config file can be written there."""
    _check_name(path, option, CONFIGS)
    _check_config(path, option, overwrite=overwrite)
    return path


def picture_target(path: Path, option: str, *, overwrite: bool = False) -> Path:
    """The path, if a picture can be written there."""
    from flatout.observe.picture import is_picture

    _check_name(path, option, PICTURES)
    check_replaceable(path, is_picture, overwrite=overwrite, way=f"name another file with {option}")
    return path


def study_target(path: Path, option: str) -> Path:
    """The path, if the trials of a search can be kept there; whether a file that is there has some, the search asks."""
    _check_name(path, option, (".db", ".sqlite"))
    check_replaceable(path, lambda _: True, way=f"name another file with {option}")
    return path


def write_config(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Writes the whole file or nothing."""
    _check_config(path, "--out", overwrite=overwrite)  # it may have been edited while it was measured
    with disk_errors(str(path), safe="; what was found is printed above"):
        write_whole(path, text.encode("utf-8"))


def _check_name(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    shown = f"{option} {quoted(str(path))}"
    with disk_errors(str(path), safe=f", or name another file with {option}"):
        if path.suffix.lower() not in suffixes or (path.exists() and not path.is_file()):
            raise UsageError(
                f"{shown} is not the name of a {suffixes[0]} file", f"for example {option} found{suffixes[0]}"
            )
        if not path.parent.is_dir():
            raise UsageError(f"the folder of {shown} does not exist", "create it first")
        check_folder_writable(path.parent)
        if path.exists() and not os.access(path, os.W_OK):  # a file that may not be written is not replaced either
            raise PermissionError(13, "Permission denied", str(path))


def _check_config(path: Path, option: str, *, overwrite: bool) -> None:
    from flatout.tuning.fragment import is_unchanged

    shown, way = f"{option} {quoted(str(path))}", f"name another file with {option}"

    def is_ours(path: Path) -> bool:
        unchanged = is_unchanged(path.read_text(encoding="utf-8", errors="replace"))
        if unchanged is None:
            raise UsageError(f"{shown} exists and was not written by `flatout tune`", f"{way}, or add --overwrite")
        if not unchanged:
            raise UsageError(f"{shown} was edited after `flatout tune` wrote it", f"{way}, or add --overwrite")
        return True

    check_replaceable(path, is_ours, overwrite=overwrite, way=way)
