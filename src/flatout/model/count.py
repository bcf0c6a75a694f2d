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

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.layers import mlp_width_of
from flatout.ops.documents import BY_BOUNDS
from flatout.ops.quantized import BYTES as QUANTIZED_BYTES
from flatout.ops.scan import CHUNK

GRAPH_BYTES = 220 * 2**20  # measured on an H200 with GPT-2 124M, 1 to 16 sequences


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """Exactly the number of trained values; a tied head is counted once."""
    width, bias = config.width, 1 if config.bias else 0
    up, hidden = _mlp_widths(config)
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    block = 2 * norm
    block += width * up + bias * up + hidden * width + bias * width
    block += 2 * width if config.residual_scale is not None else 0
    mixers = sum(_mixer_count(config, kind) for kind in config.kinds)
    total = vocab * width + config.layers * block + mixers + norm
    total += config.context * width if config.positions == "learned" else 0
    total += 0 if config.tied else vocab * width
    return total


def _mixer_count(config: ModelConfig, kind: str) -> int:
    """Trained values of attention, or of what is in its place."""
    width, (columns, rows) = config.width, _mixer_widths(config, kind)
    total = width * columns + rows * width + (width if config.bias else 0)
    if kind != "E":
        total += columns if config.has_qkv_bias else 0
        return total + (2 * config.size if config.qk_norm else 0)
    total += 2 * config.states + len(config.scales) + config.convolution * 2 * config.states
    total += config.states**2 // config.state_heads if config.resonance else 0
    return total + ((width + 1) * config.state_heads if config.modulation else 0)


def linear_count(config: ModelConfig) -> int:
    """Weights of the linear layers in all blocks, but those that have no place in `speed.fp8`."""
    return sum(sum(_linear_sizes(config, kind).values()) for kind in config.kinds)


def _linear_sizes(config: ModelConfig, kind: str) -> dict[str, int]:
    """Weights of a block's linear layers, by their names in `speed.fp8`."""
    width, (up, hidden), (columns, rows) = config.width, _mlp_widths(config), _mixer_widths(config, kind)
    return {"qkv": width * columns, "out": width * rows, "up": width * up, "down": width * hidden}


def adapter_count(config: ModelConfig, rank: int) -> int:
    """Trained values of adapters on every projection of every block, fused matrices counted by their parts."""
    groups, hidden = config.kv_heads or config.heads, mlp_width_of(config)
    ends = 2 * (config.width + config.queries)  # queries, and the projection back
    ends += 2 * (config.width + groups * config.size)
    ends += (3 if config.mlp == "swiglu" else 2) * (config.width + hidden)
    if config.family == "gpt2":  # one projection for queries, keys and values
        ends -= 2 * config.width
    return config.layers * rank * ends


