"""What a block is made of: a few operations, each in a form of torch's and in a form of our kernels.

Idea: a block's forward pass is written once (model/layers.py), over `Operations`. The residual stream is a `Stream`:
what is there already, and a branch that has not been added yet. The norm after it adds it, with the branch's bias, its
dropout and its learned scale, which in our kernels is one pass over memory.

    x_new = x + dropout(branch + bias) * scale          h = norm(x_new)

With `model.first_mix` the first norm of a block mixes the first stream in, too: x_new = a·(x + ...) + b·first.

Between blocks only our kernels leave a branch waiting. torch's form adds it before it hands the stream on (`hand_on`):
so the first block is the same code to a compiler as the others, and a block that is recomputed keeps one tensor.

Three forms: `TorchOperations`, `KernelOperations`, and `FrozenOperations`, in which a block whose adapters alone are
trained is one step of autograd.

Shape legend: B batch, T positions of this call, H query heads, G key/value heads, D head size, W width, V vocabulary.

The operations of a block by torch's own: any device, any type, and what a compiler looks into.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.model.adapted import AdaptedLinear
from flatout.model.cache import Decoding
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock
from flatout.model.norms import Norm, RMSNorm
from flatout.model.rotary import Turn, turned
from flatout.ops.documents import DocumentLayout
from flatout.ops.scales import NarrowLinear, Slot


class Branch(NamedTuple):
    """What a mixer or an MLP adds to the residual stream."""

    value_BTW: Tensor
    bias_W: Tensor | None = None  # where the product has left it to the addition
    slot: Any = None  # takes the branch's gradient: a `Slot` in 8 bits, a `GradientRoom` under frozen weights


class Stream(NamedTuple):
    """The residual stream between two blocks, and a branch that is still to be added. Flat, so that checkpointing and
    sharding see its tensors."""

    x_BTW: Tensor
    branch_BTW: Tensor | None = None
    bias_W: Tensor | None = None
    slot: Any = None
    scale_W: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None  # of the dropout, where the form wants one


class Mix(NamedTuple):
    """What the input x of a block becomes: weights[0]·x + weights[1]·first."""

    weights_2: Tensor
    first: Any  # as `Operations.first` gave it


class Gates(NamedTuple):
    """2·sigmoid of products with the first channels of a block's normed input: between 0 and 2, and 1 at zero."""

    weight_CI: Tensor | None = None  # those of values first, then those of heads
    values: int = 0  # how many of them there are
    heads: int = 0


class Heads(NamedTuple):
    """Queries, keys and values of a block's attention, and its gates."""

    q_BHTD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor
    value_gates_BTG: Tensor | None = None
    head_gates_BTH: Tensor | None = None


