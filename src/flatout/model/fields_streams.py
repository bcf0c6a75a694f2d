"""The fields of the model section about tables beside the embedding, gates, and what blocks mix into their input.

No format of Hugging Face has any of them.
"""

from flatout.config.schema import ModelConfig
from flatout.model.feature import Feature, Form, key_width, mixer_widths
from flatout.model.fields_mixing import apart
from flatout.model.layers import GATE_INPUTS

FIRST_MIX = Feature(
    fields=("first_mix",),
    values=lambda model, kind: 2 if model.first_mix else 0,
    # a block's input as it was before; our kernels keep it in the place of what the norm takes
    kept=lambda model, kind, form: form.stream * model.width if model.first_mix and not form.triton else 0,
    without={"first_mix": False},
    no_export="no model of transformers mixes its first residual stream into every block",
)


def _inputs(model: ModelConfig) -> int:
    return min(GATE_INPUTS, model.width)


def _gate_bytes(gates: int, form: Form) -> int:
    """The gates of a token, and what their sigmoid keeps."""
    return 4 * gates if form.triton else 2 * form.cell * gates


def _value_gates(model: ModelConfig) -> int:
    """Weights of the gates of all blocks that a value table serves."""
    return 2 * model.value_tables * (model.kv_heads or model.heads) * _inputs(model)


def _values_kept(model: ModelConfig, form: Form) -> int:
    """Looked-up rows, once for each table, and values in memory of their own; our kernels look up again in backward,
    and add where values lie."""
    blocks, values = 2 * model.value_tables, form.cell * key_width(model)
    looked_up, gates = model.value_tables * values, _gate_bytes(model.kv_heads or model.heads, form)
    if form.execution.checkpointing == "full":
        return 0 if form.triton else looked_up
    if form.triton:
        return blocks * gates
    # Where queries and keys are widened before their norms, nobody needs the product that the values were a part of.
    freed = form.cell * mixer_widths(model, "A")[0] if form.eager and form.half and model.qk_norm else 0
    return looked_up + blocks * (values + gates - freed)


VALUE_TABLES = Feature(
    fields=("value_tables",),
    outside=lambda model, vocab: model.value_tables * vocab * key_width(model) + _value_gates(model),
    tables=lambda model, vocab: model.value_tables * vocab * key_width(model),
    outside_work=_value_gates,
    outside_kept=_values_kept,
    without={"value_tables": 0},
    no_export="no model of transformers adds rows of a table to attention's values",
)


def _head_gate_kept(model: ModelConfig, kind: str, form: Form) -> int:
    """The gated output beside attention's own, unless torch's operations copy that into another layout anyway."""
    if not model.head_gate or kind == "E":
        return 0
    return _gate_bytes(model.heads, form) + (0 if apart(model, form) else form.cell * model.queries)


HEAD_GATE = Feature(
    fields=("head_gate",),
    values=lambda model, kind: model.heads * _inputs(model) if model.head_gate and kind != "E" else 0,
    work=lambda model, kind: model.heads * _inputs(model) if model.head_gate and kind != "E" else 0,
    kept=_head_gate_kept,
    without={"head_gate": False},
    no_export="no model of transformers has a gate on the heads of attention",
)

BIGRAM = Feature(
    fields=("bigram_rows",),
    outside=lambda model, vocab: model.bigram_rows * model.width,
    tables=lambda model, vocab: model.bigram_rows * model.width,
    without={"bigram_rows": 0},
    no_export="no model of transformers has a table of pairs of tokens",
)

STREAMS = (FIRST_MIX, VALUE_TABLES, HEAD_GATE, BIGRAM)
