"""AdamW with both moments in 8 bits: the number format, and the update in plain torch.

The format: a moment has blocks of 256 values. A value is stored as its index on a logarithmic grid, 2^(j·STEP) for
whole j, which is the same for all blocks. A block stores its largest j in 16 bits, and each value the distance to it in
one byte. The first moment uses one bit of the byte for the sign.

                      bytes a value   steps of       reaches down to
    exp_avg           1 + 2/256       9.1%           2^-15.75 of the block's largest; smaller ones become 0
    exp_avg_sq        1 + 2/256       6.7%           2^-23.81 of the block's largest; smaller ones become that

One grid for all blocks: a value that does not change is stored without error even if its block's largest value does.
Stochastic rounding: with beta2 = 0.999 a second moment changes by less than a grid step at a time, so rounding to
nearest would never change it. The random numbers are a hash of step and position: there is no random state, and a
resumed run draws the same. No zero in the second moment, because the update divides by it.

Shape legend: N values of a parameter, K blocks, 256 values in each.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
SIGNED_STEP, SIGNED_CODES = 1 / 8, 127
UNSIGNED_STEP, UNSIGNED_CODES = 3 / 32, 255
SMALLEST = 2.0**-125  # smaller values count as zero: fp32 loses precision there
NO_SCALE = -30000  # the scale of a block of zeros


def blocks_of(values: int) -> int:
    return -(-values // BLOCK)


def encode(values_N: Tensor, *, signed: bool, lot_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes [K, 256], scales [K]) of values. Rounds stochastically by `lot_N` (0 to 1), without it to the nearest."""
    step, codes = (SIGNED_STEP, SIGNED_CODES) if signed else (UNSIGNED_STEP, UNSIGNED_CODES)
    x_KB = _blocks(values_N.abs())
    live_KB = x_KB >= SMALLEST
    place_KB = torch.floor(torch.log2(x_KB.clamp(min=SMALLEST)) / step)
    below_KB, above_KB = torch.exp2(place_KB * step), torch.exp2((place_KB + 1) * step)
    lot_KB = 0.5 if lot_N is None else _blocks(lot_N)
    place_KB = place_KB + ((x_KB - below_KB) / (above_KB - below_KB) > lot_KB)
    place_KB = torch.where(live_KB, place_KB, float(NO_SCALE))
    scale_K = place_KB.amax(dim=1)
    code_KB = place_KB - scale_K[:, None] + codes
    code_KB = code_KB.clamp(min=0) if signed else code_KB.clamp(min=1)
    code_KB = torch.where(live_KB, code_KB, 0.0).to(torch.uint8)
    if signed:
        code_KB = code_KB + 128 * (_blocks(values_N) < 0).to(torch.uint8)
    return code_KB, scale_K.to(torch.int16)


def decode(code_KB: Tensor, scale_K: Tensor, values: int, *, signed: bool) -> Tensor:
    """The first `values` stored values, in fp32."""
    step, codes = (SIGNED_STEP, SIGNED_CODES) if signed else (UNSIGNED_STEP, UNSIGNED_CODES)
    size_KB = (code_KB & 127 if signed else code_KB).to(torch.float32)
    x_KB = torch.exp2((scale_K.to(torch.float32)[:, None] - codes + size_KB) * step)
    x_KB = torch.where(size_KB > 0, x_KB, 0.0)
    if signed:
        x_KB = torch.where(code_KB >= 128, -x_KB, x_KB)
    return x_KB.flatten()[:values]


def lots(values: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Two pseudo-random numbers from 0 to 1 per value: a hash of its position and of `step`."""
    mask = 0xFFFFFFFF
    h_N = torch.arange(values, dtype=torch.int64, device=step.device)
    h_N = (h_N * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA77) & mask
    h_N = h_N ^ (h_N >> 16)
    h_N = (h_N * 0x7FEB352D) & mask
    h_N = h_N ^ (h_N >> 15)
    h_N = (h_N * 0x846CA68B) & mask
    h_N = h_N ^ (h_N >> 16)
    return (h_N & 0xFFFF).to(torch.float32) / 65536, (h_N >> 16).to(torch.float32) / 65536


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyperparameters of an update that are plain numbers on the host."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adam8_reference(
    weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], scalars: Tensor, settings: Settings
) -> None:
    """One update in place. `moments` are codes and scales of the first, then of the second.

    `scalars` holds rate, 1 - beta1^t, sqrt(1 - beta2^t), divisor, skip (0 or 1) and step t.
    """
    code1_KB, scale1_K, code2_KB, scale2_K = moments
    beta1, beta2 = settings.beta1, settings.beta2
    rate, correction1, correction2, divisor, skip, step = scalars.unbind()
    count = weight.numel()
    g_N = gradient.reshape(-1).to(torch.float32) / divisor
    m_N = decode(code1_KB, scale1_K, count, signed=True)
    v_N = decode(code2_KB, scale2_K, count, signed=False)
    m_N = m_N + (1 - beta1) * (g_N - m_N)
    v_N = beta2 * v_N + (1 - beta2) * g_N * g_N
    w_N = weight.reshape(-1) * (1 - rate * settings.weight_decay)
    w_N = w_N - rate / correction1 * m_N / (v_N.sqrt() / correction2 + settings.eps)
    lot1_N, lot2_N = lots(count, step)
    new = (w_N.view_as(weight), *encode(m_N, signed=True, lot_N=lot1_N), *encode(v_N, signed=False, lot_N=lot2_N))
    for place, value in zip((weight, *moments), new, strict=True):
        place.copy_(torch.where(skip > 0, place, value.to(place.dtype)))


def _blocks(values_N: Tensor) -> Tensor:
    return F.pad(values_N, (0, -values_N.numel() % BLOCK)).view(-1, BLOCK)
