"""A run in a notebook: its curve as one picture that is drawn anew in its place, and results that show themselves.

Idea: the chart is a panel of `picture.py` as PNG, which every notebook shows, on the web too. After drawing it rests
for thirty times as long, ten seconds at most. IPython is never imported: a notebook has done so, and elsewhere `Chart`
stays silent.
"""

import base64
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy

from flatout.errors import many
from flatout.observe.human import human_count, human_parameters, human_seconds
from flatout.observe.picture import BLUE, ORANGE, Curve, Figure, draw_panel, drawable, new_figure, picture_bytes
from flatout.observe.plots import LOSS, fitted
from flatout.observe.series import GrowingSeries, Series
from flatout.observe.sinks import minutes_of
from flatout.records import EndRecord, EvalRecord, NoticeRecord, PrepareProgress, Record, RunInfo, StepRecord
from flatout.shown import html_table

MOST_POINTS = 2000
WIDTH, HEIGHT, SHARP = 7.6, 2.9, 130  # inches of 100 dots on the page, and dots in an inch of the file


def display_of_notebook() -> Callable[..., Any] | None:
    """The `display` of the notebook that this runs in; None in a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or not hasattr(shell, "kernel"):  # a terminal with IPython cannot draw over what it has shown
        return None
    return ipython.display.display


def warn(message: str) -> None:
    """A warning of the logger `flatout`; a plain line in a notebook without logging handlers: stderr is red."""
    log = logging.getLogger("flatout")
    if log.hasHandlers() or display_of_notebook() is None:
        log.warning("%s", message)
    elif log.isEnabledFor(logging.WARNING):
        print(f"note: {message}")


@final
class Chart:
    """Draws a run while it goes on: give it to `train` as `on_record`, or call it with each record.

    In a notebook there is one picture, redrawn at most every `seconds`, and a line for each notice; elsewhere nothing
    is shown. It also takes the progress of preparing.
    """

    def __init__(self, *, seconds: float = 1.0, shown: bool = True) -> None:
        """`shown=False` collects and draws nothing of itself."""
        self.seconds, self.shown = seconds, shown
        self.info: RunInfo | None = None
        self.last: StepRecord | None = None
        self.end: EndRecord | None = None
        self._losses = GrowingSeries()
        self.evals: list[tuple[int, float]] = []
        self._due, self._handle, self._ahead = -math.inf, None, ""

    def __call__(self, record: Record | PrepareProgress) -> None:
        if isinstance(record, PrepareProgress):
            if self.info is not None:
                return
            share = f" {record.bytes / record.total_bytes:.0%}" if record.total_bytes else ""
            self._ahead = record.notice or f"preparing: {record.phase}{share}"
        elif isinstance(record, NoticeRecord):
            if self.shown and display_of_notebook() is not None:
                print(f"note: {record.message}")
            return
        elif isinstance(record, RunInfo):
            self._begin(record)
        elif isinstance(record, StepRecord):
            self.last = record
            self._losses.add(record.step, record.loss)
        elif isinstance(record, EvalRecord):
            self.evals.append((record.step, record.loss))
        elif isinstance(record, EndRecord):
            self.end = record
        else:
            return
        self._show(now=isinstance(record, EndRecord))

    def _begin(self, info: RunInfo) -> None:
        """Another run gets a picture of its own; one that is resumed keeps what it had until there."""
        kept = -1
        if self.info is not None and self.info.folder == info.folder:
            kept = info.start_step
        elif self.info is not None:
            self._handle = None
        self._losses.cut_back(kept)
        self.evals = [point for point in self.evals if point[0] <= kept]
        self.info, self.last, self.end = info, None, None
        self._ahead = f"{info.folder}: waiting for the first step"

    def _show(self, *, now: bool) -> None:
        display = display_of_notebook() if self.shown else None
        began = time.monotonic()
        if display is None or not (now or began >= self._due):
            return
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)
        ended = time.monotonic()
        self._due = ended + max(self.seconds, min(10.0, 30 * (ended - began)))  # the first one imports matplotlib

    @property
    def is_shown(self) -> bool:
        """Whether a notebook shows it already."""
        return self._handle is not None

    @property
    def html(self) -> str:
        """The picture inside of a page; empty where there is nothing to draw."""
        made = self._repr_png_()
        content = "" if made is None else base64.b64encode(made[0]).decode()
        return content and f'<img src="data:image/png;base64,{content}" width="{100 * WIDTH:.0f}" alt="loss by step">'

    @property
    def losses(self) -> Sequence[tuple[int, float]]:
        """Steps and training losses: all of them, or of a long run the lowest and highest of every stretch."""
        return self._losses.series.thinned(MOST_POINTS).points

    def __repr__(self) -> str:
        if self.last is None:
            return self._ahead or "Chart()"
        return f"Chart(step {self.last.step}, {many(len(self.evals), 'evaluation')})"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        if self.last is None and not self.evals:
            return None
        return picture_bytes(self._figure), {"width": round(100 * WIDTH)}

    def _figure(self) -> Figure:
        figure = new_figure(WIDTH, HEIGHT, dpi=SHARP)
        evals = numpy.array(self.evals, dtype=float).reshape(-1, 2)
        axes = figure.add_axes((0.08, 0.15, 0.905, 0.73))
        curves = [
            Curve(replace(self._losses.series, unit="nats per token"), BLUE, "training", smoothed=True),
            Curve(Series(evals[:, 0], evals[:, 1]), ORANGE, "validation", best=True),
        ]
        name = "loss" if self.info is None else fitted(drawable(self.info.folder), 11.5, 0.35 * WIDTH)
        draw_panel(axes, name, curves, LOSS, words=self._line())
        return figure

    def _line(self) -> str:
        """One line of figures."""
        info, last = self.info, self.last
        parts = []
        if info is not None:
            parts = [human_parameters(info.parameters, info.trained_parameters, info.table_parameters)]
        if last is not None:
            steps = "" if info is None or minutes_of(info.config) is not None else f" of {info.steps:,}"
            parts += [f"step {last.step:,}{steps}"]
            parts += [] if last.tokens_per_second is None else [f"{human_count(last.tokens_per_second)} tokens/s"]
        if self.evals:
            parts.append(f"validation {self.evals[-1][1]:.4f}")
        return " · ".join([*parts, *([] if self.end is None else [self.end.reason])])


@final
@dataclass(frozen=True)
class RunResult:
    """A run that has ended: where it lies, what it was, how it ended. A notebook also shows its curve, once."""

    folder: Path
    info: RunInfo
    end: EndRecord | None  # None of a run that had nothing left to do
    chart: Chart
    shown: bool = False  # by the chart that the run was given

    @property
    def loss(self) -> float | None:
        """The last validation loss."""
        return None if self.end is None else self.end.val_loss

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r}, {'nothing left' if self.end is None else self.end.reason})"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"folder": self.folder, "steps": f"{self.info.steps:,}"}
        if self.end is not None:
            timed = minutes_of(self.info.config) is not None  # its steps were a plan
            rows |= {"steps": f"{self.end.step:,}"} if timed else {}
            rows |= {"ended": self.end.reason, "time": human_seconds(self.end.seconds)}
            rows |= {"validation loss": self.end.val_loss, "best": self.end.best_loss}
            rows["checkpoint"] = self.end.checkpoint
        return html_table(rows) + ("" if self.shown else self.chart.html)
