"""A few real training steps under torch's profiler: a folder of files, and what holds the steps up.

Contract: a folder that cannot be written is refused first. It appears under its name only when everything in it is
there, and files that are there already are never written over. In the ranks of a launcher all take the steps, and the
first one writes.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flatout.api.configs import with_sources
from flatout.config.alike import shared_settings
from flatout.config.load import Config, LoadedConfig, load_config
from flatout.engine.run import Run
from flatout.errors import UsageError, quoted
from flatout.files import disk_errors, write_whole
from flatout.folders import free_folder, whole_folder
from flatout.launch import Launch, launch
from flatout.observe.measured.profile_page import as_markdown, page_of
from flatout.parallel.ranks import joined
from flatout.tuning.measure import borrowed_run
from flatout.tuning.practice_data import practice_config, scratch_folder
from flatout.tuning.profile import attend, fitted, profile_run
from flatout.world import World

PAGE = "reading.md"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


@dataclasses.dataclass(frozen=True)
class Profile:
    """A profile: the folder with its files, and what profile.json there holds."""

    folder: Path
    figures: dict[str, Any]


def profile(
    config: Config | None = None,
    folder: str | Path | None = None,
    *,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Takes some training steps under torch's profiler and says what limits them, and which switch to try.

    Writes a trace, a memory snapshot, the kernels and a page to read into a new folder, by default profile/NAME. No run
    is written. Without `steps` it is 4, fewer if a step has many micro-batches. In the ranks of a launcher all but the
    first get None.
    """
    loaded, found = with_sources(config or load_config()), launch()
    target = _free(folder, loaded) if found is None else None
    with _quiet_profiler(), contextlib.ExitStack() as held:
        world = None if found is None else held.enter_context(_met(found, loaded))
        unfinished = None
        with contextlib.nullcontext() if world is None else world.fail_together():
            if world is None or world.first:
                target = target or _free(folder, loaded)
                unfinished = held.enter_context(_folder_for(target))
        if target is None or unfinished is None:
            take_part(loaded, world, steps=steps)
            return None
        return Profile(target, profile_into(loaded, unfinished, target, world=world, steps=steps, progress=progress))


def _free(out: str | Path | None, loaded: LoadedConfig) -> Path:
    if out is not None:
        return _named_folder(str(out))
    return free_folder(Path("profile") / loaded.config.output.name, os.path.lexists)


def _met(found: Launch, loaded: LoadedConfig) -> contextlib.AbstractContextManager[World]:
    config = loaded.config
    return joined(found, config.speed.device, timeout=config.parallel.timeout, settings=shared_settings(loaded))


def take_part(loaded: LoadedConfig, world: World | None, *, steps: int | None) -> None:
    """The steps of a profile in a rank that is not the first."""
    with _practice_run(loaded, steps, world) as (run, _):
        attend(run, steps=steps)


def profile_into(
    loaded: LoadedConfig,
    unfinished: Path,
    folder: Path,
    *,
    world: World | None = None,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Profiles a config; writes all files into `unfinished`, which will be called `folder`; returns profile.json."""
    with _practice_run(loaded, steps, world, progress) as (run, described):
        found = profile_run(run, unfinished, steps=steps, data=described, progress=progress)
    report = found.to_json()
    with disk_errors(str(folder / PAGE), safe=""):
        write_whole(unfinished / PAGE, as_markdown(page_of(report, str(folder))).encode("utf-8"))
    return report


@contextlib.contextmanager
def _practice_run(
    loaded: LoadedConfig,
    steps: int | None,
    world: World | None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Run, str]]:
    """A run of the config on data to measure on, and in words what data that is."""
    with scratch_folder("flatout-profile-") as scratch:
        # Of a stream, its reading and tokenizing is what there is to see.
        practice, described = practice_config(loaded, scratch, progress, world=world, streams=True)
        progress("building the model")
        with borrowed_run(fitted(practice, steps), world) as run:
            yield run, described


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
