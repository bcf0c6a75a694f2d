"""Blocks whose adapters alone are trained, each as one step of autograd (ops/kernels/frozen.py).

A third form of the operations: a block is taken whole, and a branch carries room for its gradient from block to block.
"""

import functools

from torch import Tensor, nn

from flatout.model.adapted import AdaptedLinear
from flatout.model.kernel_operations import KernelOperations, by_place
from flatout.model.layers import Attention, Block
from flatout.model.norms import Norm
from flatout.model.operations import Mix, Shared, Stream, product_type
from flatout.ops.attention import causal_attention
from flatout.ops.documents import document_attention
from flatout.ops.kernels.frozen import FrozenBlock, FrozenLinear, GradientRoom, frozen_block, frozen_end
from flatout.ops.kernels.norm import FrozenNorm
from flatout.ops.scales import Slot


class FrozenOperations(KernelOperations):
    """Joined weights must be fresh when a pass begins."""

    recomputes = ()

    def whole(self, block: nn.Module, stream: Stream, shared: Shared) -> Stream | None:
        assert isinstance(block, Block)
        attention = block.attention
        assert not block.beside, f"these are for other forms, as resolve/switches.py must say: {block.beside}"
        assert stream.dropout == 0.0, "samples have no dropout, as the config says"
        assert isinstance(attention, Attention), "there are no adapters in a model with eigenstates"
        layout, how = shared.layout, self.execution
        attend = functools.partial(causal_attention, backend=how.attention)
        if layout is not None:
            attend = functools.partial(document_attention, layout=layout, backend=how.document_attention)
        norms = attention.norms
        cos, sin = by_place(shared.turn)
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
        """Only after the last block: the others have theirs inside."""
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
