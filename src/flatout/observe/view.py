"""The panel of `flatout train --view` and `flatout watch`: one screen that shows how a run goes.

Idea: `ViewState` takes records, `panel` makes a screen of any size of them, and `ViewReader` shows it on the terminal's
alternate screen four times a second; when it closes, it prints the last panel on the normal screen.

Contract: `ViewReader` can be used wherever `TerminalReader` can. Where stdout is no terminal, or one that cannot move
its cursor, it prints that reader's lines. `ViewState` takes every record once, in order. `panel` has at most the lines
and the width it is asked for: parts that do not fit are left out, the least important first. Control characters are
removed from all text.

Traps: a thread of rich draws the panel, so state is read and written under a lock. Output to stderr would be drawn
over; it is held back and printed when the view closes. A process that leaves without `close()` must call
`leave_at_once()`, or the shell is left on the alternate screen without a cursor. A resumed run repeats steps:
`ViewState` forgets the first ones at the `RunInfo`.
"""

import collections
import contextlib
import io
import math
import os
import sys
import textwrap
import threading
from typing import Any, TextIO, final

import numpy
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout import records
from flatout.errors import many
from flatout.observe.alerts import STALL_SHARE, Alert, Alerts
from flatout.observe.human import exposed_share, human_bytes, human_count, human_seconds, loss_text, one_line, printable
from flatout.observe.series import GrowingSeries, Points, Series, record_sentence, usual_range
from flatout.observe.sinks import ENDINGS, minutes_of
from flatout.observe.terminal import RunPace, TerminalReader
from flatout.records import SLOW_RANK, EvalRecord, MachineRecord, Record, RunInfo, StepRecord, slowest_over_median

# Which field of `ViewState` the newest record of a kind is in.
_KEPT = {
    RunInfo: "info",
    StepRecord: "step",
    EvalRecord: "evaluation",
    MachineRecord: "machine",
    records.EigenstateRecord: "eigenstates",
    records.SampleRecord: "sample",
    records.SpanRecord: "spans",
    records.CheckpointRecord: "saved",
    records.NoticeRecord: "notice",
    records.EndRecord: "end",
}
MOST_MARKS = 40  # validation losses on the chart
LONG_WAIT = 0.10  # of the first rank's time: the aim of the report
_FAINT, _STRONG, _WARN, _GOOD, _LINE, _MARK = "bright_black", "bold", "yellow", "green", "cyan", "magenta"


