"""The panel of `flatout train --view` and `flatout watch`: one screen that shows how a run goes.

Idea: `ViewState` takes records, `panel` turns it into lines, `ViewReader` shows them on the terminal's other screen
four times a second, and puts the last panel on the first one when it closes.

Contract: `ViewReader` can be used wherever `TerminalReader` can. Where stdout is no terminal, or one that cannot move
its cursor, it prints that reader's lines.
Trap: the panel is drawn by a thread of rich, so state is read and written under a lock. Whatever is printed to
stderr meanwhile would be drawn over; it is held back and printed when the view closes. A process that leaves without
`close()` must call `leave_at_once()`, or the shell is left on the wrong screen without a cursor.
"""

import contextlib
import dataclasses
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flatout.observe.live.console import TerminalReader
from flatout.observe.live.follow import METRICS, record_of
from flatout.observe.live.panel import ENDINGS, one_line, panel
from flatout.observe.live.state import ViewState
from flatout.observe.sinks import read_metrics
from flatout.records import CheckpointRecord, EndRecord, NoticeRecord, Record, RunInfo

REDRAWS_PER_SECOND = 4


@final
class ViewReader:
    """Shows a run as a panel on a terminal, and as `TerminalReader`'s lines elsewhere."""

    def __init__(self, log_every: int, stream: TextIO | None = None) -> None:
        self.console = Console(file=stream, highlight=False)
        self.state = ViewState()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._held: _HeldStream | None = None
        self._leaving = False
        able = self.console.is_terminal and not self.console.is_dumb_terminal
        self._lines = None if able else TerminalReader(log_every, stream)

    def show(self, record: Record) -> None:
        if self._lines is not None:
            self._lines.show(_inert(record))
        with self._lock:
            self.state.add(record)
        if self._lines is None:
            self._open()

    def close(self) -> None:
        """Gives the terminal back and leaves the last panel on it; a second call does nothing."""
        if self._lines is not None:
            self._lines.close()
        live, self._live = self._live, None
        if live is None:
            return
        # Some terminals that were resized meanwhile bring parts of this screen back to the first one: leave it empty.
        self._leaving = True
        live.refresh()
        live.stop()
        held, self._held = self._held, None
        if held is not None:
            sys.stderr = held.real
        with self._lock:
            lines = panel(self.state, self.console.width, min(max(self.console.height - 2, 6), 30))
        for line in lines:
            self.console.print(line, soft_wrap=True)
        if held is not None and (text := held.getvalue()):
            held.real.write(text)
            held.real.flush()

    def recall(self, info: RunInfo) -> None:
        """Takes what a resumed run said before `info`, from its file, so that the panel shows the whole run."""
        if info.resumed_from is None or self._lines is not None:
            return
        rows = read_metrics(Path(info.folder) / METRICS)
        starts = [place for place, row in enumerate(rows) if row["type"] == "run"]
        if starts and not info.nothing_left:
            del rows[starts[-1] :]  # `info` is in the file already
        with self._lock:
            for row in rows:
                if (earlier := record_of(row)) is not None:
                    self.state.add(earlier)

    def leave_at_once(self) -> None:
        """Puts the terminal right without waiting for anything; for a signal handler that ends the process."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # a terminal that is gone needs nothing
                os.write(self.console.file.fileno(), b"\x1b[?1049l\x1b[?25h")

    def _open(self) -> None:
        if self._live is not None:
            return
        self._live = Live(
            console=self.console,
            get_renderable=self._render,
            refresh_per_second=REDRAWS_PER_SECOND,
            screen=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        self._held = _HeldStream(sys.stderr)
        sys.stderr = self._held

    def _render(self) -> RenderableType:
        width, height = self.console.size
        with self._lock:
            lines = [] if self._leaving else panel(self.state, width, height)
        return Text("\n", no_wrap=True, end="").join(lines)


def _inert(record: Record) -> Record:
    """The record with texts that can be printed: one that was read from a file may hold anything."""
    match record:
        case RunInfo():
            return dataclasses.replace(_in_one_line(record), features=tuple(map(_in_one_line, record.features)))
        case CheckpointRecord():
            return _in_one_line(record)
        case EndRecord() if record.reason not in ENDINGS:
            return NoticeRecord(step=record.step, message=one_line(f"ended at step {record.step}: {record.reason}"))
        case _:
            return record


def _in_one_line(record: Any) -> Any:
    texts = {name: one_line(text) for name, text in vars(record).items() if isinstance(text, str)}
    return dataclasses.replace(record, **texts)


@final
class _HeldStream(io.StringIO):
    """Stands for stderr while the panel is up; keeps the last 64 KiB of what is written."""

    def __init__(self, real: TextIO) -> None:
        super().__init__()
        self.real = real

    def write(self, text: str, /) -> int:
        count = super().write(text)
        if self.tell() > 1 << 17:
            kept = self.getvalue()[-(1 << 16) :]
            self.seek(0)
            self.truncate()
            super().write(kept)
        return count

    def fileno(self) -> int:
        return self.real.fileno()

    def isatty(self) -> bool:
        return self.real.isatty()
