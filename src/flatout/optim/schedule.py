"""Schedules as tables: a factor of the peak rate, a decay and Muon's momentum for every applied update.

A table, because an update skipped for a non-finite gradient must not advance the schedule, and only the device knows
about the skip: it looks the value up by its own count of applied updates, without telling the host.

Contract: no update has a rate of zero, which would waste it. A decay to a share of the peak ends with the last update.
One to zero would reach it one update later, as the schedules of transformers do, whose rates it has after the warm-up.
"""

import math

from flatout.config.schema import OptimConfig


def rate_factors(config: OptimConfig, updates: int) -> list[float]:
    """Factor of the peak rate for updates 0 .. updates-1. Never zero, never rising again past the end."""
    return [_factor(config, update, updates) for update in range(max(updates, 1))]


def decays_of(config: OptimConfig, updates: int) -> float | list[float]:
    """Weight decay: a number, or for every update one on the way to `weight_decay_end`, which the last update has."""
    start, end = config.weight_decay, config.weight_decay_end
    if end is None or end == start:
        return start
    last = max(1, updates - 1)
    return [start + (end - start) * min(1.0, update / last) for update in range(max(updates, 1))]


def momenta(config: OptimConfig, updates: int) -> list[float]:
    """Muon's momentum: up during its warm-up, and down again in the last updates of a cool-down."""
    low, high = config.momentum_start, config.momentum
    found = []
    for update in range(max(updates, 1)):
        risen = min(1.0, update / config.momentum_warmup_steps) if config.momentum_warmup_steps else 1.0
        if config.momentum_cooldown_steps:
            risen = min(risen, (updates - update) / config.momentum_cooldown_steps)
        found.append(low + (high - low) * risen)
    return found


def _factor(config: OptimConfig, update: int, updates: int) -> float:
    warmup = min(config.warmup_steps, updates)
    if update < warmup:
        rising = (update + 1) / warmup
        if config.schedule == "one-cycle":  # one-cycle rises along a cosine from 1/25 of the peak
            return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * rising)) / 2
        return rising
    if config.schedule == "constant":
        return 1.0
    floor, start = config.min_ratio, warmup
    if config.schedule == "wsd":
        start = cooling_from(config, updates)
    share = _share(update, start, updates, ends_after=floor == 0.0)
    if config.schedule in ("linear", "wsd"):
        return 1.0 - (1.0 - floor) * share
    return floor + (1.0 - floor) * (1 + math.cos(math.pi * share)) / 2


def cooling_from(config: OptimConfig, updates: int) -> int:
    """The update from which wsd decays."""
    return max(min(config.warmup_steps, updates), updates - max(1, round(config.decay_fraction * updates)))


def _share(update: int, start: int, end: int, *, ends_after: bool) -> float:
    """How far `update` is from `start` to the last update, or to the one that would come after it, in 0 .. 1."""
    if update < start:
        return 0.0
    return min(1.0, (update - start + (not ends_after)) / max(1, end - start))
