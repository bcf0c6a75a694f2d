"""The operations of a block for one new token of every row, in the kernels of ops/kernels/decode.py.

A norm is computed by the product that needs it, and waits for it as `Normed`.
Layers that are more than a matrix (adapters, 4 bits) get their input in torch's form and are called as they are.

Shape legend: B batch, T positions (1), R rows (B), H query heads, G key/value heads, D head size, W width,
V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.int8 import Int8Linear
from flatout.model.narrow import NarrowBlock, NarrowWeights
from flatout.model.operations import Branch, Gates, Mix, Norm, Operations, Own, Shared, Stream
from flatout.ops.kernels.decode import GateWeights, Normed, Weights, advance, attend, product
from flatout.ops.scales import NarrowLinear, Slot


class _Projected(NamedTuple):
    """Queries, keys and values side by side, without norms and positions; and gates."""

    qkv_RC: Tensor
    gates_RC: Tensor | None
    values: int  # how many of the gates are for values


class DecodeOperations(Operations):
    def __init__(self, execution: Execution, dtype: torch.dtype, copies: NarrowWeights) -> None:
        """`dtype`: of products; `copies`: of weights in it."""
        super().__init__(execution)
        self.dtype, self.copies = dtype, copies

    def _matrix(self, weight: Tensor) -> Weights:
        return Weights(weight if weight.dtype == self.dtype else self.copies.copy_of(weight, self.dtype).values_MK)

    def _weights(self, layer: nn.Linear) -> Weights | None:
        """None for a layer that is more than a matrix."""
        if isinstance(layer, Int8Linear):
            return Weights(layer.weight, layer.scale_N)
        return self._matrix(layer.weight) if type(layer) is nn.Linear else None

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Tensor:
        return super().embed(tokens_BT, table_VW, positions_TW).float()

    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Any]:
        x_BTW = stream.x_BTW
        same = stream.branch_BTW is None and mix is None
        new_BTW = x_BTW if same else torch.empty_like(x_BTW)
        normed = Normed(
            x_RW=x_BTW.flatten(0, 1),
            branch_RW=None if stream.branch_BTW is None else stream.branch_BTW.flatten(0, 1),
            scale_W=stream.scale_W,
            mix_2=None if mix is None else mix.weights_2,
            first_RW=None if mix is None else mix.first.flatten(0, 1),
            new_RW=new_BTW.flatten(0, 1),
            weight_W=norm.weight,
            bias_W=norm.bias,
            eps=norm.eps,
            centred=norm.centred,
        )
        return new_BTW, normed

    def project_heads(
        self, h_BTW: Any, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Any:
        counted, made = gates.values + gates.heads, None
        weights = self._weights(layer)
        if weights is None:
            h_RW = _whole(h_BTW)
            if gates.weight_CI is not None:
                made = 2 * torch.sigmoid(F.linear(h_RW[:, : gates.weight_CI.shape[1]], gates.weight_CI))
            return _Projected(layer(h_RW), made, gates.values)
        if gates.weight_CI is not None:
            made = torch.empty(len(h_BTW.x_RW), counted, dtype=torch.float32, device=h_BTW.x_RW.device)
        wanted = None if gates.weight_CI is None or made is None else GateWeights(gates.weight_CI, made)
        return _Projected(self._times(h_BTW, weights, layer.bias, gates=wanted), made, gates.values)

    def attention(self, mixer: Any, made: Any, shared: Shared, own: Own) -> Any:
        assert shared.decoding is not None
        cache, norms, turn = own.cache, mixer.norms, mixer.turn_in(shared)
        rows = len(made.qkv_RC)
        return attend(
            made.qkv_RC,
            cache.k_BGSD,
            cache.v_BGSD,
            shared.decoding.positions_BT[:, 0],
            cache.done_BG,
            heads=mixer.heads,
            window=mixer.window_in(shared),
            turn=None if turn is None else (_of_each(turn[0], rows), _of_each(turn[1], rows)),
            norms=None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps, norms[0].scale),
            values=None if not made.values else own.values.flatten(0, 1),
            gates_RC=made.gates_RC,
            value_gates=made.values,
            dtype=self.dtype,
        )

    def scales_weights(self, layer: nn.Linear, narrow: NarrowLinear | None) -> bool:
        return False

    def advance_states(self, mixer: Eigenstate, h_BTW: Any, shared: Shared, own: Own) -> Tensor:
        both_RC = self.product(h_BTW, mixer.inward, own.narrow.qkv).value_BTW.flatten(0, 1)
        return advance(both_RC, own.cache.state_BC, mixer.decay_K, mixer.detuning_K, mixer.angle_K)[:, None]

    def product(self, x: Any, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        weights = self._weights(layer)
        made_RN = layer(_whole(x)) if weights is None else self._times(x, weights, layer.bias)
        return Branch(made_RN[:, None])

    def activated_product(self, h_BTW: Any, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock) -> Branch:
        first, second = self._weights(up), self._weights(down)
        if first is None or second is None:
            return super().activated_product(_whole(h_BTW)[:, None], up, down, kind, narrow)
        made_RC = self._times(h_BTW, first, up.bias, activation=kind, out_dtype=self.dtype)
        return Branch(self._times(made_RC, second, down.bias)[:, None])

    def hand_on(self, stream: Stream) -> Stream:
        return stream

    def logits(
        self, stream: Stream, norm: Norm, head: Any, table_VW: Tensor | None, last: bool | Tensor = False
    ) -> Tensor:
        weight_VW: Any = table_VW if head.weight is None else head.weight
        if head.int8 is not None:
            weights = Weights(head.int8.weight, head.int8.scale_N)
        else:  # matrix units need whole lines of memory
            weights = Weights(self.copies.copy_of(weight_VW, self.dtype, multiple=64).values_MK)
        normed = self.add_norm(stream, norm)[1]
        return product(normed, weights, None, dtype=self.dtype, cap=head.cap)[:, None, : len(weight_VW)]

    def _times(self, source: Any, weights: Weights, bias: Tensor | None, **how: Any) -> Tensor:
        source = source.flatten(0, 1) if isinstance(source, Tensor) and source.dim() == 3 else source
        return product(source, weights, bias, dtype=self.dtype, **how)


def _of_each(x: Tensor, rows: int) -> Tensor:
    """Cosines or sines of every row, which level rows share."""
    return x.flatten(0, -2).expand(rows, -1)


def _whole(source: Tensor | Normed) -> Tensor:
    """What a waiting norm or attention comes to, in torch's form: [R, W]."""
    if isinstance(source, Tensor):
        return source.flatten(0, -2)
    x_RW = source.x_RW
    if source.branch_RW is not None:
        x_RW = x_RW + (source.branch_RW if source.scale_W is None else source.branch_RW * source.scale_W)
    if source.mix_2 is not None and source.first_RW is not None:
        x_RW = source.mix_2[0] * x_RW + source.mix_2[1] * source.first_RW
    if source.new_RW is not source.x_RW:
        source.new_RW.copy_(x_RW)
    if source.centred:
        return F.layer_norm(x_RW, x_RW.shape[-1:], source.weight_W, source.bias_W, source.eps)
    return F.rms_norm(x_RW, x_RW.shape[-1:], source.weight_W, source.eps)
