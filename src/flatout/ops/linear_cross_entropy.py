"""Output head and loss in one operation: hidden states in, summed loss out.

The sum, not the mean: only the training step knows how many labelled tokens the whole batch has, and a mean of means
over micro-batches would weigh them wrongly. The softmax runs in fp32 at least.

Three paths, one result. `plain` keeps all logits: 6.6 GB for 65,536 tokens of GPT-2. `chunked` keeps none and computes
each chunk's logits again in backward. `fused` differentiates each chunk while its logits are there: nothing is
computed twice, and what waits for backward is one gradient of the hidden states and one of the weights.

Shape legend: N tokens, W width, V vocabulary, P padded vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flatout.ops.reference import IGNORED
from flatout.ops.scales import E4M3


def linear_cross_entropy(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    targets_N: Tensor,
    *,
    label_smoothing: float = 0.0,
    pad_vocab: int = 1,
    path: str = "plain",
    chunk: int = 8192,
    kernels: str = "torch",
    fp8: bool = False,
    tuned: bool = False,
) -> Tensor:
    """Sum of the cross-entropy over targets that are not IGNORED, as a scalar of at least fp32."""
    if path == "fused":
        how = (label_smoothing, pad_vocab, chunk, kernels, fp8, tuned)
        return _FusedLoss.apply(hidden_NW, weight_VW, targets_N, *how)  # pyright: ignore
    if path == "plain" or hidden_NW.shape[0] <= chunk:
        return _plain_loss(hidden_NW, weight_VW, targets_N, label_smoothing, pad_vocab)
    total = hidden_NW.new_zeros((), dtype=torch.promote_types(hidden_NW.dtype, torch.float32))
    for hidden, targets in zip(hidden_NW.split(chunk), targets_N.split(chunk), strict=True):
        arguments = (hidden, weight_VW, targets, label_smoothing, pad_vocab)
        total = total + checkpoint(_plain_loss, *arguments, use_reentrant=False, preserve_rng_state=False)
    return total


def _plain_loss(
    hidden_NW: Tensor, weight_VW: Tensor, targets_N: Tensor, label_smoothing: float, pad_vocab: int
) -> Tensor:
    logits_NV = padded_logits(hidden_NW, weight_VW, pad_vocab)
    if logits_NV.element_size() < 4:
        logits_NV = logits_NV.float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


def padded_logits(hidden: Tensor, weight_VW: Tensor, pad_vocab: int) -> Tensor:
    """`hidden @ weight.T`, the product computed for V rounded up to a multiple of `pad_vocab` and cut back to V.

    A row length that is no multiple of 8 elements keeps matrix units from their fast layout. The padding exists only
    inside this product: the parameter, its optimizer state and its checkpoint never see it.
    """
    vocab = weight_VW.shape[0]
    missing = -vocab % pad_vocab
    if missing == 0:
        return F.linear(hidden, weight_VW)
    return F.linear(hidden, F.pad(weight_VW, (0, 0, 0, missing)))[..., :vocab]


class _FusedLoss(torch.autograd.Function):
    """Loss and, chunk by chunk, its gradients; backward only multiplies them by the gradient of the sum."""

    @staticmethod
    def forward(ctx, hidden_NW, weight_VW, targets_N, label_smoothing, pad_vocab, chunk, kernels, fp8, tuned):
        device = hidden_NW.device
        autocast = torch.is_autocast_enabled(device.type)
        narrow = torch.get_autocast_dtype(device.type) if autocast else hidden_NW.dtype
        exact = torch.promote_types(hidden_NW.dtype, torch.float32)
        vocab, width = weight_VW.shape
        learning = any(ctx.needs_input_grad[:2])
        multiple = math.lcm(pad_vocab, 16) if fp8 else pad_vocab
        with torch.autocast(device.type, enabled=False):
            weight_PW = weight_VW.new_zeros((vocab + -vocab % multiple, width), dtype=narrow)
            weight_PW[:vocab] = weight_VW
            head = _NarrowHead(hidden_NW, weight_PW, learning) if fp8 else None
            total = torch.zeros((), dtype=exact, device=device)
            dhidden_NW = torch.empty_like(hidden_NW, dtype=narrow) if learning else None
            dweight_PW = None
            for start in range(0, hidden_NW.shape[0], chunk):
                part = slice(start, start + chunk)
                hidden_CW = hidden_NW[part].to(narrow)
                logits_CP = _multiply(hidden_CW, weight_PW.t(), tuned) if head is None else head.logits(part, narrow)
                narrow_CP = None if head is None or dhidden_NW is None else head.room_for_gradient(logits_CP)
                losses_C = _rows_loss(logits_CP, targets_N[part], vocab, label_smoothing, learning, kernels, narrow_CP)
                # Not in place: torch 2.11's compiler would lose the gradient of a result that was written into.
                total = total + losses_C.sum(dtype=exact)
                if dhidden_NW is None:
                    continue
                if head is None:
                    _multiply(logits_CP, weight_PW, tuned, dhidden_NW[part])  # the logits are their own gradient by now
                else:
                    head.input_gradient(logits_CP, narrow_CP, out=dhidden_NW[part])
                dweight_PW = _add_product(dweight_PW, logits_CP.t(), hidden_CW, exact, tuned)
                del logits_CP
        ctx.save_for_backward(dhidden_NW, dweight_PW)
        ctx.hidden_dtype, ctx.weight_dtype, ctx.vocab, ctx.kernels = hidden_NW.dtype, weight_VW.dtype, vocab, kernels
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dhidden_NW, dweight_PW = ctx.saved_tensors
        # Both were made here and are used once, so they are scaled where they stand; a compiler sees to that itself.
        if ctx.kernels == "triton":
            from flatout.ops.kernels.launch import scale_in_place as scaled
        else:
            scaled = torch.mul if torch.compiler.is_compiling() else torch.Tensor.mul_
        return (
            scaled(dhidden_NW, dtotal).to(ctx.hidden_dtype),
            scaled(dweight_PW, dtotal)[: ctx.vocab].to(ctx.weight_dtype),
            *([None] * 7),
        )


class _NarrowHead:
    """The head's two products towards logits and hidden states, in 8 bits. Hidden states and weights round once."""

    def __init__(self, hidden_NW: Tensor, weight_PW: Tensor, learning: bool) -> None:
        from flatout.ops.kernels import fp8

        self.fp8 = fp8
        self.hidden = fp8.quantise(hidden_NW, E4M3)
        self.weight = fp8.quantise(weight_PW, E4M3, turned=learning)
        self.gradient_unit = torch.full((), 1.0 / fp8.GRADIENT_SCALE, device=hidden_NW.device)

    def logits(self, part: slice, dtype: torch.dtype) -> Tensor:
        hidden_NW, weight_PW = self.hidden.values_RC, self.weight.values_RC
        units = self.hidden.unit, self.weight.unit
        return self.fp8.narrow_product(hidden_NW[part], units[0], weight_PW, units[1], dtype, fast=True)

    def room_for_gradient(self, logits_CP: Tensor) -> Tensor | None:
        """Where the loss kernel can write the 8-bit gradient beside the other one, if it can."""
        return torch.empty_like(logits_CP, dtype=E4M3) if logits_CP.is_cuda else None

    def input_gradient(self, dlogits_CP: Tensor, narrow_CP: Tensor | None, *, out: Tensor) -> None:
        narrow_CP = self.fp8.narrow_gradient(dlogits_CP) if narrow_CP is None else narrow_CP
        turned_WP = self.weight.turned_CR
        assert turned_WP is not None
        units = self.gradient_unit, self.weight.unit
        self.fp8.narrow_product(narrow_CP, units[0], turned_WP, units[1], out.dtype, out=out)


