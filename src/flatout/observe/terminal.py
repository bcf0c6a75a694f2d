"""Records as lines on a terminal or in a pipe, as JSON lines, and the progress of preparing data.

`TerminalReader` redraws one line while training on a terminal and prints plain lines elsewhere. `PrepareBar` shows a
bar on a terminal, and a plain line now and then elsewhere. Control characters are removed from text of data or of a
model: a sample must not be able to move the cursor or rename the window.

`chart` draws losses over steps as lines of text: training as a line of braille dots, validation as marks, on one axis.
The axis leaves out what is rare and far above, such as the first losses, which would flatten the rest: such a column
has an arrow in its top row, and the title says from where on. A cross is a loss that is not finite.
"""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self, TextIO, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from flatout import records
from flatout.config.schema import SpeedConfig
from flatout.errors import many
from flatout.observe.alerts import Alerts
from flatout.observe.human import (
    Terminal,
    human_bytes,
    human_count,
    human_parameters,
    human_seconds,
    loss_text,
    printable,
    ranks_line,
    say,
)
from flatout.observe.series import Points, record_sentence
from flatout.observe.sinks import ENDINGS, early_stop_reason, minutes_of
from flatout.records import EndRecord, PrepareProgress, Record, RunInfo, StepRecord, record_to_json

LONG = 300.0  # seconds a run takes before a sentence says so
FIRST_EPOCHS, SHORT_EPOCH = 10, 10  # later epochs of fewer steps get a line no more often than steps do


