"""Adapters as other programs have them: PEFT's folder, written with a run's checkpoints, and one to continue from.

`RUN/adapter` always holds what `flatout chat RUN` would load: the best checkpoint so far, or else the newest. Beside
the adapter lie the tokenizer and the chat template that it was taught with, so PEFT and vLLM need nothing else but the
base model, whose name is in adapter_config.json.

Contract: the folder is replaced as a whole, and only if it holds nothing but what we wrote (`OccupiedError`). Among the
hashes in flatout.json is that of the base, and an adapter of ours is not put on another base; so is whether the base
was in 4 bits, for us to round it again. Other programs pass over that file.
`lora.init_from` takes over ranks, alphas, targets and kind from the folder; what a user wrote that says otherwise is
refused. A run that was begun so and is resumed has them from its checkpoint.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.checkpoints.run_folder import checkpoints_of, is_checkpoint
from flatout.config.schema import LoraConfig
from flatout.config.source import Source
from flatout.config.yaml_loader import format_value, shorten
from flatout.data.chat_template import ChatTemplate, read_templates
from flatout.data.tokenizer import Tokenizer
from flatout.data.tokenizer_files import TOKENIZER, read_model_tokenizer, tokenizer_files, with_stops, with_template
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.model.adapter_files import CONFIG, AdapterOrigin, check_stored, load_into, read_origin, save_adapter
from flatout.model.adapter_targets import ALL_LINEAR, AdapterPlan, Choice, Target, choose, targets_of
from flatout.model.adapters import BIASES, Adapters, settled, weights_of
from flatout.model.gpt import empty_model
from flatout.model.hub import Description
from flatout.model.hub_weights import companions
from flatout.model.patterns import endings
from flatout.model.seal import SEAL, check_seal, read_seal

ADAPTER = "adapter"
# What makes up an adapter in our config, and in PEFT's plan under the same names.
_SETTINGS = ("rank", "alpha", "rank_stabilised", "dora")
_LISTS = ("targets", "ranks", "alphas", "also")


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
    notices: tuple[str, ...] = ()
    if folder is None or not _same_tokenizer(folder, tokenizer):
        own, notices = tokenizer_files(tokenizer, context)
        files = {name: content for name, content in files.items() if name.startswith("generation_")} | own
        chat = chat or template is not None
    theirs = {} if folder is None else read_templates(folder)
    if chat and (template is None or template.texts != theirs):
        files = with_template(files, template)
    return with_stops(files, stops), notices


def _same_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    try:
        return (folder / TOKENIZER).is_file() and read_model_tokenizer(folder).fingerprint == tokenizer.fingerprint
    except DataError:
        return False


def write_adapter(
    adapters: Adapters,
    folder: Path,
    base: str,
    files: Mapping[str, bytes],
    facts: Mapping[str, str | int | None],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """PEFT's folder. A base on this machine is named by its whole path, so that it is found from everywhere.

    `facts` are what `flatout.json` keeps: base (a hash of its weights), quantize and step. `tensors` are those of that
    step, where training has gone on since.
    """
    base = str(Path(base).resolve()) if os.path.isdir(base) else base
    kept = {name: content for name, content in files.items() if not name.startswith("generation_")}
    save_adapter(adapters, folder, base=base, files=kept, facts=facts, tensors=tensors)


IN_4_BITS = "its base was in 4 bits (NF4): Flatout takes it so again, other programs have to be told (load_in_4bit)"


def who_loads(name: str, description: Description) -> str | None:
    """What to say of a base that others cannot load; None where they can. `name` is where it lies."""
    if not is_checkpoint(description.folder):
        return None
    if not description.values:
        return "its base is a checkpoint of ours, of a shape that transformers has not: only Flatout loads it"
    return f"its base is a checkpoint of ours: for PEFT, write that as a folder with `flatout export {name} FOLDER`"


def _facts(folder: Path) -> dict[str, Any]:
    """What we wrote beside an adapter for ourselves; nothing where others wrote it."""
    content = read_seal(folder) or {}
    return content.get("facts", content)


def step_of(folder: Path) -> int | None:
    """The step that an adapter's folder holds; None where it does not say."""
    try:
        step = _facts(folder).get("step")
    except CheckpointError:  # damaged: it is written anew, by who asks for the step
        return None
    return step if isinstance(step, int) else None


def stored_base(folder: Path) -> str | None:
    """The hash of the base that an adapter of ours was trained on; None for those of others."""
    base = _facts(folder).get("base")
    return base if isinstance(base, str) else None


def stored_quantize(folder: Path) -> str:
    """How the base of an adapter of ours was quantized; that of others counts as not."""
    quantize = _facts(folder).get("quantize", "none")
    if quantize not in ("none", "nf4"):
        raise CheckpointError(
            f"{folder / SEAL} says that the base was quantized as {shorten(quantize)}, which is not known here",
            "update Flatout to read it",
        )
    return quantize


# --- continuing from a folder -----------------------------------------------------------------------------------------


def adapter_at(name: str) -> Path:
    """The folder that `lora.init_from` means: one of PEFT's, or the run of ours that wrote one."""
    folder = Path(name)
    if os.path.isfile(folder / CONFIG):  # of os.path: a name that is too long is that of no file
        return folder
    if os.path.isfile(folder / ADAPTER / CONFIG):
        return folder / ADAPTER
    check_seal(folder)  # of a folder that lost its adapter_config.json
    if os.path.isdir(folder) and (is_checkpoint(folder) or checkpoints_of(folder).is_dir()):
        hint = f"write them with `flatout export {name} FOLDER --adapter`, if it has adapters"
    else:
        hint = "name a folder with adapter_config.json and adapter_model.safetensors, or a run that was trained by LoRA"
    there = os.path.exists(folder)
    told = f"{name} holds no adapter" if there else f"there is no folder {name:.200} (lora.init_from)"
    raise CheckpointError(told, hint)


