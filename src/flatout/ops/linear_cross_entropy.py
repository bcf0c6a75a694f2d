"""Output head and loss in one operation: hidden states in, summed loss out.

The sum, not the mean: only the training step knows how many labelled tokens the whole batch has, and a mean of means
over micro-batches would weigh them wrongly. The softmax runs in fp32 at least.

Shape legend: N tokens, W width, V vocabulary, P padded vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

from flatout.ops.reference import IGNORED


def linear_cross_entropy(
    hidden_NW: Tensor, weight_VW: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0, pad_vocab: int = 1
) -> Tensor:
    """Sum of the cross-entropy over targets that are not IGNORED, as a scalar of at least fp32."""
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
