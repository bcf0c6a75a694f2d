"""The verb profile: words in, a few steps under torch's profiler, a page and a folder of files out.

Contract: as in `flatout.cli`. Mistakes in the words and a folder that cannot be written answer before all else.
In the ranks of a launcher all take the steps, and the first one writes and speaks.
The folder appears under its name only when everything in it is there; Ctrl-C and SIGTERM leave none. Files that are
there already are never written over. No run is written, and no data is prepared where the config asks for it.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import UsageError
from flatout.files import disk_errors, write_whole
from flatout.folders import whole_folder
from flatout.launch import Launch, launch
from flatout.verbs.launching import told_by_one
from flatout.verbs.measuring import ended_by_signals, free_folder
from flatout.words import Parser, add_config, load_any, quoted

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.engine.run import Run
    from flatout.world import World

PAGE = "reading.md"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def profile(words: list[str]) -> int:
    parser = Parser(
        "profile",
        "Take some real training steps under torch's profiler and say what holds them: arithmetic, memory, launches or "
        "data, and which switch to try. Writes a trace, a memory snapshot, the kernels and a page to read.",
    )
    add_config(parser)
    timed = "steps under the profiler; default 4, fewer if a step has many micro-batches"
    parser.number("--steps", 1, 1000, help=timed)
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the files go; default: profile/NAME, numbered when that is taken"
    )
    parser.flag("--json", "print the figures as one JSON object instead of the page")
    found = launch()

    def checked() -> "tuple[argparse.Namespace, LoadedConfig]":
        parsed = parser.parse_words(words)
        return parsed, load_any(parsed, tell=found is None or found.rank == 0)

    parsed, loaded = told_by_one(checked)
    folder = _folder(parsed.out, loaded) if found is None else None
    with ended_by_signals(lambda: "nothing was written"), _quiet_profiler(), contextlib.ExitStack() as held:
        world = None if found is None else held.enter_context(_met(found, loaded))
        unfinished = None
        with contextlib.nullcontext() if world is None else world.together():
            if world is None or world.first:
                folder = folder or _folder(parsed.out, loaded)
                unfinished = held.enter_context(_folder_for(folder))
        if folder is None or unfinished is None:
            take_part(loaded, world, steps=parsed.steps)
            return 0
        report = profile_into(loaded, unfinished, folder, world=world, steps=parsed.steps, progress=_say)
    if parsed.json:
        import json

        print(json.dumps(report, ensure_ascii=False))
    else:
        from flatout.observe.measured.profile_page import page_of, print_page

        print_page(page_of(report, str(folder)))
    return 0


def _folder(out: str | None, loaded: "LoadedConfig") -> Path:
    if out is not None:
        return _named_folder(out)
    return free_folder(Path("profile") / loaded.config.output.name, os.path.lexists)


def _met(found: Launch, loaded: "LoadedConfig") -> "contextlib.AbstractContextManager[World]":
    from flatout.parallel.ranks import joined

    waits = loaded.config.parallel
    return joined(found, loaded.config.speed.device, join=waits.join, timeout=waits.timeout)


def take_part(loaded: "LoadedConfig", world: "World | None", *, steps: int | None) -> None:
    """The steps of a profile in a rank that is not the first."""
    from flatout.diagnose.profile import attend

    with _practice_run(loaded, steps, world) as (run, _):
        attend(run, steps=steps)


def profile_into(
    loaded: "LoadedConfig",
    unfinished: Path,
    folder: Path,
    *,
    world: "World | None" = None,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Profiles a config; writes all files into `unfinished`, which will be called `folder`; returns profile.json."""
    from flatout.diagnose.profile import profile_run
    from flatout.observe.measured.profile_page import as_markdown, page_of

    with _practice_run(loaded, steps, world, progress) as (run, described):
        found = profile_run(run, unfinished, steps=steps, data=described, progress=progress)
    report = found.to_json()
    with disk_errors(str(folder / PAGE), safe=""):
        write_whole(unfinished / PAGE, as_markdown(page_of(report, str(folder))).encode("utf-8"))
    return report


@contextlib.contextmanager
def _practice_run(
    loaded: "LoadedConfig",
    steps: int | None,
    world: "World | None",
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple["Run", str]]:
    """A run of the config on data to measure on, and in words what data that is."""
    from flatout.diagnose.profile import fitted
    from flatout.tuning.measure import borrowed_run
    from flatout.tuning.practice_data import scratch_folder
    from flatout.tuning.practice_samples import practice_config

    with scratch_folder("flatout-profile-") as scratch:
        practice, described = loaded, str(loaded.config.data.source)
        if not loaded.config.data.streaming:  # of a stream its reading and tokenizing is what there is to see
            practice, described = practice_config(loaded, scratch, progress)
        progress("building the model")
        with borrowed_run(fitted(practice, steps), world) as run:
            yield run, described


def _say(text: str) -> None:
    print(f"profile: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keeps torch's profiler, which asks when it is first used, from printing lines for its own developers."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def _named_folder(written: str) -> Path:
    if not written.strip():
        raise UsageError("--out needs a folder", "for example --out profiles/first")
    folder = Path(written)
    if folder.name in ("", ".."):  # the root, or where we are
        raise UsageError(f"--out {quoted(written)} is not the name of a new folder", "for example --out profiles/first")
    with disk_errors(f"to the folder {written}", safe=", or name another one with --out"):
        if folder.is_symlink():
            raise UsageError(f"--out {quoted(written)} is a link, and links are not followed", "name a new folder")
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(f"--out {quoted(written)} is there already and is not an empty folder", "name a new one")
    return folder


@contextlib.contextmanager
def _folder_for(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name at the end of the block, or goes with everything made for it."""
    what, safe = f"to the folder {folder}", ", or name another one with --out"
    stack = contextlib.ExitStack()
    with disk_errors(what, safe=safe):
        parent = next(filter(os.path.lexists, folder.absolute().parents))
        if not parent.is_dir():
            raise UsageError(
                f"{quoted(str(folder))} lies in {quoted(str(parent))}, which is no folder", "name another one"
            )
        unfinished = stack.enter_context(whole_folder(folder, occupied=_occupied))
    try:
        yield unfinished
    except BaseException:
        stack.__exit__(*sys.exc_info())
        raise
    with disk_errors(what, safe=safe):
        stack.close()


def _occupied(folder: Path, name: str) -> UsageError:
    return UsageError(f"{quoted(str(folder))} is in use by now: {quoted(name)} is in it", "name a new one with --out")
