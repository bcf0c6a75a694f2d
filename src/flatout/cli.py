"""The command line: finds the command, and turns what goes wrong in it into lines and an exit code.

Contract: nothing heavy is imported before the words are understood, so help and every mistake answer at once; a mistake
is one `error:` line and one `hint:` line on stderr and an exit code (see `flatout.errors`).
"""

import errno
import sys
from collections.abc import Sequence

import flatout
from flatout.errors import DataError, ResourceError, UsageError, UserError, quoted
from flatout.front.commands import actions_text, command_for, help_text, parser_of
from flatout.front.output import go_nowhere, usable_streams
from flatout.front.verbs_training import reported_once
from flatout.front.words import tell
from flatout.launch import OtherProcessError, check_one_process


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with usable_streams():
        code = _answer(words)
        try:
            sys.stdout.flush()  # what was said before an error is still in the buffer
        except OSError:
            go_nowhere(sys.stdout)
    return code


def _answer(words: list[str]) -> int:
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        if not isinstance(error, OtherProcessError):
            tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        go_nowhere(sys.stdout)
        return 141
    except OSError as error:
        error = _for_the_user(error)
        tell(error)
        return error.exit_code


def _for_the_user(error: OSError) -> UserError:
    """An error of the operating system that a user can mend, in words; any other is raised again."""
    name = str(error.filename or "a file")
    if "No usable temporary directory" in str(error):  # ours, or torch's when its compiler is imported
        hint = "free some space, or set TMPDIR to a folder with some"
        return ResourceError("no folder for temporary files can be written", hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = "check who may read and write it, and the folders that it lies in"
        return DataError(f"{name}: {error.strerror}", hint)
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS):
        return UsageError(f"{quoted(name[:200])}: {error.strerror}", "name another file or folder")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise error
    go_nowhere(sys.stdout)
    return ResourceError(f"could not write: {error.strerror}", "free some space, then try again")


def dispatch(words: list[str]) -> int:
    """Runs a command; a mistake is raised as a `UserError`."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"flatout {flatout.__version__}")
        return 0
    command, rest = command_for(words)
    if command.run is None:
        print(actions_text(command.name), end="")
        return 0
    if command.processes == "one":
        check_one_process(command.name)
    parser = parser_of(command)
    try:
        ranks = command.processes == "ranks"
        return command.run(reported_once(lambda: parser.parse(rest)) if ranks else parser.parse(rest))
    except SystemExit as stop:  # argparse leaves this way after printing help
        return int(stop.code or 0)


if __name__ == "__main__":
    sys.exit(main())
