"""What a config is measured on: text, or the samples of a fine-tuning run, and which of its steps.

`practice_config` is the one door of verbs that measure steps: the data is opened there, and with it a preset's size is
settled, by what `flatout train` settles it with.

Idea: the steps of a run over samples differ. The fullest of them decides whether a setting fits, so it is taken first;
speed is that of some steps spread over an epoch, the same ones for every setting. They are whole steps of the run
itself: its samples, its order, its loader.

Contract: the user's folders are read and never written. Samples that are not there, or were made of something else, are
made in a folder that the caller throws away; what `flatout finetune` would refuse is refused.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from flatout.config.load import LoadedConfig
from flatout.config.schema import DataConfig, at_last_stage
from flatout.config.unused import check_used
from flatout.data.batch import Delivery
from flatout.data.prepare import as_prepared
from flatout.data.sample_data import SampleData
from flatout.data.sample_loader import LargestRows, fullest_steps
from flatout.data.samples import NONE_YET
from flatout.resolve.length import steps_of
from flatout.resolve.opening import (
    DataSource,
    described,
    open_sample_data,
    why_samples_are_made,
    with_tokenizer,
)
from flatout.resolve.resolve import take_device
from flatout.resolve.sizing import settled, uncounted
from flatout.resolve.switches import Speed
from flatout.tuning.minutes_probe import in_minutes
from flatout.tuning.practice_data import is_made_up, practice_data
from flatout.world import World


@dataclasses.dataclass(frozen=True)
class PracticeSamples:
    """What a run over samples takes its steps from. `settings` have the shape of the model, `fullest` are steps of the
    whole run that may have its largest micro-batch."""

    settings: LoadedConfig
    data: SampleData
    vocab: int
    fullest: tuple[int, ...]
    described: str

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on average."""
        return self.data.facts.step_tokens or 0.0

    def tokens(self, step: int) -> int:
        """Tokens of a step that something is predicted from, as a run counts them."""
        numbers = self.data.order.indices(step)
        return int((self.data.train.lengths[numbers] - 1).sum())

    @functools.cached_property
    def rows(self) -> int:
        """The most rows of a step."""
        rows = self.data.rows(Delivery(device=torch.device("cpu")))
        return rows.most_rows(self.data.order, self.fullest)

    def spread(self, count: int, steps: int | None = None) -> tuple[int, ...]:
        """So many of the first `steps`, which are an epoch if nothing is said, far apart from each other."""
        steps = steps or self.data.order.steps_per_epoch
        places = (np.arange(count) + 0.5) * steps / max(count, 1)
        return tuple(dict.fromkeys(int(place) for place in places))

    def largest(self, speed: Speed) -> dict[int, LargestRows]:
        """By their steps, the micro-batch with the most tokens and the one with the most labels; often they are one.

        Activations grow with the tokens, the loss with the labels.
        """
        rows = self.data.rows(speed.delivery())
        found = list(rows.micro_batches(self.data.order, self.fullest, speed.micro_batch))
        ways = (LargestRows.by_tokens, LargestRows.by_labels)
        return dict(max(found, key=lambda one, way=way: way(one[1])) for way in reversed(ways))


def practice_config(
    loaded: LoadedConfig,
    scratch: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    world: World | None = None,
    streams: bool = False,
) -> tuple[LoadedConfig, str]:
    """The config on data to measure on, text or samples, and in words what data that is.

    What a preset leaves open until its data is known is settled as in a run, and steps in stages are all like the last
    ones. `scratch` is a folder for what has to be made; `say` is told of that, and of what was settled. With `streams`,
    text that is streamed is read as a run reads it.
    """
    if loaded.config.chat.source is not None:
        data, described = _sample_folder(loaded, scratch, say)
        return _with_data(loaded, data), described
    world, before = world or World(), len(loaded.notices)
    device = take_device(loaded, world)
    practice = with_tokenizer(loaded, device)
    described = str(loaded.config.data.source)
    if not (streams and loaded.config.data.streaming):
        data, described = practice_data(practice, scratch)
        practice = _with_data(practice, data)
    if practice.size is not None:
        made_up = is_made_up(practice.config.data, scratch)
        described += f"; size {practice.size.name} is settled as for text that is read once" if made_up else ""
        source = DataSource(practice, device)
        known = uncounted(practice.config) if made_up else source.known()
        practice = settled(in_minutes(source, device, world, uncounted=known), known, device, world)
    for message in practice.notices[before:]:
        say(message)
    return _at_last_stage(practice, say), described


def settled_for_runs(loaded: LoadedConfig, notice: Callable[[str], None]) -> LoadedConfig:
    """A config as a run would have it, for several runs; `notice` is told what was settled."""
    train, before = loaded.config.train, len(loaded.notices)
    if loaded.config.chat.source is not None:  # a model that has a shape
        return loaded
    if loaded.size is None and (train.minutes is None or train.steps is not None):
        settings = as_prepared(loaded)
    else:
        world = World()
        device = take_device(loaded, world)
        source = DataSource(loaded, device)
        settings = settled(in_minutes(source, device, world), source.known(), device)
    for message in settings.notices[before:]:
        notice(message)
    return settings


def _with_data(loaded: LoadedConfig, data: DataConfig) -> LoadedConfig:
    return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))


def _at_last_stage(loaded: LoadedConfig, say: Callable[[str], None]) -> LoadedConfig:
    if not loaded.config.train.staged:
        return loaded
    last = at_last_stage(loaded.config)
    say(f"stages: steps are measured as in the last one, with {last.train.batch_tokens:,} tokens each")
    return dataclasses.replace(loaded, config=last)


def practice_samples(loaded: LoadedConfig, scratch: Path, say: Callable[[str], None]) -> PracticeSamples:
    """The samples that a config names. `scratch` is a folder for what has to be made, which `say` is told of."""
    fitted, told = practice_config(loaded, scratch, say)
    base, data = open_sample_data(fitted.config, None, written=loaded.sources["model.context"])
    settings = described(fitted, base)
    fullest = fullest_steps(data.train, data.order, steps_of(settings.config, data.facts))
    vocab = base.description.vocab
    return PracticeSamples(settings=settings, data=data, vocab=vocab, fullest=fullest, described=told)


def _sample_folder(loaded: LoadedConfig, scratch: Path, say: Callable[[str], None]) -> tuple[DataConfig, str]:
    check_used(loaded)
    config, written = loaded.config, loaded.sources["model.context"]
    folder, why = why_samples_are_made(config, written=written)
    described = f"the samples in {folder}"
    if why:
        described = f"samples made for the occasion, since those in {folder} cannot be used as they are: {why}"
        if why == NONE_YET:
            described = f"samples made for the occasion, since there are none in {folder} yet"
        say(f"making the samples of {config.chat.source}, in a folder for the occasion")
        folder = scratch / "samples"
    return config.data.model_copy(update={"folder": str(folder)}), described
