"""Every field of the model section, declared once: parameters, work, memory, and Hugging Face's formats.

Contract: each field of `ModelConfig` belongs to exactly one feature of `FEATURES`; a test says which one is missing.
`fields_mixing.py` holds those of attention and of what may take its place.
What the declarations say of sizes is tested against built models, torch's FLOP counter and the bytes that autograd
keeps; what they say of formats against transformers. docs/architecture.md, "Adding a model field", is the way to extend
this file.
"""

from typing import Any

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value, shorten
from flatout.model.feature import Feature, Form, Format, Piece, in_every_block, mixer_widths, mlp_widths
from flatout.model.fields_mixing import (
    ATTENTION,
    EIGENSTATES,
    GPT2_ATTENTION,
    LLAMA_OUT,
    PATTERN,
    POSITIONS,
    QK_NORM,
    llama_qkv,
)
from flatout.model.hub_values import HubValues
from flatout.model.layers import mlp_width_of

_GPT2_NORMS = {"ln_1": Piece("attention_norm"), "ln_2": Piece("mlp_norm")}
_GPT2_MLP = {"mlp.c_fc": Piece("mlp.up", transposed=True), "mlp.c_proj": Piece("mlp.out", transposed=True)}
_LLAMA_NORMS = {"input_layernorm": Piece("attention_norm"), "post_attention_layernorm": Piece("mlp_norm")}


def _llama_mlp(model: ModelConfig) -> dict[str, Piece]:
    hidden = mlp_width_of(model)
    return {
        "mlp.gate_proj": Piece("mlp.up", 0, hidden),
        "mlp.up_proj": Piece("mlp.up", hidden, 2 * hidden),
        "mlp.down_proj": Piece("mlp.out"),
    }


# --- the residual stream ----------------------------------------------------------------------------------------------

STREAM = Feature(
    fields=("family", "layers", "width"),
    outside=lambda model, vocab: vocab * model.width,
    gpt2=Format(
        only={"family": "gpt2"},
        read=lambda read: {"layers": read.whole("n_layer"), "width": read.whole("n_embd")},
        write=lambda model, kind: {"n_embd": model.width, "n_layer": model.layers, "initializer_range": 0.02},
        tensors=lambda model: {"wte.weight": Piece("embedding.weight")},
    ),
    llama=Format(
        only={"family": "gpt"},
        read=lambda read: {"layers": read.whole("num_hidden_layers"), "width": read.whole("hidden_size")},
        write=lambda model, kind: {
            "num_hidden_layers": model.layers,
            "hidden_size": model.width,
            "initializer_range": 0.02,
        },
        tensors=lambda model: {"embed_tokens.weight": Piece("embedding.weight")},
    ),
)

CONTEXT = Feature(
    fields=("context",),
    described=False,  # a model may be used with less than it was made for
    gpt2=Format(
        read=lambda read: {"context": read.whole("n_positions", 1024)},
        write=lambda model, kind: {"n_positions": model.context, "n_ctx": model.context},
    ),
    llama=Format(
        read=lambda read: {"context": read.whole("max_position_embeddings")},
        write=lambda model, kind: {"max_position_embeddings": model.context},
    ),
)


def _norm_kept(model: ModelConfig, kind: str, form: Form) -> int:
    kept = 2 * (form.stream + form.cell) * model.width  # inputs and outputs of both norms
    if form.triton:
        kept += 16 if model.norm == "layernorm" else 8  # statistics of both
    elif form.eager and model.norm == "rmsnorm" and not form.frozen:  # a frozen scale needs no gradient
        kept += 2 * form.stream * model.width  # the normalised input, before its weight
    return kept


