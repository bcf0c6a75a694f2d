"""The operations of a pass with a cache on a CPU, in NumPy, as a list of calls that is made once and used for every
token.

With so little to compute, most time is spent in Python and in calls. So a pass notes each call with its arrays. The
same calls again, in this order, are the next pass: tokens, lengths and caches are read where they were, and every
result has its own memory. Calls of NumPy take a quarter of torch's time; products of several tokens are torch's, whose
library is faster there. Layers that are more than a matrix (adapters, 4 or 8 bits) are called as they are.

Shape legend: B rows, T positions of this call, N = B·T, H query heads, G key/value heads, A both, X queries of a group,
D head size, S positions of a cache, W width, V vocabulary, C channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.model.cache import Cache
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock
from flatout.model.operations import Branch, Gates, Mix, Norm, Operations, Own, Rotary, Shared, Stream
from flatout.ops.scales import NarrowLinear, Slot

Array = np.ndarray
_ONE, _TWO = np.array(1.0, np.float32), np.array(2.0, np.float32)  # NumPy takes longer to read Python's numbers
_BOUNDED = 40.0  # exponentials of scores up to it, and sums of them, are far from the limits of fp32


class _Projected(NamedTuple):
    """Queries, keys and values of all heads, without norms and positions; and gates."""

    all_NAD: Array
    value_gates_NG1: Array | None
    head_gates_NH1: Array | None


class RowOperations(Operations):
    """Residual streams and branches are arrays [N, W]."""

    def __init__(self, execution: Execution, cache: Cache, tokens_BT: Tensor) -> None:
        super().__init__(execution)
        assert cache.calls is not None
        self.calls, (self.rows, self.length) = cache.calls, tokens_BT.shape
        self.tokens_N = tokens_BT.numpy().reshape(-1)
        self.cache, self.length_B1 = cache, cache.length_B.numpy()[:, None]
        self.positions_BT = self._made(np.add, self.length_B1, np.arange(self.length))
        self.most, self.hidden_BTS, self.ones_S1 = 0, None, np.ones((cache.room, 1), np.float32)
        self._run(self._look)

    # --- the list -----------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., Any], *values: Any) -> None:
        function(*values)
        self.calls.append(partial(function, *values))

    def _made(self, function: Callable[..., Any], *values: Any) -> Any:
        """The result of a function that can write it to `out`."""
        found = function(*values)
        self.calls.append(partial(function, *values, out=found))
        return found

    def _by_torch(self, function: Callable[[], Tensor]) -> Tensor:
        found = function()
        self.calls.append(lambda: found.copy_(function()))
        return found

    def _look(self) -> None:
        """How far rows reach in this pass, and what each position may not see."""
        self.most = max(self.positions_BT[:, -1].tolist()) + 1
        if len(self.tokens_N) > 1:
            self.hidden_BTS = np.arange(self.most) > self.positions_BT[:, :, None]

    # --- the stream ---------------------------------------------------------------------------------------------------

    def at(self, table: Callable[[Any], Any], places: slice | Tensor) -> Any:
        if isinstance(table, Rotary):
            return self._turn(table.cos_TD.numpy(), table.sin_TD.numpy())
        positions_BT = torch.from_numpy(self.positions_BT)
        return self._by_torch(lambda: table(positions_BT))

    def _turn(self, cos_TD: Array, sin_TD: Array) -> Array:
        """Matrices [N, D, D] by which heads at these positions are multiplied."""
        half = cos_TD.shape[1]
        size, places_N = 2 * half, self.positions_BT.reshape(-1)
        turn_NDD = np.zeros((len(places_N), size, size), np.float32)
        flat_NC, span = turn_NDD.reshape(len(places_N), -1), half * (size + 1)
        begins = (0, span, half, half * size)  # of diagonals: both cosines, the sines and those below
        cos_ND, again_ND, sin_ND, minus_ND = (flat_NC[:, first : first + span : size + 1] for first in begins)
        new_ND = self._taken(cos_TD, places_N)
        self._run(np.copyto, cos_ND, new_ND)
        self._run(np.copyto, again_ND, new_ND)
        self._run(np.copyto, sin_ND, self._taken(sin_TD, places_N))
        self._run(np.negative, sin_ND, minus_ND)
        return turn_NDD

    def _taken(self, table: Array, ids_N: Array) -> Array:
        return self._made(partial(table.take, ids_N, 0, mode="wrap"))  # a mode that needs no buffer

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Any:
        x_NW = self._taken(_array(table_VW), self.tokens_N)
        return x_NW if positions_TW is None else self._made(np.add, x_NW, _array(positions_TW.flatten(0, 1)))

    def add_rows(self, x_BTW: Any, ids_BT: Tensor, table_RW: Tensor) -> Any:
        return self._made(np.add, x_BTW, self._taken(_array(table_RW), _array(ids_BT.flatten())))

    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Any:
        return self._taken(_array(table_VC), self.tokens_N)

    def scaled(self, x_BTW: Any, factor: float) -> Any:
        return self._made(np.multiply, x_BTW, np.float32(factor))

    def unit_norm(self, x_BTW: Any, eps: float) -> Any:
        if len(x_BTW) > 1:
            return self._made(np.divide, x_BTW, self._root(x_BTW[:, None], eps, np.ones(1))[:, 0])
        x_W, normed_NW = x_BTW[0], np.empty_like(x_BTW)

        def norm() -> None:
            np.multiply(x_BTW, (float(x_W.dot(x_W)) / len(x_W) + eps) ** -0.5, normed_NW)

        self._run(norm)
        return normed_NW

    def _root(self, x_NAD: Array, eps: float, scale_A: Array) -> Array:
        """√(mean of squares + eps) / scale: [N, A, 1], by a product in which eps has a place of its own."""
        size = x_NAD.shape[2]
        squares_NA1C = np.ones((*x_NAD.shape[:2], 1, size + 1), np.float32)
        self._run(np.multiply, x_NAD, x_NAD, squares_NA1C[:, :, 0, :size])
        shares_AC1 = np.array([1.0 / size] * size + [eps])[:, None] / scale_A[:, None, None] ** 2
        mean_NA11 = self._made(np.matmul, squares_NA1C, shares_AC1.astype(np.float32))
        return self._made(np.sqrt, mean_NA11)[:, :, 0]

    def add_norm(self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None) -> tuple[Any, Any]:
        x_NW: Any = self.hand_on(stream).x_BTW
        if mix is not None:
            own, first = _array(mix.weights_2)[:, None]
            x_NW = self._made(np.add, self._made(np.multiply, x_NW, own), self._made(np.multiply, mix.first, first))
        h_NW = x_NW
        if norm.centred:
            mean_N1 = self._made(np.matmul, x_NW, np.full((x_NW.shape[1], 1), 1 / x_NW.shape[1], np.float32))
            h_NW = self._made(np.subtract, x_NW, mean_N1)
        h_NW = self.unit_norm(h_NW, norm.eps)
        h_NW = h_NW if norm.weight is None else self._made(np.multiply, h_NW, _array(norm.weight))
        return x_NW, h_NW if norm.bias is None else self._made(np.add, h_NW, _array(norm.bias))

    def hand_on(self, stream: Stream) -> Stream:
        branch: Any = stream.branch_BTW
        if branch is None:
            return stream
        if stream.scale_W is not None:
            branch = self._made(np.multiply, branch, _array(stream.scale_W))
        return Stream(self._made(np.add, stream.x_BTW, branch))  # pyright: ignore[reportArgumentType]

    # --- products -----------------------------------------------------------------------------------------------------

    def _times(self, x_NC: Array, layer: nn.Linear) -> Array:
        if type(layer) is not nn.Linear:
            x_BTC = torch.from_numpy(x_NC).view(self.rows, self.length, -1)
            return self._by_torch(lambda: layer(x_BTC)).numpy().reshape(len(x_NC), -1)
        made_NC = self._product(layer.weight, x_NC)
        return made_NC if layer.bias is None else self._made(np.add, made_NC, _array(layer.bias))

    def _product(self, weight_CI: Tensor, x_NI: Array) -> Array:
        if len(x_NI) == 1:
            return self._made(_array(weight_CI).dot, x_NI[0])[None]
        return self._made(torch.mm, torch.from_numpy(x_NI), weight_CI.detach().t()).numpy()

    def product(self, x: Any, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        return Branch(self._times(x, layer))  # pyright: ignore[reportArgumentType]

    def activated_product(self, h_BTW: Any, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock) -> Branch:
        h_NC = self._times(h_BTW, up)
        if kind == "swiglu":
            half = h_NC.shape[1] // 2
            gate_NC, value_NC = h_NC[:, :half], h_NC[:, half:]
            silu_NC = self._made(np.divide, gate_NC, self._one_and_exp(gate_NC))
            h_NC = self._made(np.multiply, silu_NC, value_NC)
        elif kind == "relu2":
            h_NC = self._made(np.square, self._made(np.maximum, h_NC, np.float32(0.0)))
        else:  # gelu by tanh, as h / (1 + exp(-2z)), z = √(2/π)·(h + 0.044715·h³)
            linear, cubic = (np.array((8 / np.pi) ** 0.5 * x, np.float32) for x in (1.0, 0.044715))
            inner_NC = self._made(np.multiply, self._made(np.square, h_NC), cubic)
            twice_NC = self._made(np.multiply, self._made(np.add, inner_NC, linear), h_NC)
            h_NC = self._made(np.divide, h_NC, self._one_and_exp(twice_NC))
        return Branch(self._times(h_NC, down))  # pyright: ignore[reportArgumentType]

    def _one_and_exp(self, x: Array) -> Array:
        """1 + exp(-x), what a sigmoid divides by."""
        return self._made(np.add, self._made(np.exp, self._made(np.negative, x)), _ONE)

    def logits(
        self, stream: Stream, norm: Norm, head: Any, table_VW: Tensor | None, last: bool | Tensor = False
    ) -> Tensor:
        x_NW: Any = self.hand_on(stream).x_BTW
        if self.length > 1 and last is not False:
            ends_B = last.numpy() if isinstance(last, Tensor) else np.full(self.rows, self.length - 1)
            places_B = self._made(np.add, ends_B, np.arange(self.rows) * self.length)
            x_NW = self._taken(x_NW, places_B)
        weight_VW: Any = table_VW if head.weight is None else head.weight
        made_NV = self._product(weight_VW, self.add_norm(Stream(x_NW), norm)[1])
        if head.cap:
            cap = np.array(head.cap, np.float32)
            made_NV = self._made(np.multiply, self._made(np.tanh, self._made(np.divide, made_NV, cap)), cap)
        # what `Cache.advance` does after this pass
        self.calls.append(partial(np.add, self.length_B1, self.length, self.length_B1))
        tokens_B1 = self.tokens_N.reshape(self.rows, -1)[:, -1:]
        self.calls.append(partial(np.copyto, self.cache.last_B1.numpy(), tokens_B1))
        return torch.from_numpy(made_NV).view(self.rows, -1, made_NV.shape[1])

    # --- mixers -------------------------------------------------------------------------------------------------------

    def advance_states(self, mixer: Eigenstate, h_BTW: Any, shared: Shared, own: Own) -> Any:
        both_BTC = torch.from_numpy(self._times(h_BTW, mixer.inward)).view(self.rows, self.length, -1)
        return self._by_torch(lambda: mixer.advanced(both_BTC, shared, own.cache)).flatten(0, 1).numpy()

    def project_heads(
        self, h_BTW: Any, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Any:
        all_NAD = self._times(h_BTW, layer).reshape(len(h_BTW), heads + 2 * groups, -1)
        if gates.weight_CI is None:
            return _Projected(all_NAD, None, None)
        made_NC = self._product(gates.weight_CI, h_BTW[:, : gates.weight_CI.shape[1]])
        made_NC1 = self._made(np.divide, _TWO, self._one_and_exp(made_NC))[..., None]
        values_NG1, heads_NH1 = made_NC1[:, : gates.values], made_NC1[:, gates.values :]
        return _Projected(all_NAD, values_NG1 if gates.values else None, heads_NH1 if gates.heads else None)

    def attention(self, mixer: Any, made: Any, shared: Shared, own: Own) -> Any:
        heads, groups, size, norms = mixer.heads, mixer.groups, mixer.size, mixer.norms
        qk_NAD, v_NGD = made.all_NAD[:, : heads + groups], made.all_NAD[:, heads + groups :]
        scale_A, bound = np.repeat([size**-0.5, 1.0], [heads, groups]), np.inf
        if norms is None:
            qk_NAD = self._made(np.multiply, qk_NAD, scale_A[:, None].astype(np.float32))
        else:
            qk_NAD = self._made(np.divide, qk_NAD, self._root(qk_NAD, norms[0].eps, scale_A * norms[0].scale))
            bound = norms[0].scale ** 2 * size**0.5  # of scores
        if norms is not None and norms[0].weight is not None and norms[1].weight is not None:
            weights = _array(norms[0].weight), _array(norms[1].weight)
            qk_NAD, bound = self._made(np.multiply, qk_NAD, np.repeat(weights, [heads, groups], axis=0)), np.inf
        if (turn := mixer.turn_in(shared)) is not None:
            qk_NAD = self._made(np.matmul, qk_NAD, turn)
        if made.value_gates_NG1 is not None:
            rows_NGD = self._made(np.multiply, made.value_gates_NG1, own.values.reshape(v_NGD.shape))
            v_NGD = self._made(np.add, v_NGD, rows_NGD)
        y_NHD = np.empty((len(qk_NAD), heads, size), np.float32)
        # Queries of a group are arranged like positions where there is one position.
        axes = (0, 2, 1, 3, 4) if self.length == 1 else (0, 2, 3, 1, 4)
        shape = self.rows, self.length, groups, -1, size
        q_BGPCD, y_BGPCD = (x_NHD.reshape(shape).transpose(axes) for x_NHD in (qk_NAD[:, :heads], y_NHD))
        new_BTGD = [x_NGD.reshape(*shape[:3], size) for x_NGD in (qk_NAD[:, heads:], v_NGD)]
        kept_BGSD = [own.cache.k_BGSD.numpy(), own.cache.v_BGSD.numpy()]
        self._run(partial(self._attend, kept_BGSD, new_BTGD, q_BGPCD, y_BGPCD, bounded=bound < _BOUNDED))
        y_NHD = y_NHD if made.head_gates_NH1 is None else self._made(np.multiply, y_NHD, made.head_gates_NH1)
        return y_NHD.reshape(len(y_NHD), -1)

    def _attend(
        self, kept_BGSD: list[Array], new_BTGD: list[Array], q_BGPCD: Array, y_BGPCD: Array, *, bounded: bool
    ) -> None:
        """Writes keys and values into the cache and attends to what is there.

        Of a ring buffer, which has a window's places, all are visible that are filled. `bounded`: the exponentials of
        scores need no shift.
        """
        (k_BGSD, v_BGSD), (k_BTGD, v_BTGD) = kept_BGSD, new_BTGD
        places = k_BGSD.shape[2]
        filled = min(self.most, places)
        if self.hidden_BTS is None:
            place = (self.most - 1) % places
            k_BGSD[0, :, place], v_BGSD[0, :, place] = k_BTGD[0, 0], v_BTGD[0, 0]
        else:
            where = np.arange(self.rows)[:, None], slice(None), self.positions_BT % places
            k_BGSD[where], v_BGSD[where] = k_BTGD, v_BTGD
        score_BGPCS = np.matmul(q_BGPCD, k_BGSD[:, :, None, :filled].swapaxes(3, 4))
        if self.hidden_BTS is not None:
            np.copyto(score_BGPCS, -np.inf, where=self.hidden_BTS[:, None, None, :, :filled])
        if not bounded:
            score_BGPCS -= np.maximum.reduce(score_BGPCS, axis=4, keepdims=True)
        np.exp(score_BGPCS, score_BGPCS)
        sum_BGPC1 = np.matmul(score_BGPCS, self.ones_S1[:filled])
        np.divide(np.matmul(score_BGPCS, v_BGSD[:, :, None, :filled]), sum_BGPC1, y_BGPCD)


def _array(x: Tensor) -> Array:
    return x.detach().numpy()
