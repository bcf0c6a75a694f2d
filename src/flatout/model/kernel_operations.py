"""The operations of a block in our kernels. It needs triton, so import it only when they are used.

Packed rows are joined to one row, because kernels look positions up by the index in a row.

`FrozenOperations` runs blocks in which only adapters are trained, each as one step of autograd (ops/kernels/frozen.py).
A branch then carries the buffer for its gradient from block to block.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.model.adapted import AdaptedLinear
from flatout.model.execution import Execution
from flatout.model.layers import Attention, Block
from flatout.model.narrow import NarrowBlock, gradient_slot, input_slot
from flatout.model.operations import (
    Branch,
    Gates,
    Heads,
    Mix,
    Norm,
    Operations,
    RMSNorm,
    Shared,
    Stream,
    Turn,
    product_type,
)
from flatout.ops.attention import causal_attention
from flatout.ops.documents import DocumentLayout, document_attention
from flatout.ops.kernels.activation import activated_linear, linear_gelu
from flatout.ops.kernels.frozen import FrozenBlock, FrozenLinear, GradientRoom, frozen_block, frozen_end
from flatout.ops.kernels.heads import Rows, add_values, gate_heads, project_heads
from flatout.ops.kernels.linear import linear
from flatout.ops.kernels.rotary import prepare_heads
from flatout.ops.kernels.stream import First, FrozenNorm, add_norm, begin, embed
from flatout.ops.kernels.stream import dropout as drop
from flatout.ops.scales import NarrowLinear, Slot


class KernelOperations(Operations):
    recomputes = ("full",)  # our kernels implement selective checkpointing themselves
    kernels = True

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution)
        self.tuned = execution.products == "tuned"

    def arrange(
        self, tokens_BT: Tensor, layout: DocumentLayout | None, context: int
    ) -> tuple[Tensor, DocumentLayout | None]:
        if layout is None or (layout.alone and tokens_BT.shape[1] <= context):  # plain causal attention is the same
            return tokens_BT, None
        return tokens_BT.flatten()[None], layout.in_one_row

    def seeds(self, count: int, device: torch.device) -> Sequence[Tensor | None]:
        # 16 bytes apart, because Triton compiles a kernel again for pointers of another alignment.
        return torch.randint(2**62, (count, 2), device=device)[:, 0].unbind()

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Tensor:
        wide = torch.promote_types(table_VW.dtype, torch.float32)  # weights of a frozen model may be narrower
        dtype = torch.bfloat16 if self.execution.residual == "bf16" else wide
        return embed(tokens_BT, table_VW, None if positions_TW is None else positions_TW.flatten(0, -2), dtype)

    def unit_norm(self, x_BTW: Tensor, eps: float) -> Tensor:
        return add_norm(x_BTW, None, None, None, None, centred=False, eps=eps, dtype=x_BTW.dtype)[1]

    def drop(self, x_BTW: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
        assert seed is not None, "these kernels draw from a counter"
        return drop(x_BTW, seed, dropout)

    def add_rows(self, x_BTW: Tensor, ids_BT: Tensor, table_RW: Tensor) -> Tensor:
        return x_BTW + embed(ids_BT, table_RW, None, x_BTW.dtype)

    def first(self, x_BTW: Tensor) -> tuple[Tensor, First]:
        return begin(x_BTW)

    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Rows:
        return Rows(tokens_BT, table_VC, blocks=2)

    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        x_BTW, branch_BTW, bias_W, branch_slot, scale_W, dropout, seed = stream
        how = {"centred": norm.centred, "eps": norm.eps, "dtype": product_type(x_BTW)}
        values = (x_BTW, branch_BTW, bias_W, norm.weight, norm.bias)
        how |= {"scale": scale_W, "dropout": dropout, "seed": seed}
        how |= {} if mix is None else {"mix": mix.weights_2, "first": mix.first}
        return add_norm(*values, **how, slot=slot, branch_slot=branch_slot)

    def project_heads(
        self, h_BTW: Tensor, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Heads:
        how = {"heads": heads, "groups": groups, "narrow": narrow, "tuned": self.tuned}
        how |= {"gates": gates.weight_CI, "counts": (gates.values, gates.heads)}
        return Heads(*project_heads(h_BTW, layer.weight, layer.bias, **how))

    def add_values(self, v_BGTD: Tensor, gates_BTG: Tensor, values: Rows) -> Tensor:
        return add_values(v_BGTD, gates_BTG, values)

    def gate_heads(self, y_BHTD: Tensor, gates_BTH: Tensor) -> Tensor:
        return gate_heads(y_BHTD, gates_BTH)

    def prepare_heads(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if norms is None:
            return prepare_heads(q_BHTD, k_BGTD, v_BGTD, None, None, *by_place(turn), 0.0)
        weights, (eps, scale) = (norms[0].weight, norms[1].weight), (norms[0].eps, norms[0].scale)
        return prepare_heads(q_BHTD, k_BGTD, v_BGTD, *weights, *by_place(turn), eps, scale=scale, normed=True)

    def scales_weights(self, layer: nn.Linear, narrow: NarrowLinear | None) -> bool:
        return input_slot(narrow) is None  # 8-bit copies are rounded once per update, of the unscaled weights

    def product(self, x: Tensor, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        operand = (layer.weight, narrow) if weight is None else (weight, None)
        return Branch(linear(x, *operand, tuned=self.tuned), layer.bias, gradient_slot(narrow))

    def activated_product(
        self, h_BTW: Tensor, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock
    ) -> Branch:
        slot, active = gradient_slot(narrow.up), None
        if self.tuned and kind == "gelu" and up.bias is not None and slot is None:
            pre, active = linear_gelu(h_BTW, up.weight, up.bias, narrow.up)
        else:
            pre = linear(h_BTW, up.weight, narrow.up, tuned=self.tuned)
        y_BTW = activated_linear(
            pre,
            up.bias,
            down.weight,
            kind=kind,
            keep=self.execution.checkpointing != "selective",
            narrow=narrow.down,
            slot=slot,
            tuned=self.tuned,
            active=active,
        )
        return Branch(y_BTW, down.bias, gradient_slot(narrow.down))

    def hand_on(self, stream: Stream) -> Stream:
        """Unchanged: the next norm adds the branch in the same pass over memory."""
        return stream


def by_place(turn: Turn | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Cosines and sines with one line per position, or per token of packed rows, which are one row here."""
    return (None, None) if turn is None else (turn[0].flatten(0, -2), turn[1].flatten(0, -2))


