"""Descriptions of Hugging Face models: a folder's config.json becomes our model section, and the way back.

Idea: llama, mistral, qwen2, qwen3 and gpt2 are all settings of our one decoder. How they state each of its fields is
declared with the field (`fields.py`). What a description asks for and the decoder does not have is refused by name: a
model that is nearly the right one would be fine-tuned without a word.

Contract: `read_description` reads config.json and generation_config.json and runs no code of the folder's; of a folder
that we wrote it checks every byte first (`seal`). A folder that names code of its own (`auto_map`) is refused. The
other way, a model is described only as one that computes exactly what ours does; where transformers has none, all
fields that stand in the way are named. A model that was read from a folder keeps that folder's type and every key it
had.

Trap: transformers 5 writes `dtype` where 4 wrote `torch_dtype`; both are read.
"""

import dataclasses
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.errors import CheckpointError
from flatout.files import parse_json, read_bounded, reading_hint
from flatout.model.fields import AGAIN, ANOTHER, FEATURES, PATTERN, SUPPORTED, HubValues, read_windows
from flatout.model.seal import check_seal, refuse_link

CONFIG_FILE = "config.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a folder says about the model in it."""

    folder: Path
    model_type: str
    config: ModelConfig
    vocab: int
    dtype: str | None  # of the stored weights, as the folder states it: float32, bfloat16, float16
    begin_of_text: int | None
    end_of_text: tuple[int, ...]  # the first is that of config.json; chat models often stop at others as well
    padding: int | None
    values: dict[str, Any]  # config.json as it is


def read_description(folder: Path, *, context: int | None = None, cut: bool = False) -> Description:
    """What the folder's config.json says, as a model of ours.

    `context` is how many tokens the model will see at once; null takes all that it was made for, and so does more than
    that with `cut`, where it is refused otherwise. Learned positions (gpt2) stay whole in any case.
    """
    check_seal(folder)
    values = read_json(folder / CONFIG_FILE, "name a folder with config.json and model.safetensors")
    kind = values.get("model_type")
    if values.get("auto_map") and kind in SUPPORTED:  # others are refused for their type
        raise CheckpointError(
            f"{folder / CONFIG_FILE} names code of the model's own (auto_map), which Flatout never runs: without it "
            "the model may be another",
            f"if it is a plain {kind} model all the same, take auto_map out of the file",
        )
    return describe(values, folder, context=context, cut=cut)


def describe(values: dict[str, Any], folder: Path, *, context: int | None = None, cut: bool = False) -> Description:
    """What the values of a config.json say; `folder` is where its generation_config.json lies, if it has one."""
    path = folder / CONFIG_FILE
    _check_kind(values, path)
    kind = values["model_type"]
    read = HubValues(values, path, kind)
    fields: dict[str, Any] = {}
    for feature in FEATURES:
        fields |= feature.format(kind).fields(read)
    context = fitting_context(context, fields["context"], path, cut=cut)
    if context is not None and kind != "gpt2":
        fields["context"] = context
    fields |= read_windows(read, fields["layers"], fields["context"])
    try:
        config = ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        where = ".".join(str(part) for part in first["loc"])
        what = f"it describes a model that cannot be built: {f'{where}: ' if where else ''}{reason}"
        raise read.refuse(what, AGAIN) from error
    stops = _token_ids(read, "eos_token_id")
    return Description(
        folder=folder,
        model_type=kind,
        config=config,
        vocab=read.whole("vocab_size"),
        dtype=_stated_dtype(values),
        begin_of_text=next(iter(_token_ids(read, "bos_token_id")), None),
        end_of_text=tuple(dict.fromkeys([*stops, *_more_stops(folder)])),
        padding=next(iter(_token_ids(read, "pad_token_id")), None),
        values=values,
    )


def fitting_context(asked: int | None, made_for: int, where: Path, *, cut: bool) -> int | None:
    """The context that is asked for; one that is longer than the model was made for is `cut`, or else refused."""
    if asked is not None and asked > made_for and not cut:
        raise CheckpointError(
            f"{where}: the model has {made_for:,} positions, and {asked:,} are asked for",
            f"set model.context to at most {made_for}",
        )
    return None if asked is None else min(asked, made_for)


def check_same_model(config: ModelConfig, description: Description, hint: str) -> None:
    """Refuses a model that is not the described one; the context may be shorter, and dropout is no part of it."""
    free = {field for feature in FEATURES if not feature.described for field in feature.fields}
    for field in ModelConfig.model_fields:
        ours, theirs = getattr(config, field), getattr(description.config, field)
        if ours != theirs and field not in free:
            path = description.folder / CONFIG_FILE
            raise CheckpointError(f"the model has {field} {shorten(ours)}, {path} describes {shorten(theirs)}", hint)
    context = min(config.context, description.config.context)
    if _reaches(config, context) != _reaches(description.config, context):
        path, theirs = description.folder / CONFIG_FILE, description.config
        raise CheckpointError(
            f"the model has pattern {shorten(config.pattern)} and window {config.window}, {path} describes "
            f"{shorten(theirs.pattern)} and {theirs.window}",
            hint,
        )


def _reaches(config: ModelConfig, context: int) -> list[int]:
    """How far back each block sees in so many tokens; 0 is a block of eigenstates."""
    reach = {"A": context, "W": min(context, config.window), "E": 0}
    return [reach[kind] for kind in config.kinds]


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file of a model's folder."""
    refuse_link(path, path.parent)
    try:
        values = parse_json(read_bounded(path))
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else reading_hint(error)
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "fetch the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object", "fetch the file again")
    return values


