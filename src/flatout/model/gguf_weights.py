"""GGUF's names and layouts: config.json, tensors and values of a file, as transformers has them, and back.

llama.cpp computes the architectures gpt2, llama, qwen2 and qwen3 as transformers does. Matrices are stored [out, in].
`llama` rotates neighbouring channels of a head where transformers rotates its halves, so rows of queries and keys are
in another order. llama3's slowed rotary frequencies are a tensor (`rope_freqs`). Norms and biases are F32 in every
file, and so are learned positions.

Contract: `config_values` and `GgufWeights` present a file as the config.json and the safetensors of a folder, so that
every check of a folder is one of a file. Quantised values are the same to the bit as those of the `gguf` package.
What llama.cpp lacks is refused by name (`file_values`).
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError
from flatout.gguf_file import KINDS, GgufFile, read_gguf
from flatout.model.families import ARCHITECTURES as CLASSES
from flatout.model.layers import mlp_width_of
from flatout.model.operations import scaled_rates

# Architectures of llama.cpp by transformers' model types.
ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_FREQS = "rope_freqs.weight"
_GPT2 = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.attn.c_attn": "blk.*.attn_qkv",
    "h.*.attn.c_proj": "blk.*.attn_output",
    "h.*.mlp.c_fc": "blk.*.ffn_up",
    "h.*.mlp.c_proj": "blk.*.ffn_down",
}
_LLAMA = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    **{f"layers.*.self_attn.{x}_proj": f"blk.*.attn_{x}" for x in "qkv"},
    **{f"layers.*.self_attn.{x}_norm": f"blk.*.attn_{x}_norm" for x in "qk"},
    "layers.*.self_attn.o_proj": "blk.*.attn_output",
    **{f"layers.*.mlp.{x}_proj": f"blk.*.ffn_{x}" for x in ("gate", "up", "down")},
}
_NAMES = {**_GPT2, **_LLAMA, "lm_head": "output"}
_BACK = {ours: theirs for theirs, ours in _LLAMA.items()} | {"output": "lm_head"}
_BACK_GPT2 = {ours: theirs for theirs, ours in _GPT2.items()} | {"output": "lm_head"}
_NUMBER = re.compile(r"\b\d+\b")
_ROTARY_VALUES = 2**24  # positions times channels, of a context that only a number in a file promises
_AT_ONCE = 2**22  # values that are decoded at once
_QUANTISED = "use a file of this model in F16 or Q8_0, made from one that transformers has"


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    """A tensor's name by a table of modules, in which `*` stands for the number of a block."""
    module, _, leaf = name.rpartition(".")
    other = names.get(_NUMBER.sub("*", module))
    number = _NUMBER.search(module)
    return None if other is None else f"{other.replace('*', number.group() if number else '*')}.{leaf}"


def file_name(name: str) -> str:
    """The name in GGUF of a tensor of transformers, without the prefix `model.` or `transformer.`."""
    found = _renamed(name, _NAMES)
    assert found is not None, name
    return found


# --- a file as config.json --------------------------------------------------------------------------------------------


