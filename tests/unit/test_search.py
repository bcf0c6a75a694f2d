"""The search against made-up devices: what it finds, what it never tries, how much it tries."""

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest

from flatout.config.load import load_config
from flatout.model.count import estimate_memory
from flatout.model.execution import Execution
from flatout.tuning.search import (
    MARGIN,
    Candidate,
    Memory,
    Search,
    SwitchSpace,
    Trial,
    Trials,
    choose,
    exhaustive,
    quick,
)

GB = 10**9
SPACE = SwitchSpace(
    micro_batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    checkpointings=("none", "selective", "full"),
    losses=("fused", "chunked", "plain"),
    loss_chunks=(8192, 2048),
    kernels="triton",
    compile="off",
    optimizer_offload=False,
    context=1024,
)


@dataclasses.dataclass
class FakeDevice:
    """Speed that saturates with the micro-batch; memory on a line; an estimate that is `wrong` by a factor."""

    capacity: float
    fixed: float = 2.0 * GB
    each: float = 0.30 * GB  # per sequence, without checkpointing
    half_speed: float = 4.0  # micro-batch at which half of the full speed is reached
    wrong: float = 1.0
    noise: float = 0.0
    slower_beyond: int = 10**6
    selective: float = 0.96
    full: float = 0.76

    def peak(self, candidate: Candidate) -> int:
        kept = {"none": 1.0, "selective": 0.75, "full": 0.15}[candidate.checkpointing]
        tokens = candidate.micro_batch * SPACE.context
        logits = {"plain": 12 * tokens, "chunked": 12 * min(tokens, candidate.loss_chunk), "fused": 2 * tokens}
        chunked = 2 * min(tokens, candidate.loss_chunk) if candidate.loss == "fused" else logits[candidate.loss]
        fixed = self.fixed / 2 if candidate.optimizer_offload else self.fixed
        return int(fixed + self.each * kept * candidate.micro_batch + 50304 * chunked)

    def rate(self, candidate: Candidate) -> float:
        cost = {"none": 1.0, "selective": self.selective, "full": self.full}[candidate.checkpointing]
        cost *= {"fused": 1.0, "chunked": 0.9, "plain": 0.8}[candidate.loss]
        size = candidate.micro_batch
        falling = 0.9 if size > self.slower_beyond else 1.0
        return 600_000 * cost * falling * size / (size + self.half_speed)

    def trial(self, candidate: Candidate) -> Trial:
        peak = self.peak(candidate)
        if peak > self.capacity:
            return Trial(candidate=candidate, status="out_of_memory")
        noise = 1 + self.noise * random.Random(str(candidate)).uniform(-1, 1)
        status = "fits" if peak <= (1 - MARGIN) * self.capacity else "over"
        return Trial(
            candidate=candidate, status=status, tokens_per_second=self.rate(candidate) * noise, peak_bytes=peak
        )

    def run(self, method: Callable[[SwitchSpace, Trials], Search], space: SwitchSpace = SPACE) -> list[Trial]:
        trials = Trials(Memory(lambda candidate: int(self.wrong * self.peak(candidate)), int(self.capacity)))
        return drive(method(space, trials), self.trial)


def drive(search: Search, attempt: Callable[[Candidate], Trial]) -> list[Trial]:
    done: list[Trial] = []
    try:
        candidate = next(search)
        while True:
            done.append(attempt(candidate))
            candidate = search.send(done[-1])
    except StopIteration:
        return done


CAPACITIES = [3, 4, 8, 16, 24, 80, 140]
SHAPES = [{}, {"half_speed": 0.3}, {"half_speed": 40}, {"slower_beyond": 16}, {"selective": 0.99, "full": 0.85}]


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wrong", [0.92, 1.0, 1.1])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_quick_is_within_a_twentieth_of_exhaustive_and_takes_few_trials(capacity, wrong, shape):
    device = FakeDevice(capacity * GB, wrong=wrong, noise=0.005, **shape)
    fast, all_of_them = device.run(quick), device.run(exhaustive)
    mine, best = choose(fast), max(all_of_them, key=lambda trial: trial.rate if trial.status == "fits" else 0)
    assert mine is not None
    assert best.status == "fits"
    assert device.rate(mine.candidate) > 0.95 * device.rate(best.candidate)
    assert len(fast) <= 16
    assert len(fast) <= len(all_of_them)
    assert len({trial.candidate for trial in fast}) == len(fast), "nothing is tried twice"


