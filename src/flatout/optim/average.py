"""An exponential moving average of the weights, in fp32 like them and beside them.

After every applied update the average moves by 1 - min(decay, (1 + n) / (10 + n)) of the way towards the weights, where
n counts applied updates: the memory is short at first, since a long one would mostly hold the first weights.

Contract: elementwise and without a host sync, so it serves slices of weights as well; a skipped update does not move
the average. `swap` exchanges average and weights bit for bit, where both lie.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.optim.optimizers import Trainable

AT_ONCE = 2**26  # elements whose distance to the weights is held while the average moves
PIECE = 2**22  # elements that are exchanged at once: so few that there is room for a copy of them


class Average:
    """The average of all that optimizers update, by name."""

    @torch.no_grad()
    def __init__(self, trained: Sequence[Trainable], decay: float) -> None:
        self.weights: dict[str, nn.Parameter] = {one.name: one.parameter for one in trained}
        narrow = next((name for name, weight in self.weights.items() if weight.dtype.itemsize < 4), None)
        if narrow is not None:
            told = str(self.weights[narrow].dtype).removeprefix("torch.")
            raise ConfigError(f"optim.ema needs weights in fp32, and {narrow} is in {told}", "set optim.ema=0")
        self.values = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.decay = torch.tensor(decay, dtype=torch.float64).to(trained[0].parameter.device, torch.float32)
        self._groups = _groups(self.values)

    @torch.no_grad()
    def update(self, updates: Tensor, finite: Tensor) -> None:
        """Follows the weights after an update; `updates` counts those that were applied, this one included."""
        count = updates.float()
        share = (1 - torch.minimum(self.decay, (1 + count) / (10 + count))) * finite
        for names in self._groups:
            values = [self.values[name] for name in names]
            weights = [self.weights[name].detach() for name in names]
            ways = torch._foreach_sub(weights, values)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(ways, share)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(values, ways)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and average, piece by piece: there is no memory for a third copy of all."""
        for name, weight in self.weights.items():
            pieces = (tensor.view(-1).split(PIECE) for tensor in (weight.detach(), self.values[name]))
            for ours, theirs in zip(*pieces, strict=True):
                held = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(held)

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts a saved average back."""
        for name, value in self.values.items():
            value.copy_(tensors[name])


def _groups(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors that are worked on together; a larger one than `AT_ONCE` is alone."""
    groups: list[list[str]] = []
    size = AT_ONCE
    for name, value in values.items():
        if size + value.numel() > AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += value.numel()
    return groups