# Keys of config.json by those of a file, without the architecture before them.
_GPT2_KEYS = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), "head_dim"),
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def config_values(gguf: GgufFile) -> dict[str, Any]:
    """What config.json would say of the model in a file."""
    kind = gguf.text("general.architecture")
    if kind not in ARCHITECTURES.values():
        known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
        raise gguf.refuse(f"it holds a model of architecture {shorten(kind)}", f"use one of {known}")
    values = {key.removeprefix(f"{kind}."): value for key, value in gguf.single.items() if key.startswith(f"{kind}.")}
    if values.get("expert_count") or values.get("attention.scale"):
        raise gguf.refuse("it has experts, or a scale of its own in attention, which is not supported", _QUANTISED)
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise gguf.refuse("it has no table of embeddings (token_embd.weight)")
    ids = [gguf.single.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
    found: dict[str, Any] = {"architectures": [CLASSES[kind][0]], "model_type": kind, "torch_dtype": "float32"}
    found |= {"vocab_size": table.shape[0], "bos_token_id": ids[0]}
    found |= {"eos_token_id": list(dict.fromkeys(x for x in ids[1:] if x is not None))}
    wide, heads = values.get("embedding_length"), values.get("attention.head_count")
    if kind == "gpt2":
        hidden = values.get("feed_forward_length")
        usual = isinstance(wide, int) and hidden in (None, 4 * wide)
        return (
            found
            | {theirs: values.get(key) for key, theirs in _GPT2_KEYS.items()}
            | {"n_inner": None if usual else hidden}
        )
    if isinstance(wide, int) and isinstance(heads, int) and heads:
        values.setdefault("attention.key_length", wide // heads)
    size = values.get("attention.key_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.setdefault(key, size) != size:
            raise gguf.refuse(f"{kind}.{key} is {shorten(values[key])} and heads have {shorten(size)} channels")
    if isinstance(context := values.get("context_length"), int) and isinstance(size, int) and size > 0:
        values["context_length"] = min(context, _ROTARY_VALUES // size)
    values = {"attention.head_count_kv": heads, "rope.freq_base": 10000.0, **values}
    found |= {theirs: values.get(key) for key, theirs in _KEYS.items()}
    for part, name in (("attention", "attn_q"), ("mlp", "ffn_up")):
        found[f"{part}_bias"] = kind == "llama" and f"blk.0.{name}.bias" in gguf.tensors
    tied = "output.weight" not in gguf.tensors
    return found | {"tie_word_embeddings": tied, "rope_scaling": _rope_scaling(gguf, values, size)}


def _rope_scaling(gguf: GgufFile, values: Mapping[str, Any], size: Any) -> dict[str, Any] | None:
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    kind = values.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind != "none":
        return {"rope_type": kind, "factor": factor}
    if ROPE_FREQS not in gguf.tensors:
        return None
    stored, base = _decoded(gguf, ROPE_FREQS).flatten(), values.get("rope.freq_base", 10000.0)
    factor = float(stored.max())
    for original in (values.get("rope.scaling.original_context_length"), 8192):
        if isinstance(original, int) and 1 <= factor <= 1e6 and 1 <= original <= 2**24 and base > 1:
            fields = {"rope_factor": factor, "rope_original_context": original, "rope_base": base, "head_size": size}
            expected = rope_factors(ModelConfig(rope_scaling="llama3", **fields))
            if expected.shape == stored.shape and torch.allclose(expected, stored, rtol=1e-5):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise gguf.refuse(f"its rotary frequencies ({ROPE_FREQS}) are not scaled as those of Llama 3 are", _QUANTISED)


def rope_factors(config: ModelConfig) -> Tensor:
    """By how much every rotary frequency is slowed down."""
    rates = config.rope_base ** (-torch.arange(0, config.size, 2, dtype=torch.float64) / config.size)
    return (rates / scaled_rates(rates, config)).float()


# --- a file as safetensors --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slice:
    """The part of a tensor of safetensors that is used."""

    shape: tuple[int, ...]

    def get_dtype(self) -> str:
        return "F32"  # as which every tensor is handed out

    def get_shape(self) -> list[int]:
        return list(self.shape)


class GgufWeights:
    """The tensors of a file by transformers' names, in their layout."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf, kind = gguf, gguf.text("general.architecture")
        self.turned = kind == "llama"
        names = _BACK_GPT2 if kind == "gpt2" else _BACK
        self._names = {_renamed(name, names) or name: name for name in gguf.tensors if name != ROPE_FREQS}

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> _Slice:
        shape = self.gguf.tensors[self._names[name]].shape
        return _Slice(shape[::-1] if is_transposed(name) else shape)

    def get_tensor(self, name: str) -> Tensor:
        x = _decoded(self.gguf, self._names[name])
        heads, groups = (self.gguf.single.get(f"llama.attention.head_count{x}") for x in ("", "_kv"))
        if self.turned and (count := head_count(name, heads, groups)):
            return turned(x, count, back=True)
        return x.T if is_transposed(name) else x


def is_transposed(name: str) -> bool:
    """Whether transformers stores a matrix [in, out]."""
    return re.search(r"\.c_(attn|proj|fc)\.weight$", name) is not None


def head_count(name: str, heads: Any, groups: Any) -> int | None:
    """Of the tensors that `turned` is for."""
    found = re.search(r"\.([qk])_proj\.", name)
    return None if found is None else heads if found[1] == "q" or groups is None else groups


def turned(x: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Rows of queries or keys, or their biases, in the order of the architecture `llama`; `back`: in transformers'."""
    shape = (heads, -1, 2) if back else (heads, 2, x.shape[0] // heads // 2)
    return x.reshape(*shape, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


@contextlib.contextmanager
def opened_gguf(path: Path) -> Iterator[GgufWeights]:
    yield GgufWeights(read_gguf(path))


def _decoded(gguf: GgufFile, name: str) -> Tensor:
    """The values of a tensor in fp32."""
    stored = gguf.tensors[name]
    _, block, size = next(entry for entry in KINDS.values() if entry[0] == stored.kind)
    found = torch.empty(stored.bytes // size, block)
    step = _AT_ONCE // block
    for first in range(0, len(found), step):
        here = slice(stored.start + first * size, stored.start + min(first + step, len(found)) * size)
        raw = torch.frombuffer(bytearray(gguf.raw[here]), dtype=torch.uint8).view(-1, size)
        found[first : first + step] = _DECODE[stored.kind](raw)
    return found.view(stored.shape)


def _half(raw: Tensor) -> Tensor:
    """Scales of blocks: two bytes of each."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _q6_k(raw: Tensor) -> Tensor:
    """128 low halves, 64 bytes with four pairs of high bits each, 16 scales and one scale of these."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64))
    high = raw[:, 128:192].reshape(-1, 2, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    values = (low | high << 4).view(torch.int8).float() - 32.0
    scales = _half(raw[:, 208:]) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[:, :, None] * values.view(-1, 16, 16)).flatten(1)


_DECODE = {
    "F32": lambda raw: raw.view(torch.float32),
    "F16": lambda raw: raw.view(torch.float16).float(),
    "BF16": lambda raw: raw.view(torch.bfloat16).float(),
    "Q4_0": lambda raw: _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).float() - 8.0),
    "Q4_1": lambda raw: _half(raw[:, :2]) * _nibbles(raw[:, 4:]).float() + _half(raw[:, 2:4]),
    "Q8_0": lambda raw: _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float(),
    "Q6_K": _q6_k,
}


# --- a model as a file ------------------------------------------------------------------------------------------------


def file_values(config: ModelConfig, described: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model's shape. `config` has what is folded already, `described` is its config.json."""
    kind = described["model_type"]
    name = ARCHITECTURES.get(kind)
    if name is None:
        raise CheckpointError(
            f"llama.cpp's form of {kind} is not written here", "export it as a Hugging Face folder: leave --format out"
        )
    if name == "qwen2" and config.queries != config.width:
        raise CheckpointError(
            f"llama.cpp has no qwen2 with model.head_size={config.size}",
            f"one with model.head_size=null, and model.heads a divisor of {config.width}, can be exported",
        )
    if name != "llama" and config.rope_scaling == "llama3":
        raise CheckpointError(
            f"llama.cpp has no {name} with model.rope_scaling=llama3",
            "one that is trained with model.rope_scaling=linear, or with model.qk_norm=false, can be exported",
        )
    keys = {**(_GPT2_KEYS if name == "gpt2" else _KEYS), "vocab_size": "vocab_size"}
    values = {"feed_forward_length": mlp_width_of(config), **{key: described[theirs] for key, theirs in keys.items()}}
    if config.rope_scaling == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        values["rope.scaling.original_context_length"] = config.rope_original_context
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in values.items()}