def test_exhaustive_finds_the_best_there_is():
    for capacity in CAPACITIES:
        device = FakeDevice(capacity * GB)
        found = choose(device.run(exhaustive))
        every = [
            device.trial(SPACE.candidate(m, checkpointing, loss, chunk))
            for m, checkpointing, loss, chunk in itertools.product(
                SPACE.micro_batches, SPACE.checkpointings, SPACE.losses, SPACE.loss_chunks
            )
        ]
        assert found is not None
        assert found.rate >= 0.99 * max(trial.rate for trial in every if trial.status == "fits")


@pytest.mark.parametrize("method", [quick, exhaustive])
def test_what_cannot_fit_is_never_tried_and_the_border_is(method):
    device = FakeDevice(8 * GB)
    tried = device.run(method)
    assert all(device.peak(trial.candidate) * 0.9 <= (1 - MARGIN) * device.capacity for trial in tried)
    largest = max(
        trial.candidate.micro_batch for trial in tried if trial.candidate.path == SPACE.candidate(0, "none", "fused")
    )
    fits = [m for m in SPACE.micro_batches if device.peak(SPACE.candidate(m, "none", "fused")) < 0.92 * device.capacity]
    assert largest >= fits[-1]


def test_failures_are_learned_from():
    # The estimate promises twice as much room as there is: what fails once is not asked for again in a larger size.
    device = FakeDevice(16 * GB, wrong=0.5)
    tried = device.run(quick)
    failed: dict[Candidate, int] = {}
    for trial in tried:
        assert trial.candidate.micro_batch < failed.get(trial.candidate.path, 10**6)
        if trial.status != "fits":
            failed[trial.candidate.path] = trial.candidate.micro_batch
    assert failed
    assert choose(tried) is not None


def test_smaller_chunks_come_only_where_memory_asks_for_them():
    tight = FakeDevice(3.2 * GB)
    assert {trial.candidate.loss_chunk for trial in FakeDevice(140 * GB).run(quick)} == {8192}
    assert 2048 in {trial.candidate.loss_chunk for trial in tight.run(quick)}


def test_recomputing_is_not_tried_where_it_cannot_win():
    # Full speed at one sequence already: a larger micro-batch has nothing to give.
    tried = FakeDevice(16 * GB, half_speed=0.001).run(quick)
    assert {trial.candidate.checkpointing for trial in tried} == {"none"}


def test_the_choice_is_the_smallest_of_the_equally_fast():
    def trial(micro_batch: int, rate: float, peak: int | None, status: str = "fits") -> Trial:
        candidate = SPACE.candidate(micro_batch, "none", "fused")
        return Trial(candidate=candidate, status=status, tokens_per_second=rate, peak_bytes=peak)

    some = [trial(64, 1000.0, 40), trial(32, 995.0, 20), trial(16, 980.0, 10), trial(128, 1100.0, 80, "over")]
    chosen = choose(some)
    assert chosen is not None
    assert chosen.candidate.micro_batch == 32
    unknown = choose([trial(4, 1000.0, None), trial(2, 999.0, None)])
    assert unknown is not None
    assert unknown.candidate.micro_batch == 4, "without a figure for memory, speed decides"
    equal = choose([trial(64, 990.0, 20), trial(32, 1000.0, 20), trial(16, 989.0, 10)])
    assert equal is not None
    assert equal.candidate.micro_batch == 32, "of the same memory, the faster; a hundredth slower is too slow"
    border = choose([trial(64, 1000.0, 40), trial(32, 990.0, 20)])
    assert border is not None
    assert border.candidate.micro_batch == 32
    assert choose([]) is None
    assert (
        choose([trial(4, 1.0, 1, "over"), Trial(candidate=SPACE.candidate(1, "none", "plain"), status="absent")])
        is None
    )


def test_without_a_capacity_everything_is_in_reach():
    memory = Memory(lambda _: 10**18, None)
    assert memory.may_fit(SPACE.candidate(512, "none", "plain"))


def test_memory_is_a_line_once_two_sizes_are_known():
    device = FakeDevice(100 * GB)
    memory = Memory(lambda candidate: int(0.8 * device.peak(candidate)), int(device.capacity))
    big = SPACE.candidate(128, "none", "plain")
    assert memory.predicted(big)[0] == pytest.approx(0.8 * device.peak(big))
    memory.learn(device.trial(SPACE.candidate(4, "none", "plain")))
    memory.learn(device.trial(SPACE.candidate(8, "none", "plain")))
    assert memory.predicted(big)[0] == pytest.approx(device.peak(big), rel=1e-6)


