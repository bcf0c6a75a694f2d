"""The decoder: embed, blocks, norm, head. GPT-2 is one setting of it, the modern family another.

Contract: `forward(tokens, targets)` returns the loss SUMMED over labelled tokens; `logits` is for generation. Weights
depend only on (config, vocab, seed): they are drawn on the CPU from a generator of their own, so device, thread count
and the global random state do not matter.

Activation checkpointing (`recomputed`): full keeps only a block's input. Selective keeps the results of matrix products
and attention, which are expensive to recompute, and recomputes norms, activations and additions.

Shape legend: B batch, T positions, W width, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flatout.config.schema import ModelConfig
from flatout.model.adapted import AdaptedLinear
from flatout.model.cache import Cache
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.layers import Attention, Block, Embedding, Head, Positions, TokenTable, bigram_ids
from flatout.model.narrow import ModelNarrow, NarrowBlock, NarrowWeights
from flatout.model.operations import (
    Norm,
    Operations,
    Own,
    Rotary,
    Shared,
    Stream,
    build_norm,
    product_type,
)
from flatout.ops.documents import DocumentLayout


def recomputed(function: Callable[..., Any], *values: Any, what: str, random: bool) -> Any:
    """`function(*values)` with activation checkpointing; `what` is selective or full.

    `random`: the function draws random numbers, which the recomputation must repeat.
    """
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if what == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_what_is_dear)
    return checkpoint(function, *values, **settings)


def _keep_what_is_dear(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _dear() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _dear() -> frozenset[Any]:
    """Matrix products and attention, as far as this version of torch has them."""
    names = ["mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear"]
    names += [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    names += ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"]
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(found)


class GPT(nn.Module):
    def __init__(self, config: ModelConfig, vocab: int, execution: Execution) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.execution = execution
        # from_pretrained does not draw values: drawing on the meta device would import torch's compiler.
        self.embedding = Embedding.from_pretrained(torch.empty(vocab, config.width), freeze=False)
        places = torch.empty(config.context, config.width)
        self.positions = Positions.from_pretrained(places, freeze=False) if config.positions == "learned" else None
        # Before the blocks, because their gradients are finished last and gradients are reduced in reverse order.
        self.value_tables = nn.ModuleList(TokenTable(vocab, config.keys, std=0.01) for _ in range(config.value_tables))
        self.bigram = TokenTable(config.bigram_rows, config.width, std=0.0) if config.bigram_rows else None
        self.rotary = Rotary(config) if config.positions == "rope" and config.attends else None
        self.local_rotary = Rotary(config, local=True) if self.rotary and config.rope_local_base else None
        self.random = config.dropout > 0  # whether blocks draw random numbers in training
        self.blocks = nn.ModuleList(Block(config, kind, place) for place, kind in enumerate(config.kinds))
        self.norm = build_norm(config, config.width)
        self.head = Head(config, vocab)
        self.narrow = ModelNarrow([block.linears() for block in self.blocks if isinstance(block, Block)], execution)
        # called before a pass in our kernels, with the type of its products; set by adapters
        self.freshen: Callable[[torch.dtype], Hashable] | None = None
        self.cacheable = True  # decoding may use a cache
        self.copies = NarrowWeights()  # of weights, in the type of products, for decoding

    def use(self, execution: Execution) -> None:
        """Changes the execution; weights stay. Code compiled or recorded before must not be used any more."""
        self.execution = execution
        self.narrow.use(execution)
        for block in self.blocks:
            if isinstance(block, Block):  # else it is the user's
                block.use(execution)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        label_smoothing: float = 0.0,
        layout: DocumentLayout | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Cross-entropy summed over the targets that are not IGNORED; `layout` describes packed documents.

        `window` replaces `model.window` in blocks of kind W.
        """
        hidden_BTW = self.hidden(tokens_BT, layout=layout, window=window)
        if layout is not None and layout.labelled_L is not None:  # only labelled positions go through the head
            hidden_BTW = hidden_BTW.flatten(0, 1).index_select(0, layout.labelled_L)[None]
            targets_BT = targets_BT.flatten().index_select(0, layout.labelled_L)[None]
        return self.head(hidden_BTW, self._table, self.execution, targets_BT, label_smoothing)

    @property
    def _table(self) -> Tensor | None:
        """Embedding weight if the head is tied, else None: under FSDP it may be sharded."""
        return self.embedding.weight if self.config.tied else None

    @property
    def eigenstates(self) -> list[Eigenstate]:
        """The mixers of all E blocks."""
        return [block.attention for block in self.blocks if isinstance(block.attention, Eigenstate)]

    def logits(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        *,
        last: bool | Tensor = False,
        layout: DocumentLayout | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in at least fp32; `last`: [B, 1, V] of the last position, or of these positions [B].

        Reads and extends the cache.
        """
        do, stream = self._through_blocks(tokens_BT, cache, layout)
        with self._eager(decoding=True):
            whole = do.logits(stream, self.norm, self.head, self._table, last)
            if whole is not None:
                return whole
            hidden_BTW = do.add_norm(stream, self.norm)[1].view(*tokens_BT.shape, -1)
            if isinstance(last, Tensor):
                hidden_BTW = hidden_BTW[torch.arange(len(last)), last][:, None]
            elif last:
                hidden_BTW = hidden_BTW[:, -1:]
            return self.head_logits(hidden_BTW)

    def head_logits(self, hidden_BTW: Tensor) -> Tensor:
        """Logits of what `hidden` returns, or of some of its positions."""
        with self._eager(decoding=True):
            return self.head(hidden_BTW, self._table, self.execution)

    def hidden(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        layout: DocumentLayout | None = None,
        window: int | None = None,
    ) -> Tensor:
        """The head's input at every position: [B, T, W]."""
        do, stream = self._through_blocks(tokens_BT, cache, layout, window)
        return do.add_norm(stream, self.norm)[1].view(*tokens_BT.shape, -1)

    def _through_blocks(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        layout: DocumentLayout | None = None,
        window: int | None = None,
    ) -> tuple[Operations, Stream]:
        """The form of operations of this pass, and the stream after the last block."""
        shape, config = tokens_BT.shape, self.config
        last = shape[1] if layout is None else layout.reach
        if cache is not None:
            last += cache.most
            if last > cache.room:
                raise ValueError(f"{last} positions do not fit a cache of {cache.room}")
        if last > config.context:
            raise ValueError(f"{last} positions do not fit the context of {config.context}")
        do, all_narrow = self._begin(cache, tokens_BT)
        tokens_BT, layout = do.arrange(tokens_BT, layout, config.context)
        decoding = None if cache is None else cache.begin(shape[1])
        places = slice(0, tokens_BT.shape[1]) if decoding is None else decoding.places
        places = places if layout is None else layout.positions_BT
        positions_TW = None if self.positions is None else do.at(self.positions, places)
        rotaries = (self.rotary, self.local_rotary)
        turn, local = (None if rotary is None else do.at(rotary, places) for rotary in rotaries)
        shared = Shared(do, turn, local, layout, decoding, window=window)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        dropout, count = config.dropout if self.training else 0.0, 1 + 2 * len(layers)
        first, *seeds = do.seeds(count, tokens_BT.device) if dropout > 0.0 else [None] * count
        pairs = zip(seeds[::2], seeds[1::2], strict=True)
        x_BTW = self.embedding(tokens_BT, do, positions_TW)
        if self.bigram is not None:
            ids_BT = do.at(functools.partial(self._bigrams, tokens_BT, cache), places)
            x_BTW = do.add_rows(x_BTW, ids_BT, self.bigram.weight)
        if config.embedding_norm:
            x_BTW = do.unit_norm(x_BTW, config.norm_eps)
        if config.embedding_scale is not None:
            x_BTW = do.scaled(x_BTW, config.embedding_scale)
        if dropout > 0.0:
            x_BTW = do.drop(x_BTW, dropout, first)
        if config.first_mix:
            x_BTW, mixed_in = do.first(x_BTW)
            shared = dataclasses.replace(shared, first=mixed_in)
        stream = Stream(x_BTW)
        values = [do.look_up(tokens_BT, table) for table in self.value_tables.parameters()]
        inferring = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with self._eager(decoding=cache is not None or inferring):
            for place, (block, narrow, layer, pair) in enumerate(
                zip(self.blocks, all_narrow, layers, pairs, strict=True)
            ):
                table = config.table_of(place)
                own = Own(narrow, layer, pair, None if table is None else values[table])
                stream = self._recomputed(block, stream, shared, own)
        if cache is not None:
            cache.advance(tokens_BT)
        return do, stream

    def _bigrams(self, tokens_BT: Tensor, cache: Cache | None, places: slice | Tensor) -> Tensor:
        """Ids of pairs: each token with the one before it. At position 0 a text starts."""
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop, device=tokens_BT.device)
        before_B1 = tokens_BT[:, :1] if cache is None else cache.last_B1
        return bigram_ids(tokens_BT, before_B1, places == 0, self.config.bigram_rows)

    def _begin(self, cache: Cache | None, tokens_BT: Tensor) -> tuple[Operations, Sequence[NarrowBlock]]:
        """The form of operations for this pass, and each block's weight copies in narrower types, up to date.

        With a cache it is torch's form, NumPy's, or for one token of every row that of the kernels for decoding.
        What our kernels do not have is torch's form in every pass.
        """
        how, nothing = self.execution, [NarrowBlock()] * len(self.blocks)
        if self.config.beyond_kernels:
            return Operations(how), nothing
        if cache is not None and cache.kernels and tokens_BT.shape[1] == 1:
            from flatout.model.decode_operations import DecodeOperations

            return DecodeOperations(how, product_type(self.embedding.weight), self.copies), nothing
        if cache is not None and cache.calls is not None:
            from flatout.model.row_operations import RowOperations

            return RowOperations(how, cache, tokens_BT), nothing
        if how.kernels != "triton" or cache is not None:
            return Operations(how), nothing
        from flatout.model.kernel_operations import FrozenOperations, KernelOperations

        dtype = product_type(self.embedding.weight)
        if self.embedding.weight.requires_grad or not all(block.is_frozen for block in self.blocks):
            if how.sharded:
                return KernelOperations(how), nothing
            recording = self.training and torch.is_grad_enabled()
            return KernelOperations(how), self.narrow.begin(dtype, recording=recording)
        if self.freshen is not None:
            self.freshen(dtype)
        else:  # a copy of a model with adapters: each layer updates its own joined weight
            for layer in self.modules():
                if isinstance(layer, AdaptedLinear):
                    layer.join(dtype)
                    layer.fresh()
        return FrozenOperations(how), nothing

    def _eager(self, *, decoding: bool) -> contextlib.AbstractContextManager[None]:
        """Turns off regionally compiled blocks while decoding: every prompt length would recompile them."""
        apart = decoding and self.head._compiled_call_impl is not None
        return torch.compiler.set_stance("force_eager") if apart else contextlib.nullcontext()

    def prepare(self) -> Hashable:
        """Prepares the replay of a recorded pass. If the returned value has changed, record the pass anew."""
        if self.execution.kernels != "triton" or self.execution.sharded:
            return None
        dtype = product_type(self.embedding.weight)
        return self.narrow.prepare(dtype) if self.freshen is None else self.freshen(dtype)

    def drop(self) -> None:
        """Frees what a failed pass left behind."""
        self.narrow.drop()

    def _recomputed(self, block: nn.Module, stream: Stream, shared: Shared, own: Own) -> Stream:
        """Runs a block, with activation checkpointing as the switches say."""
        if not (self.training and torch.is_grad_enabled()):
            return block(stream, shared, own)
        what, do = self.execution.checkpointing, shared.operations
        if what not in do.recomputes:
            return block(stream, shared, own)

        def again(*values: Any) -> Stream:
            return block(Stream(*values), shared, own)

        return recomputed(again, *stream, what=what, random=self.random)

    def empty_cache(self, batch: int = 1, positions: int | None = None) -> Cache:
        """A cache for `positions` tokens in all; None: for the whole context."""
        room = min(positions or self.config.context, self.config.context)
        weight, kind = self.embedding.weight, self.embedding.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        layers = []
        for block in self.blocks:
            if isinstance(block.attention, Attention):
                layers.append(block.attention.empty_cache(batch, room, dtype, weight.device))
            elif isinstance(block.attention, Eigenstate):
                layers.append(block.attention.empty_cache(batch, dtype, weight.device))
        return Cache(layers, batch, room, weight.device)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws every weight by GPT-2's scheme: 0.02, and 0.02/√(2L) in projections back to the residual stream.

        The `gpt` family uses 0.5/√W instead of 0.02. Both are equal at W = 625; in narrower models 0.02 makes the
        output of blocks almost zero at first. `zero_init` sets projections back to the stream to zero, and draws token
        embeddings with a standard deviation of 1, or that of the head where it is tied.
        """
        generator = torch.Generator().manual_seed(seed)
        std = 0.02 if self.config.family == "gpt2" else 0.5 / math.sqrt(self.config.width)
        tokens = 0.02 if not self.config.zero_init else std if self.config.tied else 1.0
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                joins = name.endswith((".attention.out", ".mlp.out"))
                scale = std / math.sqrt(2 * self.config.layers) if joins else std
                module.weight.normal_(0.0, scale, generator=generator)
                if joins and self.config.zero_init:  # drawn before, so that all other weights are the same without it
                    module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Head) and module.weight is not None:
                module.weight.normal_(0.0, std, generator=generator)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, tokens if isinstance(module, Embedding) else 0.02, generator=generator)
            elif isinstance(module, Norm):
                if module.weight is not None:
                    module.weight.fill_(module.start)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Block | Attention):
                for own, start in module.starts.items():
                    if getattr(module, own) is not None:
                        getattr(module, own).copy_(torch.tensor(start))
        for table in self.modules():  # last, so that all other weights are the same without these tables
            if isinstance(table, TokenTable):
                table.weight.normal_(0.0, table.std, generator=generator) if table.std else table.weight.zero_()
        for mixer in self.eigenstates:  # after all linear layers, so that nothing is overwritten
            mixer.init_states(generator)


def build_model(config: ModelConfig, vocab: int, *, seed: int = 0, execution: Execution | None = None) -> GPT:
    """A model on the CPU with weights drawn from `seed`. Built on the meta device first, so nothing is drawn twice."""
    model = empty_model(config, vocab, execution=execution)
    model.init_weights(seed)
    return model


def empty_model(
    config: ModelConfig,
    vocab: int,
    *,
    execution: Execution | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GPT:
    """A model with uninitialised weights. Rotary and eigenstate tables are filled, in fp32.

    On the device `meta` it has shapes only.
    """
    with torch.device("meta"):
        model = GPT(config, vocab, execution or Execution())
    tables = {id(table) for table in model.buffers()}
    # torch's own to_empty would import half of its compiler
    model._apply(
        lambda x: torch.empty(x.shape, dtype=torch.float32 if id(x) in tables else dtype, device=torch.device(device))
    )
    for rotary in (model.rotary, model.local_rotary):
        if rotary is not None and not rotary.cos_TD.is_meta:
            rotary.fill()
    for mixer in model.eigenstates:
        mixer.fill()
    return model
