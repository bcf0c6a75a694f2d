"""Parts of a step by name in a trace of torch's profiler, put around it from outside and taken off again."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from flatout.engine.step import TrainStep
from flatout.model.protocol import LanguageModel
from flatout.world import Reducer


@contextlib.contextmanager
def quiet_profiler(activities: Sequence[ProfilerActivity]) -> Iterator[torch.profiler.profile]:
    """torch's profiler without the reminder, at every first start in torch 2.11, that a second cycle forgets the first.

    There is one cycle here. `acc_events`, which the reminder names, would silence it too, but makes a Python object of
    every event when the profiler stops: seconds of work that nobody asked for.
    """
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events", category=UserWarning)
            profiler = stack.enter_context(torch.profiler.profile(activities=activities))
        yield profiler


@contextlib.contextmanager
def named_ranges(step: TrainStep) -> Iterator[None]:
    """Names the parts of a step in a trace: micro-batch, in it forward and backward; optimizer, in it reduction."""
    micro_batch, update, model = step.run_micro_batch, step._update, _NamedModel(step.model)

    def named_micro_batch(*values: Any) -> Tensor:
        with record_function("micro-batch"), model.backward_until_the_end():
            return micro_batch(*values)

    def named_update(loss: Tensor) -> Tensor:
        with record_function("optimizer"):
            return update(loss)

    named: dict[str, Any] = {"run_micro_batch": named_micro_batch, "_update": named_update, "model": model}
    if step.reducer is not None:
        named["reducer"] = _NamedReducer(step.reducer)
    before = {name: vars(step)[name] for name in named if name in vars(step)}
    vars(step).update(named)
    try:
        yield
    finally:
        for name in named:
            vars(step).pop(name)
        vars(step).update(before)


class _NamedReducer:
    """A reducer whose wait for other ranks is named reduction."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def finish(self) -> None:
        with record_function("reduction"):
            self._reducer.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


class _NamedModel:
    """A model whose call is named forward; what follows in the same micro-batch is backward."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._backward: record_function | None = None

    def __call__(self, *values: Any) -> Any:
        self._close()
        with record_function("forward"):
            result = self._model(*values)
        self._backward = record_function("backward")
        self._backward.__enter__()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @contextlib.contextmanager
    def backward_until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None