NORM = Feature(
    fields=("norm", "norm_eps"),
    values=lambda model, kind: 2 * model.width,
    outside=lambda model, vocab: model.width,
    kept=_norm_kept,
    gpt2=Format(
        read=lambda read: read.check_gpt2(layer_norm_epsilon=(1e-5,)),
        write=lambda model, kind: {"layer_norm_epsilon": model.norm_eps},
        tensors=lambda model: in_every_block("h", _GPT2_NORMS) | {"ln_f.weight": Piece("norm.weight")},
    ),
    llama=Format(
        only={"norm": "rmsnorm"},
        read=lambda read: {"norm_eps": read.number("rms_norm_eps", 1e-6)},
        write=lambda model, kind: {"rms_norm_eps": model.norm_eps},
        tensors=lambda model: in_every_block("layers", _LLAMA_NORMS) | {"norm.weight": Piece("norm.weight")},
    ),
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
        tensors=lambda model: {} if model.tied else {"lm_head.weight": Piece("head.weight")},
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


MLP = Feature(
    fields=("mlp", "mlp_width"),
    matrices=_mlp_matrices,
    kept=_mlp_kept,
    gpt2=Format(
        read=lambda read: read.check_gpt2(
            activation_function=("gelu_new", "gelu_pytorch_tanh"), n_inner=(None, 4 * read.whole("n_embd"))
        ),
        write=lambda model, kind: {"n_inner": None, "activation_function": "gelu_new"},
        tensors=lambda model: in_every_block("h", _GPT2_MLP),
    ),
    llama=Format(
        only={"mlp": "swiglu"},
        read=_read_mlp,
        write=lambda model, kind: {"intermediate_size": mlp_width_of(model), "hidden_act": "silu"},
        tensors=lambda model: in_every_block("layers", _llama_mlp(model)),
    ),
)


def _bias_values(model: ModelConfig, kind: str) -> int:
    total = mixer_widths(model, kind)[0] if kind != "E" and model.has_qkv_bias else 0
    if model.bias:
        total += 2 * model.width + mlp_widths(model)[0]  # after the mixer, and of the MLP
        total += 2 * model.width if model.norm == "layernorm" else 0
    return total


def _read_bias(read: HubValues) -> dict[str, Any]:
    attention = read.kind in ("llama", "qwen3") and read.flag("attention_bias")
    mlp = read.kind == "llama" and read.flag("mlp_bias")
    if attention != mlp:
        raise read.refuse(
            f"attention_bias is {format_value(attention)} and mlp_bias {format_value(mlp)}; "
            "only both or none are supported"
        )
    return {"bias": attention, "qkv_bias": True if read.kind == "qwen2" else None}


def _write_bias(model: ModelConfig, kind: str) -> dict[str, Any]:
    values = {"attention_bias": model.bias} if kind in ("llama", "qwen3") else {}
    return values | ({"mlp_bias": model.bias} if kind == "llama" else {})


BIAS = Feature(
    fields=("bias", "qkv_bias"),
    values=_bias_values,
    outside=lambda model, vocab: model.width if model.bias and model.norm == "layernorm" else 0,
    gpt2=Format(
        tensors=lambda model: (
            in_every_block("h", _GPT2_NORMS | GPT2_ATTENTION | _GPT2_MLP, "bias") | {"ln_f.bias": Piece("norm.bias")}
        ),
    ),
    llama=Format(
        read=_read_bias,
        write=_write_bias,
        tensors=lambda model: (
            (in_every_block("layers", llama_qkv(model), "bias") if model.has_qkv_bias else {})
            | (in_every_block("layers", LLAMA_OUT | _llama_mlp(model), "bias") if model.bias else {})
        ),
    ),
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
    fields=("vocab", "init_from", "ignore_auto_map"),
    described=False,
    no_export="they say how a model is begun; the size of its vocabulary is written as it came out",
)

_MIXING = (ATTENTION, QK_NORM, POSITIONS, PATTERN, EIGENSTATES)
FEATURES = (STREAM, CONTEXT, NORM, *_MIXING, MLP, BIAS, RESIDUAL_SCALE, HEAD, DROPOUT, START)
