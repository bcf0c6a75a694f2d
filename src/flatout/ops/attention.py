"""Causal attention: plain, in sequences given by their bounds, and within a sliding window.

    reference   written out, every score in memory
    sdpa        torch picks one of its kernels
    flash, cudnn, efficient     exactly that kernel of torch, or an error
    fa4         FlashAttention-4 of the package flash-attn-4, which compiles its kernels on first use
    cudnn+fa4   forward by cuDNN, backward by FlashAttention-4: on an H200 each is the faster one. The backward pass
                needs the result and the log-sum-exp of each query, which both libraries define alike
    blocks      sliding windows on any device: blocks of W queries, with their own and the previous block as keys
    capped      scores bent below a cap: every score in memory, one layer at a time

A window costs about 2·W keys per query in every form: masking a full score matrix would save nothing.

Contract: token t sees tokens t-W+1 to t, itself included; without a window, all up to t. Forced kernels serve training
and evaluation. Inference mode always uses sdpa, because some kernels refuse its shapes; so does attention to a cache
(`masked_attention`).
Traps:
- Process-wide flags force a kernel during the forward call. They are set and restored inside the function, because
  checkpointing calls it again during backward.
- torch 2.11 seems to cache cuDNN's backward plan by the layout of queries, keys and values, ignoring that of the
  result's gradient. With two layouts in one process the second gets wrong gradients without an error. So the gradient
  always gets the layout of the result (`_SameLayout`).
- flash-attn-4 is young. We call two of its internal functions, because only they accept output tensors.

Shape legend: B batch, T query positions, S key positions, H query heads, G key/value heads, A heads of queries, keys
and values, D head size, N = B·T, E sequences of all rows, C blocks of W positions.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend

from flatout.ops.reference import attention_reference, causal_mask


def packed(parts_BTHD: Sequence[Tensor]) -> Tensor | None:
    """The [B, T, A, D] buffer of which these are all heads in order, or None if they are not side by side."""
    batch, positions, _, size = parts_BTHD[0].shape
    heads = sum(part.shape[2] for part in parts_BTHD)
    stride = (positions * heads * size, heads * size, size, 1)
    memory = parts_BTHD[0].untyped_storage().data_ptr()
    start = place = parts_BTHD[0].storage_offset()
    for part in parts_BTHD:
        if (part.stride(), part.storage_offset(), part.untyped_storage().data_ptr()) != (stride, place, memory):
            return None
        place += part.shape[2] * size
    return parts_BTHD[0].as_strided((batch, positions, heads, size), stride, start)


# Warnings of the package about its own compiler. Filtered at import, because callers may restore filters afterwards.
warnings.filterwarnings("ignore", message=r"Argument \w+ \(position", category=UserWarning)


def fa4_missing() -> str | None:
    """Why FlashAttention-4 cannot be used, or None."""
    found = importlib.util.find_spec("flash_attn")  # not flash_attn.cute, which would import FlashAttention-2
    folders = [] if found is None else found.submodule_search_locations or []
    return None if any((Path(folder) / "cute").is_dir() for folder in folders) else "flash-attn-4 is not installed"


@functools.cache
def fa4_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, backward)."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when it is imported
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface._flash_attn_fwd, interface._flash_attn_bwd


def _cudnn_forward(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor]:
    parts = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    y_BHTD, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, True)[:2]
    return y_BHTD.transpose(1, 2).contiguous(), lse.reshape(y_BHTD.shape[:3])  # some versions have one more axis


class FlashAttention4(torch.autograd.Function):
    """For rows [B, T, heads, D], or for sequences one after the other [N, heads, D] with bounds in `how`.

    Queries, keys and values that are views of one buffer get gradients in one buffer, in the same order, so that
    `pack_heads` (ops/kernels/heads.py) need not copy them.
    """

    @staticmethod
    def forward(ctx, q_BTHD, k_BTGD, v_BTGD, cudnn, how):
        ctx.how = {"causal": True, **how}
        if cudnn:
            y_BTHD, lse_BHT = _cudnn_forward(q_BTHD, k_BTGD, v_BTGD)
        else:
            y_BTHD, lse_BHT = fa4_kernels()[0](q_BTHD, k_BTGD, v_BTGD, return_lse=True, **ctx.how)[:2]
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, y_BTHD, lse_BHT)
        return y_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTHD):
        q_BTHD, k_BTGD, v_BTGD, y_BTHD, lse_BHT = ctx.saved_tensors
        parts, into = (q_BTHD, k_BTGD, v_BTGD), {}
        whole = packed(parts) if q_BTHD.dim() == 4 else None
        if whole is not None:
            gradients = torch.empty_like(whole).split([part.shape[2] for part in parts], dim=2)
            into = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        gradients = fa4_kernels()[1](*parts, y_BTHD, dy_BTHD.contiguous(), lse_BHT, **ctx.how, **into)
        return *gradients[:3], None, None


def flash_attention_4(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, cudnn: bool = False, window: int | None = None
) -> Tensor:
    """Causal attention with as many queries as keys, to the last `window` of them if given.

    `cudnn`: forward by cuDNN, which has no windows.
    """
    parts_BTHD = (x.transpose(1, 2) for x in (q_BHTD, k_BGTD, v_BGTD))
    how = {} if window is None else {"window_size_left": window - 1}
    return FlashAttention4.apply(*parts_BTHD, cudnn and window is None, how).transpose(1, 2)  # pyright: ignore


def varlen_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, bounds_E: Tensor, longest: int, *, kernel: str, window: int | None
) -> Tensor:
    """Causal attention within each sequence, to the last `window` tokens if given."""
    parts = [x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD)]
    if kernel == "fa4":
        how: dict[str, Any] = {} if window is None else {"window_size_left": window - 1}
        how |= {"cu_seqlens_q": bounds_E, "cu_seqlens_k": bounds_E, "max_seqlen_q": longest, "max_seqlen_k": longest}
        y_NHD = FlashAttention4.apply(*parts, False, how)
    else:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 accepts fewer key heads without an argument; later versions need `enable_gqa`.
        grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters and q_BHTD.shape[1] != k_BGTD.shape[1]
        how = {"window_size": (-1 if window is None else window - 1, 0), **({"enable_gqa": True} if grouped else {})}
        y_NHD = varlen_attn(*parts, bounds_E, bounds_E, longest, longest, **how)  # pyright: ignore
    return y_NHD.view(len(q_BHTD), q_BHTD.shape[2], *y_NHD.shape[1:]).transpose(1, 2)  # pyright: ignore


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """True where query t sees key s within the window; the queries are the last of the keys."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    return causal_mask(queries, keys, device) & (rows - torch.arange(keys, device=device)[None, :] < window)


