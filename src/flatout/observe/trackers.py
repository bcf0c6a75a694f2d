"""TensorBoard and Weights & Biases beside metrics.jsonl, which is the complete record of a run.

Idea: each tracker has a thread of its own with a queue before it; `write` only puts a record there. The thread writes
TensorBoard's files itself. The package of W&B prints, imports much, starts threads, waits for networks and sometimes
crashes, so it runs in a child process (`serve`), which reads JSON lines from a pipe and writes its output to a log file
in the run's folder. When the trainer dies, the pipe ends, and the child finishes what it has.

Contract: nothing is imported or started for a tracker that is not asked for. `write` never waits and never raises. A
tracker that fails or cannot keep up causes one message, and the run goes on without it. `close` gives each tracker a
while to finish, then leaves it. A scalar is a finite float; values that are not finite become notes, since trackers
draw them as gaps or zeros. Control characters are removed from text, and settings that look like secrets are hidden.

TensorBoard's event files need no package to be written. A file is a row of frames: length (8 bytes), its checksum, the
message, its checksum. A message is a protobuf `Event`, of which we use a few fields:

    Event    1 wall_time double, 2 step varint, 3 file_version string, 5 summary, 7 session_log
    Summary  1 value*: 1 tag, 2 simple_value float, 8 tensor, 9 metadata
    Tensor   1 dtype (7 is string), 2 shape (empty: one string), 8 string_val;   Metadata  1 plugin_data: 1 plugin_name

Each start of the run adds a file that says at which step it begins, and TensorBoard then forgets its values from that
step on. Text is written as a code block, which TensorBoard escapes: a sample cannot add a link or a picture.
"""

import contextlib
import dataclasses
import html
import importlib
import importlib.util
import json
import math
import os
import queue
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, final

import flatout
from flatout import records
from flatout.errors import ConfigError
from flatout.files import open_to_append, write_new
from flatout.observe.human import exposed_share, human_parameters, human_seconds, printable
from flatout.observe.runs import record_of_line
from flatout.records import EndRecord, Record, RunInfo, record_to_json, slowest_over_median

GIB = 2**30
_OF_LAYERS = {"horizon_tokens": "horizon", "magnitude": "magnitude", "period_tokens": "period"}


@dataclasses.dataclass(frozen=True)
class Values:
    """`odd` are the values that are not finite, by tag."""

    step: int
    scalars: dict[str, float]
    texts: dict[str, str]
    odd: dict[str, float]

    def odd_notes(self, noted: set[str]) -> list[str]:
        """A note on the first value of each tag that is not finite; it is added to the tags that are `noted`."""
        notes = [f"{tag} is {value} at step {self.step}" for tag, value in self.odd.items() if tag not in noted]
        noted.update(self.odd)
        return notes


