"""The decoder: embed, blocks, norm, head. GPT-2 is one setting of it, the modern family another.

Contract: `forward(tokens, targets)` returns the loss SUMMED over labelled tokens; `logits` serves generation. Weights
depend only on (config, vocab, seed): they are drawn on the CPU from a generator of their own, so device, thread count
and the global random state do not matter.

Shape legend: B batch, T positions, W width, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.activations import ActivationOffload, recomputed
from flatout.model.adapted import AdaptedLinear
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.layers import Attention, Block, Cache, Norm, Turn, build_norm, build_rotary, product_type
from flatout.model.narrow import ModelNarrow, gradient_slot
from flatout.ops.attention import causal_attention
from flatout.ops.documents import Layout, document_attention
from flatout.ops.linear_cross_entropy import linear_cross_entropy, padded_logits
from flatout.ops.reference import IGNORED


class GPT(nn.Module):
    def __init__(self, config: ModelConfig, vocab: int, execution: Execution) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.execution = execution
        self.embedding = _table(vocab, config.width)
        self.positions = _table(config.context, config.width) if config.positions == "learned" else None
        self.rotary = build_rotary(config) if config.positions == "rope" and config.attends else None
        self.dropout = nn.Dropout(config.dropout)
        self.random = config.dropout > 0  # whether blocks draw random numbers in training
        self.blocks = nn.ModuleList(Block(config, execution, kind, place) for place, kind in enumerate(config.kinds))
        self.norm = build_norm(config, config.width)
        self.head = None if config.tied else nn.Linear(config.width, vocab, bias=False)
        self.offload = ActivationOffload(self)
        self.narrow = ModelNarrow([block.linears() for block in self.blocks if isinstance(block, Block)], execution)
        # what adapters must do before a pass in our kernels, with the type of its products; theirs to set
        self.freshen: Callable[[torch.dtype], Hashable] | None = None

    def use(self, execution: Execution) -> None:
        """Carries on in another way; the weights stay. Code compiled or recorded before must not be used again."""
        self.execution = execution
        self.narrow.use(execution)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.use(execution)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, label_smoothing: float = 0.0, layout: Layout | None = None
    ) -> Tensor:
        """Cross-entropy summed over the targets that are not IGNORED; with a layout, of packed documents.

        In training it may come with the energy of eigenstates, once for each of those targets.
        """
        hidden_BTW = self.hidden(tokens_BT, layout=layout)
        if layout is not None and layout.labelled_L is not None:  # the head is for those alone that have a label
            hidden_BTW = hidden_BTW.flatten(0, 1).index_select(0, layout.labelled_L)[None]
            targets_BT = targets_BT.flatten().index_select(0, layout.labelled_L)[None]
        loss = self.head_and_loss(hidden_BTW, targets_BT, label_smoothing)
        if self.config.energy and self.training and self.eigenstates:
            # Times the targets, by all of which of a step the sum is divided: however it is cut, the term counts once.
            loss = loss + self.config.energy * self.energy() * (targets_BT != IGNORED).sum()
        return loss

    def use_window(self, window: int | None) -> None:
        """Gives blocks of kind W another attention window; None gives them back their own."""
        for block, kind in zip(self.blocks, self.config.kinds, strict=True):
            if kind == "W":
                block.attention.window = window or self.config.window

    @property
    def eigenstates(self) -> list[Eigenstate]:
        """The mixers of all E blocks."""
        return [block.attention for block in self.blocks if isinstance(block.attention, Eigenstate)]

    def energy(self) -> Tensor:
        """The mean of |λ|² over all states of all blocks."""
        return torch.stack([mixer.energy() for mixer in self.eigenstates]).mean()

    def head_and_loss(self, hidden_BTW: Tensor, targets_BT: Tensor, label_smoothing: float) -> Tensor:
        """The last part of `forward`, apart from it so that it can be compiled alone."""
        how = self.execution
        return linear_cross_entropy(
            hidden_BTW.flatten(0, 1),
            self.head_weight,
            targets_BT.flatten(),
            label_smoothing=label_smoothing,
            pad_vocab=how.pad_vocab,
            path=how.loss,
            chunk=how.loss_chunk,
            kernels=how.kernels,
            fp8="head" in how.fp8,
            tuned=how.products == "tuned",
        )

    def logits(
        self, tokens_BT: Tensor, cache: Cache | None = None, *, last: bool = False, layout: Layout | None = None
    ) -> Tensor:
        """Logits [B, T, V] in at least fp32, or [B, 1, V] of the last position. A cache is read and extended."""
        hidden_BTW = self.hidden(tokens_BT, cache, layout)
        if last:
            hidden_BTW = hidden_BTW[:, -1:]
        logits_BTV = padded_logits(hidden_BTW, self.head_weight, self.execution.pad_vocab)
        return logits_BTV.float() if logits_BTV.element_size() < 4 else logits_BTV

    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None, layout: Layout | None = None) -> Tensor:
        position = 0 if cache is None else cache.length
        length = tokens_BT.shape[1]
        last = position + (length if layout is None else layout.reach)
        if last > self.config.context:
            raise ValueError(f"{last} positions do not fit the context of {self.config.context}")
        if self.execution.kernels == "triton" and cache is None:
            return self._fused_blocks(tokens_BT, layout)
        x_BTW = self.embedding(tokens_BT)
        if self.positions is not None:
            places = slice(position, position + length) if layout is None else layout.positions_BT
            x_BTW = x_BTW + self.positions.weight[places]
        turn = None if self.rotary is None else self.rotary(position, length, layout)
        x_BTW = self.dropout(x_BTW)
        decoding = cache is not None or (not torch.compiler.is_compiling() and torch.is_inference_mode_enabled())
        for index, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[index]
            # Decoding has another shape for every token: it must not meet blocks that were compiled one by one.
            function = block.forward if decoding else block
            x_BTW = self._recomputed(function, x_BTW, turn, layer, position, layout)
        if cache is not None:
            cache.length = position + length
        return self.norm(x_BTW)

    def _fused_blocks(self, tokens_BT: Tensor, layout: Layout | None) -> Tensor:
        """The blocks in our kernels. A block's last addition waits for the norm after it: one pass over memory."""
        from flatout.ops.kernels.embedding import embed

        shape = tokens_BT.shape
        if layout is not None and layout.alone and shape[1] <= self.config.context:  # rows need not know of it
            layout = None
        if layout is not None:  # one row: kernels look positions up by the place in a row
            tokens_BT, layout = tokens_BT.flatten()[None], layout.in_one_row
        table_VW = self.embedding.weight
        places = slice(0, tokens_BT.shape[1]) if layout is None else layout.positions_BT.flatten()
        positions_TW = None if self.positions is None else self.positions.weight[places]
        turn = None if self.rotary is None else self.rotary(0, self.config.context, layout)
        wide = torch.promote_types(table_VW.dtype, torch.float32)  # of a frozen model weights may be narrower
        stream = torch.bfloat16 if self.execution.residual == "bf16" else wide
        x_BTW = embed(tokens_BT, table_VW, positions_TW, stream)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        if not self.norm.weight.requires_grad and all(block.is_frozen for block in blocks):
            return self._frozen_blocks(x_BTW, turn, layout).view(*shape, -1)
        branch_BTW, bias_W, slot = None, None, None
        all_narrow = self.narrow.begin(product_type(table_VW), recording=self.training and torch.is_grad_enabled())
        for block, narrow in zip(self.blocks, all_narrow, strict=True):
            assert isinstance(block, Block)
            x_BTW, branch_BTW = self._recomputed(block.fused, x_BTW, branch_BTW, bias_W, turn, narrow, slot, layout)
            bias_W, slot = block.mlp.out.bias, gradient_slot(narrow.down)
        return self.norm.after_adding(x_BTW, branch_BTW, bias_W, None, slot)[1].view(*shape, -1)

    def _frozen_blocks(self, x_BTW: Tensor, turn: Turn | None, layout: Layout | None) -> Tensor:
        """The blocks of a frozen model, whose adapters alone are trained."""
        from flatout.ops.kernels.frozen import GradientRoom, frozen_end

        dtype = product_type(x_BTW)
        if self.freshen is not None:
            self.freshen(dtype)
        else:  # a copy of a model with adapters: each of its layers for itself
            for layer in self.modules():
                if isinstance(layer, AdaptedLinear):
                    layer.join(dtype)
                    layer.fresh()
        how = self.execution
        attend = functools.partial(causal_attention, backend=how.attention)
        if layout is not None:
            attend = functools.partial(document_attention, layout=layout, backend=how.document_attention)
        branch_BTW, bias_W, below = None, None, None
        for block in self.blocks:
            assert isinstance(block, Block)
            last = block.mlp.out
            above = GradientRoom(last.layout.rank if isinstance(last, AdaptedLinear) and last.enabled else 0)
            x_BTW, branch_BTW = block.frozen(x_BTW, branch_BTW, bias_W, turn, attend, above, below)
            bias_W, below = last.bias, above
        assert branch_BTW is not None, "a model has at least one block"
        assert below is not None
        return frozen_end(x_BTW, branch_BTW, bias_W, self.norm.frozen(), dtype, below)

    def prepare(self) -> Hashable:
        """What must be done before a recorded pass is replayed; another answer means another recording."""
        if self.execution.kernels != "triton":
            return None
        dtype = product_type(self.embedding.weight)
        return self.narrow.prepare(dtype) if self.freshen is None else self.freshen(dtype)

    def _recomputed(self, function: Callable[..., Any], *values: Any) -> Any:
        """A block, with what it keeps for backward as the switches say. Our kernels are selective by themselves."""
        if not (self.training and torch.is_grad_enabled()):
            return function(*values)
        how = self.execution
        what = how.checkpointing
        keeping = self.offload.hooks() if how.activation_offload else contextlib.nullcontext()
        with keeping:
            if what == "full" or (what == "selective" and how.kernels == "torch"):
                return recomputed(function, *values, what=what, random=self.random)
            return function(*values)

    def empty_cache(self, batch: int = 1, positions: int | None = None) -> Cache:
        """For as many `positions` as will come, the whole context if that is not known."""
        room = min(positions or self.config.context, self.config.context)
        weight = self.embedding.weight
        dtype = torch.get_autocast_dtype(weight.device.type) if _autocasting(weight.device) else weight.dtype
        layers = []
        for block in self.blocks:
            if isinstance(block.attention, Attention):
                layers.append(block.attention.empty_cache(batch, room, dtype, weight.device))
            elif isinstance(block.attention, Eigenstate):
                layers.append(block.attention.empty_cache(batch, dtype, weight.device))
        return Cache(layers)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws every weight: GPT-2's scheme, 0.02 everywhere and 0.02/√(2L) where a branch joins the residual stream.

        The `gpt` family takes 0.5/√W instead of 0.02: the same at W = 625, and still of use at the widths of small
        models, where 0.02 starts the blocks almost silent.
        """
        generator = torch.Generator().manual_seed(seed)
        std = 0.02 if self.config.family == "gpt2" else 0.5 / math.sqrt(self.config.width)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                joins = name.endswith((".attention.out", ".mlp.out"))
                scale = std / math.sqrt(2 * self.config.layers) if joins else std
                module.weight.normal_(0.0, scale, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 0.02, generator=generator)
            elif isinstance(module, Norm):
                module.weight.fill_(1.0)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Block) and module.attention_scale is not None and module.mlp_scale is not None:
                module.attention_scale.fill_(self.config.residual_scale or 0.0)
                module.mlp_scale.fill_(self.config.residual_scale or 0.0)
        for mixer in self.eigenstates:  # after all linear layers, of which nothing is to be overwritten
            mixer.init_states(generator)


def build_model(config: ModelConfig, vocab: int, *, seed: int = 0, execution: Execution | None = None) -> GPT:
    """A model on the CPU with weights drawn from `seed`. Built without memory first, so nothing is drawn twice."""
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
    """A model whose weights are to be written yet: whatever lay in memory. Its tables are in place, and in fp32.

    On the device `meta` it has shapes and nothing else.
    """
    with torch.device("meta"):
        model = GPT(config, vocab, execution or Execution())
    tables = {id(table) for table in model.buffers()}
    # torch's own to_empty would import half of its compiler
    model._apply(
        lambda x: torch.empty(x.shape, dtype=torch.float32 if id(x) in tables else dtype, device=torch.device(device))
    )
    if model.rotary is not None and not model.rotary.cos_TD.is_meta:
        model.rotary.fill()
    for mixer in model.eigenstates:
        mixer.fill()
    return model


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding whose weights `init_weights` draws. Drawing them without memory would import torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _autocasting(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)
