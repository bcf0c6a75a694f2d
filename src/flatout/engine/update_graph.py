"""Muon's update recorded once as a CUDA graph, and replayed for every update after that.

It is a hundred short kernels or more over the same tensors each time, and launching them can take longer than running
them.

Contract: a replay runs the very kernels that were recorded. Divisor and flag are copied to fixed places; rates,
momentum and decay are read where they lie. Gradients or state in other places mean a new recording. One that fails is
told once, and updates go on without.
"""

import dataclasses
from collections.abc import Hashable

from torch import Tensor
from torch.autograd.graph import increment_version

from flatout.engine.graphs import WARM_UPS, Recorder, Replay
from flatout.engine.notices import Notices
from flatout.optim.muon import Muon
from flatout.optim.optimizers import Optimizers


@dataclasses.dataclass(eq=False)
class UpdateGraph:
    """Takes the place of `Muon.update`."""

    muon: Muon
    notices: Notices
    recorder: Recorder
    failed: bool = False

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the recording and gives its memory back."""
        if getattr(self, "replay", None) is not None:
            self.recorder.finish()
        self.calls = 0
        self.replay: Replay | None = None
        self.held_bytes = 0
        self.places: list[Hashable] = []
        self.inputs: tuple[Tensor, ...] = ()

    def __call__(self, divisor: Tensor, finite: Tensor) -> None:
        places = [] if self.failed else [self._places(parameter) for parameter in self.muon.parameters]
        if places != self.places:
            self.reset()
            self.places = places
        if self.replay is None and not self.failed and self.calls >= WARM_UPS:
            self._record(divisor, finite)
        if self.replay is not None:
            for place, value in zip(self.inputs, (divisor, finite), strict=True):
                place.copy_(value)
            self.replay()
            increment_version(self.muon.parameters)
        elif self.failed:
            self.muon.update(divisor, finite)
        else:
            self.calls += 1
            self.recorder.warm_up(lambda: self._run(divisor, finite))

    def _run(self, divisor: Tensor, finite: Tensor) -> Tensor:
        self.muon.update(divisor, finite)
        return divisor

    def _places(self, parameter: Tensor) -> Hashable:
        """Where the gradient and the state lie. State that is put back from a checkpoint is in a new mapping."""
        return None if parameter.grad is None else parameter.grad.data_ptr(), id(self.muon.state[parameter])

    def _record(self, divisor: Tensor, finite: Tensor) -> None:
        inputs = (divisor.clone(), finite.clone())
        before = self.recorder.held()
        try:
            self.replay, _, _ = self.recorder.record(lambda: self._run(*inputs))
        except RuntimeError as error:
            self.failed = True
            reason = str(error).strip().partition("\n")[0][:160]
            self.notices.add(f"Muon's update is not recorded: {type(error).__name__}: {reason}")
            return
        self.inputs = inputs
        self.held_bytes = max(0, self.recorder.held() - before)


def record_updates(optimizers: Optimizers, notices: Notices, recorder: Recorder) -> None:
    """Puts recordings in the place of what can be recorded: Muon alone, since AdamW is a few kernels."""
    muons = [one for one in optimizers.optimizers if isinstance(one, Muon)]
    optimizers.recorded.update((muon, UpdateGraph(muon, notices, recorder)) for muon in muons)
