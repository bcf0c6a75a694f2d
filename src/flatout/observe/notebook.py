"""A run in a notebook: its curve as one picture that is drawn anew in its place, and results that show themselves.

Idea: the picture is inline SVG made from text of our own and escaped values, so it needs no plotting library and no
script. IPython is never imported: a notebook has done so, and elsewhere `Chart` stays silent.
"""

import html
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from flatout.errors import many
from flatout.observe.human import human_count, human_parameters, human_seconds
from flatout.observe.series import GrowingSeries, Points
from flatout.observe.sinks import minutes_of
from flatout.records import EndRecord, EvalRecord, Record, RunInfo, StepRecord
from flatout.shown import html_table

MOST_POINTS = 2000
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 240, 56, 24
TRAINING, VALIDATION = "#30638e", "#d1495b"  # colours of the two curves
_STYLE = "font: 13px sans-serif"


def display_of_notebook() -> Callable[..., Any] | None:
    """The `display` of the notebook that this runs in; None in a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or not hasattr(shell, "kernel"):  # a terminal with IPython cannot draw over what it has shown
        return None
    return ipython.display.display


@final
class Chart:
    """Draws a run while it goes on: give it to `train` as `on_record`, or call it with each record.

    In a notebook there is one picture, redrawn at most every `seconds`; elsewhere nothing is shown.
    """

    def __init__(self, *, seconds: float = 1.0, shown: bool = True) -> None:
        """`shown=False` collects and draws nothing of itself."""
        self.seconds, self.shown = seconds, shown
        self.info: RunInfo | None = None
        self.last: StepRecord | None = None
        self.end: EndRecord | None = None
        self._losses = GrowingSeries()
        self.evals: list[tuple[int, float]] = []
        self._shown, self._handle = -math.inf, None

    def __call__(self, record: Record) -> None:
        if isinstance(record, RunInfo):
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
        else:
            self._handle = None
        self._losses.cut_back(kept)
        self.evals = [point for point in self.evals if point[0] <= kept]
        self.info, self.last, self.end = info, None, None

    def _show(self, *, now: bool) -> None:
        display = display_of_notebook() if self.shown else None
        if display is None or not (now or time.monotonic() - self._shown >= self.seconds):
            return
        self._shown = time.monotonic()
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    @property
    def losses(self) -> Sequence[tuple[int, float]]:
        """Steps and training losses: all of them, or of a long run the lowest and highest of every stretch."""
        return self._losses.series.thinned(MOST_POINTS).points

    def __repr__(self) -> str:
        step = 0 if self.last is None else self.last.step
        return f"Chart(step {step}, {many(len(self.evals), 'evaluation')})"

    def _repr_html_(self) -> str:
        return f'<div style="{_STYLE}">{html.escape(self._line())}<br>{curves(self.losses, self.evals)}</div>'

    def _line(self) -> str:
        """One line of figures."""
        info, last = self.info, self.last
        parts = []
        if info is not None:
            parts = [info.folder, human_parameters(info.parameters, info.trained_parameters, info.table_parameters)]
        if last is not None:
            steps = "" if info is None or minutes_of(info.config) is not None else f" of {info.steps:,}"
            parts += [f"step {last.step:,}{steps}", f"loss {last.loss:.4f}"]
            parts += [] if last.tokens_per_second is None else [f"{human_count(last.tokens_per_second)} tokens/s"]
        if self.evals:
            parts.append(f"validation {self.evals[-1][1]:.4f}, best {min(loss for _, loss in self.evals):.4f}")
        return " · ".join(parts) + ("" if self.end is None else f" · {self.end.reason}")


@final
@dataclass(frozen=True)
class RunResult:
    """A run that has ended: where it lies, what it was, how it ended. In a notebook it shows its curve."""

    folder: Path
    info: RunInfo
    end: EndRecord | None  # None of a run that had nothing left to do
    chart: Chart

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
        return html_table(rows) + self.chart._repr_html_()


def curves(losses: Points, evals: Points) -> str:
    """Training loss as a line and validation losses as points, by step, as inline SVG."""
    both = [[(step, loss) for step, loss in points if math.isfinite(loss)] for points in (losses, evals)]
    everything = [*both[0], *both[1]]
    if not everything:
        return ""
    steps, values = [step for step, _ in everything], [loss for _, loss in everything]
    right, low, high = max(max(steps), 1), min(values), max(values)
    room = (high - low) or 1.0

    def place(step: int, loss: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 8) * step / right
        return round(across, 1), round(8 + (HEIGHT - BOTTOM - 16) * (high - loss) / room, 1)

    line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in both[0]))
    dots = "".join('<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*place(*point), VALIDATION) for point in both[1])
    labels = [(4, 14, f"{high:.3g}"), (4, HEIGHT - BOTTOM - 4, f"{low:.3g}"), (LEFT, HEIGHT - 6, "step 0")]
    labels.append((WIDTH - 90, HEIGHT - 6, f"step {right:,}"))
    named = [(*label, "currentColor") for label in labels]
    named += [(WIDTH - 150, 14, "training", TRAINING), (WIDTH - 80, 14, "validation", VALIDATION)]
    words = "".join(f'<text x="{x}" y="{y}" font-size="12" fill="{ink}">{text}</text>' for x, y, text, ink in named)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="loss by step">'
        f'<polyline points="{line}" fill="none" stroke="{TRAINING}" stroke-width="1.5"/>{dots}{words}</svg>'
    )
