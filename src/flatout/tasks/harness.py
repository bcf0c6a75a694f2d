"""Tasks of lm-evaluation-harness, asked of our models by an `LM` class of our own.

The harness makes the prompts and the metrics; log-likelihoods come from `likelihood`, texts from the decoding engine,
many requests at once. Its data sets come from the Hugging Face hub or its cache, or from what YAML files in a folder
of one's own name. The package is loaded on first use: it is large.
"""

import difflib
import importlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import DataError, UsageError, first_line, quoted
from flatout.generation.engine import Engine, TextRequest, no_probabilities
from flatout.generation.pieces import TextPieces
from flatout.generation.sampling import Sampling
from flatout.model.gpt import GPT
from flatout.tasks.likelihood import Subject, known, log_likelihoods, windows
from flatout.tasks.scores import PERPLEXITY, TaskScore

_BOOTSTRAPS = 1000  # of errors that have no formula
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_MOST_TOKENS = 256  # where a task sets no limit, as the harness has it


def harness_model(subject: Subject, *, rows: int = 8, seen: Callable[[int], None] = lambda _: None) -> Any:
    """The model as an `LM` of the harness; `rows` texts are written at once."""

    class FlatoutLM(_harness("lm_eval.api.model").LM):
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = subject.encode_pairs([request.args for request in requests])
            return known(log_likelihoods(subject, pairs, seen))

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            begin, context = subject.first, subject.model.config.context
            texts = subject.encode([request.args[0] for request in requests])
            each = [list(windows(ids if begin is None else [begin, *ids], context + 1, context)) for ids in texts]
            found = iter(log_likelihoods(subject, [pair for pairs in each for pair in pairs], seen))
            return [math.fsum(next(found)[0] for _ in pairs) for pairs in each]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return list(_written(subject, [request.args for request in requests], rows))

    return FlatoutLM()


def _harness(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"what is no task file is a task of lm-evaluation-harness, which is not installed: {first_line(error)}",
            "pip install 'flatout[tasks]', or name task files, which need no package",
        ) from error


class _Written:
    """A text that ends at the first of some strings."""

    def __init__(self, subject: Subject, prompt: str, how: Mapping[str, Any]) -> None:
        context = subject.model.config.context
        asked = next((how[name] for name in _COUNTS if how.get(name) is not None), _MOST_TOKENS)
        count = max(1, min(int(asked), context - 1))
        until = how.get("until") or []
        self.until = [until] if isinstance(until, str) else list(until)
        sampling = Sampling(
            temperature=float(how.get("temperature", 1.0)) if how.get("do_sample") else 0.0,
            top_k=how.get("top_k"),
            top_p=how.get("top_p"),
        )
        ids = (subject.encode([prompt])[0] or [subject.first or 0])[-(context - count) :]
        ends = {*subject.stops, subject.tokenizer.end_of_text} - {None}
        self.request = TextRequest(ids=ids, count=count, sampling=sampling, stops=ends, slides=False)
        self.pieces, self.text, self.read = TextPieces(subject.tokenizer), "", 0

    def take(self) -> bool:
        """Reads the tokens that are new; whether the text has ended."""
        request = self.request
        while self.read < len(request.made) and not self._cut():
            token = request.made[self.read]
            self.read += 1
            self.text += "" if token in request.stops else self.pieces.add(token)
        if request.ended == "broken":
            raise no_probabilities()
        if request.ended and self.read == len(request.made):
            self.text += self.pieces.rest()
        return self._cut() or request.ended is not None

    def _cut(self) -> bool:
        places = [place for stop in self.until if stop and (place := self.text.find(stop)) >= 0]
        self.text = self.text[: min(places, default=None)]
        return bool(places)


def _written(subject: Subject, asked: Sequence[tuple[str, Mapping[str, Any]]], rows: int) -> Iterator[str]:
    model = subject.model
    if not (isinstance(model, GPT) and model.cacheable):
        raise UsageError("a model from Python writes no texts for tasks", "name tasks that have choices")
    texts = [_Written(subject, *one) for one in asked]
    vocab = subject.tokenizer.vocab
    engine = Engine(model, rows=min(rows, len(texts)), vocab=vocab, kernels=subject.kernels, scope=subject.scope)
    try:
        for text in sorted(texts, key=lambda text: -len(text.request.ids)):  # prompts of one length are read together
            engine.add(text.request)
        left = texts
        while left and engine.busy:
            engine.step()
            ended = [text for text in left if text.take()]
            for text in ended:
                engine.cancel(text.request)
            left = [text for text in left if text not in ended]
    finally:
        engine.close()
    for text in texts:
        yield text.text


def harness_scores(
    lm: Any, names: Sequence[str], *, folder: Path | None, shots: int | None, limit: int | None, seed: int
) -> tuple[list[TaskScore], list[dict[str, Any]]]:
    """The scores of tasks of the harness by name, also those of YAML files in `folder`, and every question."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks, where = _harness("lm_eval.tasks"), None if folder is None else str(folder)
    manager = tasks.TaskManager(include_path=where, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # the list of all takes ten seconds
        manager = tasks.TaskManager(include_path=where)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "name a file of JSON lines, or a task of the harness"
            raise UsageError(f"there is no task {quoted(name)}", hint)
    try:
        loaded = manager.load(list(names))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise DataError(
            f"the harness cannot load {', '.join(names)}: {first_line(error)}",
            "its data come from the Hugging Face hub or its cache; without a network, name files of tasks",
        ) from error
    groups = [group for name, group in loaded["groups"].items() if name in names]
    inside = {task.task_name for group in groups for task in group.get_all_tasks()}
    asked = [*groups, *(task for name, task in loaded["tasks"].items() if name not in inside)]
    seeds = {"random_seed": None, "numpy_random_seed": None, "torch_random_seed": None, "fewshot_random_seed": seed}
    how = {"num_fewshot": shots, "limit": limit, "bootstrap_iters": _BOOTSTRAPS, "task_manager": manager, **seeds}
    found = _harness("lm_eval.evaluator").simple_evaluate(lm, tasks=asked, **how)
    scores = [score for task in found["results"] for score in _translated(task, found)]
    rows = [_row(task, sample) for task, samples in found["samples"].items() for sample in samples]
    return scores, rows


def _translated(task: str, found: Mapping[str, Any]) -> Iterator[TaskScore]:
    """The scores of a task; `values` are of means and of perplexities alone."""
    results, samples = found["results"][task], found["samples"].get(task, [])
    for key, value in results.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [sample[metric] for sample in samples if sample.get("filter") == chosen and metric in sample]
        numbers = [float(one) for one in values if isinstance(one, int | float)]
        mean = statistics.fmean(numbers) if numbers and len(numbers) == len(values) else math.nan
        usual = math.exp(min(-mean, 700.0)) if metric == PERPLEXITY else mean
        error = results.get(f"{metric}_stderr,{chosen}")
        yield TaskScore(
            task=task,
            metric=metric if chosen == "none" else f"{metric} ({chosen})",
            value=float(value),
            error=float(error) if isinstance(error, int | float) else None,
            rows=len(values) or int(found["n-samples"].get(task, {}).get("effective", 0)),
            shots=int(found["n-shot"].get(task) or 0),
            values=tuple(numbers) if math.isclose(usual, value, rel_tol=1e-6) else (),
        )


def _row(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("filter", "arguments", "target", "filtered_resps", *sample["metrics"])
    return {"task": task, "row": sample["doc_id"], **{name: sample[name] for name in kept}}
