"""`resolve`: everything about a run is decided here, in this order, and nowhere else.

    settings   an overlay and size rules on top of what was asked for
    data       opened with the decided context; a model that is fine-tuned brings its own shape
    switches   each meets the device, in the first form of parallelism that fits all ranks
    length     schedule, steps, warm-up

What cannot be is refused by an error that names the setting to change. Ranks compare what they decided before anything
is built. What is measured (`--minutes`, `tune`) are settings that are found first and resolved like any others.
"""

import dataclasses
import os

from flatout.config.load import LoadedConfig
from flatout.device import Device, detect_device, limit_memory, use_device
from flatout.resolve.case import Probes
from flatout.resolve.checks import check_custom, check_memory, checks_on
from flatout.resolve.form import check_alike, first_form_that_fits
from flatout.resolve.length import optim_of, pace_of, schedule_of, steps_of
from flatout.resolve.memory import training_flops
from flatout.resolve.opening import DataSource, check_shares, vocabulary_of
from flatout.resolve.plan import Custom, RunPlan
from flatout.resolve.sizing import sized
from flatout.world import World


def resolve(
    source: DataSource,
    world: World,
    *,
    custom: Custom | None = None,
    probes: Probes | None = None,
    must_fit: bool = True,
) -> RunPlan:
    """The plan of a run with the settings of `source` on its data and device, as one of the processes of `world`.

    A run that is resumed from the checkpoint of `source` keeps what it has read. `custom` are parts that come from
    Python, `probes` what is tried out on the device. A step that does not fit is refused if it `must_fit`.
    """
    asked, device, resumed, custom = source.asked, source.device, source.resumed, custom or Custom()
    with world.fail_together(), world.rank0_first():  # the first one prepares the data, and the others find it
        known = source.known()
    settings = sized(asked, known, device, world)
    with world.fail_together():
        check_custom(custom, settings.config)
    with world.fail_together(), world.rank0_first():
        opened = source.open(settings)
    check_shares(opened.data, world)
    with world.fail_together():
        vocab = vocabulary_of(opened)
        start = source.start(opened, vocab)
    before = None if resumed is None else resumed.state.get("threads")
    speed, memory = first_form_that_fits(opened, vocab, device, world, custom, before, probes)
    settings, data, config = opened.settings, opened.data, opened.settings.config
    with world.fail_together():
        schedule = schedule_of(data, resumed)
        steps = steps_of(config, data.facts, schedule)
        plan = RunPlan(
            settings=settings,
            model=config.model,
            chat=config.chat,
            lora=config.lora,
            train=config.train,
            eval=config.eval,
            checkpoint=config.checkpoint,
            output=config.output,
            parallel=config.parallel,
            optim=optim_of(config, data.facts, schedule, steps),
            speed=speed,
            vocab=vocab,
            steps=steps,
            schedule=schedule,
            pace=pace_of(config, schedule, steps),
            memory=memory,
            flops_per_token=training_flops(config, vocab, data.facts.attended),
            data=data,
            base=opened.base,
            start=start,
            custom=custom,
        )
    check_alike(plan, world, resumed)
    with world.fail_together():
        if must_fit:
            check_memory(plan, resumed=resumed is not None)
        return dataclasses.replace(plan, checks=tuple(checks_on(plan, fresh=resumed is None)))


def take_device(asked: LoadedConfig, world: World) -> Device:
    """What a process of a run trains on, which it uses from here on."""
    if asked.config.train.deterministic:  # cuBLAS reads this when it starts, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    speed = asked.config.speed
    device = limit_memory(detect_device(speed.device, world.local), speed.memory_limit)
    use_device(device.torch_device)
    return device


def planned(asked: LoadedConfig, world: World | None = None, *, must_fit: bool = True) -> RunPlan:
    """The plan of a new run on this machine; its text is prepared where it is not there yet."""
    world = world or World()
    with world.fail_together():
        source = DataSource(asked, take_device(asked, world))
    return resolve(source, world, must_fit=must_fit)
