"""Every field of the model section, declared once: parameters, work, memory, and Hugging Face's formats.

Contract: each field of `ModelConfig` belongs to exactly one feature of `FEATURES`; a test names one that is missing.
The features of attention, and of what may take its place, are in `fields_mixing.py`, those of tables, gates and mixed
streams in `fields_streams.py`. Declared sizes are tested against built models, torch's FLOP counter and the bytes that
autograd keeps; declared formats against transformers. How to add a feature: docs/architecture.md, "Adding a model
field".
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.model.feature import Feature, Fold, Form, Format, Piece, mixer_widths, mlp_widths
from flatout.model.fields_mixing import ATTENTION, MIXING
from flatout.model.fields_streams import STREAMS
from flatout.model.hub_values import HubValues
from flatout.model.layers import mlp_width_of

# --- the residual stream ----------------------------------------------------------------------------------------------

STREAM = Feature(
    fields=("family", "layers", "width"),
    outside=lambda model, vocab: vocab * model.width,
    gpt2=Format(
        only={"family": "gpt2"},
        keys={"n_embd": "width", "n_layer": "layers"},
        modules=lambda model: {"wte": Piece("embedding")},
    ),
    llama=Format(
        only={"family": "gpt"},
        keys={"num_hidden_layers": "layers", "hidden_size": "width"},
        modules=lambda model: {"embed_tokens": Piece("embedding")},
    ),
)

CONTEXT = Feature(
    fields=("context",),
    described=False,  # a model may be used with less than it was made for
    gpt2=Format(keys={"n_positions": "context"}, write=lambda model, kind: {"n_ctx": model.context}),
    llama=Format(keys={"max_position_embeddings": "context"}),
)


def _norm_kept(model: ModelConfig, kind: str, form: Form) -> int:
    kept = 2 * (form.stream + form.cell) * model.width  # inputs and outputs of both norms
    if form.triton:
        kept += 16 if model.norm == "layernorm" else 8  # statistics of both
    elif form.eager and model.norm == "rmsnorm" and model.norm_weights and not form.frozen:
        kept += 2 * form.stream * model.width  # the normalised input, for the gradient of its weight
    return kept


def _norms_of_ones(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = ["norm", *(f"blocks.{layer}.{at}_norm" for layer in range(model.layers) for at in ("attention", "mlp"))]
    return dict.fromkeys([f"{name}.weight" for name in names], weights["embedding.weight"].new_ones(model.width))


NORM = Feature(
    fields=("norm", "norm_eps", "norm_weights"),
    values=lambda model, kind: 2 * model.width if model.norm_weights else 0,
    outside=lambda model, vocab: model.width if model.norm_weights else 0,
    kept=_norm_kept,
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
        only={"norm": "rmsnorm"},
        read=lambda read: {"norm_eps": read.number("rms_norm_eps", 1e-6)},
        write=lambda model, kind: {"rms_norm_eps": model.norm_eps},
        modules=lambda model: {
            "layers.*.input_layernorm": Piece("blocks.*.attention_norm"),
            "layers.*.post_attention_layernorm": Piece("blocks.*.mlp_norm"),
            "norm": Piece("norm"),
        },
    ),
    fold=Fold(
        when=lambda model: not model.norm_weights and model.norm == "rmsnorm",
        fields={"norm_weights": True},
        weights=_norms_of_ones,
    ),
)


def _normed_rows(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summed in a fixed order: adapters know their base by every bit, and torch sums otherwise on other machines."""
    table = weights["embedding.weight"].float()
    squares = functools.reduce(torch.add, (column.double().square() for column in table.unbind(1)))
    factor = (squares / model.width + model.norm_eps).sqrt().reciprocal().float()
    return {"embedding.weight": table * factor[:, None]}


EMBEDDING_NORM = Feature(
    fields=("embedding_norm",),
    without={"embedding_norm": False},
    no_export="only a table that is the embedding's alone can hold rows that are normed already: with model.tied=false",
    fold=Fold(
        when=lambda model: model.embedding_norm and not model.tied and model.positions == "rope",
        fields={"embedding_norm": False},
        weights=_normed_rows,
    ),
)

LOGIT_CAP = Feature(
    fields=("logit_cap",),
    without={"logit_cap": None},
    no_export="the formats written here have no cap on the logits",
)

RESIDUAL_SCALE = Feature(
    fields=("residual_scale",),
    values=lambda model, kind: 0 if model.residual_scale is None else 2 * model.width,
    kept=lambda model, kind, form: (
        2 * form.cell * model.width if model.residual_scale is not None and form.eager else 0
    ),
    without={"residual_scale": None},
    no_export="no model of transformers has learned scales on its residual branches",
)

