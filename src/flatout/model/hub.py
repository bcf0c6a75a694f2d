"""Descriptions of Hugging Face models: a folder's config.json becomes our model section.

Idea: llama, mistral, qwen2, qwen3 and gpt2 are all settings of our one decoder. What a description asks for and the
decoder does not have is refused by name: a model that is nearly the right one would be fine-tuned without a word.

Contract: `read_description` reads config.json and generation_config.json and runs no code of the folder's; of a folder
that we wrote it checks every byte first (`seal`). A key that is missing has the value that transformers gives it, which
differs between model types. A folder that names code of its own (`auto_map`) is refused unless that is to be ignored.

Trap: transformers 5 writes `rope_parameters` and `dtype` where 4 wrote `rope_theta`, `rope_scaling` and `torch_dtype`.
Both are read, and where a file has both, `rope_scaling` wins, as in transformers.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError
from flatout.files import CHECK_ACCESS, parse_json
from flatout.model.seal import check_seal, refuse_link

CONFIG_FILE = "config.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# What transformers takes where a description is silent.
_LLAMA = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_QWEN2 = {
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
}
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
SUPPORTED = tuple(_DEFAULTS)
_MOST = 2**40  # of any number: beyond, torch cannot even say what it would need
_NO_SHAPE = ("context", "dropout", "vocab", "init_from", "ignore_auto_map")
_ANOTHER = f"use a model of type {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"


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


class _Values:
    """The keys of a description, each checked for its type when it is asked for."""

    def __init__(self, values: dict[str, Any], path: Path, defaults: dict[str, Any]) -> None:
        self.values, self.path, self.defaults = values, path, defaults

    def refuse(self, what: str, hint: str = _ANOTHER) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", hint)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self.defaults.get(key, default))

    def whole(self, key: str, default: Any = None, *, least: int = 1) -> int:
        """A whole number; required where there is no default."""
        value = self.get(key, default)
        if value is None and key not in self.values:
            raise self.refuse(f"{key} is missing", "fetch the folder again")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self.refuse(
                f"{key} is {shorten(value)}, not a whole number of at least {least}", "fetch the folder again"
            )
        return value

    def whole_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.whole(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        # Compared before it is a float: Python's whole numbers may be larger than any.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            missing = value is None and key not in self.values
            raise self.refuse(
                f"{key} is {'missing' if missing else shorten(value)}, not a number above 0", "fetch the folder again"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shorten(value)}, not true or false", "fetch the folder again")
        return value


def read_description(
    folder: Path, *, context: int | None = None, cut: bool = False, ignore_code: bool = False
) -> Description:
    """What the folder's config.json says, as a model of ours.

    `context` is how many tokens the model will see at once; null takes all that it was made for, and so does more than
    that with `cut`, where it is refused otherwise. Learned positions (gpt2) stay whole in any case.
    """
    check_seal(folder)
    values = read_json(folder / CONFIG_FILE, "name a folder with config.json and model.safetensors")
    kind = values.get("model_type")
    if values.get("auto_map") and kind in SUPPORTED and not ignore_code:  # others are refused for their type
        raise CheckpointError(
            f"{folder / CONFIG_FILE} names code of the model's own (auto_map), which Flatout never runs: without it "
            "the model may be another",
            f"if it is a plain {kind} model all the same, take auto_map out of the file, or train it with "
            "model.ignore_auto_map=true",
        )
    found = describe(values, folder, context=context, cut=cut)
    return dataclasses.replace(found, config=found.config.model_copy(update={"ignore_auto_map": ignore_code}))


def describe(values: dict[str, Any], folder: Path, *, context: int | None = None, cut: bool = False) -> Description:
    """What the values of a config.json say; `folder` is where its generation_config.json lies, if it has one."""
    path = folder / CONFIG_FILE
    _check_kind(values, path)
    kind = values["model_type"]
    read = _Values(values, path, _DEFAULTS[kind])
    fields = _gpt2(read) if kind == "gpt2" else _llama_like(read, kind)
    made_for = fields["context"]
    if cut and context is not None:
        context = min(context, made_for)
    if context is not None and context > made_for:
        raise read.refuse(
            f"the model has {made_for:,} positions, and {context:,} are asked for",
            f"set model.context to at most {made_for}",
        )
    if context is not None and kind != "gpt2":
        fields["context"] = context
    _check_window(read, kind, fields)
    try:
        config = ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        where = ".".join(str(part) for part in first["loc"])
        raise read.refuse(
            f"it describes a model that cannot be built: {f'{where}: ' if where else ''}{reason}",
            "fetch the folder again",
        ) from error
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


def check_same_model(config: ModelConfig, description: Description, hint: str) -> None:
    """Refuses a model that is not the described one; the context may be shorter, and dropout is no part of it."""
    for field in ModelConfig.model_fields:
        ours, theirs = getattr(config, field), getattr(description.config, field)
        if ours != theirs and field not in _NO_SHAPE:
            path = description.folder / CONFIG_FILE
            raise CheckpointError(f"the model has {field} {shorten(ours)}, {path} describes {shorten(theirs)}", hint)


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file of a model's folder."""
    refuse_link(path, path.parent)
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else CHECK_ACCESS
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "fetch the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object", "fetch the file again")
    return values


