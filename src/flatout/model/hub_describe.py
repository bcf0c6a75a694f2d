"""Our model as transformers would describe it: the config.json of an exported folder.

Contract: a model is described only as one that computes exactly what ours does; where transformers has none, all fields
that stand in the way are named. A model that was read from a folder keeps that folder's type and every key it had.
"""

from typing import Any

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.errors import CheckpointError
from flatout.model.hub import ARCHITECTURES, Description, check_same_model
from flatout.model.layers import mlp_width_of


def model_type_of(config: ModelConfig) -> str:
    """The type of transformers' that computes exactly what this model does; refused where there is none."""
    if config.family == "gpt2":
        return "gpt2"
    if set(config.kinds) != {"A"}:  # first, for nothing else that is changed would help
        raise CheckpointError(
            f"transformers has no such model with model.pattern={shorten(config.pattern)}",
            "only models whose blocks all have full attention can be exported; `flatout generate` runs this one",
        )
    if needed := _needed(config):
        beside = ("width", "heads") if _needs_qwen3(config) else ()
        if "qk_norm" in needed or "qkv_bias" in needed:
            beside += tuple(field for field in ("bias", "qkv_bias") if getattr(config, field))
        fields = dict.fromkeys((*needed, *beside))
        found = ", ".join(f"model.{field}={format_value(getattr(config, field))}" for field in fields)
        words = " ".join(f"model.{field}={format_value(value)}" for field, value in needed.items())
        raise CheckpointError(
            f"transformers has no such model with {found}",
            f"a trained model keeps its shape: one that is trained with {words} can be exported",
        )
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.has_qkv_bias and not config.bias else "llama"


def _needed(config: ModelConfig) -> dict[str, Any]:
    """Every field that stands in the way, with a value that does not; together they make a model of transformers'."""
    needed: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "residual_scale": None}
    needed["logit_cap"] = None
    if _needs_qwen3(config):
        needed |= {"qk_norm": True, "bias": False, "qkv_bias": None}
    elif config.bias or config.has_qkv_bias:
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
        values = _gpt2_values(config) if kind == "gpt2" else _llama_values(config, kind)
        values |= {"vocab_size": vocab, "bos_token_id": end_of_text, "eos_token_id": end_of_text}
        return values | {"tie_word_embeddings": config.tied, "torch_dtype": dtype}
    check_same_model(config, source, "export it without that folder's description")
    values = {**source.values, "vocab_size": vocab}
    values.pop("auto_map", None)  # the code that it names does not come along
    spellings = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    return values | dict.fromkeys(spellings, dtype)


def _gpt2_values(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": 0.02,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _llama_values(config: ModelConfig, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind][0]],
        "model_type": kind,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.size,
        "intermediate_size": mlp_width_of(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": _rope_values(config),
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
    }
    if kind in ("llama", "qwen3"):
        values["attention_bias"] = config.bias
    if kind == "llama":
        values["mlp_bias"] = config.bias
    else:
        values |= {"use_sliding_window": False, "sliding_window": None}
    return values


def _rope_values(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        values |= {
            "low_freq_factor": config.rope_low,
            "high_freq_factor": config.rope_high,
            "original_max_position_embeddings": config.rope_original_context,
        }
    return values
