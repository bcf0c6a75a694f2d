"""Every field of the model section with its place in Hugging Face's formats, or the reason why it has none.

Contract: each field of `ModelConfig` belongs to exactly one feature of `FEATURES`; a test names missing ones. Declared
formats are tested against transformers. How to add a feature: docs/extending.md.
Trap: transformers 5 writes `rope_parameters` where 4 wrote `rope_theta` and `rope_scaling`. Both are read; where
both are there, `rope_scaling` wins, as in transformers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.model.families import AGAIN, DEFAULTS, GEMMAS, HubValues
from flatout.model.layers import mlp_width_of, mlp_widths

# --- the form of a declaration ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where one of their tensors or modules lies in ours: rows `first` to `last` of `name`, or all of it."""

    name: str
    first: int = 0
    last: int | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """The view of our parameter, in their layout."""
        part = parameter[self.first : self.last]
        return part.T if self.transposed else part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a Hugging Face format states a feature.

    `keys` maps keys of config.json that hold a whole number to our fields. `read` turns other keys into fields and
    refuses what our model lacks; `write` is the inverse, for a model type. `modules` maps names of their linear
    layers, norms and tables, without the prefix `model.` or `transformer.`, to ours; `*` stands for the number of a
    block.
    """

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[HubValues], Mapping[str, Any]] = lambda values: {}
    write: Callable[[ModelConfig, str], Mapping[str, Any]] = lambda model, kind: {}
    modules: Callable[[ModelConfig], Mapping[str, Piece]] = lambda model: {}

    def fields(self, read: HubValues) -> dict[str, Any]:
        """Our fields from a config.json."""
        return {**{field: read.whole(key) for key, field in self.keys.items()}, **self.read(read)}

    def values(self, model: ModelConfig, kind: str) -> dict[str, Any]:
        """Keys of config.json for a model of the type `kind`."""
        return {**{key: getattr(model, field) for key, field in self.keys.items()}, **self.write(model, kind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """How a feature is folded into weights: if `when(model)`, the model with `fields` and `weights` replaced computes
    the same. `weights` gets all weights by name and returns the changed ones."""

    when: Callable[[ModelConfig], bool]
    fields: Mapping[str, Any]
    weights: Callable[[ModelConfig, Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFeature:
    """A feature of the architecture.

    `fields`: its fields in `ModelConfig`; each field belongs to one feature.
    `gpt2` and `llama` (for all other types): its formats. If neither has the feature, `no_export` gives
    the reason, and `without` the values of a model that does not use it: any other value is refused by name.
    `fold`: for a feature that no format has but that can be folded into the weights of an exported model.
    `described=False`: its fields may differ from the folder that a model comes from.
    """

    fields: tuple[str, ...]
    gpt2: Format = Format()
    llama: Format = Format()
    no_export: str = ""
    without: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fold: Fold | None = None
    described: bool = True

    def format(self, kind: str) -> Format:
        """The format of a model type of transformers."""
        return self.gpt2 if kind == "gpt2" else self.llama


def ours_alone(field: str, without: Any, why: str) -> ModelFeature:
    """A field that no format has; a model does not use it if its value is `without`."""
    return ModelFeature(fields=(field,), without={field: without}, no_export=why)


# --- the residual stream ----------------------------------------------------------------------------------------------

STREAM = ModelFeature(
    fields=("family", "layers", "width"),
    gpt2=Format(
        keys={"n_embd": "width", "n_layer": "layers"},
        modules=lambda model: {"wte": Piece("embedding")},
    ),
    llama=Format(
        keys={"num_hidden_layers": "layers", "hidden_size": "width"},
        modules=lambda model: {"embed_tokens": Piece("embedding")},
    ),
)

CONTEXT = ModelFeature(
    fields=("context",),
    described=False,  # a model may be used with a shorter context
    gpt2=Format(keys={"n_positions": "context"}, write=lambda model, kind: {"n_ctx": model.context}),
    llama=Format(
        read=lambda read: {"context": min(read.whole("max_position_embeddings"), _original_context(read) or 2**24)},
        write=lambda model, kind: (
            {"max_position_embeddings": model.context}
            | ({"original_max_position_embeddings": model.context} if kind == "phi3" else {})
        ),
    ),
)


def _llama_norms(model: ModelConfig) -> dict[str, Piece]:
    before, after = {"input_layernorm": "attention_norm"}, {"post_attention_layernorm": "attention_out_norm"}
    after["post_feedforward_layernorm"] = "mlp_out_norm"
    before["post_attention_layernorm" if model.norm_place == "before" else "pre_feedforward_layernorm"] = "mlp_norm"
    named = {"before": before, "after": after, "both": before | after}[model.norm_place]
    return {
        **{f"layers.*.{theirs}": Piece(f"blocks.*.{ours}") for theirs, ours in named.items()},
        "norm": Piece("norm"),
    }


def _norms_of_ones(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ones, places = weights["embedding.weight"].new_ones(model.width), range(model.layers)
    return {f"{at.name.replace('*', str(n))}.weight": ones for at in _llama_norms(model).values() for n in places}


NORM = ModelFeature(
    fields=("norm", "norm_place", "norm_eps"),
    gpt2=Format(
        read=lambda read: read.check_gpt2(layer_norm_epsilon=(1e-5,)),
        write=lambda model, kind: {"layer_norm_epsilon": model.norm_eps},
        modules=lambda model: {
            "h.*.ln_1": Piece("blocks.*.attention_norm"),
            "h.*.ln_2": Piece("blocks.*.mlp_norm"),
            "ln_f": Piece("norm"),
        },
    ),
    llama=Format(
        read=lambda read: {"norm_eps": read.number("rms_norm_eps", 1e-6)},
        write=lambda model, kind: {"rms_norm_eps": model.norm_eps},
        modules=_llama_norms,
    ),
    fold=Fold(
        when=lambda model: not model.norm_weights,
        fields={"norm": "rmsnorm"},
        weights=_norms_of_ones,
    ),
)


def _normed_rows(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summed in a fixed order, since the hash of a base covers every bit and torch's order depends on the machine."""
    table = weights["embedding.weight"].float()
    squares = functools.reduce(torch.add, (column.double().square() for column in table.unbind(1)))
    factor = (squares / model.width + model.norm_eps).sqrt().reciprocal().float()
    return {"embedding.weight": table * factor[:, None]}


