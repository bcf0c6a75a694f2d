"""Our model as transformers would describe it: the config.json of an exported folder.

Contract: a model is described only as one that computes exactly what ours does; where transformers has none, the field
that stands in the way is named. A model that was read from a folder keeps that folder's type and every key it had.
"""

from typing import Any

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError
from flatout.model.hub import ARCHITECTURES, Description, check_same_model
from flatout.model.layers import mlp_width_of


def model_type_of(config: ModelConfig) -> str:
    """The type of transformers' that computes exactly what this model does; refused where there is none."""
    if config.family == "gpt2":
        return "gpt2"
    hint = "only models that transformers has the same of can be exported; train with other values of these fields"
    if set(config.kinds) != {"A"}:  # first, for nothing else that is changed would help
        raise CheckpointError(
            f"transformers has no such model with model.pattern={shorten(config.pattern)}",
            "only models whose blocks all have full attention can be exported; `flatout generate` runs this one",
        )
    for field, needed in {
        "norm": "rmsnorm",
        "positions": "rope",
        "mlp": "swiglu",
        "residual_scale": None,
    }.items():
        if getattr(config, field) != needed:
            raise CheckpointError(
                f"transformers has no such model with model.{field}={shorten(getattr(config, field))}", hint
            )
    if config.has_qkv_bias and not config.bias and not config.qk_norm:
        return "qwen2"
    if config.qk_norm and (config.bias or config.has_qkv_bias):
        raise CheckpointError("transformers has no such model with model.qk_norm and biases", hint)
    if config.bias and not config.has_qkv_bias:
        raise CheckpointError("transformers has no such model with model.bias=true and model.qkv_bias=false", hint)
    if config.width % config.heads and not config.qk_norm:
        raise CheckpointError(
            f"transformers' llama needs a width that is a multiple of heads, not {config.width} and {config.heads}",
            hint,
        )
    return "qwen3" if config.qk_norm else "llama"


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
