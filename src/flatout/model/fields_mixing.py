"""The fields of the model section that are about mixing tokens: attention, positions, windows, eigenstates.

Trap: transformers 5 writes `rope_parameters` where 4 wrote `rope_theta` and `rope_scaling`. Both are read, and where a
file has both, `rope_scaling` wins, as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import shorten
from flatout.model.feature import Feature, Fold, Form, Format, Piece, key_width, mixer_widths
from flatout.model.hub_values import HubValues
from flatout.ops.scan import CHUNK


def _mixer_matrices(model: ModelConfig, kind: str) -> dict[str, int]:
    columns, rows = mixer_widths(model, kind)
    return {"qkv": model.width * columns, "out": model.width * rows}


def _attention_kept(model: ModelConfig, kind: str, form: Form) -> int:
    # the output of qkv, the output of attention, its log-sum-exp
    return 0 if kind == "E" else form.cell * sum(mixer_widths(model, kind)) + 4 * model.heads


def _read_heads(read: HubValues) -> dict[str, Any]:
    width, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    size, groups = read.whole_or_none("head_dim"), read.whole_or_none("num_key_value_heads")
    return {
        "kv_heads": None if groups == heads else groups,
        "head_size": None if size is None or size * heads == width else size,
    }


def _llama_projections(model: ModelConfig) -> dict[str, Piece]:
    queries, keys = model.queries, key_width(model)
    return {
        "layers.*.self_attn.q_proj": Piece("blocks.*.attention.qkv", 0, queries),
        "layers.*.self_attn.k_proj": Piece("blocks.*.attention.qkv", queries, queries + keys),
        "layers.*.self_attn.v_proj": Piece("blocks.*.attention.qkv", queries + keys, queries + 2 * keys),
        "layers.*.self_attn.o_proj": Piece("blocks.*.attention.out"),
    }


ATTENTION = Feature(
    fields=("heads", "kv_heads", "head_size"),
    matrices=_mixer_matrices,
    kept=_attention_kept,
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


def _qk_norm_kept(model: ModelConfig, kind: str, form: Form) -> int:
    if kind == "E" or not model.qk_norm:
        return 0
    both = model.queries + key_width(model)
    if form.triton:  # one copy for norm and rotation; a frozen block rotates in place where there is no norm
        return form.cell * both if form.frozen or model.positions != "rope" else 0
    if not form.eager:
        return 0
    return 4 * both * (form.half + model.norm_weights)  # widened first, and normalised in fp32 before their weights


def _scaled_norms(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scale of both in the norm of queries: keys keep weights that no type rounds."""
    found: dict[str, Tensor] = {}
    for layer in range(model.layers):
        for name, scale in (("q", model.qk_scale**2), ("k", 1.0)):
            full = f"blocks.{layer}.attention.{name}_norm.weight"
            weight = weights[full] if model.norm_weights else weights["embedding.weight"].new_ones(model.size)
            found[full] = weight.float() * scale
    return found


QK_NORM = Feature(
    fields=("qk_norm", "qk_scale"),
    values=lambda model, kind: 2 * model.size if model.qk_norm and model.norm_weights and kind != "E" else 0,
    kept=_qk_norm_kept,
    llama=Format(
        read=lambda read: {"qk_norm": read.kind == "qwen3"},  # which states no key for it
        modules=lambda model: {
            f"layers.*.self_attn.{x}_norm": Piece(f"blocks.*.attention.{x}_norm") for x in "qk" if model.qk_norm
        },
    ),
    fold=Fold(
        when=lambda model: model.qk_norm and (not model.norm_weights or model.qk_scale != 1.0),
        fields={"qk_scale": 1.0},
        weights=_scaled_norms,
    ),
)


def _positions_kept(model: ModelConfig, kind: str, form: Form) -> int:
    both = form.cell * (model.queries + key_width(model))
    if kind == "E":
        return 0
    if form.triton:  # turned queries and keys
        return both if model.positions == "rope" and not form.frozen else 0
    # and attention's output in the layout of the product after it
    return both + form.cell * model.queries if apart(model, form) else 0


def apart(model: ModelConfig, form: Form) -> bool:
    """Whether torch's operations give attention queries and keys in memory of their own: turned, or normalised."""
    return not form.triton and (model.positions == "rope" or model.qk_norm)


def _read_rope(read: HubValues) -> dict[str, Any]:
    """The rotary fields, from either spelling."""
    given = read.get("rope_scaling") or read.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise read.refuse(f"rotary settings {shorten(given)} are not supported: one set for all layers is")
    inside = HubValues(given, read.path)
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
        original = "original_max_position_embeddings"
        fields |= {
            "rope_low": inside.number("low_freq_factor"),
            "rope_high": inside.number("high_freq_factor"),
            "rope_original_context": inside.whole(original, read.get(original, read.whole("max_position_embeddings"))),
        }
    return fields


def _write_rope(model: ModelConfig, kind: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low,
            "high_freq_factor": model.rope_high,
            "original_max_position_embeddings": model.rope_original_context,
        }
    return {"rope_theta": model.rope_base, "rope_scaling": None if model.rope_scaling is None else scaling}


POSITIONS = Feature(
    fields=(
        "positions",
        *(f"rope_{name}" for name in ("base", "scaling", "factor", "low", "high", "original_context")),
    ),
    outside=lambda model, vocab: model.context * model.width if model.positions == "learned" else 0,
    kept=_positions_kept,
    gpt2=Format(modules=lambda model: {"wpe": Piece("positions")}),
    llama=Format(only={"positions": "rope"}, read=_read_rope, write=_write_rope),
)