class FrozenOperations(KernelOperations):
    """The joined weights must be up to date when a pass begins."""

    recomputes = ()

    def whole(self, block: nn.Module, stream: Stream, shared: Shared) -> Stream | None:
        assert isinstance(block, Block)
        attention = block.attention
        assert not block.beside, f"not supported here; resolve/switches.py must refuse them: {block.beside}"
        assert stream.dropout == 0.0, "samples have no dropout, as the config says"
        assert isinstance(attention, Attention), "there are no adapters in a model with eigenstates"
        layout, how = shared.layout, self.execution
        attend = functools.partial(causal_attention, backend=how.attention)
        if layout is not None:
            attend = functools.partial(document_attention, layout=layout, backend=how.document_attention)
        norms = attention.norms
        cos, sin = by_place(attention.turn_in(shared))
        last = block.mlp.out
        above = GradientRoom(last.layout.rank if isinstance(last, AdaptedLinear) else 0)
        frozen = FrozenBlock(
            **{name: self._linear(layer) for name, layer in block.linears().items()},
            first=_norm(block.attention_norm),
            second=_norm(block.mlp_norm),
            heads=attention.heads,
            groups=attention.groups,
            head_norms=None if norms is None else (norms[0].weight, norms[1].weight),
            head_eps=0.0 if norms is None else norms[0].eps,
            head_scale=1.0 if norms is None else norms[0].scale,
            cos=cos,
            sin=sin,
            kind=block.mlp.kind,
            attend=functools.partial(attend, window=attention.window_in(shared)),
            checkpointing=how.checkpointing,
            dtype=product_type(stream.x_BTW),
            above=above,
            below=stream.slot,
        )
        x_BTW, branch_BTW = frozen_block(stream.x_BTW, stream.branch_BTW, stream.bias_W, frozen)
        return Stream(x_BTW, branch_BTW, last.bias, above)

    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm after the last block; a block's own norms are part of `whole`."""
        x_BTW, branch_BTW, bias_W, below, *_ = stream
        assert branch_BTW is not None, "a model has at least one block"
        return x_BTW, frozen_end(x_BTW, branch_BTW, bias_W, _norm(norm), product_type(x_BTW), below)

    def _linear(self, layer: nn.Linear) -> FrozenLinear:
        if not isinstance(layer, AdaptedLinear):
            return FrozenLinear(layer.weight, layer.bias, tuned=self.tuned)
        values = (layer.weight, layer.bias, layer.joined, layer.lora_a, tuple(layer.b))
        return FrozenLinear(*values, tuned=self.tuned)


def _norm(norm: Norm) -> FrozenNorm:
    return FrozenNorm(norm.weight, norm.bias, norm.centred, norm.eps)
