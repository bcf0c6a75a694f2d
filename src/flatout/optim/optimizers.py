"""The optimizer a run asks for, and its state by parameter name."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError
from flatout.optim.adamw import EightBitAdamW, HostAdamW, OurAdamW, dequantised


def build_adamw(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """torch's AdamW with everything on the model's device."""
    return build_optimizer(model, config, fused=fused)


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    fused: bool,
    state: str = "fp32",
    offload: bool = False,
    matrices: Sequence[nn.Parameter] | None = None,
    vectors: Sequence[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """AdamW with moments in fp32 or 8 bits, on the device or on the host.

    It moves `matrices` and `vectors`, of whatever shape they are held in, or else all that the model trains.

    The fused kernel takes its rate from a tensor on the device, so that the schedule needs no host.
    """
    if matrices is None:
        matrices, vectors = by_decay(model)
    parameters = [*matrices, *vectors]
    groups = [
        {"params": list(matrices), "weight_decay": config.weight_decay},
        {"params": list(vectors), "weight_decay": 0.0},
    ]
    rate = torch.tensor(config.learning_rate, device=parameters[0].device) if fused else config.learning_rate
    kind = HostAdamW if offload else EightBitAdamW if state == "8bit" else torch.optim.AdamW
    optimizer = kind(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=None if fused else False,
    )
    if kind is not HostAdamW:
        # torch's fused kernels and ours write weights without moving their versions, by which copies of weights in
        # narrower types are kept fresh. The host's optimizer does it by copying, and keeps book of it.
        optimizer.register_step_post_hook(lambda *_: increment_version(parameters))
    return optimizer


def by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What a model trains: (what decays, what does not).

    Weight decay goes to parameters of two or more dimensions; biases, norms and residual scales have one. Grouping by
    dimension, not by name, cannot miss a layer. What a module lists under `undecayed` is spared whatever its shape.
    """
    spared = {id(getattr(module, name)) for module in model.modules() for name in getattr(module, "undecayed", ())}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [parameter.ndim >= 2 and id(parameter) not in spared for parameter in trained]
    matrices = [parameter for parameter, decay in zip(trained, decays, strict=True) if decay]
    return matrices, [parameter for parameter, decay in zip(trained, decays, strict=True) if not decay]


def optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Moments and step counts under `PARAMETER.exp_avg` and so on; empty before the first update.

    8-bit moments are saved as they are, with their scales under `PARAMETER.exp_avg_scale`.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def assign_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], origin: str
) -> list[str]:
    """Puts saved moments back; the counterpart of `optimizer_tensors`. Returns what there is to tell.

    State saved in 8 bits comes back bit for bit into an 8-bit optimizer; between the two kinds it is converted.
    """
    saved: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise CheckpointError(f"{origin} holds optimizer state for unknown {name}", "it belongs to another model")
        saved.setdefault(name, {})[key] = tensor
    narrowed = widened = 0
    for name, moments in saved.items():
        parameter = parameters[name]
        stored_narrow = "exp_avg_scale" in moments
        wants_narrow = isinstance(optimizer, EightBitAdamW) and optimizer.quantised(parameter)
        if stored_narrow and isinstance(optimizer, EightBitAdamW) and wants_narrow:
            optimizer.state[parameter] = optimizer.fresh_moments(parameter)
            for key, value in moments.items():
                optimizer.state[parameter][key].copy_(value)
            continue
        if stored_narrow:
            moments = dequantised(moments, parameter)
            widened += 1
        narrowed += wants_narrow
        if isinstance(optimizer, OurAdamW):
            optimizer.place_moments(parameter, moments)
        else:
            optimizer.state[parameter] = _for_torch(parameter, moments, fused=bool(optimizer.defaults["fused"]))
    told = []
    if narrowed:
        told.append(f"the moments of {narrowed} tensors in {origin} are fp32: quantised to 8 bits")
    if widened:
        told.append(f"the moments of {widened} tensors in {origin} are in 8 bits: widened to fp32")
    return told


def _for_torch(parameter: Tensor, moments: Mapping[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
    state = {}
    for key, tensor in moments.items():
        if key == "step":  # the fused kernel counts on the device, the plain one on the host
            value = tensor.to(parameter.device) if fused else tensor.cpu()
        else:
            value = tensor.to(parameter.device, parameter.dtype)
        state[key] = value.clone()
    return state