def code_block(text: str) -> str:
    """Markdown that shows text as it is: no link, picture or tag in it comes to life."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def values_of(record: Record) -> Values:
    step = record.start_step if isinstance(record, RunInfo) else record.step
    numbers = {tag: float(value) for tag, value in _numbers(record).items() if value is not None}
    return Values(
        step=step,
        scalars={tag: value for tag, value in numbers.items() if math.isfinite(value)},
        texts={tag: printable(text) for tag, text in _texts(record).items()},
        odd={tag: value for tag, value in numbers.items() if not math.isfinite(value)},
    )


def _numbers(record: Record) -> dict[str, float | None]:
    match record:
        case records.StepRecord():
            waited = None if record.data_seconds is None or not record.seconds else record.data_seconds / record.seconds
            return {
                "loss/train": record.loss,
                "optimizer/learning_rate": record.learning_rate,
                "optimizer/gradient_norm": record.grad_norm,
                "optimizer/parameter_norm": record.parameter_norm,
                **{f"optimizer/update_ratio/{rule}": ratio for rule, ratio in (record.update_ratio or {}).items()},
                "optimizer/loss_scale": record.loss_scale,
                "optimizer/skipped": None if record.applied else 1.0,
                "throughput/tokens_per_second": record.tokens_per_second,
                "throughput/mfu": record.mfu,
                "throughput/step_seconds": record.seconds,
                "throughput/data_wait_share": waited,
                "memory/peak_gib": _gib(record.memory_bytes),
                "memory/reserved_gib": _gib(record.reserved_bytes),
                "progress/tokens": float(record.tokens),
                "progress/epoch": record.epoch,
            }
        case records.EvalRecord():
            return {
                "loss/validation": record.loss,
                "loss/validation_perplexity": record.perplexity,
                "loss/validation_bits_per_byte": record.bits_per_byte,
            }
        case records.TaskRecord():
            return {f"tasks/{_tag(record.task)}/{_tag(record.metric)}": record.value}
        case records.EpochRecord():
            return {"loss/epoch_mean": record.mean_loss}
        case records.SpanRecord():
            steps = max(record.steps, 1)
            spans = {f"spans/{_tag(name)}_seconds_per_step": value / steps for name, value in record.seconds.items()}
            return spans | _of_ranks(record)
        case records.MachineRecord():
            return {
                "machine/utilisation": record.utilisation,
                "machine/memory_gib": _gib(record.memory_bytes),
                "machine/power_watts": record.power_watts,
                "machine/temperature": record.temperature,
                "machine/clock_mhz": record.clock_mhz,
                "machine/throttled": None if record.utilisation is None else float(bool(record.throttled)),
                "host/cores_busy": record.cores_busy,
                "host/cores_others": record.cores_others,
                "host/threads_waiting": record.threads_waiting,
                "host/load": record.load,
                "host/process_gib": _gib(record.process_bytes),
                "host/memory_gib": _gib(record.host_bytes),
                "host/swap_gib": _gib(record.swap_bytes),
            }
        case records.EigenstateRecord():
            return {
                f"eigenstates/{tag}_layer_{layer.layer:02d}": getattr(layer, quantity).get("50%")
                for layer in record.layers
                for tag, quantity in _OF_LAYERS.items()
            }
        case records.CheckpointRecord():
            return {"checkpoint/seconds": record.seconds, "checkpoint/gib": _gib(record.bytes)}
        case EndRecord():
            return {"loss/best_validation": record.best_loss}
        case _:
            return {}


def _of_ranks(record: records.SpanRecord) -> dict[str, float | None]:
    seconds = record.rank_seconds
    if len(seconds) < 2:
        return {}
    return {
        "ranks/slowest_over_median": slowest_over_median(seconds)[1],
        "ranks/waiting_share": exposed_share(record.seconds.get("reduction", 0.0), seconds[0]),
    }


def _texts(record: Record) -> dict[str, str]:
    match record:
        case RunInfo():
            size = human_parameters(record.parameters, record.trained_parameters, record.table_parameters)
            lines = [f"flatout {record.flatout}, torch {record.torch}", f"{record.family}, {size}, on {record.device}"]
            used = "\n".join(f"{item.name}: {item.used}" for item in record.features)
            return {"run": "\n".join([*lines, used])}
        case records.SampleRecord():
            return {"samples": record.prompt + record.text}
        case records.NoticeRecord():
            return {"notices": record.message}
        case EndRecord():
            return {"notices": f"{record.reason} at step {record.step} after {human_seconds(record.seconds)}"}
        case _:
            return {}


def _gib(value: int | None) -> float | None:
    return None if value is None else value / GIB


def _tag(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:60] or "unnamed"


FLUSH_SECONDS = 1.0
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STRING = 7  # DT_STRING
_START = 1  # SessionLog.START


@final
class TensorBoard:
    """Writes a run's records below `folder`/tensorboard."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        place = folder / "tensorboard"
        place.mkdir(parents=True, exist_ok=True)
        # The name orders files by their start; two starts within one second still get two files.
        moment = time.time()
        name = f"events.out.tfevents.{moment:017.6f}.{socket.gethostname()}.{os.getpid()}.flatout"
        self._file = (place / name).open("xb")
        self._flushed = time.monotonic()
        self._noted: set[str] = set()
        self._write(_text_field(3, "brain.Event:2"), 0)
        # What lies behind a later start is forgotten. TensorBoard's own reader wants to have seen a first one for that;
        # its faster server, which not every machine has, does not.
        self._write(_field(7, _varint_field(1, _START)), info.start_step + 1)

    def write(self, record: Record) -> None:
        values = values_of(record)
        parts = [_scalar(tag, value) for tag, value in values.scalars.items()]
        parts += [_text(tag, text) for tag, text in values.texts.items()]
        for note in values.odd_notes(self._noted):
            parts.append(_text("notices", f"{note}; such values are left out of the curve"))
        if parts:
            self._write(_field(5, b"".join(_field(1, part) for part in parts)), values.step)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes, step: int) -> None:
        message = _key(1, _FIXED64) + struct.pack("<d", time.time()) + _varint_field(2, step) + content
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))


