"""The rules of a run: which optimizer its config asks for, for which parameters, by which schedules.

Schedules as tables: a factor of the peak rate and Muon's momentum for every applied update.

A table, because an update skipped for a non-finite gradient must not advance the schedule, and only the device knows
about the skip: it looks the value up by its own count of applied updates, without telling the host.

Contract: no update has a rate of zero, which would waste it. A decay to a share of the peak ends with the last update.
One to zero would reach it one update later, as the schedules of transformers do, whose rates it has after the warm-up.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatout.config.schema import OptimConfig
from flatout.optim.adamw import AdamW, EightBitAdamW, HostAdamW
from flatout.optim.muon import Exchange, Muon
from flatout.optim.optimizers import MATRICES, Rule, StateBytes, Trainable

# Muon's memory of the gradient at the first update, the updates over which it rises, and where it stays.
_MOMENTUM_START, _MOMENTUM_WARMUP, _MOMENTUM = 0.85, 100, 0.95


@dataclass(frozen=True)
class Pace:
    """Updates of different sizes, those of `train.batch_stages`: schedules then decay over tokens, not over updates.

    `places` says how far the run has come before each update and after the last, from 0 to the number of updates;
    `factors` are what the rates of each update are multiplied by.
    """

    places: Sequence[float]
    factors: Sequence[float]


def rate_factors(config: OptimConfig, updates: int, pace: Pace | None = None) -> list[float]:
    """Factor of the peak rate for updates 0 .. updates-1. Never zero, never rising again past the end."""
    count = max(updates, 1)
    if pace is None:
        return [_factor(config, update, updates, range(count + 1)) for update in range(count)]
    return [_factor(config, update, updates, pace.places) * pace.factors[update] for update in range(count)]


def momenta(updates: int) -> list[float]:
    """Muon's momentum, which rises during its warm-up."""
    rise = _MOMENTUM - _MOMENTUM_START
    return [_MOMENTUM_START + rise * min(1.0, update / _MOMENTUM_WARMUP) for update in range(max(updates, 1))]


def _factor(config: OptimConfig, update: int, updates: int, places: Sequence[float]) -> float:
    warmup = min(config.warmup_steps, updates)
    if update < warmup:
        rising = (update + 1) / warmup
        if config.schedule == "one-cycle":  # one-cycle rises along a cosine from 1/25 of the peak
            return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * rising)) / 2
        return rising
    if config.schedule == "constant":
        return 1.0
    floor, start = config.min_ratio, places[warmup]
    if config.schedule == "wsd":
        start = max(start, updates - max(1, round(config.decay_fraction * updates)))
    # A decay to a share of the peak counts the update itself, one to zero does not.
    share = 0.0
    if places[update] >= start:
        share = min(1.0, (places[update + (floor > 0.0)] - start) / max(1, updates - start))
    if config.schedule in ("linear", "wsd"):
        return 1.0 - (1.0 - floor) * share
    return floor + (1.0 - floor) * (1 + math.cos(math.pi * share)) / 2


def cooling_from(config: OptimConfig, updates: int) -> int:
    """The update from which wsd decays."""
    return max(min(config.warmup_steps, updates), updates - max(1, round(config.decay_fraction * updates)))


def rules_of(
    config: OptimConfig,
    updates: int,
    pace: Pace | None = None,
    *,
    fused: bool = True,
    state: str = "fp32",
    offload: bool = False,
    exchange: Exchange | None = None,
) -> tuple[Rule, ...]:
    """AdamW with moments in fp32 or 8 bits, on the device or on the host; decay for matrices only.

    With Muon the matrices of blocks are Muon's, decay is for them alone, and AdamW has the rest. Embedding, head and
    tables may have a decay of their own. `exchange` is how several processes share Muon's work.
    """
    kind = HostAdamW if offload else EightBitAdamW if state == "8bit" else AdamW
    factors, decay = rate_factors(config, updates, pace), config.weight_decay
    common: dict[str, Any] = {
        "optimizer": functools.partial(kind, fused=fused),
        "bytes": kind.BYTES,
        "settings": {"beta1": config.betas[0], "beta2": config.betas[1], "eps": config.kind.eps},
    }

    def rule(name: str, takes: Callable[[Trainable], bool], peak: float, **others: Any) -> Rule:
        return Rule(name=name, takes=takes, rate=[factor * peak for factor in factors], **{**common, **others})

    table_rate = config.embedding_rate if config.table_rate is None else config.table_rate
    peaks = {"embedding": config.embedding_rate, "head": config.head_rate, "table": table_rate}
    decays_of_roles = {"embedding": config.embedding_decay, "head": config.head_decay, "table": config.table_decay}
    own = {role: decay for role, decay in decays_of_roles.items() if decay is not None}

    def roles(usual: float) -> list[Rule]:
        return [
            rule(role, _plays(role), peak or config.learning_rate, decay=own.get(role, usual))
            for role, peak in peaks.items()
        ]

    if config.kind.matrices_only:
        how = {"normuon": config.kind.normed, "fused": fused, "exchange": exchange}
        how = {
            "optimizer": functools.partial(Muon, **how),
            "bytes": Muon.BYTES,
            "settings": {"momentum": momenta(updates)},
        }
        first = rule(MATRICES, in_a_block, config.muon_rate, decay=decay, **how)
        return (first, *roles(0.0), rule("other", lambda _: True, config.learning_rate))
    return (
        *(rule for rule in roles(decay) if peaks[rule.name] is not None or rule.name in own),
        rule(MATRICES, decays, config.learning_rate, decay=decay),
        rule("other", lambda _: True, config.learning_rate),
    )


def decays(one: Trainable) -> bool:
    """Whether weight decay is for a tensor: matrices, but for what their module lists under `undecayed`.

    Biases, norms and residual scales have one dimension. Going by dimension, not by name, cannot miss a layer.
    """
    return one.matrix and one.name.rpartition(".")[2] not in getattr(one.module, "undecayed", ())


def in_a_block(one: Trainable) -> bool:
    """Whether Muon takes a tensor: a matrix that decays, in a module of a list, as blocks are, and no table or head.

    The same holds for a model from Python. One without lists leaves Muon nothing.
    """
    inside = any(word.isdigit() for word in one.name.split("."))
    return bool(one.parts) and decays(one) and role_of(one) is None and inside


def role_of(one: Trainable) -> str | None:
    """The role that a tensor's module gives it, such as embedding or head; any other embedding is a table."""
    role = getattr(one.module, "role", None)
    if isinstance(role, str):
        return role
    return "table" if isinstance(one.module, nn.Embedding) else None


def _plays(role: str) -> Callable[[Trainable], bool]:
    return lambda one: role_of(one) == role


def state_bytes(config: OptimConfig, *, state: str, offload: bool, matrices: float = 0.0) -> StateBytes:
    """Bytes of optimizer state for each parameter, on average, before there is a model to deal out.

    `matrices` is the share of the parameters that are matrices of blocks. An average of the weights lies beside them,
    and a checkpoint holds both.
    """
    average = 4 if config.ema else 0
    known = config.model_copy(update={"warmup": 0})  # may be a share, which bytes do not depend on
    first, *_, last = (rule.bytes for rule in rules_of(known, 1, state=state, offload=offload))
    share = matrices if config.kind.matrices_only else 0.0
    return StateBytes(
        device=share * first.device + (1 - share) * last.device + average,
        host=share * first.host + (1 - share) * last.host,
        checkpoint=share * first.checkpoint + (1 - share) * last.checkpoint + average,
    )