def window_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int, kernel: str) -> Tensor:
    """Attention of every position to itself and the `window` - 1 before it, with as many queries as keys."""
    if kernel == "reference":
        length = q_BHTD.shape[2]
        visible = window_mask(length, length, window, q_BHTD.device)
        return attention_reference(q_BHTD, k_BGTD, v_BGTD, visible=visible)
    if kernel == "fa4":
        return flash_attention_4(q_BHTD, k_BGTD, v_BGTD, window=window)
    if kernel == "flash":
        batch, _, length, _ = q_BHTD.shape
        bounds_B = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q_BHTD.device)
        return varlen_attention(q_BHTD, k_BGTD, v_BGTD, bounds_B, length, kernel="flash", window=window)
    assert kernel == "blocks", kernel
    return _blocks(q_BHTD, k_BGTD, v_BGTD, window)


def _blocks(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, window: int) -> Tensor:
    """Queries in blocks of W. Query r of a block sees keys r + 1 to r + W of the block's 2·W keys."""
    batch, heads, length, size = q_BHTD.shape
    groups = k_BGTD.shape[1]
    grouped = heads != groups
    first = min(window, length)
    q_first, k_first, v_first = (x[:, :, :first] for x in (q_BHTD, k_BGTD, v_BGTD))
    y_BHTD = F.scaled_dot_product_attention(q_first, k_first, v_first, is_causal=True, enable_gqa=grouped)
    if length <= window:
        return y_BHTD
    blocks = -(-length // window)
    spare = blocks * window - length
    q_BHTD, k_BGTD, v_BGTD = (F.pad(x, (0, 0, 0, spare)) for x in (q_BHTD, k_BGTD, v_BGTD))
    # Blocks become the batch and sequences become heads, so that one mask of W x 2·W serves all of them.
    q_CHWD = q_BHTD[:, :, window:].unflatten(2, (blocks - 1, window)).permute(2, 0, 1, 3, 4).flatten(1, 2)
    k_CGSD, v_CGSD = (x.unfold(2, 2 * window, window).permute(2, 0, 1, 4, 3).flatten(1, 2) for x in (k_BGTD, v_BGTD))
    mask_WS = window_mask(window, 2 * window, window, q_BHTD.device)
    rest_CHWD = F.scaled_dot_product_attention(q_CHWD, k_CGSD, v_CGSD, attn_mask=mask_WS, enable_gqa=grouped)
    rest_BHTD = rest_CHWD.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4).reshape(batch, heads, -1, size)
    return torch.cat([y_BHTD, rest_BHTD], dim=2)[:, :, :length]


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FA4 = ("fa4", "cudnn+fa4")  # with kernels of the package flash-attn-4
_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}
_PROBED_POSITIONS = 64  # compared with a small reference: the first positions do not depend on later ones


