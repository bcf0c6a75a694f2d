"""The doctor's visit as a function. Needs no torch, and works with a broken one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout.api.configs import with_sources
from flatout.config.load import Config, LoadedConfig
from flatout.diagnose.examine import examine
from flatout.errors import UsageError
from flatout.finding import Finding
from flatout.launch import Launch


def doctor(
    config: Config | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    size: str | None = None,
    quick: bool = False,
    gpus: int | None = None,
    launched: Launch | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """Checks machine, data and config, and yields what was found, each with advice where there is some.

    A config that is named, with `overrides`, may have mistakes: they are findings too. `quick` leaves out compiling and
    slow trials. `gpus` is how many ranks the config is meant for, `launched` this process as the first of those that a
    launcher started.
    """
    target = str(config) if isinstance(config, str | Path) else config
    if not isinstance(target, str | LoadedConfig | None):
        target = with_sources(target)
    if overrides and isinstance(target, LoadedConfig):
        raise UsageError("overrides are for a config by its name", "change the config itself, or name its file")
    return examine(
        target,
        overrides,
        hardware=hardware,
        size=size,
        quick=quick,
        gpus=gpus,
        launched=launched,
        progress=progress,
    )
