"""Data preparation as a function."""

from pathlib import Path

from flatout.api.configs import Config, plain
from flatout.config.load import load_config
from flatout.data.pack import Progress
from flatout.data.prepare import prepare_data
from flatout.data.workers import EngineName


def prepare(
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    engine: EngineName = "local",
) -> Path:
    """Tokenizes the config's text into shards and returns their folder; does nothing when they are there.

    Input that cannot be used is left out and listed in problems.jsonl there.
    """
    wanted = plain(config or load_config())
    return prepare_data(wanted.data, wanted.clean, progress, overwrite=overwrite, workers=workers, engine=engine)[0]