EMBEDDING_NORM = ModelFeature(
    fields=("embedding_norm",),
    without={"embedding_norm": False},
    no_export="only a table that is the embedding's alone can hold rows that are normed already: with model.tied=false",
    fold=Fold(
        when=lambda model: model.embedding_norm and not model.tied and model.positions == "rope",
        fields={"embedding_norm": False},
        weights=_normed_rows,
    ),
)

EMBEDDING_SCALE = ModelFeature(
    fields=("embedding_scale",),
    llama=Format(
        read=lambda read: {"embedding_scale": read.whole("hidden_size") ** 0.5} if read.kind in GEMMAS else {}
    ),
)


def _read_caps(read: HubValues) -> dict[str, Any]:
    if read.kind not in GEMMAS:
        return {}
    if read.flag("use_bidirectional_attention"):
        raise read.refuse("use_bidirectional_attention is true, only attention to tokens before is supported")
    size, divisor = read.whole("head_dim"), read.whole("query_pre_attn_scalar")
    cap = read.number_or_none("attn_logit_softcapping")
    if cap is not None and read.kind == "gemma3_text":  # transformers leaves it out, and config.json says otherwise
        raise read.refuse(f"attn_logit_softcapping is {cap}, Gemma 3 has none")
    return {"attention_cap": cap, "score_divisor": None if divisor == size else divisor}


def _write_caps(model: ModelConfig, kind: str) -> dict[str, Any]:
    if kind not in GEMMAS:
        return {}
    divisor = model.score_divisor or model.size
    return {"attn_logit_softcapping": model.attention_cap, "query_pre_attn_scalar": divisor}


SCORES = ModelFeature(
    fields=("attention_cap", "score_divisor"),
    llama=Format(read=_read_caps, write=_write_caps),
)
LOGIT_CAP = ModelFeature(
    fields=("logit_cap",),
    llama=Format(
        read=lambda read: {"logit_cap": read.number_or_none("final_logit_softcapping")} if read.kind in GEMMAS else {},
        write=lambda model, kind: {"final_logit_softcapping": model.logit_cap} if kind in GEMMAS else {},
    ),
)
RESIDUAL_SCALE = ours_alone(
    "residual_scale", None, "no model of transformers has learned scales on its residual branches"
)