class JsonReader:
    """Prints every record as a JSON line and nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout

    def show(self, record: Record) -> None:
        print(record_to_json(record), file=self.stream, flush=True)

    def close(self) -> None:
        pass


class TerminalReader:
    """Prints what a person wants to see: a live line on a terminal, a plain line every `log_every` steps elsewhere.

    Alerts are lines of their own.
    """

    def __init__(self, log_every: int, stream: TextIO | None = None) -> None:
        self.console = Terminal(stream, soft_wrap=True)
        self.log_every = log_every
        self.info: RunInfo | None = None
        self.val_loss: float | None = None
        self.speed: float | None = None
        self.first_step: int | None = None  # of this process
        self.epoch_step = -math.inf  # at which the last epoch ended
        self.epoch_line_step = -math.inf  # of the last line about an epoch
        self.memory = ""  # of eigenstates, in a sentence
        self.step_seconds: list[float] | None = []  # until the sentence about the whole run is told
        self.alerts = Alerts()
        self.began = time.monotonic()

    def show(self, record: Record) -> None:
        self._show(record)
        for alert in self.alerts.see(record):
            say(self.console, " ".join(printable(f"warning: step {alert.step} {alert.kind}: {alert.message}").split()))

    def _show(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._step(record)
            return
        if isinstance(record, records.PreviewRecord):
            say(self.console, "--- a sample; what is learned is in colour, or in brackets ---")
            print_sample(record.pieces, most=1500, console=self.console)
            say(self.console, "---")
            return
        for line in self._lines(record):
            say(self.console, line)

    def close(self) -> None:
        self.console.end_line()

    def _step(self, record: StepRecord) -> None:
        # The first steps hold compilation and cold caches, after a resume too; a running mean begins after them.
        self.first_step = record.step if self.first_step is None else self.first_step
        rate = record.tokens_per_second
        if rate is not None:
            cold = record.step < self.first_step + 4
            self.speed = rate if self.speed is None or cold else 0.9 * self.speed + 0.1 * rate
        if self.step_seconds is not None and self.info is not None and self._minutes is None:
            self.step_seconds.append(record.seconds)
            if (total := expected(self.step_seconds, self.info)) is not None:
                self.step_seconds = None
                if total.seconds >= LONG:
                    say(self.console, total.sentence)
        if self.console.is_terminal:
            self.console.redraw(self._line(record, self.console.width))
        elif record.step % self.log_every == 0 or record.step == 1 or (self.info and record.step == self.info.steps):
            say(self.console, self._line(record))

    def _line(self, record: StepRecord, width: float = math.inf) -> str:
        """A step in one line of at most `width` cells: what does not fit is left out, the least important first."""
        steps = self.info.steps if self.info else record.step
        told = f"step {record.step:>{len(str(steps))}}" + ("" if self._minutes else f"/{steps}")
        parts = {"step": told, "loss": f"loss {record.loss:.4f}"}
        if self.val_loss is not None:
            parts["val"] = f"val {self.val_loss:.4f}"
        parts["rate"] = f"lr {record.learning_rate:.2e}"
        if self.speed:
            parts["speed"] = f"{human_count(self.speed)} tok/s"
        if record.mfu is not None:
            parts["MFU"] = f"MFU {100 * record.mfu:.0f}%"
        if record.memory_bytes is not None:
            parts["memory"] = human_bytes(record.memory_bytes)
        left = self._seconds_left(record)
        if left is not None:
            parts["ETA"] = f"ETA {human_seconds(left)}"
        if not record.applied:
            parts["skipped"] = "SKIPPED"
        for name in ("memory", "rate", "MFU", "val", "speed"):
            if len("  ".join(parts.values())) > width:
                parts.pop(name, None)
        return "  ".join(parts.values())

    @property
    def _minutes(self) -> float | None:
        return None if self.info is None else minutes_of(self.info.config)

    def _seconds_left(self, record: StepRecord) -> float | None:
        """Until the last step; by the clock where the length is told in minutes, unless some were spent before."""
        if self.info is None:
            return None
        if self._minutes is not None:
            return None if self.info.start_step else max(0.0, 60 * self._minutes - (time.monotonic() - self.began))
        return (self.info.steps - record.step) * self.info.batch_tokens / self.speed if self.speed else None

    def _lines(self, record: Record) -> list[str]:
        match record:
            case RunInfo():
                self.info, self.first_step, self.began = record, None, time.monotonic()
                return [] if record.nothing_left else _banner(record)
            case records.EvalRecord():
                self.val_loss = record.loss
                bits = "" if record.bits_per_byte is None else f"  {record.bits_per_byte:.3f} bits/byte"
                best = "  best so far" if record.best else ""
                where = f"{record.tokens:,} tokens in {record.seconds:.1f}s"
                return [f"eval at step {record.step}: val loss {record.loss:.4f}{bits}  ({where}){best}"]
            case records.EpochRecord():
                length, self.epoch_step = record.step - self.epoch_step, record.step
                recent = record.step - self.epoch_line_step < self.log_every
                if recent and length < SHORT_EPOCH and record.epoch > FIRST_EPOCHS:
                    return []
                self.epoch_line_step = record.step
                samples = self.info is not None and self.info.batch_samples is not None
                rate = f"{human_count(record.windows_per_second)} {'samples' if samples else 'windows'}/s"
                return [
                    f"epoch {record.epoch} done: mean loss {record.mean_loss:.4f}  {human_seconds(record.seconds)}  "
                    f"{rate}  {human_count(record.tokens_per_second)} tok/s"
                ]
            case records.SampleRecord():
                body = (record.prompt + record.text).strip("\n")
                return [f"--- sample at step {record.step} ---", *body.split("\n"), "---"]
            case records.CheckpointRecord():
                what = f"{human_bytes(record.bytes)} in {record.seconds:.1f}s"
                if record.background_seconds is not None:
                    beside = f"{human_bytes(record.bytes)} in {record.background_seconds:.1f}s beside training"
                    what = f"{beside}, which stood still for {record.seconds:.2f}s"
                return [f"saved {record.path} ({what}{', best so far' if record.best else ''})"]
            case records.NoticeRecord():
                return [f"note: {record.message}"]
            case records.SpanRecord() if len(record.rank_seconds) > 1:
                return [ranks_line(record.rank_seconds, record.seconds.get("reduction", 0.0))]
            case records.EigenstateRecord():
                self.memory = record_sentence(record)
                return []
            case EndRecord() if self.info is not None and self.info.nothing_left:
                return [_finished_before(self.info)]
            case EndRecord():
                return [*_ending(record, self.info), *([self.memory] if self.memory else [])]
            case _:
                return []


def _banner(info: RunInfo) -> list[str]:
    start = f", from step {info.start_step}" if info.start_step else ""
    size = human_parameters(info.parameters, info.trained_parameters, info.table_parameters)
    ranks = f" x {info.ranks} ranks" if info.ranks > 1 else ""
    step = f"{info.batch_tokens:,} tokens ({info.micro_batch} x {info.context} x {info.accumulation}{ranks})"
    if _train_section(info).get("batch_stages"):
        step = f"about {info.batch_tokens:,} tokens (in stages; {info.micro_batch} x {info.context} at once{ranks})"
    epochs = f", {info.steps * info.batch_tokens / (info.windows * info.context):.2f} epochs" if info.windows else ""
    if info.batch_samples is not None:
        step = f"{many(info.batch_samples, 'sample')} (about {info.batch_tokens:,} tokens)"
        epochs = f", {info.steps * info.batch_samples / info.windows:.2f} epochs" if info.windows else ""
    training = "streamed training text" if info.train_tokens is None else f"{info.train_tokens:,} training"
    devices = f"{info.ranks} x " if info.ranks > 1 else ""
    features = [f for f in info.features if f.name != "threads" or info.device == "cpu"]  # elsewhere they do little
    shown = [f for f in features if f.name in _SHOWN or f.used not in _QUIET.get(f.name, (f.used,))]
    used = ", ".join(f"{f.name} {f.used}" + (f" ({f.why})" if f.why else "") for f in shown)
    fallbacks = [f for f in info.features if f.why and f.asked not in ("auto", "null", f.used) and _is_told(f)]
    minutes = minutes_of(info.config)
    length = many(info.steps, "step")
    if minutes is not None:
        length = f"{many(float(f'{minutes:.3g}'), 'minute')}, about {length}"
    return [
        f"flatout {info.flatout}: {info.family}, {size}, on {devices}{info.device} (torch {info.torch})",
        f"data: {training} and {info.val_tokens:,} validation tokens ({info.tokenizer}, {info.vocab:,} ids)",
        f"run: {length} of {step}{epochs}{start}, in {info.folder}",
        f"speed: {used}; memory about {human_bytes(info.memory_estimate_bytes)}",
        *(f"note: speed.{f.name} {f.asked} became {f.used}: {f.why}" for f in fallbacks),
        *([f"resuming from {info.resumed_from}"] if info.resumed_from else []),
    ]


# Always on the speed line, or only with a value other than these; and what is told when it is not what was asked for.
_SHOWN = (
    "parallel",
    "precision",
    "kernels",
    "attention",
    "loss",
    "compile",
    "fused_optimizer",
    "loader",
    "checkpointing",
    "threads",
)
_QUIET = {
    "products": ("torch",),
    "residual": ("fp32",),
    "scan": ("none",),
    "fp8": ("[]",),
    "cuda_graphs": ("off",),
    "fused_qkv": ("true",),
    "optimizer_state": ("fp32",),
    "optimizer_offload": ("false",),
    "memory_limit": ("null",),
}
_TOLD = (*_SHOWN, *_QUIET, "expandable_segments", "micro_batch")
_TOLD_IF_CHANGED = ("loss_chunk", "workers")  # numbers that wait for their use: told only where somebody set them


def _is_told(feature: records.Feature) -> bool:
    if feature.name in _TOLD_IF_CHANGED:
        return feature.asked != str(SpeedConfig.model_fields[feature.name].default)
    return feature.name in _TOLD


def _train_section(info: RunInfo) -> dict[str, Any]:
    train = info.config.get("train")
    return train if isinstance(train, dict) else {}  # what was read from a file may be anything


def _finished_before(info: RunInfo) -> str:
    if minutes_of(info.config) is not None:
        return f"{info.folder} is finished already; --resume {info.folder} --minutes N goes on for N minutes more"
    lengths = _train_section(info)
    length = next((name for name in ("tokens", "epochs") if lengths.get(name) is not None), "steps")
    now = lengths.get(length) or info.steps
    return (
        f"{info.folder} is finished already, at step {info.steps:,}; set train.{length} above {now} to make it longer"
    )


def _ending(record: EndRecord, info: RunInfo | None) -> list[str]:
    word = ENDINGS.get(record.reason, record.reason)
    line = f"{word} at step {record.step} after {human_seconds(record.seconds)} of training"
    if record.reason == "early_stop" and info is not None:
        line += f": {early_stop_reason({'config': info.config})}"
    if record.best_loss is not None and math.isfinite(record.best_loss):
        line += f"; best val loss {record.best_loss:.4f} at step {record.best_step}"
    return [line]


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


# --- losses over steps as lines of text -------------------------------------------------------------------------------

TRAINING, VALIDATION, ABOVE, BROKEN = "⠒", "●", "↑", "×"
_FAINT, _LINE, _MARK, _WARN = "bright_black", "cyan", "magenta", "yellow"
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a braille cell, by column and from the bottom up
_BRAILLE = 0x2800
_USUAL = 0.95  # of the columns after the first tenth are on the axis, and all where that costs little room
_APART = 3  # cells between two marks: what lies below stays visible


def chart(training: Points, validation: Points, title: str, width: int, height: int) -> list[Text]:
    """A title, the curves with their scale on the left, and from five lines on the steps below them."""
    rows, first = height - (2 if height >= 5 else 1), min((step for step, _ in training), default=0)
    validation = [point for point in validation if point[0] >= first]
    last = max((step for step, _ in (*training, *validation)), default=0)
    limits = _limits(training, validation, first, last)
    labels = [loss_text(value) for value in limits]
    left = max(7, *map(len, labels)) + 1
    across = width - left
    if rows < 1 or across < 2:
        return [Text("")] * height
    grid = _Grid(across, rows, (first, last), limits)
    grid.line(training)
    grid.marks(validation)
    parts = [(f"{title}: ", _FAINT), (TRAINING * 2, _LINE), (" training", _FAINT)]
    parts += [("  ", ""), (VALIDATION, _MARK), (" validation", _FAINT)] if validation else []
    parts += [(f"  {ABOVE} above {labels[1]}", _WARN)] if grid.above else []
    lines = [Text.assemble(*parts)]
    for row in range(rows):
        label = labels[0] if row == rows - 1 else labels[1] if row == 0 else ""
        lines.append(Text.assemble((f"{label:>{left - 1}} ", _FAINT), *grid.cells(row)))
    if len(lines) == height:
        return lines
    begin, end = f"{first:,}", f"step {last:,}"
    gap = across - len(begin) - len(end)
    return [*lines, Text(" " * left + (begin + " " * gap + end if gap > 0 and last > first else end), style=_FAINT)]


def _limits(training: Points, validation: Points, first: int, last: int) -> tuple[float, float]:
    """The values of the lower and the upper edge."""
    late = first + 0.1 * (last - first)
    known = [value for _, value in (*training, *validation) if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, most = min(known), max(known)
    usual = sorted(value for step, value in training if step >= late and math.isfinite(value)) or [most]
    top = max(usual[int(_USUAL * (len(usual) - 1))], *(value for step, value in validation if step >= late), low)
    top = most if not math.isfinite(top) or most - low <= 1.3 * (top - low) else top
    if top - low < 1e-3 * max(abs(low), abs(top), 0.1):  # a flat line gets an axis that can be labelled
        room = 5e-3 * max(abs(low), abs(top), 0.1)
        return low - room, top + room
    return low, top


class _Grid:
    """Cells of a chart: dots two by four in each, and marks in the place of dots."""

    def __init__(self, across: int, rows: int, steps: tuple[int, int], limits: tuple[float, float]) -> None:
        self.across, self.rows, self.above = across, rows, False
        self._first, self._span = steps[0], max(steps[1] - steps[0], 1)
        self._low, self._range = limits[0], limits[1] - limits[0]
        self._bits: dict[tuple[int, int], int] = {}
        self._signs: dict[tuple[int, int], tuple[str, str]] = {}

    def line(self, points: Points) -> None:
        """Draws means of what falls into one column of dots, and lines between them."""
        columns: dict[int, list[float]] = {}
        for step, value in points:
            columns.setdefault(self._column(step), []).append(value)
        before: tuple[int, float] | None = None
        for column, values in sorted(columns.items()):
            level = self._level(mean_of(values))
            if level is None:
                self._signs[column // 2, self.rows - 1] = (BROKEN, _WARN)
                before = None
                continue
            if before is None:
                before = (column, level)
            self._segment(before, (column, level))
            before = (column, level)

    def marks(self, points: Points) -> None:
        """Draws points of their own, from the last one backwards as many as leave the line visible."""
        leftmost = self.across + _APART
        for step, value in sorted(points, reverse=True):
            column, level = self._column(step) // 2, self._level(value)
            if column > leftmost - _APART:
                continue
            leftmost = column
            if level is None:
                self._signs[column, self.rows - 1] = (BROKEN, _WARN)
            elif level > self._top:
                self._arrow(column)
            else:
                self._signs[column, self._row(level)] = (VALIDATION, _MARK)

    def cells(self, row: int) -> list[tuple[str, str]]:
        return [
            self._signs.get(
                (column, row), (chr(_BRAILLE + bits) if (bits := self._bits.get((column, row))) else " ", _LINE)
            )
            for column in range(self.across)
        ]

    @property
    def _top(self) -> float:
        return 4 * self.rows - 1

    def _column(self, step: int) -> int:
        """Of dots, of which a cell has two."""
        return round((step - self._first) / self._span * (2 * self.across - 1))

    def _level(self, value: float) -> float | None:
        """How many dots above the lower edge; None for what has no place."""
        return (value - self._low) / self._range * self._top if math.isfinite(value) else None

    def _row(self, level: float) -> int:
        return self.rows - 1 - max(0, round(level)) // 4

    def _arrow(self, column: int) -> None:
        self.above = True
        self._signs.setdefault((column, 0), (ABOVE, _WARN))

    def _segment(self, begin: tuple[int, float], end: tuple[int, float]) -> None:
        """Dots from one point to the next, without gaps where the line is steep."""
        count = max(1, end[0] - begin[0])
        height = begin[1]
        for place in range(0 if begin == end else 1, count + 1):
            column = begin[0] + (place if end[0] > begin[0] else 0)
            level = begin[1] + (end[1] - begin[1]) * place / count
            if level > self._top + 0.5:
                self._arrow(column // 2)
            low, high = sorted((min(height, self._top), min(level, self._top)))
            if min(height, level) <= self._top + 0.5:
                for dot in range(max(0, round(low)), round(high) + 1):
                    cell = column // 2, self._row(dot)
                    self._bits[cell] = self._bits.get(cell, 0) | _DOTS[column % 2][dot % 4]
            height = level


def mean_of(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN only if there are none, so that one bad step does not blank a column."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


# --- how long a run will take, and one of its samples ----------------------------------------------------------------

SKIPPED = 4  # first steps of a run, which compile and warm up
FEWEST = 3  # steps after those that a sentence needs

_TRAINED, _OTHER, _SIGN = "bold green", "dim", "cyan"
_OPEN, _CLOSE = "\u27e6", "\u27e7"  # white square brackets, which hardly any text holds
_SIGNS = {"\n": "\u23ce\n", "\t": "\u21e5", "\r": "\u240d"}


def print_sample(pieces: Iterable[tuple[str, bool]], *, most: int = 4000, console: Console | None = None) -> None:
    """Show a sample given as (text, is it trained on); of a long one the beginning and the end, `most` characters."""
    console = console or Terminal()
    console.print(drawn(pieces, most=most, colour=console.color_system is not None and not console.no_color))


def drawn(pieces: Iterable[tuple[str, bool]], *, most: int, colour: bool) -> Text:
    """The sample as one text with styles, or with brackets where there is no `colour`."""
    result = Text(no_wrap=False)
    for text, trained in _shortened(list(pieces), most):
        if trained is None:
            result.append(text, _SIGN)
            continue
        style = _TRAINED if trained else _OTHER
        if trained and not colour:
            result.append(_OPEN)
        for letter in text:
            if letter in _SIGNS:
                result.append(_SIGNS[letter], _SIGN)
            elif letter.isprintable():
                result.append(letter, style)
            else:
                result.append(ascii(letter)[1:-1], _SIGN)
        if trained and not colour:
            result.append(_CLOSE)
    return result


def _shortened(pieces: list[tuple[str, bool]], most: int) -> list[tuple[str, bool | None]]:
    total = sum(len(text) for text, _ in pieces)
    if total <= most:
        return list(pieces)
    head, tail = most // 2, total - most // 2
    result: list[tuple[str, bool | None]] = []
    place = 0
    left_out = False
    for text, trained in pieces:
        first, last = text[: max(head - place, 0)], text[max(tail - place, 0) :]
        result += [(first, trained)] if first else []
        if not left_out and place + len(text) > head:
            result.append((f" [{tail - head:,} characters left out] ", None))
            left_out = True
        result += [(last, trained)] if last and place + len(text) > tail else []
        place += len(text)
    return result


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is left of a run, by its own first steps."""

    seconds: float
    sentence: str


