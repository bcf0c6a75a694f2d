"""Descriptions of Hugging Face models: config.json to our model section, and back.

Models of all types in `families.py` are settings of our one decoder. `fields.py` declares how each of them states
a field. A setting that our decoder lacks is refused by name; otherwise a slightly different model would be fine-tuned
silently.

Contract: `read_description` reads config.json and generation_config.json, which a GGUF file's metadata stand for, and
runs no code from the folder. In a folder written by us it checks every byte first (`seal`). A folder with code of its
own (`auto_map`) is refused. An exported model computes exactly what ours does. If transformers has no such model, the
error names all fields that prevent it. A model read from a folder keeps that folder's model type and all keys of its
config.json.

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
from flatout.gguf_file import is_gguf, read_gguf
from flatout.model.families import (
    AGAIN,
    ANOTHER,
    ARCHITECTURES,
    FIXED,
    GEMMAS,
    HINTS,
    PATTERNS,
    SUPPORTED,
    WHOLE_WIDTH,
    HubValues,
)
from flatout.model.fields import FEATURES, PATTERN, read_pattern
from flatout.model.gguf_weights import config_values
from flatout.model.seal import check_seal, refuse_link, sealed_names

CONFIG_FILE = "config.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A model as its folder describes it."""

    folder: Path
    model_type: str
    config: ModelConfig
    vocab: int
    dtype: str | None  # stated type of the stored weights: float32, bfloat16, float16
    begin_of_text: int | None
    end_of_text: tuple[int, ...]  # the first is that of config.json; chat models often have more stop tokens
    padding: int | None
    values: dict[str, Any]  # of config.json, unchanged


def read_description(folder: Path, *, context: int | None = None, cut: bool = False) -> Description:
    """The folder's model as our model section.

    `context`: the context length to use; None: that of the folder. A longer one is refused, or cut to it with `cut`.
    Learned positions (gpt2) are never shortened.
    """
    if is_gguf(folder):
        if folder.name in sealed_names(folder.parent):
            check_seal(folder.parent)
        return describe(config_values(read_gguf(folder)), folder, context=context, cut=cut)
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
    """As `read_description`, of the values of a config.json. `folder` may hold a generation_config.json."""
    path = _config_of(folder)
    _check_kind(values, path)
    kind = values["model_type"]
    read = HubValues(values, path, kind)
    fields = dict(FIXED[kind])
    for feature in FEATURES:
        fields |= feature.format(kind).fields(read)
    context = fitting_context(context, fields["context"], path, cut=cut)
    if context is not None and kind != "gpt2":
        fields["context"] = context
    fields |= read_pattern(read, fields["layers"], fields["context"])
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


def _config_of(folder: Path) -> Path:
    """The file that describes a model, for errors."""
    return folder if is_gguf(folder) else folder / CONFIG_FILE


def fitting_context(asked: int | None, made_for: int, where: Path, *, cut: bool) -> int | None:
    """The requested context length; one longer than the model's is refused, or cut to it with `cut`."""
    if asked is not None and asked > made_for and not cut:
        raise CheckpointError(
            f"{where}: the model has {made_for:,} positions, and {asked:,} are asked for",
            f"set model.context to at most {made_for}",
        )
    return None if asked is None else min(asked, made_for)


def check_same_model(config: ModelConfig, description: Description, hint: str) -> None:
    """Refuses a model that differs from the description. A shorter context and another dropout are accepted."""
    free = {field for feature in FEATURES if not feature.described for field in feature.fields}
    for field in ModelConfig.model_fields:
        ours, theirs = getattr(config, field), getattr(description.config, field)
        if ours != theirs and field not in free:
            path = _config_of(description.folder)
            raise CheckpointError(f"the model has {field} {shorten(ours)}, {path} describes {shorten(theirs)}", hint)
    context = min(config.context, description.config.context)
    if _reaches(config, context) != _reaches(description.config, context):
        path, theirs = _config_of(description.folder), description.config
        raise CheckpointError(
            f"the model has pattern {shorten(config.pattern)} and window {config.window}, {path} describes "
            f"{shorten(theirs.pattern)} and {theirs.window}",
            hint,
        )


