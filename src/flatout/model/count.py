"""Parameters, FLOPs and memory of a model, from its config alone.

How: `outline` builds each block that differs from the others once, without memory; `parts_of` sends a few tokens
through it. All elements of a weight share one number in memory, and products are recorded, not computed: sizes are the
real ones, and a pass takes milliseconds. What autograd saves is what torch's operations keep for backward (`saved`).
Compiled code and our kernels keep the inputs and outputs of products and attention and the inputs of norms (`lean`,
`stream`), and recompute the rest. Eigenstates use torch's operations in every form, except where they are one kernel.

FLOP convention, here and everywhere in Flatout: a training token costs 6 per weight of a matrix product (2 forward,
4 backward; the head counts, tied or not, embedding look-ups do not), plus 12·W per block for every token it attends to:
with a context of T that is (T + 1) / 2 on average, with a sliding window at most the window. With `model.head_size`, W
is heads times that size. Work that a causal mask hides does not count, neither here nor in MFU. nanoGPT and others
count it: 7% more for GPT-2 124M at 1,024 tokens, and at 32,768 so much that MFU can pass 100%. Elementwise work is left
out, and so is the scan of eigenstates (some tens of operations per state). Under adapters a frozen weight costs 4 (2
forward, 2 for the gradient of its input), and each value of an adapter 6.

Memory convention: bytes of torch's allocator at the peak of a step. The peak is either inside the loss (all activations
and the logits) or at the start of backward (all activations and one block's gradients), whichever is more. Not
included: workspaces of libraries (some tens of megabytes), and 8-bit copies of activations, because a product consumes
them at once and backward keeps the wide ones.

Trap: torch makes its compiler skip a dispatch mode, and imports the compiler for that, which takes seconds.
`_should_skip_dynamo` returns False to avoid it.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.config.schema import ModelConfig
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution, Form
from flatout.model.fields import projections
from flatout.model.gpt import GPT
from flatout.model.layers import Block, TokenTable, mlp_widths
from flatout.model.operations import Norm
from flatout.model.quantize import BYTES as QUANTIZED_BYTES
from flatout.ops.documents import BY_BOUNDS
from flatout.ops.scan import CHUNK

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
TOKENS = 4  # in a pass; the scan in chunks needs two chunks


@dataclasses.dataclass(kw_only=True)
class ModelPart:
    """A block, or with an empty kind all that is outside blocks. Bytes and values are per token."""

    kind: str
    times: int  # number of such blocks
    work: int = 0  # weights that a token is multiplied with
    saved: float = 0.0  # bytes
    lean: float = 0.0  # bytes
    copies: float = 0.0  # bytes of copies in another layout, which our kernels do not need
    stream: float = 0.0  # values: inputs of norms
    results: float = 0.0  # bytes: outputs of products and attention
    fixed_saved: int = 0  # bytes that do not depend on the number of tokens
    fixed_lean: int = 0


@functools.lru_cache(maxsize=256)
def outline(config: ModelConfig, vocab: int = 1, scan: str = "sum") -> tuple[GPT, tuple[int, ...]]:
    """(a model with one block of each kind, how often each of them occurs)."""
    tables = config.value_tables  # blocks with a value table, which are the first and the last ones, all differ
    last = config.layers - tables
    middle = Counter(config.kinds[tables:last])
    kinds = config.kinds[:tables] + "".join(middle) + config.kinds[last:]
    # Attention keeps the same with a cap; its scores, which are products too, are counted in `_step_bytes`.
    other = {"layers": len(kinds), "pattern": kinds, "dropout": 0.0, "attention_cap": None}
    shorter = config.model_copy(update=other)
    with torch.device("meta"):
        return GPT(shorter, vocab, Execution(scan=scan)), (1,) * tables + (*middle.values(),) + (1,) * tables


@functools.lru_cache(maxsize=256)
def parts_of(
    config: ModelConfig, half: bool = False, frozen: bool = False, chunked: bool = False
) -> tuple[ModelPart, ...]:
    """The blocks of the outline, and last a part for all that is outside of them.

    `half`: products in half precision. `frozen`: weights have the type of products, and norms are not trained.
    `chunked`: the scan of eigenstates consists of torch's operations.
    """
    model, times = outline.__wrapped__(config, 1, "chunked" if chunked else "sum")  # not cached: it gets hooks
    dtype = torch.bfloat16 if half and frozen else torch.float32
    model._apply(lambda x: torch.zeros((), dtype=dtype).expand(x.shape))
    for module in model.modules():
        if isinstance(module, Norm):
            module.requires_grad_(not frozen)
    positions = 2 * CHUNK if chunked and "E" in config.kinds else TOKENS
    tokens = torch.zeros(1, min(config.context, positions), dtype=torch.int64)
    watch = _Watch(model, tokens)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(watch.save, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        watch,
    ):
        model.hidden(tokens, window=config.context)  # attention keeps the same with any window
    parts = [ModelPart(kind=kind, times=count) for kind, count in zip(model.config.kinds, times, strict=True)]
    return watch.sorted_into([*parts, ModelPart(kind="", times=1)])


class _Watch(TorchDispatchMode):
    """Records where each tensor is made and who uses it. It keeps all of them, so that no address is reused."""

    def __init__(self, model: GPT, tokens: Tensor) -> None:
        super().__init__()
        self.tokens, self.heads = tokens.numel(), model.config.heads
        self.chunked = model.execution.scan == "chunked"
        self.held, self.of_tokens = [tokens], {_memory(tokens)}
        self.made: dict[int, tuple[Tensor, int, Eigenstate | None]] = {}
        self.copies: dict[int, int] = {}
        self.saved, self.taken, self.results, self.added, self.normed = (set[int]() for _ in range(5))
        outside = len(model.blocks)
        self.work, self.place, self.mixer = [0] * (outside + 1), outside, None
        for place, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.register_forward_pre_hook(lambda *_, place=place: setattr(self, "place", place))
            block.register_forward_hook(lambda *_: setattr(self, "place", outside))
            for name in ("out", "down"):
                block.linears()[name].register_forward_hook(lambda _, __, y: self.added.add(_memory(y)))
        for module in model.modules():
            if isinstance(module, Norm):
                module.register_forward_pre_hook(lambda _, values: self.normed.add(_memory(values[0])))
            elif isinstance(module, Eigenstate):
                module.register_forward_pre_hook(lambda mixer, _: setattr(self, "mixer", mixer))
                module.register_forward_hook(lambda *_: setattr(self, "mixer", None))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def save(self, x: Tensor) -> Tensor:
        self.held.append(x)
        self.saved.add(_memory(x))
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = [_memory(x) for x in _tensors(args)]
        takes = self.of_tokens.intersection(given)
        if name in PRODUCTS:
            left, right = args[-2:]
            result = left.new_empty((*left.shape[:-1], right.shape[-1]))
            self.work[self.place] += left.numel() * right.shape[-1]
        elif name == "_to_copy" and not takes:  # a weight in another type
            result = args[0].new_zeros((), dtype=kwargs.get("dtype")).expand(args[0].shape)
        elif name == "add" and len(takes) == 1 and takes <= self.results:  # a bias, which products add themselves
            result = args[0].view_as(args[0])
        else:
            result = func(*args, **kwargs)
        dear = name in PRODUCTS or "dot_product" in name or name == "cumsum"
        self.taken |= takes if dear else set()
        for x in _tensors([result]):
            memory = _memory(x)
            self.held.append(x)
            if memory not in given:
                self.made.setdefault(memory, (x, self.place, self.mixer))
            if name == "clone":
                self.copies[memory] = given[0]
            if takes:
                self.of_tokens.add(memory)
                self.results |= {memory} if dear else set()
                self.added |= {memory} if name == "bmm" else set()
        return result

    def sorted_into(self, parts: list[ModelPart]) -> tuple[ModelPart, ...]:
        """Fills in the parts. Results that are only added to something are not kept; statistics are not counted."""
        for part, work in zip(parts, self.work, strict=True):
            part.work = work // self.tokens
        lean = self.taken | (self.results - self.added) | (self.results & self.saved)
        for memory, (x, place, mixer) in self.made.items():
            part, size, saved = parts[place], x.untyped_storage().nbytes(), memory in self.saved
            if size <= self.tokens * self.heads * x.itemsize:
                continue
            if memory not in self.of_tokens:
                part.fixed_saved += size if saved else 0
                part.fixed_lean += size if saved or (mixer is not None and not self.chunked) else 0
                continue
            each = size / self.tokens
            part.saved += each if saved else 0.0
            part.results += each if memory in self.results else 0.0
            if self.copies.get(memory) in lean:
                part.copies += each
            elif memory in lean or (saved and mixer is not None and self.chunked):
                part.lean += each
            elif memory in self.normed:
                part.stream += each / x.itemsize
        return tuple(parts)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = [x for value in values for x in (value if isinstance(value, list | tuple) else (value,))]
    return [x for x in found if isinstance(x, Tensor)]


GATHERED = 32 * 10**6  # weights per all-gather, which takes the host about a millisecond
SCORE_BYTES = 18  # of a score of attention that has a cap, at the peak of its backward pass: 16.0 in fp32, 17.3 in bf16
GRAPH_BYTES = 220 * 2**20  # measured on an H200 with GPT-2 124M, 1 to 16 sequences


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """The number of trained values; a tied head is counted once."""
    model, _ = outline(config, vocab)
    return _values(model) - _values(model.blocks) + _over_blocks(config, _values)


def table_count(config: ModelConfig, vocab: int) -> int:
    """Trained values in sparse tables (value tables, bigrams), of which a token reads one row each."""
    return sum(_values(module) for module in outline(config, vocab)[0].modules() if isinstance(module, TokenTable))


def block_count(config: ModelConfig, kind: str) -> int:
    """Trained values of one block of this kind, without a value table."""
    model, _ = outline(config)
    return min(_values(block) for block, its in zip(model.blocks, model.config.kinds, strict=True) if its == kind)


def blocks_gathered(config: ModelConfig) -> int:
    """How many blocks of a sharded model are gathered at once: small blocks in groups of at most a quarter of all."""
    largest = max(block_count(config, kind) for kind in set(config.kinds))
    return max(1, min(GATHERED // largest, config.layers // 4))


def matrix_count(config: ModelConfig) -> int:
    """Weights of the matrices of all blocks."""
    return _over_blocks(
        config, lambda block: sum(x.weight.numel() for x in block.modules() if isinstance(x, nn.Linear))
    )


def linear_count(config: ModelConfig) -> int:
    """Weights of the linear layers that `speed.fp8` can name, in all blocks."""
    return _over_blocks(config, lambda block: sum(layer.weight.numel() for layer in block.linears().values()))


def _over_blocks(config: ModelConfig, size: Callable[[Any], int]) -> int:
    return sum(times * size(block) for block, times in zip(*_blocks(config), strict=True))


def _blocks(config: ModelConfig) -> tuple[list[Any], tuple[int, ...]]:
    """One block of each kind, and how often each occurs."""
    model, times = outline(config)
    return list(model.blocks), times


def _values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def adapter_count(config: ModelConfig, rank: int) -> int:
    """Trained values of adapters on every projection of every block."""
    linears, total = _blocks(config)[0][0].linears(), 0
    for name, piece in projections(config).values():
        total += linears[name].in_features + (piece.last or linears[name].out_features) - piece.first
    return config.layers * rank * total


def flops_per_token(
    config: ModelConfig, vocab: int, context: float | None = None, *, adapters: int | None = None
) -> float:
    """Forward and backward FLOPs of one training token, by the convention at the top of this file.

    `context`: the length of a sample, if rows hold several. `adapters`: trained values beside frozen weights; None: all
    weights are trained.
    """
    weights = vocab * config.width + sum(part.times * part.work for part in parts_of(config))
    products = 6.0 * weights if adapters is None else 4.0 * weights + 6.0 * adapters
    return products + _attention_flops(config, config.windows, context or config.context)


def _attention_flops(config: ModelConfig, windows: Iterable[int | None], context: float) -> float:
    """FLOPs of attention per token, in blocks with these windows."""
    reaches = (context if window is None else min(context, window) for window in windows)
    # The first tokens of a context have fewer tokens before them than their window.
    return 12.0 * config.queries * sum(reach - reach * (reach - 1) / (2 * context) for reach in reaches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Equal layers: their number, and each one's parameters, FLOPs per training token and activation memory."""

    name: str
    times: int
    parameters: int
    flops: float
    kept_bytes: int


