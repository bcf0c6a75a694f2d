"""Scores of models on tasks: files of one's own, and the tasks of lm-evaluation-harness."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.checkpoints.run_folder import run_of
from flatout.errors import UsageError
from flatout.front.models import LoadedModel, load_model
from flatout.generation.engine import fitting_rows
from flatout.model.gpt import GPT
from flatout.resolve.fit_check import out_of_memory
from flatout.tasks.files import find_tasks
from flatout.tasks.harness import harness_model, harness_scores
from flatout.tasks.likelihood import Subject
from flatout.tasks.scores import ModelScores, ask


def score(
    model: LoadedModel | str | Path | None = None,
    tasks: Sequence[str | Path] = (),
    *,
    folder: str | Path | None = None,
    shots: int = 0,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> ModelScores:
    """Scores of a model on tasks: accuracies and perplexities with their standard errors, and every answer.

    A task is a file of JSON lines (docs/evaluation.md), a folder of such files, the name of a file in `folder`, or a
    task of lm-evaluation-harness, also of a YAML file in `folder`. Each question stands after `shots` solved ones, drawn
    by `seed`; `limit` takes the first questions of each task. `progress` counts answers.
    """
    words = [str(task) for task in ([tasks] if isinstance(tasks, str | Path) else tasks)]
    if not all(words) or not words:
        raise UsageError("no task was named", "name files of tasks, or tasks of lm-evaluation-harness")
    place = None if folder is None else Path(folder)
    files, names = find_tasks(words, place, shots=shots, limit=limit, seed=seed)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, weights="auto")
    began, done = time.perf_counter(), 0

    def seen(count: int) -> None:
        nonlocal done
        done += count
        progress(done)

    subject = subject_of(loaded)
    with out_of_memory():
        scores, samples = ask(subject, files, seen)
        if names:
            rows = fitting_rows(loaded.model, loaded.device) if isinstance(loaded.model, GPT) else 1
            lm = harness_model(subject, rows=rows, seen=seen)
            more = harness_scores(lm, names, folder=place, shots=shots or None, limit=limit, seed=seed)
            scores, samples = scores + more[0], samples + more[1]
    return ModelScores(
        name=run_of(loaded.origin).resolve().name,
        origin=str(loaded.origin),
        step=loaded.step,
        scores=tuple(scores),
        samples=tuple(samples),
        seconds=time.perf_counter() - began,
    )


def subject_of(loaded: LoadedModel) -> Subject:
    """A model that is ready, to be asked."""
    how = {"scope": loaded.scope, "stops": loaded.stops, "kernels": loaded.kernels}
    return Subject(model=loaded.model, tokenizer=loaded.tokenizer, **how)
