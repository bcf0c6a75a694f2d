"""The keys of a Hugging Face config.json, each checked for its type when it is asked for.

Contract: a key that is missing has the value that transformers gives it, which differs between model types.
"""

import sys
from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError

_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_QWEN2 = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gpt2": {"n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256},
}
SUPPORTED = tuple(DEFAULTS)
ANOTHER = f"use a model of type {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
AGAIN = "fetch the folder again"
_MOST = 2**40  # of any number: beyond, torch cannot even say what it would need
# As our own fields are bounded (config/model_section.py), under the names of either format. Checked as a key is read:
# lists are made and products taken of these numbers before our fields are checked.
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1024),
    **dict.fromkeys(("hidden_size", "n_embd"), 2**16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 2**24),
    "head_dim": 2**12,
    "intermediate_size": 2**20,
}


class HubValues:
    """A config.json of the model type `kind`, or a part of one; without a kind, no key has a default."""

    def __init__(self, values: dict[str, Any], path: Path, kind: str | None = None) -> None:
        self.values, self.path, self.kind = values, path, kind
        self.defaults = {} if kind is None else DEFAULTS[kind]

    def refuse(self, what: str, hint: str = ANOTHER) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", hint)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self.defaults.get(key, default))

    def whole(self, key: str, default: Any = None, *, least: int = 1) -> int:
        """A whole number; required where there is no default."""
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
        # Compared before it is a float: Python's whole numbers may be larger than any.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            missing = value is None and key not in self.values
            raise self.refuse(f"{key} is {'missing' if missing else shorten(value)}, not a number above 0", AGAIN)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shorten(value)}, not true or false", AGAIN)
        return value

    def check_gpt2(self, **fixed: tuple[Any, ...]) -> dict[str, Any]:
        """Refuses a GPT-2 with other values than these; a missing key has the first of its values. Reads no fields."""
        for key, allowed in fixed.items():
            found = self.get(key, allowed[0])
            if found not in allowed:
                raise self.refuse(
                    f"{key} is {shorten(found)}, GPT-2 has {shorten(allowed[0])}",
                    "only plain GPT-2 weights can be loaded",
                )
        return {}
