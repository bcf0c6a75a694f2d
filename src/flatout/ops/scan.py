"""The diagonal complex recurrence h_t = λ · h_{t-1} + x_t, with one λ per channel.

    reference   position by position, in complex numbers
    chunked     torch's operations on pairs of real numbers; any device, any type
    triton      our kernels (ops/kernels/scan.py)
    sum         λ = 1, as a single operation: stands in for our kernels when only sizes matter (model/count.py)

`chunked`: every chunk is computed on its own. The states at the ends of chunks are the same recurrence with fewer
positions, computed in the same way. A chunk is a product with a Toeplitz matrix of λ's powers; if documents begin
within it, all chunks are stepped through at the same time instead.

Contract: λ = exp(log_decay + i·phase), with log_decay finite and at most 0. The last axis holds complex numbers as two
halves, real parts first. `begins_BT` is true where a document begins: λ is 0 there, so no finite state passes it. The
result has the type of x. States are fp32, or float64 if x is, also the last state, which is returned too. The size of
chunks only changes rounding.

Trap: powers of λ are computed from log_decay and phase in float64, and never divided by: |λ|^t underflows, and an angle
of 32,768 · ω has lost its digits in fp32. TF32 products would lose them too, so on a GPU `chunked` needs TF32 off.

Shape legend: B rows, T positions, K channels, C = 2K (real parts, then imaginary), N chunks, L positions of a chunk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64

Pair = tuple[Tensor, Tensor]  # real and imaginary parts


def scan(
    x_BTC: Tensor,
    log_decay_K: Tensor,
    phase_K: Tensor,
    *,
    initial_BC: Tensor | None = None,
    begins_BT: Tensor | None = None,
    path: str = "chunked",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(states of all positions, the last state), from the initial state `initial_BC` (None: zeros).

    `chunk`: positions of a chunk, for paths that have chunks; None: their default.
    """
    for values_K in (log_decay_K, phase_K):
        if (2 * values_K.numel(),) != x_BTC.shape[2:] or values_K.dim() != 1:
            raise ValueError(f"eigenvalues of shape {tuple(values_K.shape)} for x of shape {tuple(x_BTC.shape)}")
    if initial_BC is not None and initial_BC.shape != (x_BTC.shape[0], x_BTC.shape[2]):
        raise ValueError(f"an initial state of shape {tuple(initial_BC.shape)} for x of shape {tuple(x_BTC.shape)}")
    if begins_BT is not None and begins_BT.shape != x_BTC.shape[:2]:
        raise ValueError(f"beginnings of shape {tuple(begins_BT.shape)} for x of shape {tuple(x_BTC.shape)}")
    if path == "reference":
        return scan_reference(x_BTC, log_decay_K, phase_K, initial_BC, begins_BT)
    if path == "chunked":
        return _chunked(x_BTC, log_decay_K, phase_K, initial_BC, begins_BT, CHUNK if chunk is None else chunk)
    if path == "sum":
        states_BTC = x_BTC.cumsum(dim=1)
        return states_BTC, states_BTC[:, -1]
    if path == "triton":
        from flatout.ops.kernels.scan import scan_kernels

        return scan_kernels(x_BTC, log_decay_K, phase_K, initial_BC, begins_BT, chunk)
    raise ValueError(f"no such path: {path}")


def state_type(x: Tensor) -> torch.dtype:
    """The type of states: never narrower than fp32."""
    return torch.promote_types(x.dtype, torch.float32)


# --- the reference -----------------------------------------------------------------------------------------------


