"""One micro-batch, forward and backward, recorded once as a CUDA graph and replayed for every micro-batch after it.

A small model's kernels are shorter than the time the host needs to launch them. A replay launches all of them at once.

Contract: a replay runs the very kernels that were recorded, so its numbers equal those of the step without graphs. Its
inputs are copied to fixed places; gradients are added in place to tensors that stay (`TrainStep.keep_gradients`); the
loss scale and the weights are read where they lie, and so are copies of weights in narrower types, which `prepare`
keeps fresh. Another shape, gradients that were dropped, or another answer of `prepare` mean a new recording.
A recording that fails is told once, and the step goes on without it.
Traps:
- Casts that autocast has cached would be recorded as constants, and replays would train yesterday's weights: the cache
  is emptied before and after.
- Recording executes nothing. The micro-batch that was recorded is replayed like any other.
- A graph's memory is its own: evaluation cannot use it, so a run with graphs holds more.
"""

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from flatout.engine.news import News
from flatout.engine.step import hold_gradients

WARM_UPS = 2  # libraries and Triton set themselves up in the first calls, which must not happen while recording

MicroBatch = Callable[[Tensor, Tensor, Tensor], Tensor]
Replay = Callable[[], None]


class Recorder:
    """How the device records. A class of its own, so that the logic around it can be tested without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device)

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Runs on the stream that will record, as torch asks for."""
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            result = function()
        outside.wait_stream(self.stream)
        return result

    def record(self, function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """(a replay of `function`, the tensor in which each replay leaves its result). Nothing is executed."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may pin memory while this one records
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace of 32 MiB for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


class MicroBatchGraph:
    """Takes the place of `TrainStep.forward_backward`."""

    def __init__(
        self,
        plain: MicroBatch,
        model: nn.Module,
        news: News,
        recorder: Recorder,
        prepare: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """`prepare` is called before every micro-batch and says what a recording depends on besides shapes."""
        self.plain = plain
        self.prepare = prepare
        self.model = model
        self.news = news
        self.recorder = recorder
        self.failed = False
        self.reset()

    def reset(self) -> None:
        """Forgets the recording and gives its memory back."""
        self.shape: torch.Size | None = None
        self.prepared: Hashable = None
        self.calls = 0
        self.replay: Replay | None = None
        self.inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self.result: Tensor | None = None
        self.gradients: list[Tensor | None] = []

    def __call__(self, tokens_BT: Tensor, targets_BT: Tensor, labelled: Tensor) -> Tensor:
        values = (tokens_BT, targets_BT, labelled)
        if self.failed:
            return self.plain(*values)
        prepared = self.prepare()
        another = self.shape != tokens_BT.shape or self.prepared != prepared
        if another or (self.replay is not None and not self._same_gradients()):
            self.reset()
            self.shape, self.prepared = tokens_BT.shape, prepared
        if self.replay is None and self.calls < WARM_UPS:
            self.calls += 1
            return self.recorder.warm_up(lambda: self.plain(*values))
        if self.replay is None and not self._record(values):
            return self.plain(*values)
        assert self.replay is not None
        assert self.inputs is not None
        assert self.result is not None
        for place, value in zip(self.inputs, values, strict=True):
            place.copy_(value)
        self.replay()
        return self.result.clone()  # the next replay writes over it

    def _record(self, values: tuple[Tensor, Tensor, Tensor]) -> bool:
        hold_gradients(self.model)
        tokens_BT, targets_BT, labelled = (value.clone() for value in values)
        torch.clear_autocast_cache()
        try:
            replay, result = self.recorder.record(lambda: self.plain(tokens_BT, targets_BT, labelled))
        except torch.OutOfMemoryError:  # a smaller micro-batch may be recorded later
            self.reset()
            raise
        except RuntimeError as error:
            self.reset()
            self.failed = True
            reason = str(error).strip().partition("\n")[0][:160]
            self.news.add(f"cuda_graphs became off: recording failed: {type(error).__name__}: {reason}")
            return False
        finally:
            torch.clear_autocast_cache()
        self.replay, self.result, self.inputs = replay, result, (tokens_BT, targets_BT, labelled)
        self.gradients = [parameter.grad for parameter in self.model.parameters()]
        return True

    def _same_gradients(self) -> bool:
        return all(p.grad is g for p, g in zip(self.model.parameters(), self.gradients, strict=True))
