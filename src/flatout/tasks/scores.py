"""Scores of tasks: accuracies with their errors, and the difference of two models.

`acc` is the share of questions whose likeliest choice is right, `acc_norm` that by log-likelihood per character of the
choice, as lm-evaluation-harness has them. A question without choices is right where its continuation is greedy;
`perplexity` is that of whole continuations. Errors are standard errors of the mean. That of a difference is of the
differences question by question, which is smaller than two errors together: hard questions are hard for both.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flatout.records import TaskRecord
from flatout.rows import BAD, GOOD, Bar, BarPanel, Picture, ResultRow, Sentence, Sheet, Table
from flatout.shown import ShortlyShown
from flatout.tasks.files import Question, Task
from flatout.tasks.likelihood import Answer, Ids, Subject, known, log_likelihoods
from flatout.world import World

PERPLEXITY = "perplexity"
_CLEAR = 2.0  # standard errors, from which on a difference is coloured


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TaskScore(ShortlyShown):
    """A metric of a task. `values` are those of the questions, of perplexity log-likelihoods; empty if unknown."""

    task: str
    metric: str
    value: float
    error: float | None
    rows: int
    shots: int
    values: tuple[float, ...] = ()

    def _shown_rows(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "values"}

    def record(self, step: int | None) -> TaskRecord:
        return TaskRecord(step=step or 0, **self._shown_rows())

    def over(self, other: "TaskScore") -> tuple[float, float | None]:
        """The difference to another model's score on the same questions, and its standard error."""
        difference = self.value - other.value
        if len(self.values) != len(other.values) or len(self.values) < 2:
            return difference, None
        error = error_of([mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)])
        scale = math.sqrt(self.value * other.value) if self.metric == PERPLEXITY else 1.0
        return difference, scale * error


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ModelScores(ShortlyShown):
    """The scores of a model, and `samples`: every question with its answers, as written to a log."""

    name: str
    origin: str
    step: int | None
    scores: tuple[TaskScore, ...]
    samples: tuple[dict[str, Any], ...]
    seconds: float

    def _shown_rows(self) -> dict[str, Any]:
        return {f"{one.task} {one.metric}": _shown(one.value, one.error) for one in self.scores}

    def plain(self, first: "ModelScores") -> dict[str, Any]:
        """The scores as JSON, of another model than the first with the differences to it."""
        rows = [score._shown_rows() for score in self.scores]
        for row, score, other in zip(rows, self.scores, first.scores, strict=True):
            if self is not first:
                row["difference"], row["difference_error"] = score.over(other)
        return {"model": self.name, "origin": self.origin, "step": self.step, "seconds": self.seconds, "scores": rows}