def _rows_loss(
    logits_CP: Tensor,
    targets_C: Tensor,
    vocab: int,
    label_smoothing: float,
    gradient: bool,
    kernels: str,
    narrow_CP: Tensor | None,
) -> Tensor:
    """Loss per row; with `gradient` the logits are overwritten with their gradient, and so is `narrow_CP` in 8 bits."""
    if kernels == "triton":
        from flatout.ops.kernels.cross_entropy import cross_entropy_rows
        from flatout.ops.kernels.fp8 import GRADIENT_SCALE

        return cross_entropy_rows(
            logits_CP,
            targets_C.contiguous(),
            vocab=vocab,
            label_smoothing=label_smoothing,
            gradient=gradient,
            narrow_NP=narrow_CP,
            narrow_scale=GRADIENT_SCALE,
        )
    wide = logits_CP[:, :vocab].to(torch.promote_types(logits_CP.dtype, torch.float32))
    log_p_CV = torch.log_softmax(wide, dim=-1)
    labelled_C = targets_C != IGNORED
    index_C1 = targets_C.clamp(min=0)[:, None]
    losses_C = -(1 - label_smoothing) * log_p_CV.gather(1, index_C1)[:, 0] - label_smoothing * log_p_CV.mean(dim=-1)
    if gradient:
        share_CV = log_p_CV.exp_().sub_(label_smoothing / vocab)
        share_CV.scatter_add_(1, index_C1, torch.full_like(share_CV[:, :1], label_smoothing - 1.0))
        logits_CP[:, :vocab] = share_CV * labelled_C[:, None]
        logits_CP[:, vocab:] = 0.0
    return losses_C * labelled_C


def _multiply(a: Tensor, b: Tensor, tuned: bool, out: Tensor | None = None) -> Tensor:
    if tuned:
        from flatout.ops.kernels.cublaslt import multiply

        return multiply(a, b, out=out)
    return a @ b if out is None else torch.mm(a, b, out=out)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, tuned: bool) -> Tensor:
    """total + a @ b in `dtype`, the products of narrower inputs added up in it."""
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if a.device.type != "cuda" or dtype != torch.float32:
        made = a.to(dtype) @ b.to(dtype)
        return made if total is None else total.add_(made)
    adding = total is not None
    into = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device) if total is None else total
    from flatout.ops.kernels.cublaslt import by_torch, multiply

    if tuned:
        return multiply(a, b, out=into, add=adding)
    by_torch(a, b, into, None, add=adding)
    return into
