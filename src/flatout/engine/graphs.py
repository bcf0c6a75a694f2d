"""Micro-batches, forward and backward, and Muon's updates: recorded once as CUDA graphs and replayed from then on.

A small model's kernels are shorter than the time the host needs to launch them. A replay launches all of them at once.

Contract: a replay runs the very kernels that were recorded, so its numbers equal those of the step without graphs. Its
inputs are copied to fixed places, the tensors of a packed layout among them; gradients are added in place to tensors
that stay (`TrainStep.keep_gradients`); the loss scale and the weights are read where they lie, and so are copies of
weights in narrower types, which `model.prepare` keeps fresh. Gradients that were dropped, or another answer of
`prepare`, mean new recordings.
Plain batches have one shape in each stage of a schedule, packed rows a few: each gets a recording of its own, up to
`MOST_RECORDINGS` that share one piece of memory, and shapes beyond those run without. So does each attention window.
A recording that fails gives one notice, and the step goes on without it.
Traps:
- Casts that autocast has cached would be recorded as constants, and replays would train yesterday's weights: the cache
  is emptied before and after. `Adapters.forget` does the same for what adapters derive from their weights.
- Recording executes nothing. The micro-batch that was recorded is replayed like any other.
- A graph's memory is its own: evaluation cannot use it, so a run with graphs holds more.
- Recordings that share memory overwrite each other's results: those are copied before anything else is replayed.
- With expandable segments the allocator gives memory back as soon as the stream that asked for it is idle. Recordings
  and warm-ups have asked on a stream of their own, and are replayed and read on another: the device must be idle before
  memory is given back or recordings are let go, or kernels find their memory gone.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flatout.engine.monitor import Notices
from flatout.model.adapters import Adapters
from flatout.model.gpt import GPT
from flatout.ops.documents import DocumentLayout
from flatout.ops.gradients import hold_gradients
from flatout.optim.muon import Muon
from flatout.optim.optimizers import Optimizers

WARM_UPS = 2  # libraries and Triton set themselves up in the first calls, which must not happen while recording
MOST_RECORDINGS = 24  # a few MB each beside the memory that they share

MicroBatch = Callable[..., Tensor]
Replay = Callable[[], None]


class Recorder:
    """How the device records. A class of its own, so that the logic around it can be tested without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device)

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Runs on the stream that will record, as torch asks for."""
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                result = function()
        finally:  # after an error, too: what it has started works on gradients, which are let go then
            outside.wait_stream(self.stream)
        result.record_stream(outside)
        return result

    def record(self, function: Callable[[], Tensor], pool: Any = None) -> tuple[Replay, Tensor, Any]:
        """(a replay of `function`, the tensor in which each replay leaves its result, the memory that it uses).

        Nothing is executed. `pool` is the memory of another recording, of those that still are.
        """
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may pin memory while this one records
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result, graph.pool()

    def finish(self) -> None:
        """Waits until the device is idle."""
        torch.cuda.synchronize(self.stream.device)

    def held(self) -> int:
        """Bytes that torch's allocator holds, without those that it keeps for later only."""
        self.finish()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.stream.device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace of 32 MiB for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


@dataclasses.dataclass(frozen=True)
class Recording:
    replay: Replay
    places: tuple[Tensor, ...]  # of the inputs
    result: Tensor
    pool: Any


