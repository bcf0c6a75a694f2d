"""Whether a config says what to fine-tune on. No torch: a command answers at once."""

import shlex
from pathlib import Path

from flatout.config.load import LoadedConfig
from flatout.errors import UsageError


def check_rows_named(loaded: LoadedConfig, resume: str | None) -> None:
    """Refuses a config without rows, or with those of a preset that are not there.

    Presets name rows and a model as an example: where they are missing, the user has to name some.
    """
    source, origin = loaded.config.chat.source, loaded.sources["chat.source"]
    if source is None:
        raise UsageError("this config has nothing to fine-tune on", "set chat.source, or use `flatout train`")
    if origin.by_user or Path(source).exists():
        return
    written = loaded.sources["model.init_from"].by_user
    model = f"model.init_from={loaded.config.model.init_from if written else 'FOLDER-OR-HUB-NAME'}"
    hint = f"name your rows and a model: flatout finetune {model} chat.source=ROWS.jsonl"
    if resume == "auto":
        from flatout.checkpoints.run_folder import choose_folder

        run = choose_folder(loaded.config.output, resume)
        if run.exists():  # by its own name it brings its settings along
            hint = f"resume {run} on what it was trained on: flatout finetune --resume {shlex.quote(str(run))}"
    raise UsageError(f"nothing was named to fine-tune on, and {source}, which {origin.where} has, is not there", hint)
