"""Output head and loss in one operation: hidden states in, summed loss out.

The sum, not the mean: only the training step knows how many labelled tokens the whole batch has, and a mean of means
over micro-batches would weigh them wrongly. The softmax runs in fp32 at least.

Three paths, one result. `plain` keeps all logits: 6.6 GB for 65,536 tokens of GPT-2. `chunked` keeps none and computes
each chunk's logits again in backward. `fused` differentiates each chunk while its logits are there: nothing is
computed twice, and what waits for backward is one gradient of the hidden states and one of the weights.

Shape legend: N tokens, W width, V vocabulary, P padded vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flatout.ops.reference import IGNORED


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
) -> Tensor:
    """Sum of the cross-entropy over targets that are not IGNORED, as a scalar of at least fp32."""
    if path == "fused":
        return _FusedLoss.apply(hidden_NW, weight_VW, targets_N, label_smoothing, pad_vocab, chunk, kernels, fp8)  # pyright: ignore
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
    def forward(ctx, hidden_NW, weight_VW, targets_N, label_smoothing, pad_vocab, chunk, kernels, fp8):
        device = hidden_NW.device
        autocast = torch.is_autocast_enabled(device.type)
        narrow = torch.get_autocast_dtype(device.type) if autocast else hidden_NW.dtype
        exact = torch.promote_types(hidden_NW.dtype, torch.float32)
        vocab, width = weight_VW.shape
        learning = any(ctx.needs_input_grad[:2])
        with torch.autocast(device.type, enabled=False):
            weight_PW = weight_VW.new_zeros((vocab + -vocab % pad_vocab, width), dtype=narrow)
            weight_PW[:vocab] = weight_VW
            total = torch.zeros((), dtype=exact, device=device)
            dhidden_NW = torch.empty_like(hidden_NW, dtype=narrow) if learning else None
            dweight_PW = None
            for start in range(0, hidden_NW.shape[0], chunk):
                part = slice(start, start + chunk)
                hidden_CW = hidden_NW[part].to(narrow)
                logits_CP = hidden_CW @ weight_PW.t()
                losses_C = _rows_loss(logits_CP, targets_N[part], vocab, label_smoothing, learning, kernels)
                total += losses_C.sum(dtype=exact)
                if dhidden_NW is None:
                    continue
                torch.mm(logits_CP, weight_PW, out=dhidden_NW[part])  # the logits are their own gradient by now
                dweight_PW = _add_product(dweight_PW, logits_CP.t(), hidden_CW, exact)
                del logits_CP
        ctx.save_for_backward(dhidden_NW, None if dweight_PW is None else dweight_PW[:vocab])
        ctx.hidden_dtype, ctx.weight_dtype = hidden_NW.dtype, weight_VW.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dhidden_NW, dweight_VW = ctx.saved_tensors
        # Both were made here and are used once, so they are scaled where they stand.
        return (
            dhidden_NW.mul_(dtotal).to(ctx.hidden_dtype),
            dweight_VW.mul_(dtotal).to(ctx.weight_dtype),
            None, None, None, None, None, None,
        )  # fmt: skip


def _rows_loss(
    logits_CP: Tensor, targets_C: Tensor, vocab: int, label_smoothing: float, gradient: bool, kernels: str
) -> Tensor:
    """Loss per row; with `gradient` the logits are overwritten with their gradient."""
    if kernels == "triton":
        from flatout.ops.kernels.cross_entropy import cross_entropy_rows

        return cross_entropy_rows(
            logits_CP, targets_C.contiguous(), vocab=vocab, label_smoothing=label_smoothing, gradient=gradient
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


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, the products of narrower inputs added up in it."""
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if a.device.type == "cuda" and dtype == torch.float32:
        made = torch.mm(a, b, out_dtype=dtype)
    else:
        made = a.to(dtype) @ b.to(dtype)
    return made if total is None else total.add_(made)