class Own(NamedTuple):
    """What one block has to itself in a pass."""

    narrow: NarrowBlock = NarrowBlock()
    cache: Any = None  # that of its mixer
    seeds: Sequence[Tensor | None] = (None, None)  # of the dropout on its two branches
    values: Any = None  # rows of its value table, as `Operations.look_up` gave them


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all blocks of a pass share."""

    operations: "Operations"
    turn: Turn | None = None
    layout: DocumentLayout | None = None
    decoding: Decoding | None = None
    first: Any = None  # the first stream, where blocks mix it in
    window: int | None = None  # of attention in blocks of kind W, where it is not their own


class Operations(abc.ABC):
    """One form of everything that a pass over the model does."""

    recomputes: tuple[str, ...]  # kinds of checkpointing that are for the caller to do, around a block
    # Whether these are our kernels. Decoding never has them, whatever `execution.kernels` says.
    kernels: bool

    def __init__(self, execution: Execution) -> None:
        self.execution = execution

    def arrange(
        self, tokens_BT: Tensor, layout: DocumentLayout | None, context: int
    ) -> tuple[Tensor, DocumentLayout | None]:
        """Tokens and documents in the rows that this form works on."""
        return tokens_BT, layout

    def seeds(self, count: int, device: torch.device) -> Sequence[Tensor | None]:
        """Seeds for so many places of dropout in a pass, drawn from torch's random stream where the form wants any."""
        return [None] * count

    @abc.abstractmethod
    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Tensor:
        """The residual stream's first values; positions are [T, W], or [B, T, W] where rows differ."""

    @abc.abstractmethod
    def add_rows(self, x_BTW: Tensor, ids_BT: Tensor, table_RW: Tensor) -> Tensor:
        """The first values with rows of another table added."""

    def first(self, x_BTW: Tensor) -> tuple[Tensor, Any]:
        """(the first stream, the same as blocks get it to mix it in)."""
        return x_BTW, x_BTW

    @abc.abstractmethod
    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Any:
        """Rows of a value table, for the two blocks that it serves."""

    @abc.abstractmethod
    def unit_norm(self, x_BTW: Tensor, eps: float) -> Tensor:
        """RMS norm without weights, in the type of the stream."""

    @abc.abstractmethod
    def drop(self, x_BTW: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
        """Dropout on the stream itself."""

    def whole(self, block: nn.Module, stream: Stream, shared: Shared) -> Stream | None:
        """The block in one step, where this form has it so."""
        return None

    @abc.abstractmethod
    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the stream with its branch added, and mixed; the norm of that). `slot` takes the norm in 8 bits."""

    @abc.abstractmethod
    def project_heads(
        self, h_BTW: Tensor, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Heads:
        """Queries, keys and values, and the gates that `gates` asks for."""

    @abc.abstractmethod
    def add_values(self, v_BGTD: Tensor, gates_BTG: Tensor, values: Any) -> Tensor:
        """Attention's values plus gated rows of a table. The given ones may be overwritten."""

    @abc.abstractmethod
    def gate_heads(self, y_BHTD: Tensor, gates_BTH: Tensor) -> Tensor:
        """Attention's output, each head times its gate."""

    @abc.abstractmethod
    def prepare_heads(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their norms and positions, and values as they are."""

    @abc.abstractmethod
    def scales_weights(self, layer: nn.Linear, narrow: NarrowLinear | None) -> bool:
        """Whether `product` may take another weight in the place of the layer's."""

    @abc.abstractmethod
    def product(self, x: Tensor, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        """The layer's result, or that of another `weight` in the place of its own where `scales_weights`.

        The layer's bias is added in either case: here, or by whoever adds the branch (`Branch.bias_W`).
        """

    @abc.abstractmethod
    def activated_product(
        self, h_BTW: Tensor, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock
    ) -> Branch:
        """An MLP: `up`, the activation of this kind, `down`."""

    @abc.abstractmethod
    def hand_on(self, stream: Stream) -> Stream:
        """The stream as the next block gets it."""


def product_type(x: Tensor) -> torch.dtype:
    """The type of matrix products: autocast's where it is on, else that of the weights, which is never narrow."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, torch.float32)


class TorchOperations(Operations):
    """Its dropout draws for itself."""

    recomputes = ("selective", "full")
    kernels = False

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Tensor:
        x_BTW = F.embedding(tokens_BT, table_VW)
        return x_BTW if positions_TW is None else x_BTW + positions_TW

    def unit_norm(self, x_BTW: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_BTW, (x_BTW.shape[-1],), None, eps)

    def drop(self, x_BTW: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
        return F.dropout(x_BTW, dropout)

    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        x_BTW = self.hand_on(stream).x_BTW
        if mix is not None:
            x_BTW = mix.weights_2[0] * x_BTW + mix.weights_2[1] * mix.first
        return x_BTW, norm(x_BTW)

    def add_rows(self, x_BTW: Tensor, ids_BT: Tensor, table_RW: Tensor) -> Tensor:
        return x_BTW + F.embedding(ids_BT, table_RW)

    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Tensor:
        return F.embedding(tokens_BT, table_VC).to(product_type(table_VC))  # once for all blocks that it serves

    def project_heads(
        self, h_BTW: Tensor, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Heads:
        counts = (heads, groups, groups)
        size = layer.out_features // sum(counts)
        parts = self._parts(h_BTW, layer, [count * size for count in counts])
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        if gates.weight_CI is None:
            return Heads(q, k, v)
        read_BTI = h_BTW[..., : gates.weight_CI.shape[1]]
        all_BTC = 2 * torch.sigmoid(F.linear(read_BTI, gates.weight_CI))
        for_values, for_heads = all_BTC.split([gates.values, gates.heads], dim=-1)
        return Heads(q, k, v, for_values if gates.values else None, for_heads if gates.heads else None)

    def add_values(self, v_BGTD: Tensor, gates_BTG: Tensor, values: Tensor) -> Tensor:
        rows_BGTD = values.to(v_BGTD.dtype).unflatten(-1, (v_BGTD.shape[1], -1)).transpose(1, 2)
        return v_BGTD + gates_BTG.transpose(1, 2)[..., None] * rows_BGTD

    def gate_heads(self, y_BHTD: Tensor, gates_BTH: Tensor) -> Tensor:
        return y_BHTD * gates_BTH.transpose(1, 2)[..., None]

    def _parts(self, h_BTW: Tensor, layer: nn.Linear, sizes: list[int]) -> tuple[Tensor, ...]:
        if self.execution.fused_qkv:
            return layer(h_BTW).split(sizes, dim=-1)
        if isinstance(layer, AdaptedLinear):
            return layer.separately(h_BTW, sizes)
        weights = layer.weight.split(sizes)
        biases = (None, None, None) if layer.bias is None else layer.bias.split(sizes)
        return tuple(F.linear(h_BTW, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def prepare_heads(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if norms is not None:
            q_BHTD, k_BGTD = norms[0](q_BHTD), norms[1](k_BGTD)
        if turn is not None:
            q_BHTD, k_BGTD = turned(q_BHTD, turn), turned(k_BGTD, turn)
        return q_BHTD, k_BGTD, v_BGTD

    def scales_weights(self, layer: nn.Linear, narrow: NarrowLinear | None) -> bool:
        return type(layer) is nn.Linear  # another one has more than its weight, as an adapter

    def product(self, x: Tensor, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        return Branch(layer(x) if weight is None else F.linear(x, weight, layer.bias))

    def activated_product(
        self, h_BTW: Tensor, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock
    ) -> Branch:
        h = up(h_BTW)
        if kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        elif kind == "relu2":
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate="tanh")
        return Branch(down(h))

    def hand_on(self, stream: Stream) -> Stream:
        """With its branch added; why, see model/operations.py."""
        branch_BTW = stream.branch_BTW
        if branch_BTW is None:
            return stream
        if stream.dropout > 0.0:
            branch_BTW = F.dropout(branch_BTW, stream.dropout)
        return Stream(stream.x_BTW + (branch_BTW if stream.scale_W is None else branch_BTW * stream.scale_W))