def _check_kind(values: dict[str, Any], path: Path) -> None:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        if values.get("auto_map"):
            raise CheckpointError(
                f"{path}: models of type {shorten(kind)} run code that comes with them, which Flatout never does",
                _ANOTHER,
            )
        raise CheckpointError(f"{path} describes a model of type {shorten(kind)}, which is not supported", _ANOTHER)
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


# --- one model type each ----------------------------------------------------------------------------------------------


def _gpt2(read: _Values) -> dict[str, Any]:
    fixed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * read.whole("n_embd")),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, allowed in fixed.items():
        found = read.get(key, allowed[0])
        if found not in allowed:
            raise read.refuse(
                f"{key} is {shorten(found)}, GPT-2 has {shorten(allowed[0])}", "only plain GPT-2 weights can be loaded"
            )
    dropout = read.get("resid_pdrop", 0.1)
    return {
        "family": "gpt2",
        "layers": read.whole("n_layer"),
        "width": read.whole("n_embd"),
        "heads": read.whole("n_head"),
        "context": read.whole("n_positions", 1024),
        "dropout": float(dropout) if isinstance(dropout, int | float) else dropout,
    }


def _llama_like(read: _Values, kind: str) -> dict[str, Any]:
    activation = read.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise read.refuse(f"hidden_act is {shorten(activation)}, only silu is supported")
    attention_bias = kind in ("llama", "qwen3") and read.flag("attention_bias")
    mlp_bias = kind == "llama" and read.flag("mlp_bias")
    if attention_bias != mlp_bias:
        raise read.refuse(
            f"attention_bias is {_word(attention_bias)} and mlp_bias {_word(mlp_bias)}; only both or none are supported"
        )
    width, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    size = read.whole_or_none("head_dim")
    groups = read.whole_or_none("num_key_value_heads")
    context = read.whole("max_position_embeddings")
    return {
        "family": "gpt",
        "layers": read.whole("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": None if groups == heads else groups,
        "head_size": None if size is None or size * heads == width else size,
        "context": context,
        "norm": "rmsnorm",
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "positions": "rope",
        "mlp": "swiglu",
        "mlp_width": read.whole("intermediate_size"),
        "bias": attention_bias,
        "qkv_bias": True if kind == "qwen2" else None,
        "qk_norm": kind == "qwen3",
        "tied": read.flag("tie_word_embeddings"),
        **_rope(read, context),
    }


def _rope(read: _Values, context: int) -> dict[str, Any]:
    """The rotary fields, from either spelling."""
    given = read.get("rope_scaling") or read.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise read.refuse(f"rotary settings {shorten(given)} are not supported: one set for all layers is")
    inside = _Values(given, read.path, {})
    partial = given.get("partial_rotary_factor", read.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise read.refuse(f"partial_rotary_factor is {shorten(partial)}, only whole heads can be turned")
    base = (inside if "rope_theta" in given else read).number("rope_theta", 10000.0)
    fields: dict[str, Any] = {"rope_base": base}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        raise read.refuse(
            f"rotary scaling of type {shorten(kind)} is not supported",
            "use a model with none, or with linear or llama3 scaling",
        )
    fields |= {"rope_scaling": kind, "rope_factor": inside.number("factor")}
    if kind == "llama3":
        fields |= {
            "rope_low": inside.number("low_freq_factor"),
            "rope_high": inside.number("high_freq_factor"),
            "rope_original_context": inside.whole(
                "original_max_position_embeddings", read.get("original_max_position_embeddings", context)
            ),
        }
    return fields


def _check_window(read: _Values, kind: str, fields: dict[str, Any]) -> None:
    """A sliding window at least as long as the context is none."""
    if kind not in ("mistral", "qwen2", "qwen3"):
        return
    layers = fields["layers"]
    if kind == "mistral":
        sliding = True
    else:
        types = read.get("layer_types") or ["sliding_attention"] * (layers > read.whole("max_window_layers", least=0))
        if not isinstance(types, list) or not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
            raise read.refuse(f"layer_types is {shorten(types)}, only full attention is supported")
        sliding = read.flag("use_sliding_window") and "sliding_attention" in types
    window = read.whole_or_none("sliding_window") if sliding else None
    if window is not None and window < fields["context"]:
        raise read.refuse(
            f"attention slides over {window:,} tokens, less than the context of {fields['context']:,}",
            f"use a context of at most {window:,}",
        )


# --- other facts ------------------------------------------------------------------------------------------------------


def _token_ids(read: _Values, key: str) -> list[int]:
    found = read.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise read.refuse(f"{key} is {shorten(found)}, not a token id or a list of them", "fetch the folder again")
    return [token for token in ids if token >= 0]  # -1 means none in old files


def _more_stops(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    return _token_ids(_Values(read_json(path, "fetch the file again"), path, {}), "eos_token_id")


def _stated_dtype(values: dict[str, Any]) -> str | None:
    stated = values.get("dtype") or values.get("torch_dtype")
    return stated.removeprefix("torch.") if isinstance(stated, str) else None


def _word(flag: bool) -> str:
    return "true" if flag else "false"