HEAD = Feature(
    fields=("tied",),
    outside=lambda model, vocab: 0 if model.tied else vocab * model.width,
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

# --- the MLP and biases -----------------------------------------------------------------------------------------------


def _mlp_matrices(model: ModelConfig, kind: str) -> dict[str, int]:
    up, hidden = mlp_widths(model)
    return {"up": model.width * up, "down": model.width * hidden}


def _mlp_kept(model: ModelConfig, kind: str, form: Form) -> int:
    up, hidden = mlp_widths(model)
    kept = form.cell * up  # the input of the non-linearity
    if not (form.triton and form.frozen):  # which makes the output again
        kept += form.cell * hidden
    if model.mlp == "swiglu" and form.eager:
        kept += form.cell * hidden  # silu(gate)
    return kept


def _read_mlp(read: HubValues) -> dict[str, Any]:
    activation = read.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise read.refuse(f"hidden_act is {shorten(activation)}, only silu is supported")
    return {"mlp_width": read.whole("intermediate_size")}


def _llama_mlp(model: ModelConfig) -> dict[str, Piece]:
    up, hidden = mlp_widths(model)
    gate = {"layers.*.mlp.gate_proj": Piece("blocks.*.mlp.up", 0, hidden)} if model.mlp == "swiglu" else {}
    return {
        **gate,
        "layers.*.mlp.up_proj": Piece("blocks.*.mlp.up", up - hidden, up),
        "layers.*.mlp.down_proj": Piece("blocks.*.mlp.out"),
    }


MLP = Feature(
    fields=("mlp", "mlp_width"),
    matrices=_mlp_matrices,
    kept=_mlp_kept,
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
        only={"mlp": "swiglu"},
        read=_read_mlp,
        write=lambda model, kind: {"intermediate_size": mlp_width_of(model), "hidden_act": "silu"},
        modules=_llama_mlp,
    ),
)


def has_bias(model: ModelConfig, module: str) -> bool:
    """Whether a linear layer, norm or table of ours has a bias beside its weight."""
    if module in ("embedding", "positions", "head"):
        return False
    if module.endswith("attention.qkv"):
        return model.has_qkv_bias
    return model.bias and (not module.endswith("norm") or (model.norm == "layernorm" and model.norm_weights))


def bias_values(model: ModelConfig, kind: str) -> int:
    """Biases of a block, in its linear layers and norms."""
    total = mixer_widths(model, kind)[0] if kind != "E" and model.has_qkv_bias else 0
    if model.bias:
        total += 2 * model.width + mlp_widths(model)[0]  # after the mixer, and of the MLP
        total += 2 * model.width if model.norm == "layernorm" and model.norm_weights else 0
    return total


def _read_bias(read: HubValues) -> dict[str, Any]:
    attention = read.kind in ("llama", "qwen3") and read.flag("attention_bias")
    mlp = read.kind == "llama" and read.flag("mlp_bias")
    if attention != mlp:
        stated = f"attention_bias is {format_value(attention)} and mlp_bias {format_value(mlp)}"
        raise read.refuse(f"{stated}; only both or none are supported")
    return {"bias": attention, "qkv_bias": True if read.kind == "qwen2" else None}


def _write_bias(model: ModelConfig, kind: str) -> dict[str, Any]:
    keys = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}
    return dict.fromkeys(keys.get(kind, ()), model.bias)


BIAS = Feature(
    fields=("bias", "qkv_bias"),
    values=bias_values,
    outside=lambda model, vocab: model.width if has_bias(model, "norm") else 0,
    llama=Format(read=_read_bias, write=_write_bias),
)

# --- what is no part of the trained model -----------------------------------------------------------------------------


def _read_gpt2_dropout(read: HubValues) -> dict[str, Any]:
    dropout = read.get("resid_pdrop", 0.1)
    return {"dropout": float(dropout) if isinstance(dropout, int | float) else dropout}


DROPOUT = Feature(
    fields=("dropout",),
    described=False,
    gpt2=Format(
        read=_read_gpt2_dropout,
        write=lambda model, kind: dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    ),
    llama=Format(write=lambda model, kind: {"attention_dropout": 0.0}),
)

START = Feature(
    fields=("vocab", "init_from", "ignore_auto_map", "zero_init", "embedding_std"),
    described=False,
    no_export="they say how a model is begun; the size of its vocabulary is written as it came out",
)

FEATURES = (STREAM, CONTEXT, NORM, EMBEDDING_NORM, *MIXING, MLP, BIAS, RESIDUAL_SCALE, *STREAMS, LOGIT_CAP, HEAD)
FEATURES += (DROPOUT, START)


def projections(model: ModelConfig) -> dict[str, tuple[str, Piece]]:
    """The projections of a block by their paths in a checkpoint of Hugging Face: our matrix, and its rows."""
    ours = {"attention.qkv": "qkv", "attention.out": "out", "mlp.up": "up", "mlp.out": "down"}
    start = "transformer" if model.family == "gpt2" else "model"
    return {
        f"{start}.{theirs}": (ours[piece.name.removeprefix("blocks.*.")], piece)
        for feature in (ATTENTION, MLP)
        for theirs, piece in feature.format(model.family).modules(model).items()
    }