HEAD = ModelFeature(
    fields=("tied",),
    gpt2=Format(
        read=lambda read: read.check_gpt2(tie_word_embeddings=(True,)),
        write=lambda model, kind: {"tie_word_embeddings": model.tied},
    ),
    llama=Format(
        read=lambda read: {"tied": read.flag("tie_word_embeddings")},
        write=lambda model, kind: {"tie_word_embeddings": model.tied},
        modules=lambda model: {} if model.tied else {"lm_head": Piece("head")},
    ),
)

# --- tokens mixed: attention, positions, windows, eigenstates ---------------------------------------------------------


def _read_heads(read: HubValues) -> dict[str, Any]:
    width, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    size, groups = read.whole_or_none("head_dim"), read.whole_or_none("num_key_value_heads")
    return {
        "kv_heads": None if groups == heads else groups,
        "head_size": None if size is None or size * heads == width else size,
    }


def _llama_projections(model: ModelConfig) -> dict[str, Piece]:
    queries, keys = model.queries, model.keys
    if model.fused_projections:
        return {
            "layers.*.self_attn.qkv_proj": Piece("blocks.*.attention.qkv"),
            "layers.*.self_attn.o_proj": Piece("blocks.*.attention.out"),
        }
    return {
        "layers.*.self_attn.q_proj": Piece("blocks.*.attention.qkv", 0, queries),
        "layers.*.self_attn.k_proj": Piece("blocks.*.attention.qkv", queries, queries + keys),
        "layers.*.self_attn.v_proj": Piece("blocks.*.attention.qkv", queries + keys, queries + 2 * keys),
        "layers.*.self_attn.o_proj": Piece("blocks.*.attention.out"),
    }


ATTENTION = ModelFeature(
    fields=("heads", "kv_heads", "head_size", "fused_projections"),
    gpt2=Format(
        keys={"n_head": "heads"},
        read=lambda read: read.check_gpt2(
            scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)
        ),
        modules=lambda model: {
            "h.*.attn.c_attn": Piece("blocks.*.attention.qkv", transposed=True),
            "h.*.attn.c_proj": Piece("blocks.*.attention.out", transposed=True),
        },
    ),
    llama=Format(
        keys={"num_attention_heads": "heads"},
        read=_read_heads,
        write=lambda model, kind: {"num_key_value_heads": model.kv_heads or model.heads, "head_dim": model.size},
        modules=_llama_projections,
    ),
)