def test_a_prediction_is_as_sure_as_what_it_rests_on():
    def size(micro_batch: int) -> Candidate:
        return SPACE.candidate(micro_batch, "none", "fused")

    def measured(micro_batch: int, peak: int, status: str = "fits") -> Trial:
        return Trial(candidate=size(micro_batch), status=status, peak_bytes=peak)

    memory = Memory(lambda candidate: 1000 + 100 * candidate.micro_batch, 4000)
    assert memory.usable == 3680
    assert memory.predicted(size(8)) == (1800, 0.10)
    memory.learn(measured(4, 1450))
    assert memory.predicted(size(8)) == (1850, 0.05), "one size gives an offset"
    assert memory.predicted(SPACE.candidate(8, "full", "fused")) == (1800, 0.10), "of its own way of working only"
    memory.learn(measured(2, 1250))
    assert memory.predicted(size(8)) == (1450 + 400, 0.02)
    memory.learn(measured(8, 1450 + 4000))
    assert memory.predicted(size(16)) == (pytest.approx(5450 + 1.33 * 800), 0.02), "a slope that noise cannot turn"
    memory.learn(measured(8, 1450))
    assert memory.predicted(size(16)) == (1450 + 0.75 * 800, 0.02)
    memory.learn(measured(16, 3700, "over"))
    memory.learn(measured(32, 3900, "over"))
    assert [memory.may_fit(size(micro_batch)) for micro_batch in (8, 15, 16, 32)] == [True, True, False, False]


def test_what_may_just_fit_is_tried_with_the_smallest_chunk():
    def memory(need: int, *, less: int) -> Memory:
        return Memory(lambda candidate: need - (less if candidate.loss_chunk == 2048 else 0), 1000)

    def chunk(memory: Memory, micro_batch: int = 64, loss: str = "fused") -> int | None:
        found = memory.fitting(SPACE, micro_batch, "none", loss)
        return None if found is None else found.loss_chunk

    assert chunk(memory(920, less=100)) == 8192, "all that stays below the margin"
    assert chunk(memory(921, less=1)) == 2048
    assert chunk(memory(1032, less=10)) == 2048, "an estimate that may be a tenth too high"
    assert chunk(memory(1033, less=10)) is None
    assert chunk(memory(1032, less=10), loss="plain") is None, "which has no chunks"
    assert chunk(memory(1032, less=10), micro_batch=2) is None, "whose tokens are one chunk"


@pytest.mark.grid
@pytest.mark.parametrize("capacity", [4, 8, 16, 24, 80, 139])
@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt2-350m"])
def test_gpt2_under_every_cap_by_the_real_estimate(preset, capacity):
    """Memory as estimated for a real model and measured a little higher, as workspaces make it; speed made up."""
    config = load_config(preset).config
    room = capacity * 2**30

    def estimate(candidate: Candidate) -> int:
        how = Execution(
            kernels="triton",
            residual="bf16",
            pad_vocab=64,
            loss=candidate.loss,
            loss_chunk=candidate.loss_chunk,
            checkpointing=candidate.checkpointing,
        )
        settings = {
            "half": True,
            "compiled": False,
            "execution": how,
            "state_bytes": 0 if candidate.optimizer_offload else 8,
        }
        return estimate_memory(config.model, 50257, micro_batch=candidate.micro_batch, **settings).total

    def attempt(candidate: Candidate) -> Trial:
        peak = int(1.04 * estimate(candidate)) + 80 * 2**20
        if peak > room:
            return Trial(candidate=candidate, status="out_of_memory")
        rate = FakeDevice(room, half_speed=1.2, selective=0.97, full=0.77).rate(candidate)
        status = "fits" if peak <= (1 - MARGIN) * room else "over"
        return Trial(candidate=candidate, status=status, tokens_per_second=rate, peak_bytes=peak)

    offload = preset == "gpt2-350m" and capacity == 4  # its moments alone would take 2.6 GiB
    space = dataclasses.replace(SPACE, optimizer_offload=offload)
    fast = drive(quick(space, Trials(Memory(estimate, room))), attempt)
    every = drive(exhaustive(space, Trials(Memory(estimate, room))), attempt)
    mine, best = choose(fast), max(trial.rate for trial in every if trial.status == "fits")
    assert mine is not None
    assert mine.rate > 0.95 * best
    assert len(fast) <= 12
