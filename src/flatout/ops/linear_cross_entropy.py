"""Output head and loss in one operation: hidden states in, summed loss out.

The loss is a sum because only the training step knows the number of labelled tokens in the whole batch: a mean of means
over micro-batches would weigh tokens unequally. The softmax is in fp32 at least.

Three paths with the same result. `plain` keeps all logits: 6.6 GB for 65,536 tokens of GPT-2. `chunked` keeps none and
recomputes each chunk's logits in backward. `fused` differentiates each chunk while its logits exist: nothing is
computed twice, and only the gradients of the hidden states and of the weights are kept for backward.

Under torch.compile `fused` is a custom operation that contains the loop. A compiler that traces the loop may compute
the logits of many chunks first and keep them all; torch 2.11 cannot trace a sum of products in a wider type either.
Only the softmax between the two products is compiled, once for all chunks.

Shape legend: N tokens, W width, V vocabulary, P padded vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flatout.ops.gradients import gradient_type
from flatout.ops.kernels.cublaslt import multiply
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
    cap: float = 0.0,
) -> Tensor:
    """Sum of the cross-entropy over targets that are not IGNORED, as a scalar of at least fp32.

    With a `cap` above 0 logits are cap·tanh(logits / cap).
    """
    if path == "fused":
        # Decided here, because `ctx.needs_input_grad` does not depend on whether gradients are enabled.
        learning = torch.is_grad_enabled() and (hidden_NW.requires_grad or weight_VW.requires_grad)
        frozen = learning and not weight_VW.requires_grad
        how = (label_smoothing, pad_vocab, chunk, kernels, fp8, tuned, learning, frozen, cap)
        return _FusedLoss.apply(hidden_NW, weight_VW, targets_N, how)  # pyright: ignore
    if path == "plain" or hidden_NW.shape[0] <= chunk:
        return _plain_loss(hidden_NW, weight_VW, targets_N, label_smoothing, pad_vocab, cap)
    total = hidden_NW.new_zeros((), dtype=torch.promote_types(hidden_NW.dtype, torch.float32))
    kind = hidden_NW.device.type
    autocasting, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    # Each chunk casts the weight: with autocast's cached cast, gradients would be summed in the narrow type.
    with torch.autocast(kind, dtype, enabled=autocasting, cache_enabled=False):
        for hidden, targets in zip(hidden_NW.split(chunk), targets_N.split(chunk), strict=True):
            arguments = (hidden, weight_VW, targets, label_smoothing, pad_vocab, cap)
            total = total + checkpoint(_plain_loss, *arguments, use_reentrant=False, preserve_rng_state=False)
    return total


def _plain_loss(
    hidden_NW: Tensor, weight_VW: Tensor, targets_N: Tensor, label_smoothing: float, pad_vocab: int, cap: float
) -> Tensor:
    logits_NV = padded_logits(hidden_NW, weight_VW, pad_vocab, cap)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


def padded_logits(hidden: Tensor, weight_VW: Tensor, pad_vocab: int, cap: float = 0.0) -> Tensor:
    """`hidden @ weight.T` in at least fp32; the product is computed with V rounded up to a multiple of `pad_vocab`.

    Matrix units are fast only if rows have a multiple of 8 elements. The padding exists in this product only, not in
    the parameter, its optimizer state or checkpoints.
    """
    vocab = weight_VW.shape[0]
    missing = -vocab % pad_vocab
    padded_PW = weight_VW if missing == 0 else F.pad(weight_VW, (0, 0, 0, missing))
    logits = F.linear(hidden, padded_PW)[..., :vocab] if missing else F.linear(hidden, padded_PW)
    logits = logits.float() if logits.element_size() < 4 else logits
    return cap * torch.tanh(logits / cap) if cap > 0.0 else logits


class _FusedLoss(torch.autograd.Function):
    """Computes the loss and, chunk by chunk, its gradients; backward only scales them by the gradient of the sum."""

    @staticmethod
    def forward(ctx, hidden_NW, weight_VW, targets_N, how):
        kind = hidden_NW.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NW.dtype
        work = _Work(*how)
        if torch.compiler.is_compiling():
            # Cast outside of the operation, so that the compiler can fuse it with the norm before.
            total, *gradients = _one_operation(hidden_NW.to(narrow), weight_VW, targets_N, *how)
        else:
            total, *gradients = room = work.room(hidden_NW, weight_VW, narrow)
            work.fill(room, hidden_NW, weight_VW, targets_N, narrow)
        ctx.save_for_backward(*gradients)
        ctx.hidden_dtype, ctx.vocab = hidden_NW.dtype, weight_VW.shape[0]
        ctx.weight_dtype = weight_VW.dtype if torch.compiler.is_compiling() else gradient_type(weight_VW)
        ctx.kernels = work.kernels
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dhidden_NW, *of_weight = ctx.saved_tensors  # a frozen head has none
        # Both belong to this function and are used once, so scale them in place; a compiler does that by itself.
        if ctx.kernels == "triton":
            from flatout.ops.kernels.launch import scale_in_place as scaled
        else:
            scaled = torch.mul if torch.compiler.is_compiling() else torch.Tensor.mul_
        return (
            scaled(dhidden_NW, dtotal).to(ctx.hidden_dtype),
            scaled(of_weight[0], dtotal)[: ctx.vocab].to(ctx.weight_dtype) if of_weight else None,
            None,
            None,
        )


@dataclasses.dataclass(frozen=True)
class _Work:
    """How the fused loss is computed."""

    label_smoothing: float
    pad_vocab: int
    chunk: int
    kernels: str
    fp8: bool
    tuned: bool
    learning: bool
    frozen: bool  # no gradient of the weights
    cap: float  # 0: no cap

    def room(self, hidden_NW: Tensor, weight_VW: Tensor, narrow: torch.dtype) -> list[Tensor]:
        """Output tensors: the summed loss, and when learning the gradients of hidden states and padded weights.

        `narrow` is the type of products.
        """
        exact = torch.promote_types(narrow, torch.float32)
        total = hidden_NW.new_empty((), dtype=exact)
        if not self.learning:
            return [total]
        dhidden_NW = torch.empty_like(hidden_NW, dtype=narrow)
        if self.frozen:
            return [total, dhidden_NW]
        dweight_PW = hidden_NW.new_empty((self.padded(weight_VW.shape[0]), weight_VW.shape[1]), dtype=exact)
        return [total, dhidden_NW, dweight_PW]

    def padded(self, vocab: int) -> int:
        return vocab + -vocab % (math.lcm(self.pad_vocab, 16) if self.fp8 else self.pad_vocab)

    def rows_loss(self, *, compiled: bool) -> Callable[..., Tensor]:
        """The softmax of a chunk."""
        if self.kernels == "triton":
            from flatout.ops.kernels.cross_entropy import cross_entropy_rows

            return cross_entropy_rows
        return _compiled_rows_loss() if compiled else _torch_rows_loss

    def fill(
        self,
        room: list[Tensor],
        hidden_NW: Tensor,
        weight_VW: Tensor,
        targets_N: Tensor,
        narrow: torch.dtype,
        *,
        compiled: bool = False,
    ) -> None:
        total, *gradients = room
        total.zero_()
        vocab, width = weight_VW.shape
        rows_loss, how = self.rows_loss(compiled=compiled), (vocab, self.label_smoothing, self.learning, self.cap)
        with torch.autocast(hidden_NW.device.type, enabled=False):
            weight_PW = weight_VW.to(narrow)
            if self.padded(vocab) != vocab:
                weight_PW = weight_VW.new_zeros((self.padded(vocab), width), dtype=narrow)
                weight_PW[:vocab] = weight_VW
            head = _NarrowHead(hidden_NW, weight_PW, self.learning) if self.fp8 else None
            for start in range(0, hidden_NW.shape[0], self.chunk):
                part = slice(start, start + self.chunk)
                hidden_CW, targets_C = hidden_NW[part].to(narrow), targets_N[part].contiguous()
                if head is None:
                    logits_CP, beside = multiply(hidden_CW, weight_PW.t(), tuned=self.tuned), {}
                else:
                    logits_CP = head.logits(part, narrow)
                    beside = head.room_for_gradient(logits_CP) if self.learning else {}
                total += rows_loss(logits_CP, targets_C, *how, **beside).sum(dtype=total.dtype)
                if not self.learning:
                    continue
                dhidden_NW, *of_weight = gradients  # the logits are their own gradient by now
                if head is None:
                    multiply(logits_CP, weight_PW, out=dhidden_NW[part], tuned=self.tuned)
                else:
                    head.input_gradient(logits_CP, **beside, out=dhidden_NW[part])
                if of_weight:
                    _write_product(of_weight[0], logits_CP.t(), hidden_CW, self.tuned, add=start > 0)
                del logits_CP


@torch.library.custom_op("flatout::loss_and_gradients", mutates_args=())
def _one_operation(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    targets_N: Tensor,
    label_smoothing: float,
    pad_vocab: int,
    chunk: int,
    kernels: str,
    fp8: bool,
    tuned: bool,
    learning: bool,
    frozen: bool,
    cap: float,
) -> list[Tensor]:
    """The fused loss as an opaque operation for compiled code. Products are in the type of `hidden_NW`.

    The softmax is compiled on a GPU only: a CPU spends its time in the products, and compiling is slow.
    """
    work = _Work(label_smoothing, pad_vocab, chunk, kernels, fp8, tuned, learning, frozen, cap)
    room = work.room(hidden_NW, weight_VW, hidden_NW.dtype)
    # torch runs the first call of compiled code in a mode in which tensors look different to the compiler. Inference
    # tensors always look the same: the softmax is compiled once, and never while a graph is recorded. The returned
    # tensors were made outside of inference mode.
    with torch.inference_mode():
        work.fill(room, hidden_NW, weight_VW, targets_N.clone(), hidden_NW.dtype, compiled=hidden_NW.is_cuda)
    return room


@_one_operation.register_fake
def _(hidden_NW, weight_VW, targets_N, *how):
    return _Work(*how).room(hidden_NW, weight_VW, hidden_NW.dtype)


@functools.cache
def _compiled_rows_loss() -> Callable[..., Tensor]:
    """Compiled once for all chunks, and once more for a shorter last chunk."""
    return torch.compile(_torch_rows_loss, dynamic=False)


class _NarrowHead:
    """The head's products for logits and hidden states in 8 bits. Hidden states and weights are rounded once."""

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

    def room_for_gradient(self, logits_CP: Tensor) -> dict[str, Tensor]:
        """A tensor in which the loss kernel also writes the gradient in 8 bits; on CUDA only."""
        return {"narrow_NP": torch.empty_like(logits_CP, dtype=E4M3)} if logits_CP.is_cuda else {}

    def input_gradient(self, dlogits_CP: Tensor, *, narrow_NP: Tensor | None = None, out: Tensor) -> None:
        narrow_CP = self.fp8.narrow_gradient(dlogits_CP) if narrow_NP is None else narrow_NP
        turned_WP = self.weight.turned_CR
        assert turned_WP is not None
        units = self.gradient_unit, self.weight.unit
        self.fp8.narrow_product(narrow_CP, units[0], turned_WP, units[1], out.dtype, out=out)


