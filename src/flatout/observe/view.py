"""The panel of `flatout train --view` and `flatout watch`: one screen that shows how a run goes.

Idea: `ViewState` takes records, `panel` turns it into lines for a screen of any size, and `ViewReader` shows them on
the terminal's other screen four times a second; when it closes, it prints the last panel on the first screen.

Contract: `ViewReader` can be used wherever `TerminalReader` can. Where stdout is no terminal, or one that cannot move
its cursor, it prints that reader's lines. `ViewState` takes every record once, in order, and keeps 16 bytes of each
step and evaluation. `panel` never returns more lines than asked for, none wider than the
screen: parts that do not fit are left out, the least important first. Control characters are removed from all text.

Traps: a thread of rich draws the panel, so state is read and written under a lock. Output to stderr would be drawn
over; it is held back and printed when the view closes. A process that leaves without `close()` must call
`leave_at_once()`, or the shell is left on the wrong screen without a cursor. A resumed run repeats steps: `ViewState`
forgets the first ones at the `RunInfo`.
"""

import collections
import contextlib
import dataclasses
import io
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flatout import records
from flatout.errors import many
from flatout.observe.alerts import STALL_SHARE, Alert, Alerts
from flatout.observe.human import exposed_share, human_bytes, human_count, human_seconds, loss_text, printable
from flatout.observe.runs import METRICS, record_of
from flatout.observe.series import GrowingSeries, record_sentence
from flatout.observe.sinks import ENDINGS, minutes_of, read_metrics
from flatout.observe.terminal import BROKEN, TerminalReader, chart, mean_of
from flatout.records import (
    SLOW_RANK,
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MachineRecord,
    NoticeRecord,
    Record,
    RunInfo,
    SampleRecord,
    StepRecord,
    slowest_over_median,
)

# Which field of `ViewState` the newest record of a kind is in.
_KEPT = {
    EvalRecord: "evaluation",
    records.MachineRecord: "machine",
    records.EigenstateRecord: "eigenstates",
    records.SampleRecord: "sample",
    records.SpanRecord: "spans",
    records.CheckpointRecord: "saved",
    records.NoticeRecord: "notice",
    records.EndRecord: "end",
}
POINTS = 512  # of a chart
RECENT = 50  # steps whose mean is shown as speed
QUIET_SECONDS = 20.0