def expected(step_seconds: Sequence[float], info: RunInfo) -> Expected | None:
    """What a run that has just begun will take, from the seconds of its steps so far; None while those are too few.

    The first steps compile and warm up, and are not counted. An evaluation is taken for a third of the same tokens'
    training, since forward is about a third of forward and backward; samples and checkpoints are not in it.
    """
    counted = list(step_seconds)[SKIPPED:]
    if len(counted) < FEWEST:
        return None
    step = statistics.median(counted)
    left = max(0, info.steps - info.start_step - len(step_seconds))
    settings = info.config.get("eval", {})  # a run that is read back may have been written by anybody
    every, asked = settings.get("every", 0), settings.get("tokens")
    every = 0 if isinstance(every, str) else every  # epochs
    per_evaluation = min(info.val_tokens, asked or info.val_tokens) * step / max(info.batch_tokens, 1) / 3
    evaluations = left // every + (1 if left % every else 0) if every else min(left, 1)
    total = left * step + evaluations * per_evaluation
    tokens = info.steps * info.batch_tokens
    return Expected(
        total,
        f"about {human_seconds(total)} to go: {left:,} steps of {_seconds(step)}, measured over {len(counted)}, "
        f"and {many(evaluations, 'evaluation')}; {human_count(tokens)} tokens in all, "
        f"{tokens / max(info.parameters, 1):.1f} per parameter",
    )


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.1f}s" if value < 90 else human_seconds(value)