def _torch_rows_loss(
    logits_CP: Tensor, targets_C: Tensor, vocab: int, label_smoothing: float, gradient: bool, cap: float = 0.0
) -> Tensor:
    """Loss per row; `gradient`: overwrites the logits with their gradient."""
    wide = logits_CP[:, :vocab].to(torch.promote_types(logits_CP.dtype, torch.float32))
    if cap > 0.0:
        wide = torch.tanh(wide / cap)
    log_p_CV = torch.log_softmax(cap * wide if cap > 0.0 else wide, dim=-1)
    labelled_C = targets_C != IGNORED
    index_C1 = targets_C.clamp(min=0)[:, None]
    losses_C = (label_smoothing - 1) * log_p_CV.gather(1, index_C1)[:, 0]
    if label_smoothing > 0:
        losses_C = losses_C - label_smoothing * log_p_CV.mean(dim=-1)
    if gradient:
        if torch.compiler.is_compiling():  # can be fused; a scatter would need a wide copy in memory
            hit_CV = index_C1 == torch.arange(vocab, device=logits_CP.device)
            share_CV = log_p_CV.exp() - label_smoothing / vocab - (1 - label_smoothing) * hit_CV
        else:
            share_CV = log_p_CV.exp_().sub_(label_smoothing / vocab)
            share_CV.scatter_add_(1, index_C1, torch.full_like(share_CV[:, :1], label_smoothing - 1.0))
        if cap > 0.0:
            share_CV = share_CV * (1 - wide.square())
        logits_CP[:, :vocab] = share_CV * labelled_C[:, None]
        logits_CP[:, vocab:] = 0.0
    return losses_C * labelled_C


def _write_product(into: Tensor, a: Tensor, b: Tensor, tuned: bool, *, add: bool) -> None:
    """Writes a @ b to `into`, which has the same or a wider type, or adds it; sums are in that type."""
    if a.dtype == into.dtype:
        into.addmm_(a, b) if add else torch.mm(a, b, out=into)
    elif a.device.type != "cuda" or into.dtype != torch.float32:
        made = a.to(into.dtype) @ b.to(into.dtype)
        into.add_(made) if add else into.copy_(made)
    else:
        multiply(a, b, out=into, add=add, tuned=tuned)