@final
class ViewState:
    """What the panel shows, from the records seen so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.heard = clock()
        self.info: RunInfo | None = None
        self.step: StepRecord | None = None
        self.evaluation: EvalRecord | None = None
        self.machine: records.MachineRecord | None = None
        self.eigenstates: records.EigenstateRecord | None = None
        self.sample: records.SampleRecord | None = None
        self.spans: records.SpanRecord | None = None
        self.saved: records.CheckpointRecord | None = None
        self.end: records.EndRecord | None = None
        self.losses, self.validation = GrowingSeries(), GrowingSeries()
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=50)
        self._bests: collections.deque[tuple[float, int]] = collections.deque(maxlen=POINTS)  # each below those before
        self.skipped = 0
        self.notice: records.NoticeRecord | None = None
        self.trained_seconds = self.other_seconds = 0.0
        self._alerts = Alerts()
        self._steps_seen = 0
        self._recent: collections.deque[tuple[float, float, float | None]] = collections.deque(maxlen=RECENT)

    def add(self, record: Record) -> list[Alert]:
        """Takes a record; returns the alerts it raised."""
        self.heard = self._clock()
        if kept := _KEPT.get(type(record)):
            setattr(self, kept, record)
        if isinstance(record, RunInfo):
            self._start(record)
        elif isinstance(record, StepRecord):
            self._step(record)
        elif isinstance(record, EvalRecord | records.CheckpointRecord):
            self.other_seconds += _finite(record.seconds)
        if isinstance(record, EvalRecord):
            self.validation.add(record.step, record.loss)
        lowest = math.inf if self.best is None else self.best[0]
        if isinstance(record, EvalRecord) and -math.inf < record.loss < lowest:
            self._bests.append((record.loss, record.step))
        raised = self._alerts.see(record)
        self.alerts.extend(raised)
        return raised

    def _start(self, info: RunInfo) -> None:
        self.info, self.end, self.notice, self._steps_seen = info, None, None, 0
        self._recent.clear()
        if self.step is not None and self.step.step > info.start_step:
            self.losses.cut_back(info.start_step)
            self.validation.cut_back(info.start_step)
            while self._bests and self._bests[-1][1] > info.start_step:
                self._bests.pop()

    def _step(self, record: StepRecord) -> None:
        self.step, self.end = record, None
        self.losses.add(record.step, record.loss)
        self.skipped += not record.applied
        self._steps_seen += 1
        self.trained_seconds += _finite(record.seconds)
        # The first two steps hold compilation and cold caches.
        if record.tokens_per_second and record.seconds > 0 and self._steps_seen > 2:
            self._recent.append((record.tokens_per_second * record.seconds, record.seconds, record.data_seconds))

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss and its step."""
        return self._bests[-1] if self._bests else None

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(item[1] for item in self._recent)
        if seconds > 0:
            return sum(item[0] for item in self._recent) / seconds
        return None if self.step is None else self.step.tokens_per_second

    @property
    def data_share(self) -> float | None:
        known = [(item[2], item[1]) for item in self._recent if item[2] is not None]
        seconds = sum(item[1] for item in known)
        return min(sum(item[0] for item in known) / seconds, 1.0) if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Training, and as much evaluation and saving for each second of it as there has been until now.

        By the clock where the length is told in minutes, unless some were spent before.
        """
        minutes = None if self.info is None else minutes_of(self.info.config)
        if self.info is not None and minutes is not None:
            spent = self.trained_seconds + self.other_seconds
            return None if self.info.start_step else max(0.0, 60 * minutes - spent)
        if self.info is None or self.step is None or not self.tokens_per_second:
            return None
        training = max(self.info.steps - self.step.step, 0) * self.info.batch_tokens / self.tokens_per_second
        return training * (1 + self.other_seconds / self.trained_seconds) if self.trained_seconds > 0 else training

    @property
    def quiet_seconds(self) -> float | None:
        """How long nothing was heard, if that is long for this run."""
        quiet = self._clock() - self.heard
        usual = 0.0 if self.step is None else 10 * _finite(self.step.seconds)
        return quiet if self.end is None and quiet > max(QUIET_SECONDS, usual) else None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


LONG_WAIT = 0.10  # of the first rank's time: the aim of the report
ZOOM = 100  # steps of the second chart
_BLOCKS = "▁▂▃▄▅▆▇█"
_FAINT, _STRONG, _WARN, _GOOD = "bright_black", "bold", "yellow", "green"


def panel(state: ViewState, width: int, height: int) -> list[Text]:
    """The lines of the panel, at most `height` of at most `width` cells.

    Rows are given away in order of importance; what is left over goes to the chart and the sample.
    """
    inner = max(width - 4, 1)
    if height < 6 or width < 24:
        return [_cut(line, width) for line in _brief(state)[: max(height, 1)]]
    room = height - 3  # the frame, and the line of progress
    alerts = _alert_lines(state, inner, 1 if room < 12 else 3 if room < 24 else 6)
    facts = _facts(state, inner)[: max(room - len(alerts) - 1, 1)]
    room -= len(alerts) + len(facts)
    gap = 1 if room >= 8 else 0
    room -= gap
    sample: list[Text] = []
    if state.sample is not None and room >= 5:
        sample = _sample_lines(state.sample, inner, min(max(room // 3, 3), 12))
    chart_rows = min(room - len(sample), 16)
    body = [_progress(state, inner), *_charts(state, inner, chart_rows), *([Text("")] * gap), *facts, *sample, *alerts]
    info, title = state.info, "flatout"
    if info is not None:
        title = one_line(f"{info.folder}: {info.family} {human_count(info.parameters)} on {info.device}")
    return _framed(body, width, title, _status(state))


def spark(values: Sequence[float], width: int) -> str:
    """A series as one row of blocks, at most `width` cells, for screens without room for a chart.

    The scale ends at the 90th percentile: the first losses would press everything else flat. A column without a finite
    value is a cross.
    """
    columns = _columns(values, width)
    finite = sorted(value for value in columns if math.isfinite(value))
    if not finite:
        return BROKEN * len(columns)
    low, high = finite[0], finite[int(0.9 * (len(finite) - 1))]
    scale = 7 / (high - low) if high > low else 0.0
    levels = [1 + round(min(value - low, high - low) * scale) if math.isfinite(value) else 0 for value in columns]
    return "".join(_BLOCKS[level - 1] if level else BROKEN for level in levels)


def _columns(values: Sequence[float], width: int) -> list[float]:
    """The series in at most `width` means; a short one is stretched so that it fills the width."""
    count = len(values)
    if count == 0 or width < 1:
        return []
    if count >= width:
        edges = [index * count // width for index in range(width + 1)]
        return [mean_of(values[low:high]) for low, high in itertools.pairwise(edges)]
    return [values[index * count // width] for index in range(width)]


def _charts(state: ViewState, width: int, height: int) -> list[Text]:
    if height < 1:
        return []
    if state.step is None:
        waiting = "waiting for the first step" if state.info is not None else "waiting for the run to begin"
        return [Text(waiting, style=_FAINT), *[Text("")] * (height - 1)]
    if height == 1:
        losses = [loss for _, loss in state.losses.series.means(POINTS).points]
        return [Text.assemble(("loss ", _FAINT), (spark(losses, width - 5), "cyan"))]
    losses, validation = state.losses.series, state.validation.series.means(POINTS).points
    if width < 120 or len(losses.x) <= 2 * ZOOM:
        return chart(losses.means(POINTS).points, validation, "loss", width, height)
    left = width * 3 // 5
    first = chart(losses.means(POINTS).points, validation, "loss", left - 2, height)
    second = chart(state.losses.latest(ZOOM), validation, f"last {ZOOM} steps", width - left, height)
    return [_joined([_padded(_cut(one, left - 2), left), two]) for one, two in zip(first, second, strict=True)]


def _facts(state: ViewState, width: int) -> list[Text]:
    """Figures in as many columns as fit, the most important first, so that what is cut off is the least."""
    cells = _figures(state)
    for columns in (4, 3, 2, 1):
        groups = [cells[place::columns] for place in range(columns)]
        names = [max((len(name) for name, _, _ in group), default=0) + 1 for group in groups]
        values = [max((cell_len(value) for _, value, _ in group), default=0) for group in groups]
        if sum(names) + sum(values) + columns - 1 <= width:
            break
    gap = min((width - sum(names) - sum(values)) // max(columns - 1, 1), 8)
    lines = []
    for start in range(0, len(cells), columns):
        parts = []
        for place, (name, value, style) in enumerate(cells[start : start + columns]):
            cell = Text.assemble((f"{name:<{names[place]}}", _FAINT), (value, style))
            parts.append(cell if place == columns - 1 else _padded(cell, names[place] + values[place] + gap))
        lines.append(_cut(_joined(parts), width))
    if state.eigenstates is not None and (words := record_sentence(state.eigenstates)):
        lines.append(_cut(Text(words), width))
    return lines


def _figures(state: ViewState) -> list[tuple[str, str, str]]:
    """(name, value, style) of everything that is known; a run on a CPU has no clock of a card to show."""
    step, evaluation = state.step, state.evaluation
    if step is None:
        return []
    machine = state.machine or _NO_READING
    rate, share, best = state.tokens_per_second, state.data_share, state.best
    limit = "" if machine.power_limit_watts is None else f" of {machine.power_limit_watts:.0f}"
    held = f" ({one_line(machine.throttled)})" if machine.throttled else ""
    host = "" if machine.host_total_bytes is None else f" of {machine.host_total_bytes / 2**30:.0f}"
    found: list[tuple[str, str | None, str]] = [
        ("loss", loss_text(step.loss), _STRONG),
        ("speed", f"{human_count(rate)} tokens/s" if rate else None, _STRONG),
        ("val loss", evaluation and f"{loss_text(evaluation.loss)} at {evaluation.step:,}", ""),
        ("MFU", _put("{:.1%}", step.mfu), ""),
        ("best val", best and f"{loss_text(best[0])} at {best[1]:,}", _GOOD),
        ("memory", None if step.memory_bytes is None else human_bytes(step.memory_bytes), ""),
        ("rate", f"{step.learning_rate:.2e}", ""),
        ("data wait", _put("{:.1%}", share), _WARN if (share or 0.0) > STALL_SHARE else ""),
        *_ranks(state),
        ("grad norm", f"{step.grad_norm:.3g}", ""),
        ("GPU use", _put("{:.0%}", machine.utilisation), ""),
        ("skipped", many(state.skipped, "update") if state.skipped else None, _WARN),
        ("power", _put("{:.0f}{} W", machine.power_watts, limit), ""),
        ("trained", human_seconds(state.trained_seconds), ""),
        ("clock", _put("{:.0f} MHz{}", machine.clock_mhz, held), _WARN if held else ""),
        ("heat", _put("{:.0f} °C", machine.temperature), ""),
        ("host cores", _put("{:.1f} of {:g}", machine.cores_busy, machine.cores), ""),
        ("host load", _put("{:.1f}", machine.load), ""),
        ("host memory", _put("{:.1f}{} GiB", machine.process_bytes and machine.process_bytes / 2**30, host), ""),
        ("swap", human_bytes(machine.swap_bytes) if machine.swap_bytes else None, _WARN),
        ("tokens", human_count(step.tokens), ""),
        ("reserved", None if step.reserved_bytes is None else human_bytes(step.reserved_bytes), ""),
        ("epoch", _put("{:.2f}", step.epoch), ""),
    ]
    return [(name, value, style) for name, value, style in found if value is not None]


_OF_CARDS = ("utilisation", "memory_bytes", "power_watts", "power_limit_watts", "temperature", "clock_mhz")
_NO_READING = MachineRecord(step=0, elapsed=0.0, throttled="", **dict.fromkeys(_OF_CARDS))


def _put(form: str, *values: Any) -> str | None:
    """The values in words; None where one is not known."""
    return None if None in values else form.format(*values)


def _ranks(state: ViewState) -> list[tuple[str, str | None, str]]:
    """Several ranks: the slowest, and the share of time that the first one waits for gradients."""
    seconds = () if state.spans is None else state.spans.rank_seconds
    if state.spans is None or len(seconds) < 2:
        return []
    slowest, times = slowest_over_median(seconds)
    slow = times >= 1.005
    waits = exposed_share(state.spans.seconds.get("reduction", 0.0), seconds[0])
    word = f", {slowest} is +{times - 1:.1%}" if slow else ", even"
    return [
        ("ranks", f"{len(seconds)}{word}", _WARN if times > 1 + SLOW_RANK else ""),
        ("grad wait", f"{waits:.1%}", _WARN if waits > LONG_WAIT else ""),
    ]


def _progress(state: ViewState, width: int) -> Text:
    total, start = (0, 0) if state.info is None else (state.info.steps, state.info.start_step)
    done = start if state.step is None else state.step.step
    share, of = min(done / total, 1.0) if total else 0.0, f"/{total:,}"
    minutes = None if state.info is None else minutes_of(state.info.config)
    if minutes is not None:  # the number of steps is a plan that changes
        of = ""
        share = share if state.seconds_left is None else 1 - state.seconds_left / (60 * minutes)
    left = "" if state.seconds_left is None or state.end is not None else f"  ETA {human_seconds(state.seconds_left)}"
    before, after = f"step {done:,}{of} ", f" {share:.1%}{left}"
    bar = width - len(before) - len(after)
    if bar < 4:
        return _cut(Text(before.strip() + after), width)
    full = int(share * bar)
    return Text.assemble((before, _STRONG), ("━" * full, "cyan"), ("─" * (bar - full), _FAINT), (after, ""))


def _sample_lines(sample: SampleRecord, width: int, height: int) -> list[Text]:
    body = [line.expandtabs(4).rstrip() for line in printable(sample.prompt + sample.text).split("\n")]
    lines = [_cut(Text(line, style="italic"), width) for line in body if line]
    return [Text(f"sample at step {sample.step:,}", style=_FAINT), *lines[: height - 1]]


def _alert_lines(state: ViewState, width: int, most: int) -> list[Text]:
    """The latest alert of each kind, newest last, each on one line or, where there is room, on two."""
    lines: list[Text] = []
    shown: set[str] = set()
    for alert in reversed(state.alerts):
        room = min(most - len(lines), 2)
        if alert.kind not in shown and room > 0:
            words = one_line(f"! step {alert.step:,} {alert.kind}: {alert.message}")
            lines = [Text(part, style=_WARN) for part in _wrapped(words, width, room)] + lines
        shown.add(alert.kind)
    return lines


def _wrapped(words: str, width: int, most: int) -> list[str]:
    """Text in at most `most` lines, the later ones indented; what does not fit is cut with an ellipsis."""
    lines, rest = [], words
    while rest and len(lines) < most:
        indent = "  " if lines else ""
        if cell_len(indent + rest) <= width or len(lines) == most - 1:
            lines.append(_cut(Text(indent + rest), width).plain)
            break
        head = set_cell_size(rest, width - len(indent))
        cut = head.rfind(" ")
        cut = cut if cut > width // 2 else len(head)
        lines.append(indent + rest[:cut])
        rest = rest[cut:].lstrip()
    return lines


def _status(state: ViewState) -> tuple[str, str]:
    """What stands in the lower edge, and its style."""
    if state.end is not None:
        word = ENDINGS.get(state.end.reason, "ended")
        return f"{word} at step {state.end.step:,}", _GOOD if state.end.reason == "finished" else _WARN
    if (quiet := state.quiet_seconds) is not None:
        return f"nothing heard for {human_seconds(quiet)}", _WARN
    if state.notice is not None and (state.step is None or state.step.step - state.notice.step < 50):
        return one_line(state.notice.message), ""
    if state.saved is not None:
        return f"saved at step {state.saved.step:,} ({human_bytes(state.saved.bytes)})", _FAINT
    return "", ""


def _brief(state: ViewState) -> list[Text]:
    """For screens too small for a panel."""
    words = _progress(state, 200).plain.replace("━", "").replace("─", "")
    lines = [Text(" ".join(words.split()))]
    if (step := state.step) is not None:
        lines.append(Text(f"loss {loss_text(step.loss)}  lr {step.learning_rate:.2e}"))
    if state.evaluation is not None:
        lines.append(Text(f"val {loss_text(state.evaluation.loss)}"))
    if state.tokens_per_second:
        lines.append(Text(f"{human_count(state.tokens_per_second)} tokens/s"))
    return lines + _alert_lines(state, 200, 1)


def _framed(lines: Sequence[Text], width: int, title: str, status: tuple[str, str]) -> list[Text]:
    inner = width - 4
    top = _cut(Text(f" {title} ", style=_STRONG), inner)
    bottom = _cut(Text(f" {status[0]} ", style=status[1]), inner) if status[0] else Text("")
    return [
        _joined([Text("╭─", _FAINT), top, Text("─" * (inner - top.cell_len) + "─╮", _FAINT)]),
        *(_joined([Text("│ ", _FAINT), _padded(_cut(line, inner), inner), Text(" │", _FAINT)]) for line in lines),
        _joined([Text("╰─", _FAINT), bottom, Text("─" * (inner - bottom.cell_len) + "─╯", _FAINT)]),
    ]


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _cut(line: Text, width: int) -> Text:
    if line.cell_len > width:
        line = line.copy()
        line.truncate(max(width, 1), overflow="ellipsis")
    return line


def _padded(line: Text, width: int) -> Text:
    return _joined([line, Text(" " * max(width - line.cell_len, 0))])


def _joined(parts: Sequence[Text]) -> Text:
    return Text("", no_wrap=True, end="").join(parts)


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
