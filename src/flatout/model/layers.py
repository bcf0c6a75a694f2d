"""The modules of a decoder. Each takes the model section or plain values, never a whole config.

A block's forward pass is written once: training, evaluation, decoding, packed documents, windows and eigenstates all
use it, with torch's operations or our kernels. `Own`, `Shared`, `Stream` and `Branch`, which every `forward` takes or
returns, are defined in model/operations.py.

Shape legend: B batch, T positions of this call, H query heads, G key/value heads, D head size, W width, V vocabulary.
"""

import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.adapted import AdaptedLinear
from flatout.model.cache import LayerCache
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.int8 import Int8Linear
from flatout.model.narrow import input_slot
from flatout.model.operations import (
    Branch,
    Gates,
    JoinedNorm,
    Mix,
    NoNorm,
    Norm,
    Operations,
    Own,
    RMSNorm,
    Shared,
    Stream,
    Turn,
    build_norm,
    norm_settings,
)
from flatout.ops.attention import causal_attention
from flatout.ops.documents import document_attention
from flatout.ops.linear_cross_entropy import linear_cross_entropy, padded_logits

GATE_INPUTS = 12  # channels of a block's normed input that its gates read


class Embedding(nn.Embedding):
    """The token table. Returns token rows plus position rows: the first values of the residual stream."""

    role = "embedding"  # optimizers choose a rate by it

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens_BT: Tensor, do: Operations, positions_TW: Tensor | None
    ) -> Tensor:
        return do.embed(tokens_BT, self.weight, positions_TW)


class TokenTable(nn.Module):
    """A second table: of values, or of pairs of tokens. It is drawn with a standard deviation of `std`."""

    role = "table"  # optimizers choose a rate by it

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(rows, width))


def bigram_ids(tokens_BT: Tensor, before_B1: Tensor, starts_BT: Tensor, rows: int) -> Tensor:
    """Rows [B, T] of a table of pairs: a hash of each token and the one before; the last row where a text starts.

    `before_B1` is the token before the first one of each row; it has no effect where a text starts.
    """
    before_BT = torch.cat([before_B1, tokens_BT[:, :-1]], dim=1)
    hashed_BT = torch.bitwise_xor(tokens_BT * 36_313, before_BT * 27_191) % (rows - 1)
    return torch.where(starts_BT, rows - 1, hashed_BT)