def _scalar(tag: str, value: float) -> bytes:
    single = max(min(value, 3.4e38), -3.4e38)  # larger ones would become infinite
    return _text_field(1, tag) + _key(2, _FIXED32) + struct.pack("<f", single)


def _text(tag: str, text: str) -> bytes:
    tensor = _varint_field(1, _STRING) + _field(2, b"") + _text_field(8, code_block(text))
    metadata = _field(1, _text_field(1, "text"))
    return _text_field(1, tag) + _field(8, tensor) + _field(9, metadata)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _text_field(number: int, text: str) -> bytes:
    return _field(number, text.encode("utf-8", "replace"))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, rotated and shifted as these files want it."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _TABLE[(value ^ byte) & 255] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE]


PROJECT = "flatout"


def serve() -> None:
    """The child's whole life."""
    lines, answers = _take_over()
    try:
        _run(Path(sys.argv[1]), lines, answers)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything; the trainer gets one line about it
        words = " ".join(f"{type(error).__name__}: {error}".split())
        _say(answers, f"failed {words[:300]}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # its threads and exit hooks must not keep the process


def _take_over() -> tuple[Any, TextIO]:
    """The two pipes under other numbers; in their place nothing to read, and the log, which stderr is already."""
    lines = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return lines, answers


def _say(answers: TextIO, line: str) -> None:
    with contextlib.suppress(OSError):  # the trainer may be gone
        answers.write(line + "\n")
        answers.flush()


def _run(folder: Path, lines: Any, answers: TextIO) -> None:
    info = record_of_line(lines.readline())
    if not isinstance(info, RunInfo):
        return  # the trainer was gone before it began
    run = WeightsAndBiases(folder, info, lambda words: _say(answers, f"note {words}"))
    _say(answers, "ready")
    noted: set[str] = set()
    for line in lines:
        record = record_of_line(line)
        if record is None:
            continue
        values = values_of(record)
        texts = dict(values.texts)
        if odd := values.odd_notes(noted):
            texts["notices"] = "\n".join([*odd, *filter(None, [texts.get("notices")])])
        if values.scalars or texts:
            run.log(values.step, values.scalars, texts)
    run.finish()


@final
class WeightsAndBiases:
    """A run of W&B, online where the user has logged in, else offline in the run's folder, to be synced later."""

    def __init__(self, folder: Path, info: RunInfo, note: Callable[[str], None]) -> None:
        from flatout.observe.bundle import Private, scrubbed_values  # here: TensorBoard needs no secrets hidden

        wandb = importlib.import_module("wandb")
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, disable_code=True, x_disable_stats=True,
            x_save_requirements=False
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": folder.resolve().name,
            "dir": str(folder),
            "id": _run_id(folder),
            "resume": "allow",
            "config": scrubbed_values(info.config, Private.of(os.environ, Path.home())),
            "settings": settings,
        }
        self._html = wandb.Html
        try:
            self.run = wandb.init(**arguments)
        except wandb.errors.UsageError as error:
            if "api key" not in str(error).lower() and "api_key" not in str(error).lower():
                raise
            # Without a login nothing is lost: the same data is kept on disk.
            self.run = wandb.init(**arguments, mode="offline")
            note(f"there is no login, so the run is kept offline; upload it with `wandb sync` from {folder / 'wandb'}")
        # A resumed run goes back some steps; W&B would drop them if they were its own steps.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        blocks = {tag: self._html(f"<pre>{html.escape(text)}</pre>", inject=False) for tag, text in texts.items()}
        self.run.log({"step": step, **scalars, **blocks})

    def finish(self) -> None:
        self.run.finish()


def _run_id(folder: Path) -> str:
    """The same id for every start of a run, kept beside its records."""
    path = folder / "wandb.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["id"]
        if isinstance(found, str) and found.isalnum():
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    made = uuid.uuid4().hex[:12]
    write_new(path, (json.dumps({"id": made}) + "\n").encode("ascii"))  # another file of that name is not ours
    return made


MOST_WAITING = 20_000  # records; a step's takes about 1 KB
CLOSE_SECONDS = 30.0
_TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}