def layer_rows(config: ModelConfig, vocab: int, tokens: int, form: Form) -> tuple[LayerRow, ...]:
    """A model by its layers, with micro-batches of `tokens`; all blocks of one kind are one row."""
    rows, parts = [], _parts(config, form)
    plain = {part.kind: part for part in sorted(parts, key=lambda part: -part.work)}  # those without a value table
    for kind in dict.fromkeys(config.kinds):
        windows = [] if kind == "E" else [config.window if kind == "W" else None]
        rows.append(
            LayerRow(
                name=f"block {kind}",
                times=config.kinds.count(kind),
                parameters=block_count(config, kind),
                flops=6.0 * plain[kind].work + _attention_flops(config, windows, config.context),
                kept_bytes=_kept_and_again(config, plain[kind], tokens, form)[0],
            )
        )
    tables = table_count(config, vocab)
    if tables:
        rows.append(LayerRow(name="tables", times=1, parameters=tables, flops=0.0, kept_bytes=0))
    kept = sum(part.times * _kept_and_again(config, part, tokens, form)[0] for part in parts)
    outside = LayerRow(
        name="embedding, last norm, head",
        times=1,
        parameters=parameter_count(config, vocab) - sum(row.times * row.parameters for row in rows),
        flops=flops_per_token(config, vocab) - sum(row.times * row.flops for row in rows),
        kept_bytes=kept - sum(row.times * row.kept_bytes for row in rows),
    )
    return (*rows, outside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """Fine-tuning beside frozen weights, as far as memory is concerned."""

    rank: int
    dora: bool = False
    dropout: bool = False
    quantized: bool = False  # linear layers in 4 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device at the peak of a training step. `working`: temporary tensors at the peak.

    `later`: gradients that do not add to the peak, since with one micro-batch per step they are made while backward
    frees activations. `graphs`: memory of CUDA graphs.
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

    Activations are added up layer by layer; tests compare them with the bytes that autograd saves, and on a GPU with
    the measured peak. `accumulated`: a step has several micro-batches, so gradients exist during all but the first;
    CUDA graphs (`graphs`) keep them too.

    `row_tokens`: the length of rows of packed samples; only `labels` tokens reach the head. `frozen`: fine-tuning with
    weights in the type of products. `shards`: the number of processes that share a sharded model.
    """
    form = Form(half=half, compiled=compiled, execution=execution, frozen=frozen is not None)
    parameters, tokens = parameter_count(config, vocab), micro_batch * (row_tokens or config.context)
    trained, labels, gathered = parameters, tokens if labels is None else labels, 0
    if execution.sharded:
        trained, gathered = -(-parameters // shards), _gathered(config, vocab)
        weights = 4 * trained + (form.cell if form.triton else 4 + (2 if half else 0)) * gathered
    elif frozen is None:
        weights = 4 * parameters + _narrow_bytes(config, parameters - table_count(config, vocab), form)
    else:
        trained = adapter_count(config, frozen.rank)
        weights = form.cell * parameters + (4 + form.cell) * trained
        weights -= round((form.cell - QUANTIZED_BYTES) * linear_count(config)) if frozen.quantized else 0
    activations, working = _step_bytes(config, vocab, tokens, labels, form, frozen, row_tokens or config.context)
    if row_tokens is not None:
        activations += _mask_bytes(config, tokens, row_tokens, form)
    alone = frozen is None and not accumulated and not graphs
    recorded = graphs and not execution.sharded
    return MemoryEstimate(
        weights=weights,
        gradients=4 * (trained + gathered),
        optimizer=int(state_bytes * trained),
        activations=activations,
        working=working,
        later=min(4 * trained, activations + working) if alone else 0,
        graphs=_graph_bytes(vocab, tokens if frozen is None else labels, form) if recorded else 0,
    )


# --- what stays -------------------------------------------------------------------------------------------------------


def _gathered(config: ModelConfig, vocab: int) -> int:
    """Gathered values of a sharded model at a time: tables, and two groups of blocks, one in use and one being gathered
    or reduced."""
    blocks = blocks_gathered(config) * max(block_count(config, kind) for kind in set(config.kinds))
    table = vocab * config.width
    stays = table_count(config, vocab) + (table if config.tied else 0)
    return 2 * (blocks if config.tied else max(blocks, table)) + stays


def _narrow_bytes(config: ModelConfig, parameters: int, form: Form) -> int:
    """Copies of weights in narrower types. They live through the step; with full checkpointing our half-precision
    copies live for one product only. 8-bit copies have a transpose too."""
    how = form.execution
    if not form.triton:
        return 2 * parameters if form.half else 0

    def wide(block: Block) -> int:
        return sum(layer.weight.numel() for name, layer in block.linears().items() if name not in how.fp8)

    eight = linear_count(config) - _over_blocks(config, wide)
    halves = max(map(wide, _blocks(config)[0])) if how.checkpointing == "full" else _over_blocks(config, wide)
    return 2 * eight + (2 * halves if form.half else 0)


def _graph_bytes(vocab: int, tokens: int, form: Form) -> int:
    """Workspaces of the recording stream, and logits that an eager loss would have freed earlier."""
    how = form.execution
    if how.loss == "fused" or form.compiled:
        return GRAPH_BYTES
    chunk = min(tokens, how.loss_chunk) if how.loss == "chunked" else tokens
    return 2 * GRAPH_BYTES + chunk * vocab * form.cell


# --- what passes: (bytes kept for backward, bytes alive at the peak only) ---------------------------------------------


def _step_bytes(
    config: ModelConfig, vocab: int, tokens: int, labels: int, form: Form, frozen: FrozenModel | None, row: int
) -> tuple[int, int]:
    """Of a step over `tokens` in rows of `row`, of which `labels` reach the head."""
    *parts, outside = _parts(config, form)
    blocks = [(part.times, *_kept_and_again(config, part, tokens, form, frozen)) for part in parts]
    kept, again = sum(times * kept for times, kept, _ in blocks), max(again for *_, again in blocks)
    kept += _kept_and_again(config, outside, tokens, form)[0]
    scores = SCORE_BYTES * config.heads * row if config.attention_cap is not None else 0
    backward = again + tokens * max(_backward_bytes(config, form), scores)
    loss, head_gradient = _loss_bytes(config, vocab, labels, form, frozen)
    return kept, max(loss, backward + head_gradient)


def _mask_bytes(config: ModelConfig, tokens: int, row_tokens: int, form: Form) -> int:
    """Masks of packed rows, made once for all layers: a byte per pair of tokens, and a value to add to its score, for
    windows and for full attention. Our kernels join rows to one."""
    if not config.attends or form.execution.document_attention in BY_BOUNDS:
        return 0
    pairs = tokens * (tokens if form.triton else row_tokens)
    return (1 + form.cell * len(set(config.windows))) * pairs


# --- one block --------------------------------------------------------------------------------------------------------


def _parts(config: ModelConfig, form: Form) -> tuple[ModelPart, ...]:
    return parts_of(config, form.half, form.frozen, form.execution.scan != "triton")


def _kept_and_again(
    config: ModelConfig, part: ModelPart, tokens: int, form: Form, frozen: FrozenModel | None = None
) -> tuple[int, int]:
    """(bytes that a block keeps, bytes that its backward recomputes)."""
    how, cell, width, (up, hidden) = form.execution, form.cell, config.width, mlp_widths(config)
    block = part.saved if form.eager else part.lean + form.stream * part.stream + (0 if form.triton else part.copies)
    fixed = part.fixed_lean if form.triton else part.fixed_saved
    if not part.kind:
        return round(tokens * (block + cell * width)), 0  # with the head's input
    if frozen is not None:  # products with A
        block += cell * len(projections(config)) * frozen.rank
        if form.triton:
            kept, again = _frozen_kernels(config, part.kind, block, form, frozen)
            return round(tokens * kept), round(tokens * again)
        block += 2 * width + config.queries + hidden if frozen.dropout else 0  # masks
        block += cell * (config.queries + 2 * config.keys + 2 * width + up) if frozen.dora else 0  # unscaled
    if how.checkpointing == "full":
        # In our kernels a block has two inputs: the stream, and a branch that is not added yet.
        return tokens * (form.stream + (cell if form.triton else 0)) * width, round(tokens * block) + fixed
    kept = block
    if how.checkpointing == "selective":  # torch's form keeps its input and results of products and attention
        kept = block - cell * hidden if form.triton else form.stream * width + part.results
    again = max(0.0, block - kept)
    aside = fixed if again and not form.triton else 0
    return round(tokens * kept) + fixed - aside, round(tokens * again) + aside


def _frozen_kernels(
    config: ModelConfig, kind: str, block: float, form: Form, frozen: FrozenModel
) -> tuple[float, float]:
    """The same per token for ops/kernels/frozen.py: activations are recomputed, and heads without a norm are rotated in
    place."""
    cell, width = form.cell, config.width
    block -= cell * mlp_widths(config)[1]
    if config.positions == "rope" and not config.qk_norm and kind != "N":
        block -= cell * (config.queries + config.keys)
    less = block - 2 * cell * width  # without the outputs of norms
    if form.execution.checkpointing == "full":
        return form.stream * width + cell * frozen.rank, less
    return (less, cell * width) if form.execution.checkpointing == "selective" else (block, 0.0)


def _backward_bytes(config: ModelConfig, form: Form) -> int:
    """Bytes of gradients during the backward pass of an MLP, where a block's memory peaks."""
    # Stream and branch share one gradient if they have the same type, but not under adapters.
    own = form.cell if form.stream != form.cell or form.frozen else 0
    return (form.stream + own) * config.width + form.cell * sum(mlp_widths(config))


# --- the end: head and loss -------------------------------------------------------------------------------------------


def _loss_bytes(
    config: ModelConfig, vocab: int, tokens: int, form: Form, frozen: FrozenModel | None
) -> tuple[int, int]:
    """(bytes inside head and loss, bytes of its gradients that stay until the end of the blocks' backward pass)."""
    how, cell = form.execution, form.cell
    padded, chunk = vocab + -vocab % how.pad_vocab, min(tokens, how.loss_chunk)
    matrix = padded * config.width
    if frozen is not None:
        chunk, each = (tokens if how.loss == "plain" else chunk), _fused_loss_cell(form) if how.loss == "fused" else 12
        return chunk * padded * each + tokens * cell * config.width, 0
    if how.loss == "fused":
        stays = 4 * matrix if config.tied else 0  # until the embedding's own gradient is added to it
        inside = chunk * padded * _fused_loss_cell(form) + tokens * cell * config.width
        return inside + (6 if form.half else 4) * matrix, stays
    # Eager code holds logits, log-softmax and its gradient at once, twelve bytes in either precision; compiled code
    # writes the gradient over the logits.
    each = cell if form.compiled else 12
    if how.loss == "chunked" and chunk < tokens:
        return chunk * padded * each + 2 * 4 * matrix, 0
    return tokens * padded * each, 0


def _fused_loss_cell(form: Form) -> int:
    """Bytes per logit in the fused loss: our kernel and compiled code overwrite the logits with their gradient; torch's
    operations need three wide copies."""
    return 12 + (2 if form.half else 0) if form.eager else form.cell
