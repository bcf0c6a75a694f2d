"""The operations of a block for one new token of one row on a CPU, in NumPy.

With so little to compute, most time is spent in calls, and those of NumPy take a quarter of torch's time. Arrays share
the memory of weights and caches. Layers that are more than a matrix (adapters, 4 or 8 bits) are called as they are.

Shape legend: H query heads, G key/value heads, A both, X queries of a group, D head size, S positions of a cache,
W width, V vocabulary, C channels.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock
from flatout.model.operations import Branch, Gates, Mix, Norm, Operations, Own, Shared, Stream
from flatout.ops.scales import NarrowLinear, Slot

Array = np.ndarray


class _Projected(NamedTuple):
    """Queries, keys and values of all heads, without norms and positions; and gates."""

    all_AD: Array
    value_gates_G1: Array | None
    head_gates_H1: Array | None


class RowOperations(Operations):
    """Residual streams and branches are arrays without the axes of rows and positions."""

    def __init__(self, execution: Execution, arrays: dict[Any, Any]) -> None:
        """`arrays`: views of weights that were made before."""
        super().__init__(execution)
        self.arrays = arrays
        self.turns: dict[int, tuple[Array, Array]] = {}

    def _of(self, x: Tensor) -> Array:
        found = self.arrays.get(x)
        if found is None:
            found = self.arrays[x] = x.detach().numpy()
        return found

    def _layer(self, module: Any) -> tuple[Any, Array | None]:
        """Weight and bias of a layer or a norm."""
        found = self.arrays.get(module)
        if found is None:
            weight, bias = (None if x is None else x.detach().numpy() for x in (module.weight, module.bias))
            found = self.arrays[module] = weight, bias
        return found

    def _times(self, x_C: Array, layer: nn.Linear) -> Array:
        if type(layer) is not nn.Linear:
            return layer(torch.from_numpy(x_C)[None, None])[0, 0].numpy()
        weight, bias = self._layer(layer)
        made_C = weight.dot(x_C)
        return made_C if bias is None else made_C + bias

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Any:
        x_W = self._of(table_VW)[int(tokens_BT)]
        return x_W if positions_TW is None else x_W + positions_TW[0].detach().numpy()

    def add_rows(self, x_BTW: Any, ids_BT: Tensor, table_RW: Tensor) -> Any:
        return x_BTW + self._of(table_RW)[int(ids_BT)]

    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Any:
        return self._of(table_VC)[int(tokens_BT)]

    def unit_norm(self, x_BTW: Any, eps: float) -> Any:
        return x_BTW * (float(x_BTW.dot(x_BTW)) / len(x_BTW) + eps) ** -0.5

    def add_norm(self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None) -> tuple[Any, Any]:
        x_W: Any = self.hand_on(stream).x_BTW
        if mix is not None:
            own, first = self._of(mix.weights_2)
            x_W = own * x_W + first * mix.first
        normed_W = self.unit_norm(x_W - x_W.mean() if norm.centred else x_W, norm.eps)
        weight, bias = self._layer(norm)
        normed_W = normed_W if weight is None else normed_W * weight
        return x_W, normed_W if bias is None else normed_W + bias

    def hand_on(self, stream: Stream) -> Stream:
        if stream.branch_BTW is None:
            return stream
        scale_W: Any = 1.0 if stream.scale_W is None else self._of(stream.scale_W)
        return Stream(stream.x_BTW + stream.branch_BTW * scale_W)

    def project_heads(
        self, h_BTW: Any, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Any:
        all_AD = self._times(h_BTW, layer).reshape(heads + 2 * groups, -1)
        if gates.weight_CI is None:
            return _Projected(all_AD, None, None)
        weight_CI = gates.weight_CI.detach().numpy()
        made_C1 = (2 / (1 + np.exp(-weight_CI.dot(h_BTW[: weight_CI.shape[1]]))))[:, None]
        return _Projected(
            all_AD, made_C1[: gates.values] if gates.values else None, made_C1[gates.values :] if gates.heads else None
        )

    def attention(self, mixer: Any, made: Any, shared: Shared, own: Own) -> Any:
        assert shared.decoding is not None
        assert shared.decoding.filled is not None, "one row, whose length the host knows"
        heads, groups, size, norms = mixer.heads, mixer.groups, mixer.size, mixer.norms
        qk_AD, v_GD = made.all_AD[: heads + groups], made.all_AD[heads + groups :]
        if norms is not None:
            mean_A1 = np.add.reduce(qk_AD * qk_AD, axis=1, keepdims=True) / size
            qk_AD = qk_AD * (norms[0].scale / np.sqrt(mean_A1 + norms[0].eps))
            weights = self._layer(norms[0])[0], self._layer(norms[1])[0]
            if weights[0] is not None:
                qk_AD = np.concatenate([qk_AD[:heads] * weights[0], qk_AD[heads:] * weights[1]])
        turn = mixer.turn_in(shared)
        if turn is not None:
            cos_D, sin_D = self._turn(turn)
            half = size // 2
            qk_AD = qk_AD * cos_D + np.concatenate([qk_AD[:, half:], qk_AD[:, :half]], axis=1) * sin_D
        if made.value_gates_G1 is not None:
            v_GD = v_GD + made.value_gates_G1 * own.values.reshape(groups, -1)
        k_GSD, v_GSD = own.cache.k_BGSD.numpy()[0], own.cache.v_BGSD.numpy()[0]
        place, filled = (shared.decoding.filled - 1) % own.cache.places, min(shared.decoding.filled, own.cache.places)
        k_GSD[:, place], v_GSD[:, place] = qk_AD[heads:], v_GD
        # All places are visible: a ring buffer has no more than a window's.
        q_GXD = (qk_AD[:heads] * size**-0.5).reshape(groups, -1, size)
        score_GXS = np.matmul(q_GXD, k_GSD[:, :filled].transpose(0, 2, 1))
        share_GXS = np.exp(score_GXS - np.maximum.reduce(score_GXS, axis=2, keepdims=True))
        sum_GX1 = np.add.reduce(share_GXS, axis=2, keepdims=True)
        y_HD = (np.matmul(share_GXS, v_GSD[:, :filled]) / sum_GX1).reshape(heads, size)
        return (y_HD if made.head_gates_H1 is None else y_HD * made.head_gates_H1).reshape(-1)

    def _turn(self, turn: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
        """Cosines and signed sines for both halves of a head."""
        if id(turn) not in self.turns:
            cos, sin = (x[0].numpy() for x in turn)
            self.turns[id(turn)] = np.concatenate([cos, cos]), np.concatenate([-sin, sin])
        return self.turns[id(turn)]

    def advance_states(self, mixer: Eigenstate, h_BTW: Any, shared: Shared, own: Own) -> Any:
        both_BTC = torch.from_numpy(self._times(h_BTW, mixer.inward))[None, None]
        return mixer.advanced(both_BTC, shared, own.cache)[0, 0].numpy()

    def product(self, x: Any, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        return Branch(self._times(x, layer))  # pyright: ignore[reportArgumentType]

    def activated_product(self, h_BTW: Any, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock) -> Branch:
        h = self._times(h_BTW, up)
        if kind == "swiglu":
            gate, value = h[: len(h) // 2], h[len(h) // 2 :]
            h = gate / (1 + np.exp(-gate)) * value
        elif kind == "relu2":
            h = np.square(np.maximum(h, 0))
        else:
            h = 0.5 * h * (1 + np.tanh((2 / np.pi) ** 0.5 * (h + 0.044715 * h * h * h)))
        return Branch(self._times(h, down))  # pyright: ignore[reportArgumentType]

    def logits(self, stream: Stream, norm: Norm, head: Any, table_VW: Tensor | None) -> Tensor:
        weight_VW = self._of(head.weight if table_VW is None else table_VW)
        made_V = weight_VW.dot(self.add_norm(stream, norm)[1])
        made_V = head.cap * np.tanh(made_V / head.cap) if head.cap else made_V
        return torch.from_numpy(made_V)[None, None]
