"""Records as lines on a terminal or in a pipe, as JSON lines, and the progress of preparing data.

`TerminalReader` redraws one line while training on a terminal and prints plain lines elsewhere. `PrepareBar` shows a
bar on a terminal, and a plain line now and then elsewhere. Control characters are removed from text of data or of a
model: a sample must not be able to move the cursor or rename the window.
"""

import collections
import math
import sys
import time
from collections.abc import Iterable
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
    one_line,
    ranks_line,
    say,
)
from flatout.observe.series import record_sentence
from flatout.observe.sinks import ENDINGS, minutes_of
from flatout.records import EndRecord, PrepareProgress, Record, RunInfo, StepRecord, record_to_json

COLD_STEPS, RECENT_STEPS = 4, 50  # the first steps of a process compile and warm up
FIRST_EPOCHS = 10  # later ones get a line no more often than steps do


@final
class RunPace:
    """The speed of a run over its latest steps, and the time that the rest of it takes."""

    def __init__(self) -> None:
        self.trained_seconds = 0.0
        self._other_seconds = 0.0
        self._info: RunInfo | None = None
        self._last: StepRecord | None = None
        self._steps = 0
        self._recent: collections.deque[StepRecord] = collections.deque(maxlen=RECENT_STEPS)

    def add(self, record: Record) -> None:
        if isinstance(record, RunInfo):
            self._info, self._steps = record, 0
            self._recent.clear()
        elif isinstance(record, StepRecord):
            self._last = record
            self._steps += 1
            self.trained_seconds += _finite(record.seconds)
            if record.tokens_per_second and 0 < record.seconds < math.inf and self._steps > COLD_STEPS:
                self._recent.append(record)
        elif isinstance(record, records.EvalRecord | records.CheckpointRecord):
            self._other_seconds += _finite(record.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the latest steps; before there are any, the speed of the last step."""
        seconds = sum(step.seconds for step in self._recent)
        if seconds > 0:
            return sum((step.tokens_per_second or 0.0) * step.seconds for step in self._recent) / seconds
        return None if self._last is None else self._last.tokens_per_second

    @property
    def data_share(self) -> float | None:
        """The share of the latest steps in which the host waited for data."""
        known = [step for step in self._recent if step.data_seconds is not None]
        seconds = sum(step.seconds for step in known)
        return min(sum(step.data_seconds or 0.0 for step in known) / seconds, 1.0) if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Training, and as much evaluation and saving for each second of it as there has been until now.

        A run with a length in minutes ends by the clock; of one that was resumed it is not known how many were spent.
        """
        info, speed = self._info, self.tokens_per_second
        if info is None:
            return None
        if (minutes := minutes_of(info.config)) is not None:
            spent = self.trained_seconds + self._other_seconds
            return None if info.start_step else max(0.0, 60 * minutes - spent)
        if self._last is None or not speed:
            return None
        training = max(info.steps - self._last.step, 0) * info.batch_tokens / speed
        return training * (1 + self._other_seconds / self.trained_seconds) if self.trained_seconds > 0 else training


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


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
        self.pace = RunPace()
        self.epoch_line_step = -math.inf  # of the last line about an epoch
        self.memory = ""  # of eigenstates, in a sentence
        self.alerts = Alerts()

    def show(self, record: Record) -> None:
        self.pace.add(record)
        self._show(record)
        for alert in self.alerts.see(record):
            say(self.console, one_line(f"warning: step {alert.step} {alert.kind}: {alert.message}"))

    def _show(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._step(record)
            return
        if isinstance(record, records.PreviewRecord):
            say(self.console, "--- a sample; what is learned is in colour, or in brackets ---")
            print_sample(record.pieces, most=1500, console=self.console)
            say(self.console, "---")
            return
        if isinstance(record, records.SampleRecord):
            say(self.console, f"--- sample at step {record.step} ---")
            say(self.console, (record.prompt + record.text).strip("\n"))
            say(self.console, "---")
            return
        for line in self._lines(record):
            say(self.console, one_line(line))

    def close(self) -> None:
        self.console.end_line()

    def _step(self, record: StepRecord) -> None:
        if self.console.is_terminal:
            self.console.redraw(self._line(record, self.console.width))
        elif record.step % self.log_every == 0 or record.step == 1 or (self.info and record.step == self.info.steps):
            say(self.console, self._line(record))

    def _line(self, record: StepRecord, width: float = math.inf) -> str:
        """A step in one line of at most `width` cells: what does not fit is left out, the least important first."""
        steps = self.info.steps if self.info else record.step
        timed = self.info is not None and minutes_of(self.info.config) is not None  # its number of steps is a plan
        parts = {"step": f"step {record.step:>{len(str(steps))}}" + ("" if timed else f"/{steps}")}
        parts["loss"] = f"loss {record.loss:.4f}"
        if self.val_loss is not None:
            parts["val"] = f"val {self.val_loss:.4f}"
        parts["rate"] = f"lr {record.learning_rate:.2e}"
        if speed := self.pace.tokens_per_second:
            parts["speed"] = f"{human_count(speed)} tok/s"
        if record.mfu is not None:
            parts["MFU"] = f"MFU {100 * record.mfu:.0f}%"
        if record.memory_bytes is not None:
            parts["memory"] = human_bytes(record.memory_bytes)
        if (left := self.pace.seconds_left) is not None:
            parts["ETA"] = f"ETA {human_seconds(left)}"
        if not record.applied:
            parts["skipped"] = "SKIPPED"
        for name in ("memory", "rate", "MFU", "val", "speed"):
            if len("  ".join(parts.values())) > width:
                parts.pop(name, None)
        return "  ".join(parts.values())

    def _lines(self, record: Record) -> list[str]:
        match record:
            case RunInfo():
                self.info = record
                return [] if record.nothing_left else _banner(record)
            case records.EvalRecord():
                self.val_loss = record.loss
                bits = "" if record.bits_per_byte is None else f"  {record.bits_per_byte:.3f} bits/byte"
                best = "  best so far" if record.best else ""
                where = f"{record.tokens:,} tokens in {record.seconds:.1f}s"
                return [f"eval at step {record.step}: val loss {record.loss:.4f}{bits}  ({where}){best}"]
            case records.TaskRecord():
                error = "" if record.error is None else f" ±{record.error:.4f}"
                score = f"{record.metric} {record.value:.4f}{error}  ({record.rows:,} questions)"
                return [f"task {record.task} at step {record.step}: {score}"]
            case records.EpochRecord():
                if record.epoch > FIRST_EPOCHS and record.step - self.epoch_line_step < self.log_every:
                    return []
                self.epoch_line_step = record.step
                samples = self.info is not None and self.info.batch_samples is not None
                rate = f"{human_count(record.windows_per_second)} {'samples' if samples else 'windows'}/s"
                return [
                    f"epoch {record.epoch} done: mean loss {record.mean_loss:.4f}  {human_seconds(record.seconds)}  "
                    f"{rate}  {human_count(record.tokens_per_second)} tok/s"
                ]
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
                return [*_ending(record), *([self.memory] if self.memory else [])]
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
    fallbacks = [f for f in info.features if f.why and f.asked not in ("auto", "null", f.used) and _is_noted(f)]
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


# Always on the speed line, or only with a value other than these. A note says where one is not what was asked for.
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
_NOTED = (*_SHOWN, *_QUIET, "expandable_segments", "micro_batch")
_NOTED_IF_CHANGED = ("loss_chunk", "workers")  # a note only where the config does not have the default


def _is_noted(feature: records.Feature) -> bool:
    if feature.name in _NOTED_IF_CHANGED:
        return feature.asked != str(SpeedConfig.model_fields[feature.name].default)
    return feature.name in _NOTED


def _train_section(info: RunInfo) -> dict[str, Any]:
    train = info.config.get("train")
    return train if isinstance(train, dict) else {}  # what was read from a file may be anything


def _finished_before(info: RunInfo) -> str:
    return (
        f"{info.folder} is finished already, at step {info.steps:,}; to make it longer, raise train.steps, "
        "train.tokens or train.epochs, or resume it with --minutes N"
    )


def _ending(record: EndRecord) -> list[str]:
    word = ENDINGS.get(record.reason, "ended")
    line = f"{word} at step {record.step} after {human_seconds(record.seconds)} of training"
    if record.reason == "early_stop":
        line += ": no lower validation loss"
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
            say(self._console, f"{_PHASES[progress.phase]}: {line}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

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


# --- the first sample of a fine-tuning run ---------------------------------------------------------------------------

_TRAINED, _OTHER, _SIGN = "bold green", "dim", "cyan"
_OPEN, _CLOSE = "\u27e6", "\u27e7"  # white square brackets, which hardly any text holds
_SIGNS = {"\n": "\u23ce\n", "\t": "\u21e5", "\r": "\u240d"}


def print_sample(pieces: Iterable[tuple[str, bool]], *, most: int = 4000, console: Console | None = None) -> None:
    """Shows a sample as pieces of text, each with whether it is trained on; at most `most` characters of it."""
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
    """The first `most` characters, and a note of how many are left out."""
    shown: list[tuple[str, bool | None]] = []
    room = most
    for text, trained in pieces:
        if room > 0:
            shown.append((text[:room], trained))
        room -= len(text)
    return shown if room >= 0 else [*shown, (f" [{-room:,} characters left out]", None)]