def error_of(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


# --- answers to scores ------------------------------------------------------------------------------------------------


def encoded(subject: Subject, tasks: Sequence[Task]) -> list[tuple[Ids, Ids]]:
    """The pairs of all tasks, in order."""
    return subject.encode_pairs([pair for task in tasks for pair in task.pairs()])


def ask(
    subject: Subject,
    tasks: Sequence[Task],
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    world: World | None = None,
    seen: Callable[[int], None] = lambda _: None,
) -> tuple[list[TaskScore], list[dict[str, Any]]]:
    """The scores of tasks and every question, from their `encoded` pairs; each process of a world answers its share."""
    world, answers = world or World(), list[Answer]([(0.0, False)] * len(pairs))
    with world.fail_together():
        own = log_likelihoods(subject, pairs[world.rank :: world.size], seen)
    for rank, part in enumerate(world.gather(own)):
        answers[rank :: world.size] = [(value, greedy) for value, greedy in part]
    rest, scores, samples = iter(known(answers)), [], []
    for task in tasks:
        rows = answered(task, rest)
        scores += scores_of(task, rows)
        samples += rows
    return scores, samples


def answered(task: Task, answers: Iterator[Answer]) -> list[dict[str, Any]]:
    """Every question of a task with what the model answered; takes the next answers, in the order of `Task.pairs`."""
    rows = []
    for number, question in enumerate(task.asked):
        own = [next(answers) for _ in question.pairs]
        context, continuation = question.pairs[question.gold or 0]
        rows.append(
            {
                "task": task.name,
                "row": number,
                "context": context,
                "continuation": continuation,
                **({"choices": list(question.choices)} if question.choices else {}),
                "gold": question.gold,
                "log_likelihoods": [value for value, _ in own],
                "greedy": [greedy for _, greedy in own],
                **_metrics(question, own),
            }
        )
    return rows


def _metrics(question: Question, answers: Sequence[Answer]) -> dict[str, float]:
    values = [value for value, _ in answers]
    if question.gold is None:
        return {"acc": float(answers[0][1]), PERPLEXITY: values[0]}
    found = {"acc": float(values.index(max(values)) == question.gold)}
    if question.choices:
        each = [value / len(choice) for value, choice in zip(values, question.choices, strict=True)]
        found["acc_norm"] = float(each.index(max(each)) == question.gold)
    return found


def scores_of(task: Task, rows: Sequence[dict[str, Any]]) -> Iterator[TaskScore]:
    """The scores of a task's questions."""
    for metric in ("acc", "acc_norm", PERPLEXITY):
        values = tuple(row[metric] for row in rows if metric in row)
        if not values:
            continue
        value, error = statistics.fmean(values), error_of(values)
        if metric == PERPLEXITY:
            value = math.exp(min(-value, 700.0))
            error *= value
        how = {"task": task.name, "metric": metric, "rows": len(values), "shots": task.shots}
        yield TaskScore(value=value, error=error, values=values, **how)


# --- for people -------------------------------------------------------------------------------------------------------


def sheet_of(models: Sequence[ModelScores]) -> Sheet:
    """A table with a column for each model, and of several the difference to the first."""
    first, *others = models
    rows = []
    for place, score in enumerate(first.scores):
        cells = {"metric": score.metric, "rows": f"{score.rows:,}", first.name: _shown(score.value, score.error)}
        tone = ""
        for other in others:
            own = other.scores[place]
            difference, error = own.over(score)
            cells[other.name] = _shown(own.value, own.error)
            cells[f"{other.name} - {first.name}"] = _shown(difference, error, sign="+")
            if error and abs(difference) > _CLEAR * error and len(others) == 1:
                tone = GOOD if (difference > 0) != (score.metric == PERPLEXITY) else BAD
        name = score.task if place == 0 or first.scores[place - 1].task != score.task else ""
        rows.append(ResultRow(name=name, cells=cells, tone=tone))
    shots = first.scores[0].shots if first.scores else 0
    note = Sentence(f"{shots}-shot; ± is one standard error" + (", of differences paired" if others else ""), "faint")
    return Sheet(blocks=[Table(rows=rows, names="task", left=("metric",)), note])


def picture_of(models: Sequence[ModelScores]) -> Picture:
    """Shares with their errors, a panel for each model."""
    shares = [place for place, score in enumerate(models[0].scores) if 0 <= score.value <= 1]
    names = [f"{models[0].scores[place].task} {models[0].scores[place].metric}" for place in shares]
    panels = []
    for model in models:
        bars = []
        for line, place in enumerate(shares):
            score = model.scores[place]
            error = score.error or 0.0
            interval = (score.value - error, score.value + error)
            bars.append(Bar(line=line, dot=score.value, interval=interval, words=_shown(score.value, score.error)))
        panels.append(BarPanel(title=model.name, bars=bars, limits=(0.0, 1.0)))
    return Picture(title="Tasks", lines=["shares of right answers, ± one standard error"], names=names, bars=panels)


def _shown(value: float, error: float | None, sign: str = "") -> str:
    digits = 4 if abs(value) < 10 else 2
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