def causal_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    backend: str,
    dropout: float = 0.0,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention of every position to itself and all before it, or to the last `window` of these.

    With a `cap` on scores it has one form, whatever the backend.
    """
    if cap is not None:
        return capped_attention(q_BHTD, k_BGTD, v_BGTD, window or k_BGTD.shape[2], cap)
    if window is not None and window < k_BGTD.shape[2]:
        return _within_window(q_BHTD, k_BGTD, v_BGTD, backend, dropout, window)
    if backend == "reference":
        return attention_reference(q_BHTD, k_BGTD, v_BGTD, keep_BHTS=_dropout_factors(q_BHTD, k_BGTD, dropout))
    if backend == "sdpa" or _inferring():
        return _torch_attention(q_BHTD, k_BGTD, v_BGTD, dropout)
    if backend in FA4:
        if dropout > 0.0:
            raise ValueError("FlashAttention-4 has no dropout")
        return flash_attention_4(q_BHTD, k_BGTD, v_BGTD, cudnn=backend != "fa4")
    if backend == "efficient":  # no support for groups: each head gets a copy of its group's keys and values
        repeats = q_BHTD.shape[1] // k_BGTD.shape[1]
        if repeats > 1:
            k_BGTD, v_BGTD = (x.repeat_interleave(repeats, dim=1) for x in (k_BGTD, v_BGTD))
    with _only(KERNELS[backend]):
        return _torch_attention(q_BHTD, k_BGTD, v_BGTD, dropout)


def _within_window(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, backend: str, dropout: float, window: int) -> Tensor:
    if dropout > 0.0:
        raise ValueError("attention within a window has no dropout")
    if _inferring() and backend != "reference":  # a prompt: by torch's kernels, and without a full mask
        backend = "sdpa"
    return window_attention(q_BHTD, k_BGTD, v_BGTD, window=window, kernel=window_kernel(backend, q_BHTD))


def masked_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible_BTS: Tensor | None, cap: float | None = None
) -> Tensor:
    """Attention to the visible ones of S positions, for a cache; None: to all of them.

    Queries of one group are arranged like positions, because kernels with masks do not support groups.
    """
    if cap is not None:
        return capped_attention(q_BHTD, k_BGSD, v_BGSD, None if visible_BTS is None else visible_BTS[:, None], cap)
    batch, heads, _, size = q_BHTD.shape
    groups = k_BGSD.shape[1]
    if visible_BTS is not None:
        visible_BTS = visible_BTS.repeat(1, heads // groups, 1)[:, None]
    q_BGXD = q_BHTD.reshape(batch, groups, -1, size)
    y_BGXD = F.scaled_dot_product_attention(q_BGXD, k_BGSD, v_BGSD, attn_mask=visible_BTS)
    return y_BGXD.reshape(q_BHTD.shape)  # a copy, if the kernel returns another layout


class _Capped(torch.autograd.Function):
    """Keeps queries, keys and values; backward computes the scores again, as they take more memory than all else."""

    @staticmethod
    def forward(ctx, q_BGXTD, k_BGSD, v_BGSD, visible, cap):
        ctx.save_for_backward(q_BGXTD, k_BGSD, v_BGSD, None if isinstance(visible, int) else visible)
        ctx.window, ctx.cap = visible, cap
        share_BGXTS, _ = _capped_shares(q_BGXTD, k_BGSD, visible, cap)
        return (share_BGXTS.to(v_BGSD.dtype).flatten(2, 3) @ v_BGSD).view_as(q_BGXTD)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BGXTD):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BGXTD, k_BGSD, v_BGSD, visible = ctx.saved_tensors
        visible = ctx.window if visible is None else visible
        share_BGXTS, bent_BGXTS = _capped_shares(q_BGXTD, k_BGSD, visible, ctx.cap)
        q_BGRD, dy_BGRD = q_BGXTD.flatten(2, 3), dy_BGXTD.flatten(2, 3)
        dscore = (dy_BGRD @ v_BGSD.transpose(-1, -2)).view_as(share_BGXTS).to(share_BGXTS.dtype)
        dscore -= (dscore * share_BGXTS).sum(-1, keepdim=True)
        dscore *= bent_BGXTS.square_().neg_().add_(1.0).mul_(share_BGXTS)  # the slope of tanh, times the share
        dscore *= q_BGXTD.shape[-1] ** -0.5
        dscore_BGRS = dscore.flatten(2, 3).to(k_BGSD.dtype)
        dv_BGSD = share_BGXTS.flatten(2, 3).to(dy_BGRD.dtype).transpose(-1, -2) @ dy_BGRD
        dq_BGXTD = (dscore_BGRS @ k_BGSD).view_as(q_BGXTD)
        return dq_BGXTD, dscore_BGRS.transpose(-1, -2) @ q_BGRD, dv_BGSD, None, None


def _capped_shares(q_BGXTD: Tensor, k_BGSD: Tensor, visible: Tensor | int | None, cap: float) -> tuple[Tensor, Tensor]:
    """(softmax, tanh) of scores, at least in fp32."""
    scores = (q_BGXTD.flatten(2, 3) @ k_BGSD.transpose(-1, -2)).unflatten(2, q_BGXTD.shape[2:4])
    bent_BGXTS = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(q_BGXTD.shape[-1] ** -0.5 / cap)
    capped = cap * bent_BGXTS.tanh_()
    if isinstance(visible, int):
        visible = window_mask(q_BGXTD.shape[3], k_BGSD.shape[2], visible, capped.device)
    if visible is not None:
        capped.masked_fill_(~visible, float("-inf"))
    return torch.softmax(capped, dim=-1), bent_BGXTS


def capped_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible: Tensor | int | None, cap: float
) -> Tensor:
    """Attention with cap·tanh(score / cap) in the place of scores.

    `visible`: a mask [B, 1, T, S], or the last positions that each one sees; None is all.
    """
    kind = q_BHTD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_BHTD.dtype
    q_BGXTD = q_BHTD.to(dtype).unflatten(1, (k_BGSD.shape[1], -1))
    if isinstance(visible, Tensor):
        visible = visible[:, :, None]
    return _Capped.apply(q_BGXTD, k_BGSD.to(dtype), v_BGSD.to(dtype), visible, cap).flatten(1, 2)  # pyright: ignore


def window_kernel(backend: str, x: Tensor) -> str:
    """The kernel for windows when `backend` is that of full attention. cuDNN has no windows; flash takes half precision
    and head sizes 8, 16, ... 256.

    Kernels that use bounds sum gradients in any order, so deterministic runs use blocks.
    """
    if backend == "reference":
        return "reference"
    if torch.are_deterministic_algorithms_enabled():
        return "blocks"
    if backend in FA4:
        return "fa4"
    fits = x.is_cuda and x.element_size() == 2 and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
    return "flash" if fits and backend != "efficient" else "blocks"


def _torch_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, dropout: float) -> Tensor:
    # Only is_causal reaches the fast kernels; an explicit mask would rule them out.
    causal, grouped = False, q_BHTD.shape[1] != k_BGTD.shape[1]
    if q_BHTD.shape[2] > 1:  # a branch, because with dynamic shapes the comparison is a symbol to the compiler
        causal = True
    y_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )
    return _SameLayout.apply(y_BHTD) if y_BHTD.is_cuda and y_BHTD.requires_grad else y_BHTD  # pyright: ignore


class _SameLayout(torch.autograd.Function):
    """The identity; its gradient gets the layout of the result: positions before heads, or the order of axes."""

    @staticmethod
    def forward(ctx, y_BHTD):
        ctx.positions_first = y_BHTD.transpose(1, 2).is_contiguous()
        return y_BHTD.view_as(y_BHTD)

    @staticmethod
    def backward(ctx, dy_BHTD):  # pyright: ignore
        if ctx.positions_first:
            return dy_BHTD.transpose(1, 2).contiguous().transpose(1, 2)
        return dy_BHTD.contiguous()


def _inferring() -> bool:
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _dropout_factors(q_BHTD: Tensor, k_BGTD: Tensor, dropout: float) -> Tensor | None:
    if dropout == 0.0:
        return None
    shape = (*q_BHTD.shape[:3], k_BGTD.shape[2])
    return F.dropout(torch.ones(shape, dtype=q_BHTD.dtype, device=q_BHTD.device), dropout)


# --- one kernel only --------------------------------------------------------------------------------------------------


def _only(kernel: SDPBackend) -> contextlib.AbstractContextManager[Any]:
    """torch's own context under torch.compile; otherwise the same flags with less overhead on the host."""
    return torch_attention.sdpa_kernel(kernel) if torch.compiler.is_compiling() else _Flags(kernel)