def flops_per_token(
    config: ModelConfig, vocab: int, context: float | None = None, *, adapters: int | None = None
) -> float:
    """Forward and backward FLOPs of one training token, by the convention at the top of this file.

    `context` is the length of what attends to itself, where rows hold several samples. `adapters` is how many values
    are trained beside frozen weights; None trains them all.
    """
    matrices = linear_count(config) + vocab * config.width
    if "E" in config.kinds:
        rates = config.width * config.state_heads if config.modulation else 0
        # Both halves of a state go through the same matrix of its head.
        coupled = 2 * config.states**2 // config.state_heads if config.resonance else 0
        matrices += config.kinds.count("E") * (rates + coupled)
    products = 6.0 * matrices if adapters is None else 4.0 * matrices + 6.0 * adapters
    context = context or config.context
    windows = (context if window is None else min(context, window) for window in config.windows)
    # The first tokens of a context have less before them than the window, or the context, would let them see.
    reached = sum(window - window * (window - 1) / (2 * context) for window in windows)
    return products + 12.0 * config.queries * reached


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """What is trained beside frozen weights, as far as memory goes."""

    rank: int
    dora: bool = False
    dropout: bool = False
    quantized: bool = False  # linear layers in 4 bits


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
) -> MemoryEstimate:
    """The memory of a training step with AdamW, fp32 weights and `half`- or single-precision matrix products.

    Activations are what backward needs, added up part by part from the layers; tested against the bytes autograd
    really keeps, and on a GPU against the measured peak. `accumulated` says that a step has several micro-batches, so
    that gradients are there from the second one on; a recording (`graphs`) keeps them, too.

    Packed samples have rows of `row_tokens`, of all of which only `labels` tokens reach the head. Under adapters the
    model is `frozen`, and held in the type of its products.
    """
    parameters = parameter_count(config, vocab)
    tokens = micro_batch * (row_tokens or config.context)
    labels = tokens if labels is None else labels
    # Made once for all layers: a byte for each pair of tokens, and what is added to its score, in windows and in full
    # attention. Our kernels join rows.
    mask = 0
    if row_tokens is not None and config.attends and execution.document_attention not in BY_BOUNDS:
        pairs = tokens * (tokens if execution.kernels == "triton" else row_tokens)
        mask = (1 + (2 if half else 4) * len(set(config.windows))) * pairs
    if frozen is not None:
        estimate = _estimate_frozen(
            config,
            vocab,
            tokens=tokens,
            labels=labels,
            half=half,
            compiled=compiled,
            execution=execution,
            state_bytes=state_bytes,
            frozen=frozen,
        )
        held = _graph_bytes(vocab, labels, half=half, compiled=compiled, execution=execution) if graphs else 0
        return dataclasses.replace(estimate, activations=estimate.activations + mask, graphs=held)
    blocks = {}
    for kind in set(config.kinds):
        block = _block_bytes(config, kind, half=half, compiled=compiled, execution=execution)
        blocks[kind] = _kept_and_again(config, kind, block, half=half, execution=execution)
    kept, again = sum(blocks[kind][0] for kind in config.kinds), max(again for _, again in blocks.values())
    if execution.activation_offload:  # on its way out or back: one block being made, one being used
        kept = min(kept, 2 * max(kept for kept, _ in blocks.values()))
    backward = tokens * (again + _backward_bytes(config, half=half, execution=execution))
    loss, head_gradient = _loss_bytes(config, vocab, labels, half=half, compiled=compiled, execution=execution)
    activations = tokens * (kept + _end_bytes(config, half=half, execution=execution)) + mask
    activations += config.kinds.count("E") * _chunk_bytes(config, row_tokens or config.context, execution)
    scaled, scaled_again = _scaled_weights(config, half=half, execution=execution)
    activations += scaled
    working = max(loss, backward + scaled_again + head_gradient)
    return MemoryEstimate(
        weights=4 * parameters + _narrow_bytes(config, parameters, half=half, execution=execution),
        gradients=4 * parameters,
        optimizer=int(state_bytes * parameters),
        activations=activations,
        working=working,
        later=0 if accumulated or graphs else min(4 * parameters, activations + working),
        graphs=_graph_bytes(vocab, tokens, half=half, compiled=compiled, execution=execution) if graphs else 0,
    )


def _graph_bytes(vocab: int, tokens: int, *, half: bool, compiled: bool, execution: Execution) -> int:
    """Workspaces of the stream that records, and logits that an eager loss would have given back sooner."""
    if execution.loss == "fused" or compiled:
        return GRAPH_BYTES
    chunk = min(tokens, execution.loss_chunk) if execution.loss == "chunked" else tokens
    return 2 * GRAPH_BYTES + chunk * vocab * (2 if half else 4)


