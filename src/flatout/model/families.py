"""The model types of transformers that are read and written: what their config.json leaves out, and what they share.

`HubValues` reads keys of a config.json and checks their types. A missing key has transformers' default for the model
type. What the keys mean for our fields is in `fields.py`.
"""

import sys
from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Model"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Model"),
    "phi3": ("Phi3ForCausalLM", "Phi3Model"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_QWEN2 = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "bos_token_id": 128000, "eos_token_id": 128001,
        "pad_token_id": 128004, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4,
    },
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1},
    "phi3": {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000,
    },
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA, "max_position_embeddings": 131072, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    },
    "gpt2": {"n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256},
}  # fmt: skip
# What all models of a type have; the fields that are not here follow from the rest of a config.json.
_LLAMA_FIELDS: dict[str, Any] = {
    "family": "gpt",
    "norm": "rmsnorm",
    "norm_place": "before",
    "positions": "rope",
    "mlp": "swiglu",
    "qk_norm": False,
    "qk_norm_whole": False,
    "fused_projections": False,
    "rope_share": 1.0,
    "rope_local_base": None,
    "embedding_scale": None,
    "attention_cap": None,
    "score_divisor": None,
    "logit_cap": None,
    "qkv_bias": None,
}
_NO_BIAS = {**_LLAMA_FIELDS, "bias": False}


def _but(fields: dict[str, Any], *free: str, **other: Any) -> dict[str, Any]:
    """Without the `free` ones, and with `other` values."""
    return {field: value for field, value in fields.items() if field not in free} | other


_GEMMA_FIELDS = _but(
    _NO_BIAS,
    *("embedding_scale", "attention_cap", "score_divisor", "logit_cap"),
    norm="offset-rmsnorm",
    norm_place="both",
    mlp="geglu",
)
FIXED: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_FIELDS,
    "mistral": _NO_BIAS,
    "qwen3": _but(_NO_BIAS, qk_norm=True),
    "qwen2": _but(_NO_BIAS, qkv_bias=True),
    "smollm3": _LLAMA_FIELDS,
    "olmo2": _but(_NO_BIAS, norm_place="after", qk_norm=True, qk_norm_whole=True),
    "phi3": _but(_NO_BIAS, "rope_share", fused_projections=True),
    "gemma2": _GEMMA_FIELDS,
    "gemma3_text": _but(_GEMMA_FIELDS, "rope_local_base", qk_norm=True, attention_cap=None),
    "gpt2": {"family": "gpt2"},
}
# The kinds of blocks that models of a type may have; of others, A alone.
PATTERNS = {"smollm3": "AN", "phi3": "AW", "gemma2": "AW", "gemma3_text": "AW"}
GEMMAS = ("gemma2", "gemma3_text")
# Types whose width must be a multiple of their heads.
WHOLE_WIDTH = ("llama", *GEMMAS)
SUPPORTED = tuple(ARCHITECTURES)
ANOTHER = f"use a model of type {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
HINTS = {"gemma3": "it reads pictures too: use a model of text alone, of type gemma3_text, such as gemma-3-1b"}
AGAIN = "fetch the folder again"
_MOST = 2**40  # of any number: with larger ones torch cannot compute the memory it would need
# The bounds of our own fields (config/model_section.py) by the names of both formats. Checked when a key is read,
# because lists are made from these numbers before our fields are checked.
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1024),
    **dict.fromkeys(("hidden_size", "n_embd"), 2**16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 2**24),
    "head_dim": 2**12,
    "intermediate_size": 2**20,
}


class HubValues:
    """Values of a config.json of the model type `kind`, or a part of them. Without a kind there are no defaults."""

    def __init__(self, values: dict[str, Any], path: Path, kind: str | None = None) -> None:
        self.values, self.path, self.kind = values, path, kind
        self.defaults = {} if kind is None else DEFAULTS[kind]

    def refuse(self, what: str, hint: str = ANOTHER) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", hint)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self.defaults.get(key, default))

    def whole(self, key: str, default: Any = None, *, least: int = 1) -> int:
        """A whole number; required if it has no default."""
        value = self.get(key, default)
        if value is None and key not in self.values:
            raise self.refuse(f"{key} is missing", AGAIN)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(f"{key} is {shorten(value)}, not a whole number of at least {least}", AGAIN)
        if value > (most := _MOST_OF.get(key, _MOST)):
            raise self.refuse(f"{key} is {shorten(value)}, and Flatout takes at most {most:,}", AGAIN)
        return value

    def whole_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.whole(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        # Compared before the conversion: Python's integers may exceed the range of floats.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            missing = value is None and key not in self.values
            raise self.refuse(f"{key} is {'missing' if missing else shorten(value)}, not a number above 0", AGAIN)
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shorten(value)}, not true or false", AGAIN)
        return value

    def check_gpt2(self, **fixed: tuple[Any, ...]) -> dict[str, Any]:
        """Refuses a GPT-2 with other values; a missing key counts as the first of its values. Returns no fields."""
        for key, allowed in fixed.items():
            found = self.get(key, allowed[0])
            if found not in allowed:
                raise self.refuse(
                    f"{key} is {shorten(found)}, GPT-2 has {shorten(allowed[0])}",
                    "only plain GPT-2 weights can be loaded",
                )
        return {}
