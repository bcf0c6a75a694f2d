"""How far the eigenstate blocks of a run look back, read from its records: by layer, over training, and in a sentence.

Contract: takes rows of `RunHistory.eigenstates` of any age or damage; what is no number is missing, NaN and infinity
stay. A step comes once, as the last row that names it told it. Layers are numbers that count from 1; no text of a file
is handed on. A run without such blocks has no layers.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from flatout.observe.human import human_count
from flatout.observe.sinks import LARGEST, is_count
from flatout.records import EigenstateRecord

QUANTITIES = ("magnitude", "horizon", "period")
QUANTILES = ("min", "10%", "50%", "90%", "max")
MOST_LAYERS = 1000  # more than any model has; a damaged file could name any number


@dataclasses.dataclass(frozen=True)
class LayerHistory:
    """One block over training: `values[quantity][quantile]` and `beyond` have an entry for each of `steps`."""

    layer: int
    states: int | None
    steps: tuple[int, ...]
    values: dict[str, dict[str, tuple[float | None, ...]]]
    beyond: tuple[float | None, ...]

    def last(self, quantity: str, quantile: str = "50%") -> float | None:
        return self.values[quantity][quantile][-1]

    def first(self, quantity: str, quantile: str = "50%") -> float | None:
        return self.values[quantity][quantile][0]


@dataclasses.dataclass(frozen=True)
class EigenstateHistory:
    """All eigenstate blocks of a run, from the input to the output; `context` is the one its records name."""

    context: int | None
    layers: tuple[LayerHistory, ...]

    @property
    def sentence(self) -> str:
        return memory_sentence([(layer.layer, layer.last("horizon")) for layer in self.layers], self.context)

    def middle(self, quantity: str) -> list[tuple[int, float]]:
        """(step, median over layers of their medians), where there is a finite one: a whole model as one curve."""
        found: dict[int, list[float]] = {}
        for layer in self.layers:
            for step, value in zip(layer.steps, layer.values[quantity]["50%"], strict=True):
                if value is not None and math.isfinite(value):
                    found.setdefault(step, []).append(value)
        return [(step, statistics.median(found[step])) for step in sorted(found)]


def eigenstate_history(rows: Sequence[dict[str, Any]]) -> EigenstateHistory:
    """What these rows tell, layer by layer."""
    by_step = {row["step"]: row for row in rows if is_count(row.get("step"))}
    context = next((row["context"] for row in reversed(by_step.values()) if is_count(row.get("context"), 1)), None)
    told: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for step in sorted(by_step):
        layers = by_step[step].get("layers")
        named = {
            layer["layer"]: layer
            for layer in (layers if isinstance(layers, list | tuple) else ())
            if isinstance(layer, dict) and is_count(layer.get("layer"), 1) and layer["layer"] <= MOST_LAYERS
        }
        for number, layer in named.items():
            told.setdefault(number, []).append((step, layer))
    return EigenstateHistory(context, tuple(_layer(number, told[number]) for number in sorted(told)))


def memory_sentence(medians: Sequence[tuple[int, float | None]], context: int | None) -> str:
    """Median horizons, from the shortest to the longest, with their layers; empty where none is known."""
    known = [(horizon, layer) for layer, horizon in medians if horizon is not None and not math.isnan(horizon)]
    if not known:
        return ""
    (short, first), (long, last) = min(known), max(known, key=lambda pair: pair[0])
    words = f"eigenstate memory: median horizon {short_tokens(short)} tokens"
    if short_tokens(short) != short_tokens(long):
        words += f" (layer {first}) to {short_tokens(long)} (layer {last})"
    else:
        count = len(known)
        words += f" (layer {first})" if count == 1 else " in both layers" if count == 2 else f" in all {count} layers"
    return words + (f", context {context:,}" if context else "")


def record_sentence(record: EigenstateRecord) -> str:
    return memory_sentence([(layer.layer, layer.horizon.get("50%")) for layer in record.layers], record.context)


def short_tokens(value: float) -> str:
    """A number of tokens: `3.2`, `181`, `8.2k`, `infinite`."""
    if not math.isfinite(value):
        return "infinite" if value > 0 else "NaN"
    return f"{value:.2g}" if value < 10 else human_count(value) if value < 1e15 else f"{value:.3g}"


def _layer(number: int, told: Sequence[tuple[int, dict[str, Any]]]) -> LayerHistory:
    def column(quantity: str, quantile: str) -> tuple[float | None, ...]:
        groups = [layer.get(quantity) for _, layer in told]
        return tuple(_number(group.get(quantile)) if isinstance(group, dict) else None for group in groups)

    counts = [layer["states"] for _, layer in told if is_count(layer.get("states"), 1)]
    return LayerHistory(
        layer=number,
        states=counts[-1] if counts else None,
        steps=tuple(step for step, _ in told),
        values={quantity: {name: column(quantity, name) for name in QUANTILES} for quantity in QUANTITIES},
        beyond=tuple(_number(layer.get("beyond")) for _, layer in told),
    )


def _number(value: Any) -> float | None:
    """A number that a float can hold, else None. Below zero is none of these: that is damage."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return float(value) if isinstance(value, float) or value <= LARGEST else None