def _estimate_frozen(
    config: ModelConfig,
    vocab: int,
    *,
    tokens: int,
    labels: int,
    half: bool,
    compiled: bool,
    execution: Execution,
    state_bytes: float,
    frozen: FrozenModel,
) -> MemoryEstimate:
    """Adapters on every projection. In torch's operations the residual stream has the type of the weights, and norms
    keep their input only: a frozen scale needs no gradient. What adapters keep comes on top: inputs times A, dropout's
    masks, and with DoRA the products before they are scaled."""
    cell, (up, hidden) = 2 if half else 4, _mlp_widths(config)
    triton = execution.kernels == "triton"
    projections = 4 if config.family == "gpt2" else 7 if config.mlp == "swiglu" else 6
    if triton:
        per_layer, again = _frozen_kernels_bytes(config, projections * frozen.rank, frozen.rank, cell, execution)
    else:
        # A stream in the type of weights is what our kernels call a stream in bf16.
        how = dataclasses.replace(execution, residual="bf16" if half else "fp32")
        block = _block_bytes(config, "A", half=half, compiled=compiled, execution=how)
        block -= 2 * (4 - cell) * config.width  # the inputs of both norms
        block -= 2 * 4 * config.width if config.norm == "rmsnorm" and not compiled else 0
        inputs = 2 * config.width + config.queries + hidden
        block += cell * projections * frozen.rank + (inputs if frozen.dropout else 0)
        if frozen.dora:
            block += cell * (_qkv_columns(config) + 2 * config.width + up)
        per_layer, again = _kept_and_again(config, "A", block, half=half, execution=how)
    if not triton and execution.checkpointing != "none":
        per_layer -= (4 - cell) * config.width  # a block's input
    kept = config.layers * per_layer
    if execution.activation_offload:
        kept = min(kept, 2 * per_layer)
    padded = vocab + -vocab % execution.pad_vocab
    each = (cell if compiled or triton else 12 + (2 if half else 0)) if execution.loss == "fused" else 12
    chunk = labels if execution.loss == "plain" else min(labels, execution.loss_chunk)
    loss = chunk * padded * each + labels * cell * config.width
    parameters, adapters = parameter_count(config, vocab), adapter_count(config, frozen.rank)
    weights = cell * parameters + (4 + cell) * adapters
    if frozen.quantized:
        weights -= round((cell - QUANTIZED_BYTES) * linear_count(config))
    return MemoryEstimate(
        weights=weights,
        gradients=4 * adapters,
        optimizer=int(state_bytes * adapters),
        activations=tokens * (kept + (cell + (_stream(execution) if triton else cell)) * config.width),
        working=max(loss, tokens * (again + 2 * cell * config.width + cell * (up + hidden))),
    )


def _frozen_kernels_bytes(
    config: ModelConfig, ranks: int, last: int, cell: int, execution: Execution
) -> tuple[int, int]:
    """(bytes per token that a block of ops/kernels/frozen.py keeps, bytes that its backward makes again).

    `ranks` are those of all adapters, `last` that of the MLP's second product.
    """
    stream, width, (up, _) = _stream(execution), config.width, _mlp_widths(config)
    statistics = 8 if config.norm == "layernorm" else 4  # of one norm
    block = 2 * (stream * width + statistics) + cell * (_qkv_columns(config) + config.queries + up + ranks)
    block += 4 * config.heads  # attention's log-sum-exp
    if config.qk_norm:  # turned queries and keys; without norms they are turned where they lie
        block += cell * (_qkv_columns(config) + config.queries) // 2
    if execution.checkpointing == "full":
        return stream * width + statistics + cell * last, block
    return (block, cell * width) if execution.checkpointing == "selective" else (block + 2 * cell * width, 0)


def _narrow_bytes(config: ModelConfig, parameters: int, *, half: bool, execution: Execution) -> int:
    """Copies of weights in narrower types: they live through the step, but those in half precision of our kernels
    only for one product where memory is dear. 8-bit copies come with a transpose."""
    if execution.kernels == "torch":
        return 2 * parameters if half else 0
    layers = [_linear_sizes(config, kind) for kind in config.kinds]
    eight = [sum(size for name, size in sizes.items() if name in execution.fp8) for sizes in layers]
    wide = [sum(sizes.values()) - rounded if half else 0 for sizes, rounded in zip(layers, eight, strict=True)]
    staying = execution.checkpointing != "full" and not execution.activation_offload
    return 2 * sum(eight) + 2 * (sum(wide) if staying else max(wide))