def _scaled_norms(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both scales go into the norm of queries, so that the keys' weights need no rounding."""
    found: dict[str, Tensor] = {}
    queries, keys = (model.queries, model.keys) if model.qk_norm_whole else (model.size, model.size)
    for layer in range(model.layers):
        for name, scale, size in (("q", model.qk_scale**2, queries), ("k", 1.0, keys)):
            full = f"blocks.{layer}.attention.{name}_norm.weight"
            weight = weights[full] if model.norm_weights else weights["embedding.weight"].new_ones(size)
            found[full] = weight.float() * scale
    return found


QK_NORM = ModelFeature(
    fields=("qk_norm", "qk_norm_whole"),
    llama=Format(
        modules=lambda model: {
            f"layers.*.self_attn.{x}_norm": Piece(f"blocks.*.attention.{x}_norm") for x in "qk" if model.qk_norm
        },
    ),
    fold=Fold(
        when=lambda model: (
            bool(model.qk_norm) and (not model.norm_weights or (model.qk_scale != 1.0 and model.norm == "rmsnorm"))
        ),
        fields={"qk_norm": True},
        weights=_scaled_norms,
    ),
)


def _rope_of(read: HubValues, kind: str = "full_attention") -> HubValues:
    """The rotary settings, from either spelling; those of one `kind` of layers where these differ."""
    rope = read.get("rope_scaling") or read.get("rope_parameters") or {}
    if read.kind == "gemma3_text":
        both = read.get("rope_parameters") or {}
        rope = (both.get(kind) if isinstance(both, dict) else both) or {}
        if kind == "full_attention" and isinstance(rope, dict):
            rope = rope | (read.get("rope_scaling") or {})
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise read.refuse(f"rotary settings {shorten(rope)} are not supported: one set for all layers is")
    return HubValues(rope, read.path)


def _scaling_of(read: HubValues) -> str | None:
    rope, phi = _rope_of(read), read.kind == "phi3"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    kind = "longrope" if phi and kind in ("su", "yarn") else kind  # former names
    if kind not in (("longrope",) if phi else ("linear", "llama3")):
        raise read.refuse(
            f"rotary scaling of type {shorten(kind)} is not supported",
            "use a model with none, or with linear or llama3 scaling (of type phi3: with longrope)",
        )
    return kind


def _original_context(read: HubValues) -> int | None:
    """The context within which longrope has its short factors. Beyond it every rotary frequency is another."""
    return read.whole("original_max_position_embeddings", least=2) if _scaling_of(read) == "longrope" else None


def _read_longrope(read: HubValues, inside: HubValues) -> dict[str, Any]:
    original, factors = _original_context(read) or 2, inside.get("short_factor")
    if not isinstance(factors, list) or not all(type(factor) in (int, float) for factor in factors):
        raise read.refuse(f"short_factor is {shorten(factors)}, not a list of numbers", AGAIN)
    grown = inside.number("factor", read.whole("max_position_embeddings") / original)
    usual = 1.0 if grown <= 1.0 else math.sqrt(1 + math.log(grown) / math.log(original))
    return {"rope_factors": factors, "rope_gain": inside.number("attention_factor", usual)}


def _read_rope(read: HubValues) -> dict[str, Any]:
    inside, kind = _rope_of(read), _scaling_of(read)
    place = inside if "partial_rotary_factor" in inside.values else read
    share = place.number("partial_rotary_factor", 1.0)
    if share != 1.0 and read.kind != "phi3":
        raise read.refuse(f"partial_rotary_factor is {share}, only whole heads can be turned")
    base = (inside if "rope_theta" in inside.values else read).number("rope_theta", 10000.0)
    fields: dict[str, Any] = {"rope_base": base, "rope_scaling": kind, "rope_share": share}
    if read.kind == "gemma3_text":
        local = _rope_of(read, _TYPES["W"])
        if local.get("rope_type", "default") != "default":
            raise read.refuse(f"rotary scaling of type {shorten(local.get('rope_type'))} in windows is not supported")
        named = "rope_theta" in local.values
        fields["rope_local_base"] = local.number("rope_theta") if named else read.number("rope_local_base_freq")
    if kind == "longrope":
        return fields | _read_longrope(read, inside)
    if kind is not None:
        fields["rope_factor"] = inside.number("factor")
    if kind == "llama3":
        original = "original_max_position_embeddings"
        fields |= {
            "rope_low": inside.number("low_freq_factor"),
            "rope_high": inside.number("high_freq_factor"),
            "rope_original_context": inside.whole(original, read.get(original, read.whole("max_position_embeddings"))),
        }
    return fields


def _write_rope(model: ModelConfig, kind: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling}
    if model.rope_scaling == "longrope":
        scaling |= dict.fromkeys(("short_factor", "long_factor"), model.rope_factors)
        scaling["attention_factor"] = model.rope_gain
    else:
        scaling["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low,
            "high_freq_factor": model.rope_high,
            "original_max_position_embeddings": model.rope_original_context,
        }
    own: dict[str, dict[str, Any]] = {"phi3": {"partial_rotary_factor": model.rope_share}}
    own["gemma3_text"] = {"rope_local_base_freq": model.rope_local_base}
    written = {"rope_theta": model.rope_base, "rope_scaling": None if model.rope_scaling is None else scaling}
    return written | own.get(kind, {})


POSITIONS = ModelFeature(
    fields=(
        "positions",
        *("rope_base", "rope_local_base", "rope_share", "rope_scaling", "rope_factor", "rope_low", "rope_high"),
        *("rope_original_context", "rope_factors", "rope_gain"),
    ),
    gpt2=Format(modules=lambda model: {"wpe": Piece("positions")}),
    llama=Format(read=_read_rope, write=_write_rope),
)


def read_pattern(read: HubValues, layers: int, context: int) -> dict[str, Any]:
    """The fields of windows that are shorter than the context, and of layers without positions."""
    if read.kind == "smollm3":
        if read.flag("use_sliding_window") and read.get("sliding_window") is not None:
            raise read.refuse("use_sliding_window is true, and windows are not supported beside no_rope_layers")
        every, turned = read.whole("no_rope_layer_interval"), read.get("no_rope_layers")
        turned = [int((layer + 1) % every != 0) for layer in range(layers)] if turned is None else turned
        if not isinstance(turned, list) or len(turned) < layers or not set(map(str, turned)) <= {"0", "1"}:
            raise read.refuse(f"no_rope_layers is {shorten(turned)}, not a 0 or 1 for each of {layers:,} layers", AGAIN)
        return {"pattern": _shortest("".join("NA"[int(one)] for one in turned[:layers]))}
    if read.kind not in ("mistral", "phi3", "qwen2", "qwen3", *GEMMAS):
        return {}
    types: Any = ["sliding_attention"] * layers
    if read.kind in GEMMAS:
        every, types = 2 if read.kind == "gemma2" else read.whole("sliding_window_pattern"), read.get("layer_types")
        types = [_TYPES["W" if (layer + 1) % every else "A"] for layer in range(layers)] if types is None else types
    elif read.kind in ("qwen2", "qwen3"):
        full = min(layers, read.whole("max_window_layers", least=0))
        types = read.get("layer_types") or [_TYPES["A"]] * full + types[full:]
    if not isinstance(types, list) or not set(map(str, types)) <= set(_TYPES.values()):
        raise read.refuse(f"layer_types is {shorten(types)}, only full and sliding attention are supported")
    if read.kind in ("qwen2", "qwen3") and not read.flag("use_sliding_window"):
        return {}
    window = read.whole_or_none("sliding_window") if _TYPES["W"] in types else None
    if window is None or (window >= context and read.kind != "gemma3_text"):  # whose windows turn otherwise
        return {}
    if len(types) != layers:
        raise read.refuse(f"layer_types names {len(types):,} layers, and there are {layers:,}")
    return {"pattern": _shortest("".join("W" if kind == _TYPES["W"] else "A" for kind in types)), "window": window}


_TYPES = {"A": "full_attention", "W": "sliding_attention"}


def _shortest(kinds: str) -> str:
    """The shortest pattern that gives these blocks."""
    lengths = range(1, len(kinds) + 1)
    return next(kinds[:length] for length in lengths if (kinds[:length] * len(kinds)).startswith(kinds))


def _write_pattern(model: ModelConfig, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind in ("qwen2", "qwen3", "smollm3"):
        found = {"use_sliding_window": False, "sliding_window": None}
    elif kind == "phi3":
        found = {"sliding_window": model.window if "W" in model.kinds else None}
    elif kind in GEMMAS:
        found = {"sliding_window": model.window, "layer_types": [_TYPES[one] for one in model.kinds]}
    return found | ({"no_rope_layers": [int(one != "N") for one in model.kinds]} if kind == "smollm3" else {})


PATTERN = ModelFeature(
    fields=("pattern", "window"),
    described=False,  # compared by the reach of attention, which a shorter context may make equal
    llama=Format(write=_write_pattern),  # `read_pattern` reads it once the context is known
    no_export="only models whose blocks all have full attention can be exported; `flatout generate` runs this one",
)

EIGENSTATES = ModelFeature(
    fields=("states",),
    no_export="transformers has no blocks of eigenstates; model.pattern says whether there are any",
)

# --- the MLP and biases -----------------------------------------------------------------------------------------------


def _read_mlp(read: HubValues) -> dict[str, Any]:
    key, allowed = (
        ("hidden_activation", ("gelu_pytorch_tanh",)) if read.kind in GEMMAS else ("hidden_act", ("silu", "swish"))
    )
    activation = read.get(key, "silu")
    if activation not in allowed:
        raise read.refuse(f"{key} is {shorten(activation)}, only {allowed[0]} is supported")
    return {"mlp_width": read.whole("intermediate_size")}


def _write_mlp(model: ModelConfig, kind: str) -> dict[str, Any]:
    activation = {"hidden_activation": "gelu_pytorch_tanh"} if kind in GEMMAS else {"hidden_act": "silu"}
    return {"intermediate_size": mlp_width_of(model), **activation}


def _llama_mlp(model: ModelConfig) -> dict[str, Piece]:
    up, hidden = mlp_widths(model)
    if model.fused_projections:
        down = Piece("blocks.*.mlp.out")
        return {"layers.*.mlp.gate_up_proj": Piece("blocks.*.mlp.up"), "layers.*.mlp.down_proj": down}
    gate = {"layers.*.mlp.gate_proj": Piece("blocks.*.mlp.up", 0, hidden)} if model.gated_mlp else {}
    return {
        **gate,
        "layers.*.mlp.up_proj": Piece("blocks.*.mlp.up", up - hidden, up),
        "layers.*.mlp.down_proj": Piece("blocks.*.mlp.out"),
    }


MLP = ModelFeature(
    fields=("mlp", "mlp_width"),
    gpt2=Format(
        read=lambda read: read.check_gpt2(
            activation_function=("gelu_new", "gelu_pytorch_tanh"), n_inner=(None, 4 * read.whole("n_embd"))
        ),
        write=lambda model, kind: {"n_inner": None, "activation_function": "gelu_new"},
        modules=lambda model: {
            "h.*.mlp.c_fc": Piece("blocks.*.mlp.up", transposed=True),
            "h.*.mlp.c_proj": Piece("blocks.*.mlp.out", transposed=True),
        },
    ),
    llama=Format(
        read=_read_mlp,
        write=_write_mlp,
        modules=_llama_mlp,
    ),
)


def has_bias(model: ModelConfig, module: str) -> bool:
    """Whether a linear layer, norm or table of ours has a bias beside its weight."""
    if module in ("embedding", "positions", "head"):
        return False
    if module.endswith("attention.qkv"):
        return model.has_qkv_bias
    return model.bias and (not module.endswith("norm") or model.norm == "layernorm")


def _read_bias(read: HubValues) -> dict[str, Any]:
    attention = read.kind not in ("mistral", "qwen2", "phi3") and read.flag("attention_bias")
    mlp = read.kind in ("llama", "smollm3") and read.flag("mlp_bias")
    if attention != mlp:
        stated = f"attention_bias is {format_value(attention)} and mlp_bias {format_value(mlp)}"
        raise read.refuse(f"{stated}; only both or none are supported")
    return {"bias": attention}


def _write_bias(model: ModelConfig, kind: str) -> dict[str, Any]:
    keys = {"qwen2": (), "phi3": (), "llama": ("attention_bias", "mlp_bias"), "smollm3": ("attention_bias", "mlp_bias")}
    return dict.fromkeys(keys.get(kind, ("attention_bias",)), model.bias)


BIAS = ModelFeature(
    fields=("bias", "qkv_bias"),
    llama=Format(read=_read_bias, write=_write_bias),
)

# --- tables beside the embedding, gates, mixed streams: in no format of Hugging Face ----------------------------------

FIRST_MIX = ours_alone("first_mix", False, "no model of transformers mixes its first residual stream into every block")
VALUE_TABLES = ours_alone("value_tables", 0, "no model of transformers adds rows of a table to attention's values")
HEAD_GATE = ours_alone("head_gate", False, "no model of transformers has a gate on the heads of attention")
BIGRAM = ours_alone("bigram_rows", 0, "no model of transformers has a table of pairs of tokens")

# --- what is no part of the trained model -----------------------------------------------------------------------------


def _read_gpt2_dropout(read: HubValues) -> dict[str, Any]:
    dropout = read.get("resid_pdrop", 0.1)
    return {"dropout": float(dropout) if isinstance(dropout, int | float) else dropout}


DROPOUT = ModelFeature(
    fields=("dropout",),
    described=False,
    gpt2=Format(
        read=_read_gpt2_dropout,
        write=lambda model, kind: dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    ),
    llama=Format(write=lambda model, kind: {"attention_dropout": 0.0}),
)

START = ModelFeature(
    fields=("vocab", "init_from", "zero_init"),
    described=False,
    # The row of a padding token would get no gradient there, and its id may be beyond the vocabulary.
    llama=Format(write=lambda model, kind: {"pad_token_id": None} if "pad_token_id" in DEFAULTS[kind] else {}),
    no_export="they say how a model is begun; the size of its vocabulary is written as it came out",
)

FEATURES = (STREAM, CONTEXT, NORM, EMBEDDING_SCALE, EMBEDDING_NORM, ATTENTION, SCORES, QK_NORM, POSITIONS, PATTERN)
FEATURES += (EIGENSTATES, MLP, BIAS, RESIDUAL_SCALE, FIRST_MIX, VALUE_TABLES, HEAD_GATE, BIGRAM, LOGIT_CAP, HEAD)
FEATURES += (DROPOUT, START)


def projections(model: ModelConfig) -> dict[str, tuple[str, Piece]]:
    """The projections of a block by their paths in a Hugging Face checkpoint: our matrix and its rows."""
    ours = {"attention.qkv": "qkv", "attention.out": "out", "mlp.up": "up", "mlp.out": "down"}
    start = "transformer" if model.family == "gpt2" else "model"
    return {
        f"{start}.{theirs}": (ours[piece.name.removeprefix("blocks.*.")], piece)
        for feature in (ATTENTION, MLP)
        for theirs, piece in feature.format(model.family).modules(model).items()
    }