def continue_from(name: str, adapters: Adapters, base: str, base_name: str | None) -> None:
    """Gives adapters the values in the folder that `lora.init_from` means; `base` is the hash of what is under them."""
    folder = adapter_at(name)
    if stored_base(folder) not in (None, base):
        raise CheckpointError(
            f"the adapter in {folder} was trained on other weights than those of {base_name}",
            "set model.init_from to the model that it was trained on",
        )
    load_into(adapters, folder)


def with_adapter(
    lora: LoraConfig,
    description: Description,
    source: Callable[[str], Source],
    *,
    begun: LoraConfig | None = None,
) -> LoraConfig:
    """The settings of the adapter that a run continues from, where it does.

    `begun` is what the checkpoint of a resumed run says: it began with that folder as it was then, and what lies
    there today, if anything, does not matter any more.
    """
    name = lora.init_from
    if name is None:
        return lora
    if not lora.rank:
        raise ConfigError("lora.init_from is set, but lora.rank is 0", "leave one of the two out")
    if begun is not None and begun.rank and begun.init_from is not None and Path(begun.init_from) == Path(name):
        found = {field: getattr(begun, field) for field in (*_SETTINGS, *_LISTS)}
        whose, hint = "the run", "leave lora.{} out: a resumed run keeps the adapter that it has"
    elif begun is not None and not os.path.isdir(name):
        return lora
    else:
        origin = read_origin(adapter_at(name))
        found = {field: getattr(origin.plan, field) for field in _SETTINGS}
        found |= {"alpha": float(origin.plan.alpha), **_lists(origin, description)}
        whose = f"the adapter in {origin.folder}"
        hint = "leave lora.{} out, or begin a new adapter without lora.init_from"
    for field, value in found.items():
        ours, written = getattr(lora, field), source(f"lora.{field}")
        if written.by_user and written.where and not _mean_the_same(field, ours, value, found["rank"], description):
            raise ConfigError(
                f"lora.{field} is {format_value(ours)}, but {whose} has {format_value(value)}",
                hint.format(field),
                where=written.where,
                setting=f"lora.{field}",
            )
    return lora.model_copy(update=found)


def _mean_the_same(field: str, ours: Any, theirs: Any, rank: int, description: Description) -> bool:
    """Whether two values of a setting make the same adapter: a null alpha is a number, and lists have many forms."""
    if field == "also":
        return settled(ours, description.config) == tuple(theirs)
    if field == "alpha":
        return (2.0 * rank if ours is None else ours) == (2.0 * rank if theirs is None else theirs)
    if field not in ("targets", "ranks", "alphas") or ours == theirs:
        return ours == theirs
    targets = targets_of(empty_model(description.config, description.vocab, device="meta"))

    def choices(values: list[str]) -> list[Choice]:
        lora = LoraConfig.model_validate({field: values})
        lists = {"ranks": lora.named_ranks, "alphas": lora.named_alphas, "targets": plan_targets(lora.targets)}
        return choose(AdapterPlan(rank=rank, **lists), targets)

    try:
        return choices(ours) == choices(theirs)
    except (ConfigError, ValueError):
        return False


def adapter_plan(config: LoraConfig) -> AdapterPlan:
    return AdapterPlan(
        rank=config.rank,
        alpha=2.0 * config.rank if config.alpha is None else config.alpha,
        dropout=config.dropout,
        targets=plan_targets(config.targets),
        ranks=config.named_ranks,
        alphas=config.named_alphas,
        also=tuple(config.also),
        rank_stabilised=config.rank_stabilised,
        dora=config.dora,
    )


def plan_targets(names: list[str]) -> str | tuple[str, ...]:
    return ALL_LINEAR if names == [ALL_LINEAR] else tuple(names)


def _lists(origin: AdapterOrigin, description: Description) -> dict[str, list[str]]:
    """The adapter's targets, ranks and alphas as our config can say them: targets by its names, or by whole paths.

    Refuses ranks that the adapter's file does not have, before a run takes memory for them.
    """
    plan, model = origin.plan, empty_model(description.config, description.vocab, device="meta")
    targets = targets_of(model)
    try:
        choices = choose(plan, targets, strict=False)
        also = settled(plan.also, model.config)
    except ConfigError as error:
        raise CheckpointError(f"{origin.folder / CONFIG}: {error.message}", error.hint) from error
    check_stored(origin, model, choices)
    paths = tuple(choice.target.path for choice in choices)
    # Those that fit nothing do nothing there, and would be refused here.
    numbers = {
        field: [f"{pattern}={number}" for pattern, number in pairs if endings(pattern, paths)]
        for field, pairs in (("ranks", plan.ranks), ("alphas", plan.alphas))
    }
    # Biases of a model without any: PEFT lets them pass.
    also = [name for name in also if name != BIASES or weights_of(model, [BIASES], strict=False)]
    return {"targets": _targets(plan, targets, choices), "also": also, **numbers}


def _targets(plan: AdapterPlan, targets: list[Target], choices: list[Choice]) -> list[str]:
    if plan.targets == ALL_LINEAR and plan.layers is None and not plan.exclude:
        return [ALL_LINEAR]
    names = [name for name in plan.targets if isinstance(plan.targets, tuple)]
    plain = dataclasses.replace(plan, targets=tuple(names) or ALL_LINEAR, exclude=(), layers=None)
    if names and choose(plain, targets, strict=False) == choices:
        fitting = {choice.target.path for choice in choices}
        return [name for name in names if any(path == name or path.endswith(f".{name}") for path in fitting)]
    return [choice.target.path for choice in choices]
