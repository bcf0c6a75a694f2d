"""Adapters as other programs have them: PEFT's folder, written with a run's checkpoints, and one to go on from.

`RUN/adapter` always holds what `flatout chat RUN` would load: the best checkpoint so far, or else the newest. Beside
the adapter lie the tokenizer and the chat template that it was taught with, so PEFT and vLLM need nothing else but the
base model, whose name is in adapter_config.json.

Contract: the folder is replaced as a whole. The hash of the base is kept in it, and an adapter of ours is not put on
another base. `lora.init_from` takes over rank, alpha, targets and kind from the folder; what a user wrote that says
otherwise is refused.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout.config.schema import LoraConfig, RunConfig
from flatout.data.chat_template import ChatTemplate
from flatout.data.model_folder import TOKENIZER, read_model_tokenizer, read_templates
from flatout.data.portable import tokenizer_files, with_stops, with_template
from flatout.data.tokenizer import Tokenizer
from flatout.engine.run_folder import checkpoints_of, is_checkpoint
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.files import canonical_json
from flatout.model.adapter_files import CONFIG, AdapterOrigin, read_origin, save_adapter
from flatout.model.adapter_targets import ALL_LINEAR, choose, targets_of
from flatout.model.adapters import Adapters
from flatout.model.gpt import empty_model
from flatout.model.hub import Description
from flatout.model.hub_weights import companions

ADAPTER = "adapter"
FACTS = "flatout.json"  # beside the adapter: the hash of its base, and its step
# What makes up an adapter in our config, and in PEFT's plan under the same names.
_SETTINGS = ("rank", "alpha", "rank_stabilised", "dora")


def files_beside(
    tokenizer: Tokenizer,
    *,
    context: int,
    description: Description | None,
    chat: bool,
    template: ChatTemplate | None,
    stops: tuple[int, ...],
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files that go beside weights or adapters, and what there is to say of them.

    The base's own files are taken where it has the same tokenizer: they say more than ours do. After `chat` training
    the template is the one it was taught with, whatever the base has; None means that it was taught without any.
    """
    folder = None if description is None or is_checkpoint(description.folder) else description.folder
    files = {} if folder is None else companions(folder)
    remarks: tuple[str, ...] = ()
    if folder is None or not _same_tokenizer(folder, tokenizer):
        own, remarks = tokenizer_files(tokenizer, context)
        files = {name: content for name, content in files.items() if name.startswith("generation_")} | own
        chat = chat or template is not None
    theirs = {} if folder is None else read_templates(folder)
    if chat and (template is None or template.texts != theirs):
        files = with_template(files, template)
    return with_stops(files, stops), remarks


def _same_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    try:
        return (folder / TOKENIZER).is_file() and read_model_tokenizer(folder).fingerprint == tokenizer.fingerprint
    except DataError:
        return False


def write_adapter(
    adapters: Adapters, folder: Path, *, base: str, fingerprint: str | None, step: int | None, files: dict[str, bytes]
) -> None:
    """PEFT's folder. A base on this machine is named by its whole path, so that it is found from everywhere."""
    place = Path(base)
    kept = {name: content for name, content in files.items() if not name.startswith("generation_")}
    save_adapter(
        adapters,
        folder,
        base=str(place.resolve()) if place.is_dir() else base,
        files={**kept, FACTS: canonical_json({"base": fingerprint, "step": step})},
    )


def _facts(folder: Path) -> dict[str, Any]:
    """What we wrote beside an adapter for ourselves; nothing where others wrote it."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def step_of(folder: Path) -> int | None:
    """The step that an adapter's folder holds."""
    step = _facts(folder).get("step")
    return step if isinstance(step, int) else None


def stored_base(folder: Path) -> str | None:
    """The hash of the base that an adapter of ours was trained on; None for those of others."""
    base = _facts(folder).get("base")
    return base if isinstance(base, str) else None


# --- going on from a folder -------------------------------------------------------------------------------------------


def adapter_at(name: str) -> Path:
    """The folder that `lora.init_from` means: one of PEFT's, or the run of ours that wrote one."""
    folder = Path(name)
    if (folder / CONFIG).is_file():
        return folder
    if (folder / ADAPTER / CONFIG).is_file():
        return folder / ADAPTER
    if folder.is_dir() and (is_checkpoint(folder) or checkpoints_of(folder).is_dir()):
        hint = f"write them with `flatout export {name} FOLDER --adapter`, if it has adapters"
    else:
        hint = "name a folder with adapter_config.json and adapter_model.safetensors, or a run that was trained by LoRA"
    raise CheckpointError(f"{name} holds no adapter", hint)


def with_adapter(config: RunConfig, description: Description, written: Callable[[str], str | None]) -> RunConfig:
    """The config with the settings of the adapter it goes on from."""
    if config.lora.init_from is None:
        return config
    if not config.lora.rank:
        raise ConfigError("lora.init_from is set, but lora.rank is 0", "leave one of the two out")
    origin = read_origin(adapter_at(config.lora.init_from))
    found = {**{name: getattr(origin.plan, name) for name in _SETTINGS}, "targets": _targets(origin, description)}
    found["alpha"] = float(found["alpha"])
    for name, value in found.items():
        ours, default = getattr(config.lora, name), LoraConfig.model_fields[name].default
        where = written(f"lora.{name}")
        same = sorted(ours) == sorted(value) if isinstance(ours, list) and isinstance(value, list) else ours == value
        if where and not same and ours != default:
            raise ConfigError(
                f"{where}: lora.{name} is {ours}, but the adapter in {origin.folder} has {value}",
                f"leave lora.{name} out, or begin a new adapter without lora.init_from",
            )
    return config.model_copy(update={"lora": config.lora.model_copy(update=found)})


def _targets(origin: AdapterOrigin, description: Description) -> list[str]:
    """The adapter's targets as our config can say them: its names, or whole paths."""
    plan = origin.plan
    if plan.targets == ALL_LINEAR and plan.layers is None and not plan.exclude:
        return [ALL_LINEAR]
    model = empty_model(description.config, description.vocab, device="meta")
    try:
        choices = choose(plan, targets_of(model), strict=False)
    except ConfigError as error:
        raise CheckpointError(f"{origin.folder / CONFIG}: {error.message}", error.hint) from error
    if {(choice.rank, choice.scale) for choice in choices} != {(plan.rank, plan.scale(plan.rank, plan.alpha))}:
        raise CheckpointError(
            f"{origin.folder} has ranks or alphas that differ between its targets, which cannot be trained on here",
            "merge it into its base first, and begin a new adapter on that",
        )
    names = [name for name in plan.targets if isinstance(plan.targets, tuple)]
    plain = dataclasses.replace(plan, targets=tuple(names) or ALL_LINEAR, exclude=(), layers=None)
    if names and choose(plain, targets_of(model), strict=False) == choices:
        fitting = {choice.target.path for choice in choices}
        return [name for name in names if any(path == name or path.endswith(f".{name}") for path in fitting)]
    return [choice.target.path for choice in choices]
