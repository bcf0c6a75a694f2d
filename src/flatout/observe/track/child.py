"""The process that talks to trackio or Weights & Biases, so that these never run inside the trainer.

They print, import much, start threads, wait for networks and sometimes crash. Here all of that happens to a child: it
gets records as JSON lines through a pipe, and its own output goes to a log file in the run's folder. When the trainer
dies, the pipe ends, and the child finishes what it has.

    python -c "from flatout.observe.track.child import serve; serve()" wandb FOLDER

The first line is the `RunInfo`. On its stdout it answers `ready` once the tracker is open, then `note ...` lines and at
most one `failed ...` line.
"""

import contextlib
import html
import importlib
import json
import os
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, final

from flatout.files import write_new
from flatout.observe.live.follow import record_of_line
from flatout.observe.track.values import code_block, safe_config, values_of
from flatout.records import RunInfo

PROJECT = "flatout"


def serve() -> None:
    """The child's whole life."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    lines, answers = _take_over()
    try:
        _run(name, folder, lines, answers)
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


def _run(name: str, folder: Path, lines: Any, answers: TextIO) -> None:
    info = record_of_line(lines.readline())
    if not isinstance(info, RunInfo):
        return  # the trainer was gone before it began
    adapter = _ADAPTERS[name](folder, info, lambda words: _say(answers, f"note {words}"))
    _say(answers, "ready")
    told_odd: set[str] = set()
    for line in lines:
        record = record_of_line(line)
        if record is None:
            continue
        values = values_of(record)
        texts = dict(values.texts)
        if odd := values.odd_notes(told_odd):
            texts["notices"] = "\n".join([*odd, *filter(None, [texts.get("notices")])])
        if values.scalars or texts:
            adapter.log(values.step, values.scalars, texts)
    adapter.run.finish()


@final
class Trackio:
    """Local runs in trackio's own database; `trackio show` displays them."""

    def __init__(self, folder: Path, info: RunInfo, _note: Callable[[str], None]) -> None:
        trackio = importlib.import_module("trackio")
        self._text = trackio.Markdown
        self.run = trackio.init(
            project=PROJECT,
            name=folder.resolve().name,
            config=safe_config(info.config),
            resume="allow" if info.resumed_from else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        blocks = {tag: self._text(code_block(text)) for tag, text in texts.items()}
        self.run.log({**scalars, **blocks}, step=step)


@final
class WeightsAndBiases:
    """A run of W&B, online where the user has logged in, else offline in the run's folder, to be synced later."""

    def __init__(self, folder: Path, info: RunInfo, note: Callable[[str], None]) -> None:
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
            "config": safe_config(info.config),
            "settings": settings,
        }
        self._html = wandb.Html
        try:
            self.run = wandb.init(**arguments)
        except wandb.errors.UsageError as error:
            if "api key" not in str(error).lower() and "api_key" not in str(error).lower():
                raise
            # Nobody has logged in. Nothing is lost: the same data is kept on disk.
            self.run = wandb.init(**arguments, mode="offline")
            note(f"there is no login, so the run is kept offline; upload it with `wandb sync` from {folder / 'wandb'}")
        # A resumed run goes back some steps; W&B would drop them if they were its own steps.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        blocks = {tag: self._html(f"<pre>{html.escape(text)}</pre>", inject=False) for tag, text in texts.items()}
        self.run.log({"step": step, **scalars, **blocks})


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


_ADAPTERS = {"trackio": Trackio, "wandb": WeightsAndBiases}