@final
class ViewState:
    """What the panel shows, from the records seen so far."""

    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.step: StepRecord | None = None
        self.evaluation: EvalRecord | None = None
        self.machine: MachineRecord | None = None
        self.eigenstates: records.EigenstateRecord | None = None
        self.sample: records.SampleRecord | None = None
        self.spans: records.SpanRecord | None = None
        self.saved: records.CheckpointRecord | None = None
        self.notice: records.NoticeRecord | None = None
        self.end: records.EndRecord | None = None
        self.losses, self.validation = GrowingSeries(), GrowingSeries()
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=50)
        self.skipped = 0
        self.pace = RunPace()
        self._alerts = Alerts()

    def add(self, record: Record) -> None:
        self.pace.add(record)
        if kept := _KEPT.get(type(record)):
            setattr(self, kept, record)
        if isinstance(record, RunInfo):
            self.end = self.notice = None
            self.losses.cut_back(record.start_step)
            self.validation.cut_back(record.start_step)
        elif isinstance(record, StepRecord):
            self.end = None
            self.losses.add(record.step, record.loss)
            self.skipped += not record.applied
        elif isinstance(record, EvalRecord):
            self.validation.add(record.step, record.loss)
        self.alerts.extend(self._alerts.see(record))

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss and its step."""
        evaluations = [(loss, step) for step, loss in self.validation.series.points if math.isfinite(loss)]
        return min(evaluations, default=None)


def panel(state: ViewState, width: int, height: int) -> RenderableType:
    """The screen: figures and alerts get their rows first, and the chart and the sample what is left."""
    if height < 6 or width < 24:
        return Group(*_brief(state)[:height])
    inner, room = width - 4, height - 3
    alerts = _alert_lines(state, inner, max(1, room // 4))
    figures = _figure_rows(state, inner, max(1, room // 2 - len(alerts)))
    room -= len(alerts) + len(figures)
    sample = _sample_lines(state, room // 3) if room >= 9 else []
    parts: list[RenderableType] = [_progress(state, inner), *_chart(state, inner, min(room - len(sample), 16))]
    if figures:
        table = Table.grid(padding=(0, 2))
        for _ in figures[0]:
            table.add_column(no_wrap=True, overflow="ellipsis")
        for row in figures:
            table.add_row(*row)
        parts.append(table)
    info, title = state.info, "flatout"
    if info is not None:
        title = one_line(f"{info.folder}: {info.family} {human_count(info.parameters)} on {info.device}")
    return Panel(
        Group(*parts, *sample, *alerts),
        title=Text(title, style=_STRONG),
        title_align="left",
        subtitle=_status(state),
        subtitle_align="left",
        border_style=_FAINT,
        width=width,
    )


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _progress(state: ViewState, width: int) -> RenderableType:
    total, start = (0, 0) if state.info is None else (state.info.steps, state.info.start_step)
    done = start if state.step is None else state.step.step
    left = None if state.end is not None else state.pace.seconds_left
    minutes = None if state.info is None else minutes_of(state.info.config)
    share, of = min(done / total, 1.0) if total else 0.0, f"/{total:,}"
    if minutes is not None:  # its number of steps is a plan that changes
        share, of = share if left is None else 1 - left / (60 * minutes), ""
    before = f"step {done:,}{of}"
    after = f"{share:.1%}" + ("" if left is None else f"  ETA {human_seconds(left)}")
    bar = width - len(before) - len(after) - 2
    if bar < 4:
        return _line(f"{before} {after}")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(before, _STRONG), ProgressBar(total=1.0, completed=share, width=bar), after)
    return grid


def _figure_rows(state: ViewState, width: int, most: int) -> list[list[Text]]:
    """Figures in as many columns as fit, the most important first, so that the least important is cut off."""
    columns = max(1, min(4, width // 25))
    cells = [Text.assemble((f"{name} ", _FAINT), (value, style)) for name, value, style in _figures(state)]
    rows = [cells[place : place + columns] for place in range(0, len(cells), columns)]
    return rows[:most]


def _figures(state: ViewState) -> list[tuple[str, str, str]]:
    """(name, value, style) of everything that is known; a run on a CPU has no clock of a card to show."""
    step, evaluation, best = state.step, state.evaluation, state.best
    if step is None:
        return []
    rate, share, machine = state.pace.tokens_per_second, state.pace.data_share, state.machine
    found: list[tuple[str, str | None, str]] = [
        ("loss", loss_text(step.loss), _STRONG),
        ("speed", f"{human_count(rate)} tokens/s" if rate else None, _STRONG),
        ("val loss", evaluation and f"{loss_text(evaluation.loss)} at {evaluation.step:,}", ""),
        ("MFU", _put("{:.1%}", step.mfu), ""),
        ("best val", best and f"{loss_text(best[0])} at {best[1]:,}", _GOOD),
        ("memory", None if step.memory_bytes is None else human_bytes(step.memory_bytes), ""),
        ("rate", f"{step.learning_rate:.2e}", ""),
        ("data wait", _put("{:.1%}", share), _WARN if (share or 0.0) > STALL_SHARE else ""),
        *_rank_figures(state),
        ("grad norm", f"{step.grad_norm:.3g}", ""),
        ("skipped", many(state.skipped, "update") if state.skipped else None, _WARN),
        ("trained", human_seconds(state.pace.trained_seconds), ""),
        *([] if machine is None else _machine_figures(machine)),
        ("tokens", human_count(step.tokens), ""),
    ]
    return [(name, value, style) for name, value, style in found if value is not None]


def _machine_figures(machine: MachineRecord) -> list[tuple[str, str | None, str]]:
    limit = "" if machine.power_limit_watts is None else f" of {machine.power_limit_watts:.0f}"
    held = f" ({one_line(machine.throttled)})" if machine.throttled else ""
    return [
        ("GPU use", _put("{:.0%}", machine.utilisation), ""),
        ("power", _put("{:.0f}{} W", machine.power_watts, limit), ""),
        ("clock", _put("{:.0f} MHz{}", machine.clock_mhz, held), _WARN if held else ""),
        ("heat", _put("{:.0f} °C", machine.temperature), ""),
        ("host cores", _put("{:.1f} of {:g}", machine.cores_busy, machine.cores), ""),
        ("host memory", None if machine.process_bytes is None else human_bytes(machine.process_bytes), ""),
    ]


def _put(form: str, *values: Any) -> str | None:
    """The values in words; None where one is not known."""
    return None if None in values else form.format(*values)


def _rank_figures(state: ViewState) -> list[tuple[str, str | None, str]]:
    """Of several ranks the slowest, and the share of time that the first one waits for gradients."""
    seconds = () if state.spans is None else state.spans.rank_seconds
    if state.spans is None or len(seconds) < 2:
        return []
    slowest, times = slowest_over_median(seconds)
    words = f", {slowest} is +{times - 1:.1%}" if times >= 1.005 else ", even"
    waits = exposed_share(state.spans.seconds.get("reduction", 0.0), seconds[0])
    return [
        ("ranks", f"{len(seconds)}{words}", _WARN if times > 1 + SLOW_RANK else ""),
        ("grad wait", f"{waits:.1%}", _WARN if waits > LONG_WAIT else ""),
    ]


def _sample_lines(state: ViewState, most: int) -> list[Text]:
    if state.sample is None:
        return []
    body = [line.expandtabs(4) for line in printable(state.sample.prompt + state.sample.text).split("\n")]
    lines = [_line(line, "italic") for line in body if line.strip()]
    return [_line(f"sample at step {state.sample.step:,}", _FAINT), *lines][:most]


def _alert_lines(state: ViewState, width: int, most: int) -> list[Text]:
    """The latest alert of each kind, newest first, each in at most two lines."""
    latest: dict[str, Alert] = {}
    for alert in reversed(state.alerts):
        latest.setdefault(alert.kind, alert)
    lines: list[str] = []
    for alert in latest.values():
        words = one_line(f"! step {alert.step:,} {alert.kind}: {alert.message}")
        lines += textwrap.wrap(words, width, max_lines=2, placeholder="…", subsequent_indent="  ")
    eigenstates = "" if state.eigenstates is None else record_sentence(state.eigenstates)
    return [*([_line(eigenstates)] if eigenstates else []), *(_line(line, _WARN) for line in lines)][:most]


def _status(state: ViewState) -> Text | None:
    """What stands in the lower edge: how the run ended, a notice of the last steps, or the newest checkpoint."""
    if state.end is not None:
        words = f"{ENDINGS.get(state.end.reason, 'ended')} at step {state.end.step:,}"
        return Text(words, _GOOD if state.end.reason == "finished" else _WARN)
    if state.notice is not None and (state.step is None or state.step.step - state.notice.step < 50):
        return Text(one_line(state.notice.message))
    if state.saved is not None:
        return Text(f"saved at step {state.saved.step:,} ({human_bytes(state.saved.bytes)})", _FAINT)
    return None


def _brief(state: ViewState) -> list[Text]:
    """For screens too small for a panel."""
    if state.step is None:
        return [_line("waiting for the first step")]
    return [_line(f"step {state.step.step:,}"), _line(f"loss {loss_text(state.step.loss)}")]


# --- losses over steps as lines of text -------------------------------------------------------------------------------

VALIDATION, BROKEN = "●", "×"
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a braille cell, by column and from the bottom up
_BRAILLE = 0x2800
_SLACK = 1.5  # of `usual_range`: the first losses are beyond the axis, else they would flatten the rest


def _chart(state: ViewState, width: int, height: int) -> list[Text]:
    if height < 1:
        return []
    if state.step is None:
        waiting = "waiting for the first step" if state.info is not None else "waiting for the run to begin"
        return [_line(waiting, _FAINT), *[Text("")] * (height - 1)]
    return chart(state.losses.series, state.validation.series.means(MOST_MARKS).points, width, height)


def chart(training: Series, validation: Points, width: int, height: int) -> list[Text]:
    """Training loss as a line of braille dots and validation as marks, with a title, the scale and the steps.

    Losses beyond the usual range are drawn at the edge. A cross is a loss that is not finite.
    """
    rows, across = height - 2, width - 10
    if rows < 2 or across < 8 or not len(training.x):
        return [Text("")] * height
    first, last = float(training.x[0]), float(training.x[-1])
    validation = [(step, loss) for step, loss in validation if first <= step <= last]
    both = numpy.concatenate([training.y, [loss for _, loss in validation]])
    low, high = usual_range(both, _SLACK) or (0.0, 1.0)
    if high - low < 1e-3 * max(abs(low), abs(high), 0.1):  # a flat line gets an axis that can be labelled
        room = 5e-3 * max(abs(low), abs(high), 0.1)
        low, high = low - room, high + room

    def column_of(step: float) -> int:
        """The cell of a step."""
        return round((step - first) / max(last - first, 1) * (across - 1))

    def level_of(loss: Any) -> Any:
        """The number of dots above the lower edge."""
        return numpy.rint((numpy.clip(loss, low, high) - low) / (high - low) * (4 * rows - 1))

    cells = [[(" ", _LINE)] * across for _ in range(rows)]
    for (column, row), bits in _line_bits(training.means(2 * across), level_of, across).items():
        cells[rows - 1 - row][column] = (chr(_BRAILLE + bits), _LINE)
    for step in training.bad:
        cells[-1][column_of(step)] = (BROKEN, _WARN)
    for step, loss in validation:
        if math.isfinite(loss):
            cells[rows - 1 - int(level_of(loss)) // 4][column_of(step)] = (VALIDATION, _MARK)
    labels = [loss_text(high), *[""] * (rows - 2), loss_text(low)]
    title = [("loss: ", _FAINT), ("⠒⠒", _LINE), (" training", _FAINT)]
    title += [(f"  {VALIDATION}", _MARK), (" validation", _FAINT)] if validation else []
    body = [[(f"{label:>9} ", _FAINT), *line] for label, line in zip(labels, cells, strict=True)]
    begin, end = f"{first:,.0f}", f"step {last:,.0f}"
    steps = [(" " * 10 + begin + end.rjust(across - len(begin)), _FAINT)]
    return [Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in (title, *body, steps)]


def _line_bits(means: Series, level_of: Any, across: int) -> dict[tuple[int, int], int]:
    """Dots of a line without gaps, as bits by cell; rows count from the bottom."""
    finite = numpy.isfinite(means.y)
    bits: dict[tuple[int, int], int] = {}
    if not finite.any():
        return bits
    places = numpy.linspace(means.x[0], means.x[-1], 2 * across)
    levels = level_of(numpy.interp(places, means.x[finite], means.y[finite])).astype(int).tolist()
    before = levels[0]
    for column, level in enumerate(levels):
        for dot in range(min(before, level), max(before, level) + 1):
            cell = column // 2, dot // 4
            bits[cell] = bits.get(cell, 0) | _DOTS[column % 2][dot % 4]
        before = level
    return bits


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
            self._lines.show(record)
            return
        with self._lock:
            self.state.add(record)
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
            self.console.print(panel(self.state, self.console.width, min(max(self.console.height - 2, 6), 30)))
        if held is not None and (text := held.getvalue()):
            held.real.write(text)
            held.real.flush()

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
            return Text("") if self._leaving else panel(self.state, width, height)


@final
class _HeldStream(io.StringIO):
    """Stands for stderr while the panel is up, and keeps what is written."""

    def __init__(self, real: TextIO) -> None:
        super().__init__()
        self.real = real

    def fileno(self) -> int:
        return self.real.fileno()

    def isatty(self) -> bool:
        return self.real.isatty()