class _Flags:
    """Enables one kernel of scaled_dot_product_attention, and restores the flags."""

    __slots__ = ("changed", "kernel")

    def __init__(self, kernel: SDPBackend) -> None:
        self.kernel = kernel
        self.changed: list[tuple[Callable[[bool], None], bool]] = []

    def __enter__(self) -> None:
        for kernel, enabled, enable in _switches():
            before, wanted = enabled(), kernel is self.kernel
            if before is not wanted:
                enable(wanted)
                self.changed.append((enable, before))

    def __exit__(self, *_: object) -> None:
        for enable, before in self.changed:
            enable(before)


@functools.cache
def _switches() -> tuple[tuple[SDPBackend, Callable[[], bool], Callable[[bool], None]], ...]:
    flags = torch.backends.cuda
    return (
        (SDPBackend.FLASH_ATTENTION, flags.flash_sdp_enabled, flags.enable_flash_sdp),
        (SDPBackend.CUDNN_ATTENTION, flags.cudnn_sdp_enabled, flags.enable_cudnn_sdp),
        (SDPBackend.EFFICIENT_ATTENTION, flags.mem_efficient_sdp_enabled, flags.enable_mem_efficient_sdp),
        (SDPBackend.MATH, flags.math_sdp_enabled, flags.enable_math_sdp),
    )