def scan_reference(
    x_BTC: Tensor,
    log_decay_K: Tensor,
    phase_K: Tensor,
    initial_BC: Tensor | None = None,
    begins_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, written out."""
    wide = state_type(x_BTC)
    batch, positions, _ = x_BTC.shape
    x_BTK = torch.complex(*x_BTC.to(wide).chunk(2, dim=-1))
    eigenvalue_K = torch.exp(log_decay_K.to(wide)) * torch.exp(1j * phase_K.to(wide))
    eigenvalue_BTK = eigenvalue_K.expand(batch, positions, -1)
    if initial_BC is None:
        state_BK = torch.zeros_like(x_BTK[:, 0])
    else:
        state_BK = torch.complex(*initial_BC.to(wide).chunk(2, dim=-1))
    states = []
    for t in range(positions):
        if begins_BT is not None:
            state_BK = torch.where(begins_BT[:, t, None].bool(), 0.0, state_BK)
        state_BK = eigenvalue_BTK[:, t] * state_BK + x_BTK[:, t]
        states.append(state_BK)
    h_BTK = torch.stack(states, dim=1)
    h_BTC = torch.cat([h_BTK.real, h_BTK.imag], dim=-1).to(x_BTC.dtype)
    return h_BTC, torch.cat([state_BK.real, state_BK.imag], dim=-1)


# --- chunks in torch's operations --------------------------------------------------------------------------------


def _chunked(
    x_BTC: Tensor, log_decay_K: Tensor, phase_K: Tensor, initial_BC: Tensor | None, begins_BT: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    if chunk < 2:
        raise ValueError(f"a chunk of {chunk} positions; at least 2 are needed")
    wide = state_type(x_BTC)
    with torch.autocast(x_BTC.device.type, enabled=False):  # it would round the products to its own type
        x_BTK = _halves(x_BTC.to(wide))
        if initial_BC is not None:  # the decayed initial state is an additional input at the first position
            left_BK = _times(_eigenvalue(log_decay_K, phase_K, wide), _halves(initial_BC.to(wide)))
            if begins_BT is not None:
                left_BK = _each(left_BK, lambda part_BK: part_BK.masked_fill(begins_BT[:, :1].bool(), 0.0))
            left_BTK = _each(left_BK, lambda part_BK: F.pad(part_BK[:, None], (0, 0, 0, x_BTC.shape[1] - 1)))
            x_BTK = _plus(x_BTK, left_BTK)
        if begins_BT is None:
            h_BTK = _toeplitz(x_BTK, _wide(log_decay_K), _wide(phase_K), chunk)
        else:
            factor_K = _eigenvalue(log_decay_K, phase_K, wide)
            factor_BTK = _each(factor_K, lambda part_K: part_K.masked_fill(begins_BT[..., None].bool(), 0.0))
            h_BTK = _in_step(x_BTK, factor_BTK, chunk)
        h_BTC = torch.cat(h_BTK, dim=-1)
        return h_BTC.to(x_BTC.dtype), h_BTC[:, -1].clone()


def _toeplitz(x_BTK: Pair, log_decay_K: Tensor, phase_K: Tensor, chunk: int) -> Pair:
    """States with the same λ at all positions, from zeros. log_decay and phase are float64."""
    positions, dtype = x_BTK[0].shape[1], x_BTK[0].dtype
    length = min(chunk, positions)
    lags_L = torch.arange(length + 1, dtype=phase_K.dtype, device=phase_K.device)[:, None]
    powers_LK = _eigenvalue(lags_L * log_decay_K, lags_L * phase_K, dtype)  # λ^0 to λ^L
    steps_L = torch.arange(length, device=phase_K.device)
    lag_LL = steps_L[:, None] - steps_L[None, :]
    # Row i reads column j only for j <= i: causal.
    matrix_KLL = _each(powers_LK, lambda power_LK: power_LK[lag_LL.clamp(min=0)].permute(2, 0, 1) * (lag_LL >= 0))
    x_BNLK = _each(x_BTK, lambda part_BTK: _cut(part_BTK, length))
    batch, chunks, _, channels = x_BNLK[0].shape
    # Both halves side by side: two matrix products instead of four.
    both_KLM = torch.stack(x_BNLK).permute(4, 3, 0, 1, 2).reshape(channels, length, -1)
    by_real, by_imaginary = (
        (part_KLL @ both_KLM).view(channels, length, 2, batch, chunks).permute(2, 3, 4, 1, 0) for part_KLL in matrix_KLL
    )
    h_BNLK = by_real[0] - by_imaginary[1], by_real[1] + by_imaginary[0]
    if chunks > 1:
        ends_BNK = _each(h_BNLK, lambda part_BNLK: part_BNLK[:, :, -1])
        starts_BNK = _one_later(_toeplitz(ends_BNK, length * log_decay_K, length * phase_K, chunk))
        h_BNLK = _plus(h_BNLK, _times(_each(powers_LK, lambda power_LK: power_LK[1:]), _each(starts_BNK, _to_all)))
    return _each(h_BNLK, lambda part_BNLK: part_BNLK.flatten(1, 2)[:, :positions])


def _in_step(x_BTK: Pair, factor_BTK: Pair, chunk: int) -> Pair:
    """States with a λ for each position, from zeros: all chunks take their first step, then their second, ..."""
    positions = x_BTK[0].shape[1]
    length = min(chunk, positions)
    x_BNLK, factor_BNLK = (_each(pair, lambda part_BTK: _cut(part_BTK, length)) for pair in (x_BTK, factor_BTK))
    chunks = x_BNLK[0].shape[1]
    states, products = [_at(x_BNLK, 0)], [_at(factor_BNLK, 0)]
    for step in range(1, length):
        factor_BNK = _at(factor_BNLK, step)
        states.append(_plus(_times(factor_BNK, states[-1]), _at(x_BNLK, step)))
        if chunks > 1:
            products.append(_times(factor_BNK, products[-1]))
    h_BNLK = _stacked(states)
    if chunks > 1:
        starts_BNK = _one_later(_in_step(states[-1], products[-1], chunk))
        h_BNLK = _plus(h_BNLK, _times(_stacked(products), _each(starts_BNK, _to_all)))
    return _each(h_BNLK, lambda part_BNLK: part_BNLK.flatten(1, 2)[:, :positions])


# --- pairs of real numbers ---------------------------------------------------------------------------------------


def _halves(x: Tensor) -> Pair:
    real, imaginary = x.chunk(2, dim=-1)
    return real, imaginary


def _each(pair: Pair, function: Callable[[Tensor], Tensor]) -> Pair:
    return function(pair[0]), function(pair[1])


def _times(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _plus(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def _eigenvalue(log_decay_K: Tensor, phase_K: Tensor, dtype: torch.dtype) -> Pair:
    """exp(log_decay + i·phase), computed in float64 and rounded once."""
    magnitude_K, angle_K = torch.exp(_wide(log_decay_K)), _wide(phase_K)
    return (magnitude_K * torch.cos(angle_K)).to(dtype), (magnitude_K * torch.sin(angle_K)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    """In float64; in fp32 on MPS, which has no float64."""
    return x.float() if x.device.type == "mps" else x.double()


def _cut(part_BTK: Tensor, length: int) -> Tensor:
    """[B, N, L, K] of [B, T, K], zeros at the end."""
    missing = -part_BTK.shape[1] % length
    return F.pad(part_BTK, (0, 0, 0, missing)).unflatten(1, (-1, length))


def _at(pair_BNLK: Pair, step: int) -> Pair:
    return pair_BNLK[0][:, :, step], pair_BNLK[1][:, :, step]


def _stacked(steps: list[Pair]) -> Pair:
    return torch.stack([step[0] for step in steps], dim=2), torch.stack([step[1] for step in steps], dim=2)


def _one_later(pair_BNK: Pair) -> Pair:
    """The initial state of every chunk: the end of the previous one, zeros for the first."""
    return _each(pair_BNK, lambda part_BNK: F.pad(part_BNK[:, :-1], (0, 0, 1, 0)))


def _to_all(part_BNK: Tensor) -> Tensor:
    return part_BNK[:, :, None]
