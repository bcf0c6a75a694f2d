"""A save that finds the disk full: the run pauses and tries again, since somebody may make room."""

import time
from collections.abc import Callable, Generator
from typing import TypeVar

from flatout.errors import FullDiskError, UserError
from flatout.records import NoticeRecord
from flatout.world import World

PAUSE = 5.0  # seconds between tries
Result = TypeVar("Result")


def when_there_is_room(
    write: Callable[[], Result], step: int, wait: float, world: World | None = None
) -> Generator[NoticeRecord, None, Result]:
    """What `write` returns, tried again for `wait` seconds; yields a notice when the pause begins and when it ends.

    Where all processes of a `world` write, a disk that is full for one of them makes all pause.
    """
    world = world or World()
    began = time.monotonic()
    until, told = began + wait, False
    while True:
        try:
            written = write()
            break
        except UserError as error:
            full = world.gather(error.message if isinstance(error, FullDiskError) else None)
            left = world.told(until - time.monotonic())
            if not any(full) or left <= 0:
                raise
            if not told:
                told = True
                yield NoticeRecord(
                    step=step,
                    message=f"{next(filter(None, full))}: training pauses and tries again every {PAUSE:g} s, for "
                    f"{wait:g} s; free some space (checkpoint.full_disk_wait)",
                )
        time.sleep(min(PAUSE, left))
    if told:
        paused = time.monotonic() - began
        yield NoticeRecord(step=step, message=f"the disk has room again: training goes on after {paused:.0f} s")
    return written