class Positions(nn.Embedding):
    """Learned positions."""

    role = "positions"

    def forward(self, places: slice | Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.weight[places]


class Head(nn.Module):
    """The output head: logits, or the loss. A tied head has no weight of its own and uses the embedding's."""

    role = "head"

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.cap = config.logit_cap or 0.0
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab, config.width))
        self.int8: Int8Linear | None = None  # takes the weight's place, for inference

    def forward(
        self,
        hidden_BTW: Tensor,
        table_VW: Tensor | None,
        how: Execution,
        targets_BT: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The summed loss; without targets the logits [B, T, V] in at least fp32."""
        weight_VW = table_VW if self.weight is None else self.weight
        weight_VW = weight_VW if self.int8 is None else self.int8.widened()
        assert weight_VW is not None, "a tied head needs the embedding's table"
        if targets_BT is None:
            return padded_logits(hidden_BTW, weight_VW, how.pad_vocab, self.cap)
        return linear_cross_entropy(
            hidden_BTW.flatten(0, 1),
            weight_VW,
            targets_BT.flatten(),
            label_smoothing=label_smoothing,
            pad_vocab=how.pad_vocab,
            path=how.loss,
            chunk=how.loss_chunk,
            kernels=how.kernels,
            fp8="head" in how.fp8,
            tuned=how.products == "tuned",
            cap=self.cap,
        )


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, kind: str = "A", *, valued: bool = False) -> None:
        """`kind`: the letter of its block. `valued`: rows of a value table come to its values."""
        super().__init__()
        self.kind = kind
        self.window = config.window if kind == "W" else None
        self.heads = config.heads
        self.groups = config.kv_heads or config.heads
        self.size = config.size
        self.dropout = config.dropout
        queries, keys = self.heads * self.size, self.groups * self.size
        self.qkv = nn.Linear(config.width, queries + 2 * keys, bias=config.has_qkv_bias)
        self.parts = {"qkv.weight": (queries, keys, keys)}
        self.out = nn.Linear(config.queries, config.width, bias=config.bias)
        self.cap = config.attention_cap
        self.query_scale = (self.size / (config.score_divisor or self.size)) ** 0.5  # attention divides by √size
        how: dict[str, Any] = norm_settings(config) | {"scale": config.qk_scale}
        norm, sizes = (JoinedNorm, (queries, keys)) if config.qk_norm_whole else (RMSNorm, (self.size, self.size))
        self.q_norm = norm(sizes[0], **how) if config.qk_norm else None
        self.k_norm = norm(sizes[1], **how) if config.qk_norm else None
        # Of one dimension, as everything that is no matrix to an optimizer or to sharding.
        self.gated = (self.groups if valued else 0, self.heads if config.head_gate else 0)
        self.gate_inputs = min(GATE_INPUTS, config.width)
        self.gates = nn.Parameter(torch.empty(sum(self.gated) * self.gate_inputs)) if any(self.gated) else None
        self.starts = {"gates": 0.0}  # what parameters begin with that are in no layer of their own

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Those of queries and keys."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)

    def forward(self, h_BTW: Tensor, shared: Shared, own: Own) -> Branch:
        do, narrow = shared.operations, own.narrow
        gates = Gates(None if self.gates is None else self.gates.view(-1, self.gate_inputs), *self.gated)
        made = do.project_heads(h_BTW, self.qkv, self.heads, self.groups, narrow.qkv, gates)
        return do.product(do.attention(self, made, shared, own), self.out, narrow.out)

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared, cache: LayerCache | None
    ) -> Tensor:
        how, qkv = shared.operations.execution, (q_BHTD, k_BGTD, v_BGTD)
        form = {"window": self.window_in(shared), "cap": self.cap}
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            assert shared.decoding is not None
            return cache.attend(*qkv, shared.decoding, backend=how.attention, **form)
        if shared.layout is None:
            return causal_attention(*qkv, backend=how.attention, dropout=dropout, **form)
        if dropout > 0.0:
            raise ValueError("attention inside packed documents has no dropout")
        return document_attention(*qkv, shared.layout, backend=how.document_attention, **form)

    def turn_in(self, shared: Shared) -> Turn | None:
        """The rotary positions of this pass; None if this block turns nothing by them."""
        if self.kind == "W" and shared.local_turn is not None:
            return shared.local_turn
        return None if self.kind == "N" else shared.turn

    def window_in(self, shared: Shared) -> int | None:
        """The window of this pass; None for full attention."""
        if self.window is None or shared.window is None:
            return self.window
        return operator.index(shared.window)  # a constant to the compiler, also where it serves all shapes

    def empty_cache(self, batch: int, positions: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        return LayerCache(batch, self.groups, min(positions, self.window or positions), self.size, dtype, device)


def mlp_width_of(config: ModelConfig) -> int:
    """4·W; with a gate 8/3·W, rounded up to a multiple of 8: three matrices then have as many values as two."""
    if config.mlp_width is not None:
        return config.mlp_width
    if config.gated_mlp:
        return -(-8 * config.width // 24) * 8
    return 4 * config.width


def mlp_widths(config: ModelConfig) -> tuple[int, int]:
    """(columns of the MLP's first product, rows of its second)."""
    hidden = mlp_width_of(config)
    return (2 * hidden if config.gated_mlp else hidden), hidden


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        columns, hidden = mlp_widths(config)
        self.kind = config.mlp
        # gate and value are in one matrix: one product instead of two
        parts = (hidden,) * (columns // hidden)
        self.up = nn.Linear(config.width, columns, bias=config.bias)
        self.parts = {"up.weight": parts}
        self.out = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, h_BTW: Tensor, shared: Shared, own: Own) -> Branch:
        return shared.operations.activated_product(h_BTW, self.up, self.out, self.kind, own.narrow)


def build_mixer(config: ModelConfig, kind: str, place: int) -> Attention | Eigenstate:
    """The mixer for `kind`, a letter of `model.pattern`, in the block at index `place`."""
    if kind == "E":
        return Eigenstate(config, place)
    return Attention(config, kind, valued=config.table_of(place) is not None)


_IN_ONE_STEP = ("attention_norm", "attention.qkv", "attention.q_norm", "attention.k_norm", "attention.out", "mlp_norm")
_IN_ONE_STEP += ("mlp.up", "mlp.out")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Branches may carry learned scales; norms may come after them.

    In blocks of kind E, `self.attention` holds an `Eigenstate` instead.
    """

    def __init__(self, config: ModelConfig, kind: str = "A", place: int = 0) -> None:
        super().__init__()
        norm = functools.partial(build_norm, config, config.width)
        before, after = (norm if config.norm_place in (side, "both") else None for side in ("before", "after"))
        self.attention_norm = before() if before else NoNorm()
        self.attention = build_mixer(config, kind, place)
        self.attention_out_norm = after() if after else None
        self.mlp_norm = before() if before else NoNorm()
        self.mlp = MLP(config)
        self.mlp_out_norm = after() if after else None
        self.dropout = config.dropout
        scaled = config.residual_scale is not None
        self.attention_scale = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.mix = nn.Parameter(torch.empty(2)) if config.first_mix else None
        self.starts = {"attention_scale": config.residual_scale, "mlp_scale": config.residual_scale, "mix": [1.0, 0.1]}
        # parameters that `FrozenOperations` (model/kernel_operations.py) does not support
        self.beside = [name for name, _ in self.named_parameters() if name.rpartition(".")[0] not in _IN_ONE_STEP]

    def forward(self, stream: Stream, shared: Shared, own: Own) -> Stream:
        """Adds the pending branch of the previous block, if any; its own MLP branch may be left to the next block."""
        do = shared.operations
        whole = do.whole(self, stream, shared)
        if whole is not None:
            return whole
        dropout = self.dropout if self.training else 0.0
        mix = None if self.mix is None else Mix(self.mix, shared.first)
        x_BTW, h_BTW = do.add_norm(stream, self.attention_norm, input_slot(own.narrow.qkv), mix)
        branch = self._normed(self.attention_out_norm, self.attention(h_BTW, shared, own))
        stream = Stream(x_BTW, *branch, scale_W=self.attention_scale, dropout=dropout, seed=own.seeds[0])
        x_BTW, h_BTW = do.add_norm(stream, self.mlp_norm, input_slot(own.narrow.up))
        branch = self._normed(self.mlp_out_norm, self.mlp(h_BTW, shared, own))
        return do.hand_on(Stream(x_BTW, *branch, scale_W=self.mlp_scale, dropout=dropout, seed=own.seeds[1]))

    def _normed(self, norm: Norm | None, branch: Branch) -> Branch:
        """torch's form alone: its branches have their bias already."""
        return branch if norm is None else Branch(norm(branch.value_BTW))

    def use(self, execution: Execution) -> None:
        for layer in self.modules():
            if isinstance(layer, AdaptedLinear):
                layer.use(execution)

    @property
    def is_frozen(self) -> bool:
        """Whether the frozen-block kernels can run it: it has attention, and only adapters are trained."""
        if not isinstance(self.attention, Attention):
            return False
        norms = (self.attention_norm, self.mlp_norm, self.attention.q_norm, self.attention.k_norm)
        own = [module for module in (*norms, *self.linears().values()) if module is not None]
        return not any(x is not None and x.requires_grad for module in own for x in (module.weight, module.bias))

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers by their names in `speed.fp8`."""
        first = self.attention.qkv if isinstance(self.attention, Attention) else self.attention.inward
        return {"qkv": first, "out": self.attention.out, "up": self.mlp.up, "down": self.mlp.out}

    def set_linear(self, name: str, layer: nn.Linear) -> None:
        """Replaces one of `linears`."""
        owner, attribute = {
            "qkv": (self.attention, "qkv" if isinstance(self.attention, Attention) else "inward"),
            "out": (self.attention, "out"),
            "up": (self.mlp, "up"),
            "down": (self.mlp, "out"),
        }[name]
        setattr(owner, attribute, layer)
