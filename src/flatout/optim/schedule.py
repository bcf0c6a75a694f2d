"""Schedules as tables: a factor of the peak rate and Muon's momentum for every applied update.

A table, because an update skipped for a non-finite gradient must not advance the schedule, and only the device knows
about the skip: it looks the value up by its own count of applied updates, without telling the host.

Contract: no update has a rate of zero, which would waste it. A decay to a share of the peak ends with the last update.
One to zero would reach it one update later, as the schedules of transformers do, whose rates it has after the warm-up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.config.schema import OptimConfig

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
