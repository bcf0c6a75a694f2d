"""AdamW with decay on matrices only, its state by parameter name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError


def build_adamw(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """Weight decay goes to parameters of two or more dimensions; biases, norms and residual scales have one.

    Grouping by dimension, not by name, cannot miss a layer. The fused kernel takes its rate from a tensor on the
    device, so that the schedule needs no host.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = torch.tensor(config.learning_rate, device=parameters[0].device) if fused else config.learning_rate
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=None if fused else False,
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Moments and step counts under `PARAMETER.exp_avg` and so on; empty before the first update."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def assign_optimizer(
    model: nn.Module, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], origin: str
) -> None:
    """Puts saved moments back; the counterpart of `optimizer_tensors`."""
    names = dict(model.named_parameters())
    fused = bool(optimizer.defaults["fused"])
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name not in names:
            raise CheckpointError(f"{origin} holds optimizer state for unknown {name}", "it belongs to another model")
        parameter = names[name]
        if key == "step":  # the fused kernel counts on the device, the plain one on the host
            value = tensor.to(parameter.device) if fused else tensor.cpu()
        else:
            value = tensor.to(parameter.device, parameter.dtype)
        optimizer.state[parameter][key] = value.clone()
