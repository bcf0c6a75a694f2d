"""How big, how much arithmetic, how much memory: from the config alone, before anything is built.

FLOP convention, here and everywhere in Flatout: a training token costs 6 per weight of a matrix product (2 forward,
4 backward; the tied or untied head counts, embedding look-ups do not) plus, in each block, 12·W for every token that it
attends to: of a context of T on average (T + 1) / 2, with a sliding window at most the window. Where `model.head_size`
is given, W is heads times that size. What a causal mask hides is no work, and counts in no utilisation; nanoGPT and
others count it, which is 7% more for GPT-2 124M at 1,024 tokens, and at 32,768 so much that it can pass 100%. The scan
of eigenstates, some tens of operations for each state, is left out, as all work is that goes element by element. Under
adapters a frozen weight costs 4 (2 forward, 2 for the gradient that passes through; it has none of its own), and each
value of an adapter 6.

Memory convention: bytes of torch's allocator at the peak of a step, which is either inside the loss (all blocks' kept
values and the logits) or at the start of backward (all kept values and one block's gradients), whichever is more. What
a library takes as workspace, some tens of megabytes, is not in it. 8-bit copies of values are not either: a product
takes them at once, and backward keeps the wide ones.
"""

import dataclasses
from collections.abc import Collection, Iterable

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.feature import LINEARS, Form, mixer_widths, mlp_widths
from flatout.model.fields import FEATURES, bias_values, has_bias, projections
from flatout.model.layers import mlp_width_of
from flatout.ops.documents import BY_BOUNDS
from flatout.ops.quantized import BYTES as QUANTIZED_BYTES

GATHERED = 32 * 10**6  # weights that are worth a gathering: each costs the host about a millisecond
GRAPH_BYTES = 220 * 2**20  # measured on an H200 with GPT-2 124M, 1 to 16 sequences


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """Exactly the number of trained values; a tied head is counted once."""
    total = sum(feature.outside(config, vocab) for feature in FEATURES)
    return total + sum(block_count(config, kind) for kind in config.kinds)


def table_count(config: ModelConfig, vocab: int) -> int:
    """Trained values in tables beside the embedding, of which a token reads a row each. All others are dense."""
    return sum(feature.tables(config, vocab) for feature in FEATURES)


def block_count(config: ModelConfig, kind: str) -> int:
    """Trained values of one block, of a kind that `model.pattern` names."""
    return sum(_matrices(config, kind).values()) + sum(feature.values(config, kind) for feature in FEATURES)


