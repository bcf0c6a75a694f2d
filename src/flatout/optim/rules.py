"""The rules of a run: which optimizer its config asks for, for which parameters, by which schedules."""

import functools

from flatout.config.schema import OptimConfig
from flatout.optim.adamw import AdamW, EightBitAdamW, HostAdamW
from flatout.optim.optimizer import Rule, StateBytes, Trainable
from flatout.optim.schedule import Pace, rate_factors


def rules_of(
    config: OptimConfig,
    updates: int,
    pace: Pace | None = None,
    *,
    fused: bool = True,
    state: str = "fp32",
    offload: bool = False,
) -> tuple[Rule, ...]:
    """AdamW with moments in fp32 or 8 bits, on the device or on the host; decay for matrices only."""
    kind = HostAdamW if offload else EightBitAdamW if state == "8bit" else AdamW
    common = {
        "optimizer": functools.partial(kind, fused=fused),
        "bytes": kind.BYTES,
        "rate": [factor * config.learning_rate for factor in rate_factors(config, updates, pace)],
        "settings": {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps},
    }
    return (
        Rule(name="matrices", takes=decays, decay=config.weight_decay, **common),
        Rule(name="all that is left", takes=lambda _: True, **common),
    )


def decays(one: Trainable) -> bool:
    """Whether weight decay is for a tensor: matrices, but for what their module lists under `undecayed`.

    Biases, norms and residual scales have one dimension. Going by dimension, not by name, cannot miss a layer.
    """
    return one.matrix and one.name.rpartition(".")[2] not in getattr(one.module, "undecayed", ())


def state_bytes(config: OptimConfig, *, state: str, offload: bool) -> StateBytes:
    """Bytes of optimizer state for each parameter, before there is a model to deal out: the most of any rule.

    An average of the weights lies beside them, and a checkpoint holds both.
    """
    average = 4 if config.ema else 0
    sizes = [rule.bytes for rule in rules_of(config, 1, state=state, offload=offload)]
    return StateBytes(
        device=max(size.device for size in sizes) + average,
        host=max(size.host for size in sizes),
        checkpoint=max(size.checkpoint for size in sizes) + average,
    )