# --- what works here --------------------------------------------------------------------------------------------------


def attention_failure(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    groups: int,
    size: int,
    context: int,
    dropout: float = 0.0,
) -> str | None:
    """Why this kernel cannot train these shapes here, or None. It is tried on one sequence, both passes."""
    if backend in ("sdpa", "reference"):
        return None
    if backend in FA4 and (missing := fa4_missing()) is not None:
        return missing
    if backend in FA4 and dropout > 0.0:
        return "FlashAttention-4 has no dropout"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for packed in (True, False):  # with rotary positions they are separate tensors
                values = trial_inputs(device, dtype, heads, groups, size, context, packed=packed)
                if (reason := _trial(backend, values, dropout)) is not None:
                    return reason
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the kernel is the reason
            return _reason(backend, error, [str(warning.message) for warning in caught])


def _trial(backend: str, qkv: Sequence[Tensor], dropout: float) -> str | None:
    """Compares the first positions and their gradients with a small reference."""
    y_BHTD = causal_attention(*qkv, backend=backend, dropout=dropout)
    gradients = torch.autograd.grad(y_BHTD[:, :, :_PROBED_POSITIONS].float().square().sum(), qkv)
    if not all(bool(torch.isfinite(x).all()) for x in (y_BHTD, *gradients)):
        return f"{backend} gave a result that is not finite"
    if dropout > 0.0:
        return None
    exact = [x[:, :, :_PROBED_POSITIONS].detach().float().requires_grad_() for x in qkv]
    expected = attention_reference(*exact)
    pairs = zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True)
    for what, mine, theirs in [("result", y_BHTD, expected), *(("gradient", *pair) for pair in pairs)]:
        difference = float((mine[:, :, :_PROBED_POSITIONS].float() - theirs).abs().max())
        if difference > 0.02 * (1 + float(theirs.abs().max())):
            return f"{backend} is {difference:.2g} away from the reference in its {what}"
    return None