def _check_kind(values: dict[str, Any], path: Path) -> None:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        if values.get("auto_map"):
            raise CheckpointError(
                f"{path}: models of type {shorten(kind)} run code that comes with them, which Flatout never does",
                ANOTHER,
            )
        raise CheckpointError(f"{path} describes a model of type {shorten(kind)}, which is not supported", ANOTHER)
    if values.get("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantised", "use the model in its unquantised form; quantise while fine-tuning"
        )
    named = values.get("architectures")
    known = ARCHITECTURES[kind]
    if isinstance(named, list) and named and not any(name in known for name in named):
        raise CheckpointError(
            f"{path} describes {shorten(named[0])}, not a language model ({known[0]})",
            "use the model that this one was made from",
        )


# --- other facts ------------------------------------------------------------------------------------------------------


def _token_ids(read: HubValues, key: str) -> list[int]:
    found = read.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise read.refuse(f"{key} is {shorten(found)}, not a token id or a list of them", AGAIN)
    return [token for token in ids if token >= 0]  # -1 means none in old files


def _more_stops(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    return _token_ids(HubValues(read_json(path, "fetch the file again"), path), "eos_token_id")


def _stated_dtype(values: dict[str, Any]) -> str | None:
    stated = values.get("dtype") or values.get("torch_dtype")
    return stated.removeprefix("torch.") if isinstance(stated, str) else None


# --- our model as transformers would describe it ----------------------------------------------------------------------


def model_type_of(config: ModelConfig) -> str:
    """The type of transformers' that computes exactly what this model does; refused where there is none."""
    config = folded(config)
    if set(config.kinds) != {"A"}:  # first, for nothing else that is changed would help
        raise CheckpointError(
            f"transformers has no such model with model.pattern={shorten(config.pattern)}", PATTERN.no_export
        )
    if needed := _needed(config):
        beside = ("width", "heads") if _needs_qwen3(config) else ()
        if "qk_norm" in needed or "qkv_bias" in needed:
            beside += tuple(field for field in ("bias", "qkv_bias") if getattr(config, field))
        fields = dict.fromkeys((*needed, *beside))
        found = ", ".join(f"model.{field}={format_value(getattr(config, field))}" for field in fields)
        words = " ".join(f"model.{field}={format_value(value)}" for field, value in needed.items())
        reasons = [feature.no_export for feature in FEATURES if feature.without.keys() & needed.keys()]
        way_out = f"a trained model keeps its shape: one that is trained with {words} can be exported"
        raise CheckpointError(f"transformers has no such model with {found}", "; ".join([*reasons, way_out]))
    if config.family == "gpt2":
        return "gpt2"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.has_qkv_bias and not config.bias else "llama"


def changes_for_export(config: ModelConfig) -> dict[str, Any]:
    """The fields with which a model has to be trained so that transformers has it; none where it has it as it is."""
    attention = {} if set(config.kinds) == {"A"} else {"pattern": "A"}
    return {**attention, **_needed(folded(config.model_copy(update=attention)))}


def folded(config: ModelConfig) -> ModelConfig:
    """The model without what its weights can take in (`hub_folder.folded_weights`)."""
    folds = [feature.fold for feature in FEATURES if feature.fold is not None and feature.fold.when(config)]
    return config.model_copy(update={field: value for fold in folds for field, value in fold.fields.items()})


def _needed(config: ModelConfig) -> dict[str, Any]:
    """Every field that stands in the way, with a value that does not; together they make a model of transformers'."""
    needed: dict[str, Any] = {}
    for feature in FEATURES:
        needed |= {**feature.format(config.family).only, **feature.without}
    if _needs_qwen3(config):
        needed |= {"qk_norm": True, "bias": False, "qkv_bias": None}
    elif config.family == "gpt" and (config.bias or config.has_qkv_bias):
        needed |= {"qk_norm": False} | ({} if config.has_qkv_bias else {"qkv_bias": None})
    return {field: value for field, value in needed.items() if getattr(config, field) != value}


def _needs_qwen3(config: ModelConfig) -> bool:
    """llama's width must be a multiple of its heads; qwen3, which is qk_norm without biases, takes any."""
    biased = config.has_qkv_bias and not config.bias  # qwen2, which takes any as well
    return bool(config.width % config.heads) and not biased and (config.bias or not config.qk_norm)


def description_of(
    config: ModelConfig,
    vocab: int,
    *,
    dtype: str,
    end_of_text: int | None = None,
    source: Description | None = None,
) -> dict[str, Any]:
    """config.json for a model; `source` is what the model was read from, and all else that it says is kept."""
    if source is None:
        kind = model_type_of(config)
        values: dict[str, Any] = {"architectures": [ARCHITECTURES[kind][0]], "model_type": kind}
        for feature in FEATURES:
            values |= feature.format(kind).values(config, kind)
        values |= {"vocab_size": vocab, "bos_token_id": end_of_text, "eos_token_id": end_of_text}
        return values | {"initializer_range": 0.02, "torch_dtype": dtype}
    check_same_model(config, source, "export it without that folder's description")
    values = {**source.values, "vocab_size": vocab}
    values.pop("auto_map", None)  # the code that it names does not come along
    spellings = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    return values | dict.fromkeys(spellings, dtype)