def read_windows(read: HubValues, layers: int, context: int) -> dict[str, Any]:
    """The fields that a sliding window gives; none where it is at least as long as the context."""
    if read.kind not in ("mistral", "qwen2", "qwen3"):
        return {}
    types: Any = ["sliding_attention"] * layers
    if read.kind != "mistral":
        full = min(layers, read.whole("max_window_layers", least=0))
        types = read.get("layer_types") or ["full_attention"] * full + types[full:]
        if not isinstance(types, list) or not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
            raise read.refuse(f"layer_types is {shorten(types)}, only full and sliding attention are supported")
        if not read.flag("use_sliding_window"):
            return {}
    window = read.whole_or_none("sliding_window") if "sliding_attention" in types else None
    if window is None or window >= context:
        return {}
    if len(types) != layers:
        raise read.refuse(f"layer_types names {len(types):,} layers, and there are {layers:,}")
    kinds = "".join("W" if kind == "sliding_attention" else "A" for kind in types)
    return {"pattern": kinds if len(set(kinds)) > 1 else kinds[0], "window": window}


PATTERN = Feature(
    fields=("pattern", "window"),
    described=False,  # compared by how far tokens see, which a shorter context may make the same
    llama=Format(  # what a file says of windows is read by `read_windows`, once the context is known
        write=lambda model, kind: {} if kind == "llama" else {"use_sliding_window": False, "sliding_window": None}
    ),
    no_export="only models whose blocks all have full attention can be exported; `flatout generate` runs this one",
)

# --- eigenstates ------------------------------------------------------------------------------------------------------


def _eigenstate_values(model: ModelConfig, kind: str) -> int:
    if kind != "E":
        return 0
    total = 2 * model.states + len(model.scales) + model.convolution * 2 * model.states
    total += model.states**2 // model.state_heads if model.resonance else 0
    return total + (model.state_heads if model.modulation else 0)


def _eigenstate_kept(model: ModelConfig, kind: str, form: Form) -> int:
    """The compiler is not asked: it looks into little of it."""
    if kind != "E":
        return 0
    cell, both, how = form.cell, 2 * model.states, form.execution
    kept = cell * 4 * both  # inputs and gate in one buffer; the states, and what the gate leaves of them
    options = model.resonance or model.modulation or model.convolution or model.scales
    if options or not form.triton or how.scan != "triton" or "qkv" in how.fp8:
        kept += cell * both  # the gate after its non-linearity
    if model.convolution:
        kept += cell * both  # inputs with what came before them
    if model.modulation:  # rates, decays, and scales of inputs, all in fp32
        kept += 4 * 3 * both + (cell * both if model.convolution else 0)
    if model.scales:
        kept += cell * both  # weighted states
    if model.resonance:
        kept += cell * both  # coupled states
    if how.scan != "triton":  # inputs in fp32; where decays differ, every step, and what is carried over chunks
        steps = 1 if not model.modulation else 3 if model.context <= CHUNK else 5
        kept += steps * 4 * both
    return kept


def _chunk_bytes(model: ModelConfig, positions: int, form: Form) -> int:
    """Powers of eigenvalues that the scan in chunks multiplies with: of a chunk, of chunks of chunks, and so on."""
    how = form.execution
    if how.scan != "chunked" or model.modulation or how.checkpointing == "full":
        return 0
    total = 0
    while positions > 1:
        length = min(CHUNK, positions)
        total += 2 * 4 * model.states * length**2
        positions = -(-positions // length)
    return total


def _scaled_weights(model: ModelConfig, form: Form) -> tuple[int, int]:
    """(bytes of weights times the scale of inputs that E blocks keep for backward, those that backward makes again).

    The product of such a block is with a copy of its first matrix, 4·K by W in fp32, which holds the scale. In torch's
    operations in half precision only its cast is kept, which is counted among the copies of all weights. Where decays
    vary with the input, or weights are of 8 bits, inputs are scaled instead.
    """
    count, how = model.kinds.count("E"), form.execution
    if not count or model.modulation or (form.triton and "qkv" in how.fp8):
        return 0, 0
    one = 4 * 4 * model.states * model.width
    if form.triton:
        return (0, one) if how.checkpointing == "full" else (count * one, 0)
    if how.checkpointing != "none":
        return 0, one
    if form.half:
        return 0, 0
    return (min(count, 2) if how.activation_offload else count) * one, 0


def _eigenstate_fixed(model: ModelConfig, positions: int, form: Form) -> tuple[int, int]:
    kept, again = _scaled_weights(model, form)
    return kept + model.kinds.count("E") * _chunk_bytes(model, positions, form), again


EIGENSTATES = Feature(
    fields=("states", "state_heads", "resonance", "modulation", "convolution", "scales", "energy"),
    matrices=lambda model, kind: (  # those into and out of the states are counted with attention's
        {"modulate": model.width * model.state_heads} if kind == "E" and model.modulation else {}
    ),
    values=_eigenstate_values,
    # both halves of a state go through the same matrix of its head
    work=lambda model, kind: 2 * model.states**2 // model.state_heads if kind == "E" and model.resonance else 0,
    kept=_eigenstate_kept,
    fixed=_eigenstate_fixed,
    no_export="transformers has no blocks of eigenstates; model.pattern says whether there are any",
)

MIXING = (ATTENTION, QK_NORM, POSITIONS, PATTERN, EIGENSTATES)