def _kept_and_again(config: ModelConfig, kind: str, block: int, *, half: bool, execution: Execution) -> tuple[int, int]:
    """(bytes per token that a block keeps, bytes that its backward makes again), of the `block` bytes it needs."""
    cell, width = 2 if half else 4, config.width
    triton = execution.kernels == "triton"
    up, hidden = _mlp_widths(config)
    if execution.checkpointing == "full":
        # In our kernels a block is handed a sum that is not added up yet, so it has two inputs.
        kept = (_stream(execution) + cell if triton else 4) * width
        return kept, block
    if execution.checkpointing == "selective":
        if triton:
            return block - cell * hidden, cell * hidden
        # The block's input and the results of its products and of attention.
        kept = 4 * width + cell * (sum(_mixer_widths(config, "A")) + up + 2 * width) + 4 * config.heads
        if kind == "E":
            kept = 4 * width + cell * (4 * config.states + up + 2 * width)
            kept += 16 * config.states if execution.scan == "chunked" else 0  # products inside of it
        return kept, max(0, block - kept)
    return block, 0


def _backward_bytes(config: ModelConfig, *, half: bool, execution: Execution) -> int:
    """Bytes per token of the gradients alive while an MLP is differentiated: the widest moment of a block."""
    cell, (up, hidden) = 2 if half else 4, _mlp_widths(config)
    stream = _stream(execution)
    own = cell if stream != cell else 0  # stream and branch share one gradient where they have one type
    return (stream + own) * config.width + cell * (up + hidden)


def _end_bytes(config: ModelConfig, *, half: bool, execution: Execution) -> int:
    """Bytes per token of the final norm and the head's input."""
    cell, stream = 2 if half else 4, _stream(execution)
    if execution.kernels == "triton":
        return (stream + cell) * config.width + 8
    return (stream + cell + (stream if config.norm == "rmsnorm" else 0)) * config.width


def _loss_bytes(
    config: ModelConfig, vocab: int, tokens: int, *, half: bool, compiled: bool, execution: Execution
) -> tuple[int, int]:
    """(bytes inside head and loss, bytes of its gradients that stay until the blocks' backward is over)."""
    cell = 2 if half else 4
    padded = vocab + -vocab % execution.pad_vocab
    chunk = min(tokens, execution.loss_chunk)
    matrix = padded * config.width
    # Eager code holds logits, log-softmax and its gradient at once, twelve bytes in either precision; compiled code
    # writes the gradient over the logits.
    each = cell if compiled else 12
    if execution.loss == "fused":
        # Our kernel and compiled code write the gradient over the logits; torch's operations need three wide copies.
        each = cell if compiled or execution.kernels == "triton" else 12 + (2 if half else 0)
        stays = 4 * matrix if config.tied else 0  # waits for the embedding's own gradient, to be added to it
        return chunk * padded * each + tokens * cell * config.width + 4 * matrix + (2 * matrix if half else 0), stays
    if execution.loss == "chunked" and chunk < tokens:
        return chunk * padded * each + 2 * 4 * matrix, 0
    return tokens * padded * each, 0


def _stream(execution: Execution) -> int:
    """Bytes of a value in the residual stream."""
    return 2 if execution.kernels == "triton" and execution.residual == "bf16" else 4


def _block_bytes(config: ModelConfig, kind: str, *, half: bool, compiled: bool, execution: Execution) -> int:
    """Bytes that one block keeps per token until its backward, where nothing is computed again."""
    triton, stream, cell = execution.kernels == "triton", _stream(execution), 2 if half else 4
    width, (up, hidden) = config.width, _mlp_widths(config)
    mixer = _eigenstate_bytes if kind == "E" else _attention_bytes
    parts = [
        2 * stream * width,  # inputs of both norms
        2 * cell * width,  # inputs of qkv and up
        mixer(config, half=half, compiled=compiled, execution=execution),
        cell * (up + hidden),  # input and output of the non-linearity
    ]
    if triton:
        parts.append(16 if config.norm == "layernorm" else 8)  # statistics of both norms
        return sum(parts)
    if compiled:  # the rest is recomputed in backward
        return sum(parts)
    if config.norm == "rmsnorm":
        parts.append(2 * stream * width)  # the normalised input, before its weight
    if config.mlp == "swiglu":
        parts.append(cell * hidden)  # silu(gate)
    if config.residual_scale is not None:
        parts.append(2 * cell * width)
    return sum(parts)