def _reaches(config: ModelConfig, context: int) -> list[int]:
    """How many tokens each block attends to within `context`: 0 for eigenstates, below 0 without positions."""
    reach = {"A": context, "N": -context, "W": min(context, config.window), "E": 0}
    if config.rope_local_base is not None:  # which makes a W block another one than A, however far both reach
        reach["W"] += context
    return [reach[kind] for kind in config.kinds]


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder."""
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
        raise CheckpointError(
            f"{path} describes a model of type {shorten(kind)}, which is not supported", HINTS.get(str(kind), ANOTHER)
        )
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


# --- tokens and types -------------------------------------------------------------------------------------------------


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


# --- the way back: config.json for our model --------------------------------------------------------------------------


def model_type_of(config: ModelConfig) -> str:
    """The model type of transformers that computes exactly the same; an error if there is none."""
    kind, needed = _nearest(config)
    if "pattern" in needed:  # first, because no change of other fields would help
        raise CheckpointError(
            f"transformers has no such model with model.pattern={shorten(config.pattern)}", PATTERN.no_export
        )
    if needed:
        config = folded(config)
        beside = ("width", "heads") if config.width % config.heads else ()
        if "qk_norm" in needed or "qkv_bias" in needed:
            beside += tuple(field for field in ("bias", "qkv_bias") if getattr(config, field))
        fields = dict.fromkeys((*needed, *beside))
        found = ", ".join(f"model.{field}={format_value(getattr(config, field))}" for field in fields)
        words = " ".join(f"model.{field}={format_value(value)}" for field, value in needed.items())
        reasons = [feature.no_export for feature in FEATURES if feature.without.keys() & needed.keys()]
        way_out = f"a trained model keeps its shape: one that is trained with {words} can be exported"
        raise CheckpointError(f"transformers has no such model with {found}", "; ".join([*reasons, way_out]))
    return kind


def changes_for_export(config: ModelConfig) -> dict[str, Any]:
    """The fields that a model needs to be exportable to transformers; none if it is already."""
    return _nearest(config)[1]


def _nearest(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model type that needs the fewest fields changed, and these with their values; none if they are the same."""
    config = folded(config)
    kinds = [kind for kind, fixed in FIXED.items() if fixed["family"] == config.family and kind != "mistral"]
    kinds = [kind for kind in kinds if not (kind in WHOLE_WIDTH and config.width % config.heads)]
    needed = [(kind, _needed(config, kind)) for kind in kinds]
    return min(needed, key=lambda pair: len(pair[1]))


def _needed(config: ModelConfig, kind: str) -> dict[str, Any]:
    """Every field that keeps a model from being of this type, with a value that does not."""
    wanted = dict(FIXED[kind])
    for feature in FEATURES:
        wanted |= feature.without
    if config.has_qkv_bias == config.bias and wanted.get("qkv_bias") is None:
        wanted.pop("qkv_bias", None)
    if kind in GEMMAS:
        wanted["embedding_scale"] = config.width**0.5
    if kind == "gemma3_text" and config.rope_local_base is None:
        wanted["rope_local_base"] = 10000.0
    letters, found = PATTERNS.get(kind, "A"), set(config.kinds)
    if not found <= set(letters) or (kind == "smollm3" and "N" not in found) or (kind == "phi3" and len(found) > 1):
        wanted["pattern"] = letters
    if config.rope_scaling not in ((None, "longrope") if kind == "phi3" else (None, "linear", "llama3")):
        wanted["rope_scaling"] = None
    return {field: value for field, value in wanted.items() if getattr(config, field) != value}


def folded(config: ModelConfig) -> ModelConfig:
    """The model without the features that can be folded into its weights (`hub_folder.folded_weights`)."""
    folds = [feature.fold for feature in FEATURES if feature.fold is not None and feature.fold.when(config)]
    return config.model_copy(update={field: value for fold in folds for field, value in fold.fields.items()})


def description_of(
    config: ModelConfig,
    vocab: int,
    *,
    dtype: str,
    end_of_text: int | None = None,
    source: Description | None = None,
) -> dict[str, Any]:
    """config.json for a model. `source` describes the folder it came from, whose other keys are kept."""
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