def trial_inputs(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int, context: int, *, packed: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model has them: [B, T, heads, D] in memory, in one buffer or separate."""
    generator = torch.Generator().manual_seed(0)
    whole_BTAD = torch.randn(1, context, heads + 2 * groups, size, generator=generator).to(device, dtype)
    parts = [part.transpose(1, 2) for part in whole_BTAD.split([heads, groups, groups], dim=2)]
    if not packed:
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    q_BHTD, k_BGTD, v_BGTD = (part.detach().requires_grad_() for part in parts)
    return q_BHTD, k_BGTD, v_BGTD


def _reason(backend: str, error: Exception, warned: list[str]) -> str:
    """The reason for a failure. With "No available kernel" torch gives it as one of several warnings."""
    words = {"cudnn+fa4": "cudnn", "efficient": "memory efficient"}
    if "No available kernel" in str(error) or "No viable backend" in str(error):
        skipped = ("because", "not been runtime disabled", "runtime disabled")
        reasons = [text for text in warned if not any(word in text.lower() for word in skipped)]
        if reasons := [text for text in reasons if words.get(backend, backend) in text.lower()] or reasons:
            return f"{backend} does not take it: {_first_sentence(reasons[0])}"
        return f"torch has no {backend} kernel for these shapes"
    return f"{backend} failed: {type(error).__name__}: {_first_sentence(str(error))}"


def _first_sentence(text: str) -> str:
    line = text.strip().partition("\n")[0].partition(" (Triggered")[0]
    return line[:160].rstrip(". ")


def picked_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    groups: int,
    size: int,
    context: int,
    dropout: float = 0.0,
) -> str | None:
    """The kernel that sdpa picks for these shapes, or None if torch has no answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it also warns about kernels that it does not pick
        try:
            q_BHTD, k_BGTD, v_BGTD = trial_inputs(device, dtype, heads, groups, size, min(context, 1024))
            choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
                q_BHTD, k_BGTD, v_BGTD, None, dropout, context > 1, enable_gqa=heads != groups
            )
            return _NAMES.get(SDPBackend(choice))
        except (RuntimeError, AttributeError, TypeError, ValueError):  # a private function of torch, which may change
            return None
