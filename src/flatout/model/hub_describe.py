"""Our model as transformers would describe it: the config.json of an exported folder.

Contract: a model is described only as one that computes exactly what ours does; where transformers has none, all fields
that stand in the way are named. What a field is called there, or why it has no name, is declared with the field
(`fields.py`). A model that was read from a folder keeps that folder's type and every key it had.
"""

from typing import Any

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.errors import CheckpointError
from flatout.model.fields import FEATURES
from flatout.model.fields_mixing import PATTERN
from flatout.model.hub import ARCHITECTURES, Description, check_same_model


def model_type_of(config: ModelConfig) -> str:
    """The type of transformers' that computes exactly what this model does; refused where there is none."""
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
