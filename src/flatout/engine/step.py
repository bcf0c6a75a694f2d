"""One optimizer step: micro-batches in, an update out, and no word to the host in between.

Contract:
- The loss is the mean over the labelled tokens of the WHOLE step. Micro-batches add their summed losses; nothing
  depends on how the batch is cut.
- A non-finite loss or gradient norm never reaches the weights: the device itself turns the update into nothing, and
  neither the moments, nor the schedule, nor the count of updates move.
- Order: backward of all micro-batches, norm, unscale and clip, update. With the fused optimizer unscaling and clipping
  are one division inside its kernel.
Trap: reading any of the returned tensors stalls the device. The loop reads them late.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from flatout.ops.reference import IGNORED

CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


@dataclasses.dataclass
class LossScale:
    """fp16's loss scale, on the device: halved by an overflow, doubled after `interval` updates without one."""

    scale: Tensor
    good_updates: Tensor
    interval: int = 2000

    @classmethod
    def start(cls, device: torch.device) -> "LossScale":
        return cls(torch.tensor(2.0**16, device=device), torch.tensor(0, dtype=torch.int64, device=device))

    def update(self, finite: Tensor) -> None:
        good = torch.where(finite, self.good_updates + 1, torch.zeros_like(self.good_updates))
        grow = good >= self.interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.mul_(factor)
        self.good_updates.copy_(torch.where(grow, torch.zeros_like(good), good))


class TrainStep:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        *,
        rates: list[float],
        clip: float,
        micro_batch: int,
        label_smoothing: float = 0.0,
        loss_scale: LossScale | None = None,
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        first = next(model.parameters())
        self.model = model
        self.optimizer = optimizer
        self.clip = clip
        self.micro_batch = micro_batch
        self.label_smoothing = label_smoothing
        self.loss_scale = loss_scale
        self.scope = scope
        self.fused = bool(optimizer.defaults["fused"])
        self.rates = torch.tensor(rates, dtype=torch.float64).to(first.device, torch.float32)
        self.updates = torch.zeros((), dtype=torch.int64, device=first.device)
        self.one = torch.ones((), dtype=torch.float32, device=first.device)

    def __call__(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Five numbers on the device: loss, gradient norm before clipping, applied (0 or 1), rate, loss scale."""
        self.model.train()
        with self.scope():
            loss = self.accumulate(tokens_BT, targets_BT)
            return self._update(loss)

    def accumulate(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Adds the gradients of the whole batch and returns its mean loss."""
        labelled = (targets_BT != IGNORED).sum().clamp(min=1)
        total = None
        for start in range(0, tokens_BT.shape[0], self.micro_batch):
            part = slice(start, start + self.micro_batch)
            loss_sum = self.model(tokens_BT[part], targets_BT[part], self.label_smoothing)
            mean = loss_sum / labelled
            (mean if self.loss_scale is None else mean * self.loss_scale.scale).backward()
            total = mean.detach() if total is None else total + mean.detach()
        assert total is not None, "a batch has at least one sequence"
        return total

    @torch.no_grad()
    def _update(self, loss: Tensor) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        scale = self.one if self.loss_scale is None else self.loss_scale.scale
        norm = torch.nn.utils.get_total_norm(gradients) / scale
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        excess = ((norm + CLIP_EPS) / self.clip).clamp(min=1.0) if self.clip > 0 else self.one
        # index_select, because plain indexing by a tensor of no dimensions asks the device for its value and waits
        rate = self.rates.index_select(0, self.updates.clamp(max=len(self.rates) - 1).view(1)).squeeze(0)
        report = torch.stack([loss.to(rate.dtype), norm.to(rate.dtype), finite.to(rate.dtype), rate, scale.clone()])
        if self.fused:
            self._fused_update(rate, divisor=(scale * excess).float(), finite=finite)
        elif bool(finite):
            self._plain_update(gradients, float(rate), divisor=scale * excess)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self.updates.add_(finite)
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _fused_update(self, rate: Tensor, divisor: Tensor, finite: Tensor) -> None:
        # The fused kernel divides gradients by `grad_scale` and does nothing at all where `found_inf` is 1: made for
        # fp16 scaling, used here for clipping and for the non-finite guard too.
        for group in self.optimizer.param_groups:
            group["lr"].copy_(rate)
        optimizer: torch.optim.Optimizer = self.optimizer
        optimizer.grad_scale = divisor  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = (~finite).to(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()

    def _plain_update(self, gradients: list[Tensor], rate: float, divisor: Tensor) -> None:
        for gradient in gradients:
            gradient.div_(divisor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
