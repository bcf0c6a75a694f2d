"""How far preparing has come: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from typing import Self, TextIO, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from flatout.observe.human import human_count, human_seconds, say
from flatout.records import PrepareProgress

QUIET_SECONDS = 10.0
_PHASES = {
    "characters": "finding characters",
    "reading": "preparing",
    "merging": "writing shards",
    "validation": "reading validation text",
}


@final
class PrepareBar:
    """Shows progress on stderr while it is open; a run that is over within a second shows nothing."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        # Parts that an earlier, stopped prepare had finished come at once and are no measure of the speed.
        self._found: PrepareProgress | None = None
        self._latest: PrepareProgress | None = None
        self._said: PrepareProgress | None = None  # on the last line, elsewhere than on a terminal

    def __call__(self, progress: PrepareProgress) -> None:
        now = time.monotonic()
        if progress.notice:
            say(self._console, f"note: {progress.notice}")
        if progress.phase == "measuring":
            self.close()
            return
        if self._latest is None or self._latest.phase != progress.phase:
            self._found, self._started = progress, now
        elif now - self._started < 0.5:
            self._found = progress
        self._latest = progress
        line = self._line(progress, now)
        if self._console.is_terminal:
            if self._bar is None:
                percent = TaskProgressColumn("{task.percentage:>3.0f}%")
                self._bar = Progress(
                    TextColumn("{task.description}"), BarColumn(24), percent, TextColumn("{task.fields[line]}"),
                    console=self._console, transient=True,
                )  # fmt: skip
                self._bar.start()
                self._bar.add_task("", total=None, line="")
            (task,) = self._bar.task_ids
            total = (progress.total_bytes if progress.phase != "merging" else None) or None
            phase = _PHASES[progress.phase]
            self._bar.update(task, description=phase, total=total, completed=progress.bytes, line=line)
        elif now - self._last_line >= QUIET_SECONDS:
            self._last_line = now
            self._say(progress, line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._said is not None and self._latest is not None and self._latest.bytes > self._said.bytes:
            self._say(self._latest, self._line(self._latest, time.monotonic()))  # else what was said last looks stuck
        self._said = None

    def _say(self, progress: PrepareProgress, line: str) -> None:
        self._said = progress
        say(self._console, f"{_PHASES[progress.phase]}: {line}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _line(self, progress: PrepareProgress, now: float) -> str:
        found = self._found or progress
        seconds = max(now - self._started, 1e-3)
        done, tokens = progress.bytes - found.bytes, progress.tokens - found.tokens
        parts = [f"{progress.files:,}/{progress.total_files:,} files", f"{progress.bytes / 1e6:,.0f} MB"]
        if done > 0:
            parts.append(f"{done / 1e6 / seconds:,.1f} MB/s")
        if tokens > 0:
            parts.append(f"{human_count(tokens / seconds)} tokens/s")
        if done > 0 and progress.total_bytes > progress.bytes and progress.phase != "merging":
            parts.append(f"ETA {human_seconds((progress.total_bytes - progress.bytes) * seconds / done)}")
        if progress.problems:
            parts.append(f"{progress.problems:,} problems")
        return "  ".join(parts)
