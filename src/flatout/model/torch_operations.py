"""The operations of a block by torch's own: any device, any type, and what a compiler looks into."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.model.adapted import AdaptedLinear
from flatout.model.narrow import NarrowBlock
from flatout.model.norms import Norm, RMSNorm
from flatout.model.operations import Branch, Gates, Heads, Mix, Operations, Stream, product_type
from flatout.model.rotary import Turn, turned
from flatout.ops.scales import NarrowLinear, Slot


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