@dataclasses.dataclass(eq=False)
class MicroBatchGraph:
    """Replays micro-batches of `model`, or of `adapters` on it.

    `model.prepare` is called before every micro-batch and says what a recording depends on besides shapes; False: this
    one is not worth recording, and recordings for later ones stay.
    """

    model: GPT
    notices: Notices
    recorder: Recorder
    adapters: Adapters | None = None
    failed: bool = False
    crowded: bool = False
    recordings: dict[Hashable, Recording] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all recordings and gives their memory back."""
        if self.recordings:
            self.recorder.finish()
        self.prepared: Hashable = None
        self.calls: dict[Hashable, int] = {}
        self.recordings = {}
        self.gradients: list[Tensor | None] = []
        self.held_bytes = 0  # by recordings, whether one is replayed or not

    def __call__(
        self, plain: MicroBatch, values: Sequence[Tensor], layout: DocumentLayout | None, window: int | None
    ) -> Tensor:
        """`plain(*values, layout, window)`, by a replay where there is one; `values` are tokens, targets and labels."""
        run = functools.partial(plain, *values, layout, window)
        if self.failed:
            return run()
        prepared = self.model.prepare()
        if prepared is False:
            return self.recorder.warm_up(run)
        if self.prepared != prepared or (self.recordings and not self._same_gradients()):
            self.reset()
            self.prepared = prepared
        shape = (values[0].shape, None if layout is None else layout.sizes, window)
        recording = self.recordings.get(shape)
        if recording is None and not self._ready(shape):
            self.calls[shape] = self.calls.get(shape, 0) + 1
            return self.recorder.warm_up(run)
        if recording is None:
            recording = self._record(shape, plain, values, layout, window)
        if recording is None:
            return run()
        fresh = (*values, *(() if layout is None else layout.tensors))
        for place, value in zip(recording.places, fresh, strict=True):
            place.copy_(value)
        recording.replay()
        return recording.result.clone()  # the next replay writes over it

    def _ready(self, shape: Hashable) -> bool:
        """Whether everything has set itself up: libraries in the first calls, and what goes by shape in this one's."""
        if len(self.recordings) >= MOST_RECORDINGS:
            if not self.crowded:
                self.crowded = True
                self.notices.add(
                    f"cuda_graphs: more than {MOST_RECORDINGS} shapes of micro-batches, the others run without"
                )
            return False
        return shape in self.calls and sum(self.calls.values()) >= WARM_UPS

    def _record(
        self,
        shape: Hashable,
        plain: MicroBatch,
        values: Sequence[Tensor],
        layout: DocumentLayout | None,
        window: int | None,
    ) -> Recording | None:
        hold_gradients(self.model.parameters())
        inputs, own = [value.clone() for value in values], None if layout is None else layout.each(Tensor.clone)
        pool = next(iter(self.recordings.values())).pool if self.recordings else None

        def recorded() -> Tensor:
            # A new object with the same tensors: what a layout keeps for all layers, a mask, is made in the recording.
            return plain(*inputs, None if own is None else dataclasses.replace(own), window)

        self._forget()
        before = self.recorder.held()
        try:
            replay, result, pool = self.recorder.record(recorded, pool)
        except RuntimeError as error:
            self.reset()
            # A smaller micro-batch may be recorded later; packed rows may have nothing to halve.
            if isinstance(error, torch.OutOfMemoryError) and layout is None:
                raise
            self.failed = True
            reason = str(error).strip().partition("\n")[0][:160]
            self.notices.add(f"cuda_graphs became off: recording failed: {type(error).__name__}: {reason}")
            return None
        finally:
            self._forget()
        places = (*inputs, *(() if own is None else own.tensors))
        self.recordings[shape] = recording = Recording(replay, places, result, pool)
        self.held_bytes += max(0, self.recorder.held() - before)
        self.gradients = [parameter.grad for parameter in self.model.parameters()]
        return recording

    def _forget(self) -> None:
        """Around every recording: tensors that are kept from one pass to the next must be made inside it."""
        torch.clear_autocast_cache()
        if self.adapters is not None:
            self.adapters.forget()

    def _same_gradients(self) -> bool:
        """Whether gradients lie where recordings add to them. Those are held here, so no other can take their place."""
        now = [_address(parameter.grad) for parameter in self.model.parameters()]
        return now == [_address(gradient) for gradient in self.gradients]


def _address(gradient: Tensor | None) -> int | None:
    return None if gradient is None else gradient.data_ptr()


# --- updates ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class UpdateGraph:
    """Takes the place of `Muon.update`, which is a hundred short kernels or more over the same tensors each time.

    Divisor and flag are copied to fixed places; rates, momentum and decay are read where they lie. Gradients or state
    in other places mean a new recording. One that fails gives one notice, and updates go on without.
    """

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
        return _address(parameter.grad), id(self.muon.state[parameter])

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
    """Puts a recording in the place of Muon's update. AdamW is a few kernels, which is not worth one."""
    muons = [one for one in optimizers.optimizers if isinstance(one, Muon)]
    optimizers.recorded.update((muon, UpdateGraph(muon, notices, recorder)) for muon in muons)
