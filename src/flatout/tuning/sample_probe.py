"""Trying settings on a fine-tuning run: whole steps of its own samples.

Idea: a micro-batch is a number of packed rows, and a step has as many rows as its samples fill. So steps are not put
together from shorter ones as in pretraining: the fullest of the run are taken first, which shows whether a setting fits
at all, then some that are spread over an epoch, which show how fast it is. How many is settled by the first setting
that fits, and every other is timed on the very same steps, so that their tokens per second can be compared.

Contract: as in `probe.py`. Tokens are those that something is predicted from, without padding, as a run counts them.
`Timing.seconds` is what a step of the mean number of tokens would take.
Trap: packed rows come in several shapes, and a recording of one is made when it comes for the second time, after some
micro-batches that were not recorded. Where CUDA graphs are on, steps are taken so often before they are timed.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

from flatout.config.load import LoadedConfig
from flatout.data.sample_loader import LargestRows
from flatout.engine.graphs import WARM_UPS
from flatout.engine.run import Run
from flatout.engine.spans import StepReport
from flatout.resolve.memory import memory_of
from flatout.resolve.switches import Speed
from flatout.tuning import probe
from flatout.tuning.measure import Steps, of_steps
from flatout.tuning.practice_samples import PracticeSamples
from flatout.tuning.probe import Probe, Timing, divisors
from flatout.tuning.search import Candidate

MOST_STEPS = 8  # of an epoch that are timed
REPEATS = 3  # how often each of them is, while that is quick


class SampleProbe(Probe):
    """A model on a device, and the ways in which it can be fine-tuned there."""

    def __init__(self, loaded: LoadedConfig, practice: PracticeSamples, memory: float | None) -> None:
        super().__init__(loaded, practice.settings.config.data.model_dump(), memory)
        described = {"model": practice.settings.config.model, "lora": practice.settings.config.lora}
        config = self.settings.config.model_copy(update=described)
        self.settings = dataclasses.replace(self.settings, config=config)
        self.practice = practice
        self.sequences = config.chat.batch_samples
        self.corpus_bytes, self.step_tokens = None, practice.step_tokens
        self.steps: tuple[int, ...] | None = None  # those that are timed
        self.found: dict[tuple[int, bool], dict[int, LargestRows]] = {}

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step on average."""
        return round(self.practice.step_tokens)

    def micro_batches(self) -> tuple[int, ...]:
        """Divisors of the batch, as `speed.micro_batch` takes them, up to one that holds all rows of any step."""
        sizes = divisors(self.sequences)
        enough = next(size for size in sizes if size >= self.practice.rows)
        return tuple(size for size in sizes if size <= enough)

    def accumulation(self, candidate: Candidate) -> int:
        """The most micro-batches of a step."""
        return -(-self.practice.rows // candidate.micro_batch)

    def _largest(self, speed: Speed) -> dict[int, LargestRows]:
        key = (speed.micro_batch, speed.delivery().joined)
        if key not in self.found:
            self.found[key] = self.practice.largest(speed)
        return self.found[key]

    def _need(self, speed: Speed, vocab: int) -> int:
        return max(memory_of(self.settings.config, vocab, speed, one).total for one in self._largest(speed).values())

    def _measured(self, run: Run) -> Timing:
        timing = self._whole_steps(run, None)
        assert timing is not None, "there is time enough"
        return timing

    def _whole_steps(self, run: Run, seconds: float | None) -> Timing | None:
        """None where `seconds` are not enough for the fullest steps."""
        fullest, graphs = tuple(self._largest(run.speed)), run.speed.cuda_graphs
        untimed = 1 + WARM_UPS if graphs else 1
        with Steps(of_steps(run, fullest)) as steps:
            reports = steps.take(len(fullest))
            if seconds is not None and reports[0].seconds * (untimed + 1) * len(fullest) > seconds:
                return None
            steps.take((untimed - 1) * len(fullest))
            reports = steps.take(len(fullest))
            peak = self._peak(self._held_by_graphs(run))
        longest = max(report.seconds for report in reports)
        if self.steps is None:
            self.steps = self.practice.spread(_how_many(longest))
        chosen = self.steps
        if chosen:
            repeats = REPEATS if REPEATS * len(chosen) * longest <= 4 * probe.TIMED_SECONDS or seconds else 1
            with Steps(of_steps(run, chosen)) as steps:
                steps.take((2 if graphs else 1) * len(chosen))
                reports = steps.take(repeats * len(chosen))
                peak = None if peak is None else max(peak, self._peak(self._held_by_graphs(run)) or 0)
        return Timing(self.practice.step_tokens / self._rate(chosen or fullest, reports), peak)

    def _rate(self, chosen: Sequence[int], reports: Sequence[StepReport]) -> float:
        """Tokens per second over all of the steps, each with its median time."""
        seconds: dict[int, list[float]] = defaultdict(list)
        for number, report in enumerate(reports):
            seconds[chosen[number % len(chosen)]].append(report.seconds)
        whole = sum(statistics.median(times) for times in seconds.values())
        return sum(self.practice.tokens(step) for step in seconds) / max(whole, 1e-9)


def _how_many(seconds: float) -> int:
    """Steps to time where the fullest takes so long. None where that is too long for any but the fullest itself."""
    if seconds > 2 * probe.TIMED_SECONDS:
        return 0
    return max(2, min(MOST_STEPS, int(probe.TIMED_SECONDS / max(seconds, 1e-4))))
