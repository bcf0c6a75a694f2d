"""A full disk: the run pauses and tries again, since somebody may make room.

Everything that a run writes after it was accepted goes through here: `when_there_is_room` in the loop, which passes
notices on, and `wait_for_room` in the thread that saves beside training. What they are given to do is done again from
its beginning, so it must leave nothing half done behind where it fails. Files of trackers and pictures are no part of
it: a full disk costs these alone.
"""

import time
from collections.abc import Callable, Generator
from typing import TypeVar

from flatout.errors import FullDiskError, UserError
from flatout.files import disk_errors
from flatout.records import NoticeRecord
from flatout.world import World

WAIT = 300.0  # seconds before a run on a full disk ends
PAUSE = 5.0  # between tries
Result = TypeVar("Result")


def when_there_is_room(
    write: Callable[[], Result], step: int, wait: float, world: World | None = None, *, what: str = "the run's files"
) -> Generator[NoticeRecord, None, Result]:
    """What `write` returns, tried again for `wait` seconds; yields a notice when the pause begins and when it ends.

    Where all processes of a `world` write, a disk that is full for one of them makes all pause. `what` names files for
    which `write` has no words of its own.
    """
    world = world or World()
    began = time.monotonic()
    until, told = began + wait, False
    while True:
        try:
            with disk_errors(what):
                written = write()
            break
        except UserError as error:
            full = world.gather(error.message if isinstance(error, FullDiskError) else None)
            left = world.broadcast(until - time.monotonic())
            if not any(full) or left <= 0:
                raise
            if not told:
                told = True
                yield NoticeRecord(
                    step=step,
                    message=f"{next(filter(None, full))}: training pauses and tries again every {PAUSE:g} s, for "
                    f"{wait:g} s; free some space",
                )
        time.sleep(min(PAUSE, left))
    if told:
        paused = time.monotonic() - began
        yield NoticeRecord(step=step, message=f"the disk has room again: training goes on after {paused:.0f} s")
    return written


def wait_for_room(
    write: Callable[[], Result], step: int, wait: float, notice: Callable[[str], None], *, what: str = "the run's files"
) -> Result:
    """The same in a thread: notices are handed to `notice`."""
    waiting = when_there_is_room(write, step, wait, what=what)
    while True:
        try:
            notice(next(waiting).message)
        except StopIteration as done:
            return done.value
