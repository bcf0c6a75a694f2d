"""A run that is decided and built, without being trained."""

from flatout.checkpoints.checkpoint import Checkpoint
from flatout.config.load import LoadedConfig
from flatout.data.array_data import Arrays
from flatout.engine.custom import CustomParts
from flatout.engine.run import Run
from flatout.resolve.opening import DataSource
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import resolve, take_device
from flatout.resolve.sizing import as_before
from flatout.world import World


def planned(
    loaded: LoadedConfig,
    world: World | None = None,
    *,
    resumed: Checkpoint | None = None,
    arrays: Arrays | None = None,
    custom: CustomParts | None = None,
) -> RunPlan:
    world = world or World()
    asked = loaded if resumed is None else as_before(loaded, resumed.config)
    with world.fail_together():
        source = DataSource(asked, take_device(asked, world), arrays=arrays, resumed=resumed)
    return resolve(source, world, custom=(custom or CustomParts()).facts)


def set_up(
    loaded: LoadedConfig,
    world: World | None = None,
    *,
    resumed: Checkpoint | None = None,
    arrays: Arrays | None = None,
    custom: CustomParts | None = None,
) -> Run:
    plan = planned(loaded, world, resumed=resumed, arrays=arrays, custom=custom)
    return Run(plan, world, resumed=resumed, custom=custom)