class Tracker(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """Refuses a tracker whose package is missing, before a run is started; imports nothing."""
    for name in names:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"output.trackers names {name}, and the package {name} is not installed",
                f"pip install {name}, or take it out of output.trackers; metrics.jsonl is written anyway",
            )


def open_trackers(names: Sequence[str], folder: Path, info: RunInfo) -> "Trackers":
    """Trackers for a run that begins with `info`, which is their first record; give the later ones to `write`."""

    def opener(name: str) -> Callable[[Callable[[str], None]], Tracker]:
        return lambda notify: TensorBoard(folder, info) if name == "tensorboard" else _Child(folder, notify)

    return Trackers([_Lane(name, opener(name), info) for name in dict.fromkeys(names)])


@final
class Trackers:
    """All trackers of a run."""

    def __init__(self, lanes: Sequence["_Lane"]) -> None:
        self._lanes = list(lanes)

    def write(self, record: Record) -> list[str]:
        """Hands a record over; returns messages that came up since the last call. A `RunInfo` they have already."""
        for lane in self._lanes if not isinstance(record, RunInfo) else ():
            lane.put(record)
        return self._messages()

    def close(self, seconds: float = CLOSE_SECONDS) -> list[str]:
        """Lets the trackers finish, for at most `seconds` in all; returns the last messages."""
        for lane in self._lanes:
            lane.finish()
        until = time.monotonic() + seconds
        for lane in self._lanes:
            lane.leave(until)
        messages, self._lanes = self._messages(), []
        return messages

    def _messages(self) -> list[str]:
        return [message for lane in self._lanes for message in lane.messages()]


@final
class _Lane:
    """A queue and the thread that empties it into one tracker."""

    def __init__(self, name: str, opener: Callable[[Callable[[str], None]], Tracker], info: RunInfo) -> None:
        self.title = _TITLES[name]
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._off = threading.Event()
        self._left_out = 0
        self._queue.put(info)
        self._thread = threading.Thread(target=self._work, args=(opener,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        if self._off.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._left_out:
                self._notify("cannot keep up: records are left out of it from here on; metrics.jsonl has them all")
            self._left_out += 1

    def finish(self) -> None:
        # A full queue belongs to a tracker that hangs: then its thread is not waited for.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def leave(self, until: float) -> None:
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive() and not self._off.is_set():
            self._off.set()
            self._notify("did not finish in time and was left alone: its last records may be missing there")

    def messages(self) -> list[str]:
        return [self._messages.get() for _ in range(self._messages.qsize())]

    def _notify(self, words: str) -> None:
        self._messages.put(printable(f"{self.title} {words}"))

    def _work(self, opener: Callable[[Callable[[str], None]], Tracker]) -> None:
        tracker: Tracker | None = None
        try:
            tracker = opener(self._notify)
            while (record := self._queue.get()) is not None and not self._off.is_set():
                tracker.write(record)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever happens to a tracker must not happen to the run
            self._off.set()
            words = " ".join(str(error).split()) or type(error).__name__
            self._notify(f"failed and is off for the rest of the run: {words[:300]}")
            if tracker is not None:
                with contextlib.suppress(Exception):
                    tracker.close()
        finally:
            self._off.set()


class _ChildError(Exception):
    """What a child said before it ended."""


@final
class _Child:
    """W&B in a process of its own, fed with JSON lines."""

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._log = folder / "wandb.log"
        root = str(Path(flatout.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # A session of its own: Ctrl-C is for the trainer, which then says what there is to say, and ends the pipe.
        command = "from flatout.observe.trackers import serve; serve()"
        with open_to_append(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._failed = False

    def write(self, record: Record) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(record_to_json(record).encode("utf-8", "replace") + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._failed = True
            raise _ChildError(self._last_words()) from None

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._failed and (words := self._last_words()):
            raise _ChildError(words)

    def _last_words(self) -> str:
        """Waits for the end of the child, passes its notes on, and returns why it failed: empty if it did not."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            lines = [line.decode("utf-8", "replace").rstrip("\n") for line in answers]
        code = self._process.wait()
        why = ""
        for line in lines:
            kind, _, words = line.partition(" ")
            if kind == "note":
                self._notify(f"says: {words}")
            elif kind == "failed":
                why = words
        if not why and code:
            why = f"its process ended with code {code}"
        return f"{why} (see {self._log})" if why else ""