def blocks_gathered(config: ModelConfig) -> int:
    """How many blocks of a sharded model are gathered at once: small ones in groups, but never more than a quarter."""
    largest = max(block_count(config, kind) for kind in config.kinds)
    return max(1, min(GATHERED // largest, config.layers // 4))


def matrix_count(config: ModelConfig) -> int:
    """Weights of the matrices of all blocks."""
    return sum(sum(_matrices(config, kind).values()) for kind in config.kinds)


def linear_count(config: ModelConfig) -> int:
    """Weights of the linear layers in all blocks, but those that have no place in `speed.fp8`."""
    return sum(_matrices(config, kind)[name] for kind in config.kinds for name in LINEARS)


def _matrices(config: ModelConfig, kind: str) -> dict[str, int]:
    """Weights of a block's matrices, by name."""
    return {name: size for feature in FEATURES for name, size in feature.matrices(config, kind).items()}


def adapter_count(config: ModelConfig, rank: int) -> int:
    """Trained values of adapters on every projection of every block, fused matrices counted by their parts."""
    matrices, total = _matrices(config, "A"), 0
    for linear, piece in projections(config).values():
        inputs = {"out": config.queries, "down": mlp_width_of(config)}.get(linear, config.width)
        total += inputs + (piece.last or matrices[linear] // inputs) - piece.first
    return config.layers * rank * total


def whole_count(config: ModelConfig, vocab: int, also: Collection[str]) -> int:
    """Trained values of weights that are trained whole beside adapters; a tied head comes with its embedding."""
    tables = ("embedding" in also) + ("head" in also and not config.tied)
    return tables * vocab * config.width + (bias_count(config) if "biases" in also else 0)


def bias_count(config: ModelConfig) -> int:
    """Biases of all layers and norms."""
    return config.layers * bias_values(config, "A") + (config.width if has_bias(config, "norm") else 0)


def flops_per_token(
    config: ModelConfig, vocab: int, context: float | None = None, *, adapters: int | None = None, head: bool = False
) -> float:
    """Forward and backward FLOPs of one training token, by the convention at the top of this file.

    `context` is the length of what attends to itself, where rows hold several samples. `adapters` is how many values
    are trained beside frozen weights; None trains them all. `head` says that the head is trained beside them, too.
    """
    weights = vocab * config.width + sum(feature.outside_work(config) for feature in FEATURES)
    weights += sum(_block_work(config, kind) for kind in config.kinds)
    products = 6.0 * weights if adapters is None else 4.0 * weights + 6.0 * adapters
    products += 2.0 * vocab * config.width if head and adapters is not None else 0.0
    return products + _attention_flops(config, config.windows, context or config.context)


def _block_work(config: ModelConfig, kind: str) -> int:
    """Weights that a token is multiplied with in a block."""
    return sum(_matrices(config, kind).values()) + sum(feature.work(config, kind) for feature in FEATURES)


def _attention_flops(config: ModelConfig, windows: Iterable[int | None], context: float) -> float:
    """Of a token with all that it attends to, in blocks that reach so far back."""
    reaches = (context if window is None else min(context, window) for window in windows)
    # The first tokens of a context have less before them than the window, or the context, would let them see.
    return 12.0 * config.queries * sum(reach - reach * (reach - 1) / (2 * context) for reach in reaches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Layers that are alike: how many, and what each has, does for a training token, and keeps for backward."""

    name: str
    times: int
    parameters: int
    flops: float
    kept_bytes: int


def layer_rows(config: ModelConfig, vocab: int, tokens: int, form: Form) -> tuple[LayerRow, ...]:
    """A model by its layers, in a step over micro-batches of `tokens`; the blocks of one kind are one row."""
    rows = []
    for kind in dict.fromkeys(config.kinds):
        windows = [] if kind == "E" else [config.window if kind == "W" else None]
        kept, _ = _kept_and_again(config, kind, _block_bytes(config, kind, form), form)
        rows.append(
            LayerRow(
                name=f"block {kind}",
                times=config.kinds.count(kind),
                parameters=block_count(config, kind),
                flops=6.0 * _block_work(config, kind) + _attention_flops(config, windows, config.context),
                kept_bytes=tokens * kept,
            )
        )
    tables = table_count(config, vocab)
    if tables:
        kept = tokens * sum(feature.outside_kept(config, form) for feature in FEATURES)
        rows.append(LayerRow(name="tables", times=1, parameters=tables, flops=0.0, kept_bytes=kept))
    outside = LayerRow(
        name="embedding, last norm, head",
        times=1,
        parameters=sum(feature.outside(config, vocab) for feature in FEATURES) - tables,
        flops=6.0 * (vocab * config.width + sum(feature.outside_work(config) for feature in FEATURES)),
        kept_bytes=tokens * _end_bytes(config, form),
    )
    return (*rows, outside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """What is trained beside frozen weights, as far as memory goes."""

    rank: int
    dora: bool = False
    dropout: bool = False
    quantized: bool = False  # linear layers in 4 bits
    also: frozenset[str] = frozenset()  # trained whole: embedding, head, biases


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device at the peak of a training step. `working` is alive for a moment only, and at the peak.

    `later` is what of the gradients takes the place of activations: those of a step's only micro-batch are made while
    backward gives activations back. `graphs` is what recording costs.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    later: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        passing = self.activations + self.working + self.graphs - self.later
        return self.weights + self.gradients + self.optimizer + passing


def estimate_memory(
    config: ModelConfig,
    vocab: int,
    *,
    micro_batch: int,
    half: bool,
    compiled: bool,
    execution: Execution,
    state_bytes: float = 8,
    accumulated: bool = True,
    graphs: bool = False,
    frozen: FrozenModel | None = None,
    row_tokens: int | None = None,
    labels: int | None = None,
    shards: int = 1,
) -> MemoryEstimate:
    """The memory of a training step with AdamW, fp32 weights and `half`- or single-precision matrix products.

    Activations are what backward needs, added up part by part from the layers; tested against the bytes autograd
    really keeps, and on a GPU against the measured peak. `accumulated` says that a step has several micro-batches, so
    that gradients are there from the second one on; a recording (`graphs`) keeps them, too.

    Packed samples have rows of `row_tokens`, of all of which only `labels` tokens reach the head. Under adapters the
    model is `frozen`, and held in the type of its products. Of a sharded model a process holds one of so many `shards`.
    """
    whole = frozenset() if frozen is None else frozen.also
    form = Form(half=half, compiled=compiled, execution=execution, frozen=frozen is not None)
    parameters, tokens = parameter_count(config, vocab), micro_batch * (row_tokens or config.context)
    labels = tokens if labels is None else labels
    if frozen is None:
        trained, recorded = parameters, tokens
        weights = 4 * parameters + _narrow_bytes(config, parameters - table_count(config, vocab), form)
        activations, working = _trained_bytes(config, vocab, tokens, labels, row_tokens or config.context, form)
    else:
        trained, recorded = adapter_count(config, frozen.rank), labels
        weights = form.cell * parameters + (4 + form.cell) * trained + 4 * whole_count(config, vocab, whole)
        trained += whole_count(config, vocab, whole)
        weights -= round((form.cell - QUANTIZED_BYTES) * linear_count(config)) if frozen.quantized else 0
        activations, working = _frozen_bytes(config, vocab, tokens, labels, form, frozen)
    if row_tokens is not None:
        activations += _mask_bytes(config, tokens, row_tokens, form)
    alone = frozen is None and not accumulated and not graphs
    if execution.sharded:
        return _sharded_memory(config, vocab, form, shards, state_bytes, activations, working, alone=alone)
    return MemoryEstimate(
        weights=weights,
        gradients=4 * trained,
        optimizer=int(state_bytes * trained),
        activations=activations,
        working=working,
        later=min(4 * trained, activations + working) if alone else 0,
        graphs=_graph_bytes(vocab, recorded, form) if graphs else 0,
    )


def _sharded_memory(
    config: ModelConfig,
    vocab: int,
    form: Form,
    shards: int,
    state_bytes: float,
    activations: int,
    working: int,
    *,
    alone: bool,
) -> MemoryEstimate:
    """Slices of weights, gradients and state; and whole ones of the groups that are at work.

    Of two groups weights are whole at a time, and of two gradients: of the one that is at work, and of the one that
    comes or leaves.
    """
    blocks = blocks_gathered(config) * max(block_count(config, kind) for kind in config.kinds)
    parameters, table = parameter_count(config, vocab), vocab * config.width
    slices, stays = -(-parameters // shards), (table if config.tied else 0) + table_count(config, vocab)
    largest = blocks if config.tied else max(blocks, table)
    cell = form.cell if form.triton else 4 + (2 if form.half else 0)
    return MemoryEstimate(
        weights=4 * slices + cell * (2 * largest + stays),
        gradients=4 * (slices + 2 * largest + stays),
        optimizer=int(state_bytes * slices),
        activations=activations,
        working=working,
        later=min(4 * slices, activations + working) if alone else 0,
    )


# --- what stays: weights in narrower types ----------------------------------------------------------------------------


def _narrow_bytes(config: ModelConfig, parameters: int, form: Form) -> int:
    """Copies of weights in narrower types: they live through the step, but those in half precision of our kernels
    only for one product where memory is dear. 8-bit copies come with a transpose."""
    how = form.execution
    if not form.triton:
        return 2 * parameters if form.half else 0
    blocks = [_matrices(config, kind) for kind in config.kinds]
    eight = [sum(block[name] for name in LINEARS if name in how.fp8) for block in blocks]
    wide = [sum(block[name] for name in LINEARS if name not in how.fp8) if form.half else 0 for block in blocks]
    staying = how.checkpointing != "full" and not how.activation_offload
    return 2 * sum(eight) + 2 * (sum(wide) if staying else max(wide))


def _graph_bytes(vocab: int, tokens: int, form: Form) -> int:
    """Workspaces of the stream that records, and logits that an eager loss would have given back sooner."""
    how = form.execution
    if how.loss == "fused" or form.compiled:
        return GRAPH_BYTES
    chunk = min(tokens, how.loss_chunk) if how.loss == "chunked" else tokens
    return 2 * GRAPH_BYTES + chunk * vocab * form.cell


# --- what passes: (bytes kept for backward, bytes alive at the peak only) ---------------------------------------------


def _trained_bytes(
    config: ModelConfig, vocab: int, tokens: int, labels: int, positions: int, form: Form
) -> tuple[int, int]:
    """Of a step in which all weights are trained, with rows of so many positions."""
    blocks = {kind: _kept_and_again(config, kind, _block_bytes(config, kind, form), form) for kind in set(config.kinds)}
    kept, again = sum(blocks[kind][0] for kind in config.kinds), max(again for _, again in blocks.values())
    if form.execution.activation_offload:  # on its way out or back: one block being made, one being used
        kept = min(kept, 2 * max(kept for kept, _ in blocks.values()))
    fixed = [feature.fixed(config, positions, form) for feature in FEATURES]
    kept += _end_bytes(config, form) + sum(feature.outside_kept(config, form) for feature in FEATURES)
    activations = tokens * kept + sum(kept for kept, _ in fixed)
    loss, head_gradient = _loss_bytes(config, vocab, labels, form)
    backward = tokens * (again + _backward_bytes(config, form)) + sum(again for _, again in fixed)
    return activations, max(loss, backward + head_gradient)


def _frozen_bytes(
    config: ModelConfig, vocab: int, tokens: int, labels: int, form: Form, frozen: FrozenModel
) -> tuple[int, int]:
    """Of a step that trains adapters on every projection: what they keep comes on top of the blocks' own."""
    how, cell, (up, hidden) = form.execution, form.cell, mlp_widths(config)
    per_layer, again = _frozen_kept_and_again(config, form, frozen)
    kept = config.layers * per_layer
    if how.activation_offload:
        kept = min(kept, 2 * per_layer)
    padded = vocab + -vocab % how.pad_vocab
    each = _fused_loss_cell(form) if how.loss == "fused" else 12
    chunk = labels if how.loss == "plain" else min(labels, how.loss_chunk)
    loss = chunk * padded * each + labels * cell * config.width
    backward = tokens * (again + 2 * cell * config.width + cell * (up + hidden))
    # Gradients of whole tables are made before they are added to their places.
    tables = 4 * padded * config.width if frozen.also & {"embedding", "head"} else 0
    kept += (cell + form.stream) * config.width + sum(feature.outside_kept(config, form) for feature in FEATURES)
    return tokens * kept, max(loss, backward) + tables


def _mask_bytes(config: ModelConfig, tokens: int, row_tokens: int, form: Form) -> int:
    """The mask of packed rows, made once for all layers: a byte for each pair of tokens, and what is added to its
    score, in windows and in full attention. Our kernels join rows."""
    if not config.attends or form.execution.document_attention in BY_BOUNDS:
        return 0
    pairs = tokens * (tokens if form.triton else row_tokens)
    return (1 + form.cell * len(set(config.windows))) * pairs


# --- one block, per token ---------------------------------------------------------------------------------------------


def _block_bytes(config: ModelConfig, kind: str, form: Form) -> int:
    """Bytes that one block keeps until its backward, where nothing is computed again."""
    return sum(feature.kept(config, kind, form) for feature in FEATURES)


def _kept_and_again(config: ModelConfig, kind: str, block: int, form: Form) -> tuple[int, int]:
    """(bytes that a block keeps, bytes that its backward makes again), of the `block` bytes it needs."""
    how, cell, width, (up, hidden) = form.execution, form.cell, config.width, mlp_widths(config)
    if how.checkpointing == "full":
        # In our kernels a block is handed a sum that is not added up yet, so it has two inputs.
        return (form.stream + (cell if form.triton else 0)) * width, block
    if how.checkpointing == "selective":
        if form.triton:
            return block - cell * hidden, cell * hidden
        # The block's input and the results of its products and of attention.
        kept = 4 * width + cell * (sum(mixer_widths(config, "A")) + up + 2 * width) + 4 * config.heads
        if kind == "E":
            kept = 4 * width + cell * (4 * config.states + up + 2 * width)
            kept += 16 * config.states if how.scan == "chunked" else 0  # products inside of it
        return kept, max(0, block - kept)
    return block, 0


def _frozen_kept_and_again(config: ModelConfig, form: Form, frozen: FrozenModel) -> tuple[int, int]:
    """The same of a block with adapters: inputs times A, dropout's masks, and with DoRA the unscaled products."""
    how, cell, width, (up, hidden) = form.execution, form.cell, config.width, mlp_widths(config)
    block = _block_bytes(config, "A", form) + cell * len(projections(config)) * frozen.rank
    if form.triton:  # ops/kernels/frozen.py
        less = block - 2 * cell * width  # without the outputs of norms
        if how.checkpointing == "full":
            statistics = 8 if config.norm == "layernorm" else 4  # of one norm
            return form.stream * width + statistics + cell * frozen.rank, less
        return (less, cell * width) if how.checkpointing == "selective" else (block, 0)
    block += 2 * width + config.queries + hidden if frozen.dropout else 0
    block += cell * (mixer_widths(config, "A")[0] + 2 * width + up) if frozen.dora else 0
    kept, again = _kept_and_again(config, "A", block, dataclasses.replace(form, frozen=False))
    if how.checkpointing != "none":
        kept -= (4 - cell) * width  # a block's input
    return kept, again


def _backward_bytes(config: ModelConfig, form: Form) -> int:
    """Bytes of the gradients alive while an MLP is differentiated: the widest moment of a block."""
    own = form.cell if form.stream != form.cell else 0  # stream and branch share one gradient where they have one type
    return (form.stream + own) * config.width + form.cell * sum(mlp_widths(config))


# --- the end: final norm, head and loss -------------------------------------------------------------------------------


def _end_bytes(config: ModelConfig, form: Form) -> int:
    """Bytes per token of the final norm, the head's input, and what a norm after the embedding was given."""
    kept = (form.stream + form.cell) * config.width
    kept += form.stream * config.width if config.embedding_norm else 0
    if form.triton:
        return kept + 8
    return kept + (form.stream * config.width if config.norm == "rmsnorm" and config.norm_weights else 0)


def _loss_bytes(config: ModelConfig, vocab: int, tokens: int, form: Form) -> tuple[int, int]:
    """(bytes inside head and loss, bytes of its gradients that stay until the blocks' backward is over)."""
    how, cell = form.execution, form.cell
    padded, chunk = vocab + -vocab % how.pad_vocab, min(tokens, how.loss_chunk)
    matrix = padded * config.width
    if how.loss == "fused":
        stays = 4 * matrix if config.tied else 0  # waits for the embedding's own gradient, to be added to it
        inside = chunk * padded * _fused_loss_cell(form) + tokens * cell * config.width
        return inside + (6 if form.half else 4) * matrix, stays
    # Eager code holds logits, log-softmax and its gradient at once, twelve bytes in either precision; compiled code
    # writes the gradient over the logits.
    each = cell if form.compiled else 12
    if how.loss == "chunked" and chunk < tokens:
        return chunk * padded * each + 2 * 4 * matrix, 0
    return tokens * padded * each, 0


def _fused_loss_cell(form: Form) -> int:
    """Bytes of a logit in the fused loss: our kernel and compiled code write the gradient over the logits; torch's
    operations need three wide copies."""
    return 12 + (2 if form.half else 0) if form.eager else form.cell