def _attention_bytes(config: ModelConfig, *, half: bool, compiled: bool, execution: Execution) -> int:
    """What attention keeps per token, between the inputs of its first and of its last product."""
    triton, cell, queries = execution.kernels == "triton", 2 if half else 4, config.queries
    values = (config.kv_heads or config.heads) * config.size
    queries_keys = queries + values
    parts = [
        cell * (queries_keys + values),  # output of qkv
        cell * queries + 4 * config.heads,  # output of attention, log-sum-exp
    ]
    if config.positions == "rope" or (triton and config.qk_norm):
        parts.append(cell * queries_keys)  # turned queries and keys
    if config.positions == "rope" and not triton:
        parts.append(cell * queries)  # attention's output in out's layout
    if config.qk_norm and not triton and not compiled:
        parts.append((8 if half else 4) * queries_keys)  # normalised in fp32, and widened first
    return sum(parts)


def _eigenstate_bytes(config: ModelConfig, *, half: bool, compiled: bool, execution: Execution) -> int:
    """The same of eigenstates. The compiler is not asked: it looks into little of it."""
    cell, both = 2 if half else 4, 2 * config.states
    parts = [
        cell * 2 * both,  # inputs and gate, in one buffer
        cell * 2 * both,  # the states, and what the gate leaves of them
    ]
    options = config.resonance or config.modulation or config.convolution or config.scales
    if options or execution.kernels != "triton" or execution.scan != "triton" or "qkv" in execution.fp8:
        parts.append(cell * both)  # the gate after its non-linearity
    if config.convolution:
        parts.append(cell * both)  # inputs with what came before them
    if config.modulation:  # rates, decays, and scales of inputs, all in fp32
        parts.append(4 * 3 * both + (cell * both if config.convolution else 0))
    if config.scales:
        parts.append(cell * both)  # weighted states
    if config.resonance:
        parts.append(cell * both)  # coupled states
    if execution.scan != "triton":  # inputs in fp32; where decays differ, every step, and what is carried over chunks
        steps = 1 if not config.modulation else 3 if config.context <= CHUNK else 5
        parts.append(steps * 4 * both)
    return sum(parts)


def _chunk_bytes(config: ModelConfig, positions: int, execution: Execution) -> int:
    """Powers of eigenvalues that the scan in chunks multiplies with: of a chunk, of chunks of chunks, and so on."""
    if execution.scan != "chunked" or config.modulation or execution.checkpointing == "full":
        return 0
    total = 0
    while positions > 1:
        length = min(CHUNK, positions)
        total += 2 * 4 * config.states * length**2
        positions = -(-positions // length)
    return total


def _scaled_weights(config: ModelConfig, *, half: bool, execution: Execution) -> tuple[int, int]:
    """(bytes of weights times the scale of inputs that E blocks keep for backward, those that backward makes again).

    The product of such a block is with a copy of its first matrix, 4·K by W in fp32, which holds the scale. In torch's
    operations in half precision only its cast is kept, which is counted among the copies of all weights. Where decays
    vary with the input, or weights are of 8 bits, inputs are scaled instead.
    """
    count = config.kinds.count("E")
    if not count or config.modulation or (execution.kernels == "triton" and "qkv" in execution.fp8):
        return 0, 0
    one = 4 * 4 * config.states * config.width
    if execution.kernels == "triton":
        return (0, one) if execution.checkpointing == "full" else (count * one, 0)
    if execution.checkpointing != "none":
        return 0, one
    if half:
        return 0, 0
    return (min(count, 2) if execution.activation_offload else count) * one, 0


def _mixer_widths(config: ModelConfig, kind: str) -> tuple[int, int]:
    """(columns of the product into attention or what is in its place, rows of the one out of it)."""
    return (4 * config.states, 2 * config.states) if kind == "E" else (_qkv_columns(config), config.queries)


def _qkv_columns(config: ModelConfig) -> int:
    return config.queries + 2 * (config.kv_heads or config.heads) * config.size


def _mlp_widths(config: ModelConfig) -> tuple[int, int]:
    hidden = mlp_width_of(config)
    return (2 * hidden if config.mlp == "swiglu" else hidden), hidden
