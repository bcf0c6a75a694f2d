"""What a run came to: energy by the card's own readings, and cost by a price per hour.

Contract: nothing is guessed. Energy is the power between two readings of one start, so what passed before the first
and after the last of them is not in it. Cost counts steps, evaluations, samples and checkpoints; start-ups are not
recorded. Both cover all starts of a run that was resumed.
"""

from collections.abc import Sequence
from typing import Any

from flatout.observe.history import RunHistory
from flatout.observe.human import human_seconds
from flatout.observe.report.series import amount


def cost_figures(history: RunHistory, seconds: float, price: float | None) -> list[dict[str, str]]:
    """Figures for the top of the page; `seconds` is what the run took, `price` what an hour costs."""
    figures = []
    joules, read = energy(history.machine)
    if read > 0:
        ranks = amount(history.info.get("ranks")) or 1
        whose = "of the first rank's card alone" if ranks > 1 else "of the card alone"
        note = f"{joules / read:,.0f} W in {human_seconds(read)} of readings, {whose}"
        figures.append({"key": "energy", "label": "Energy", "text": f"{joules / 3.6e6:,.3g} kWh", "note": note})
    if price is not None and seconds > 0:
        note = f"{human_seconds(seconds)} at {price:g} per hour, without start-up"
        figures.append({"key": "cost", "label": "Cost", "text": f"{seconds / 3600 * price:,.2f}", "note": note})
    return figures


def energy(machine: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(joules, seconds) between readings; a clock that goes back is another start of the run."""
    joules = seconds = 0.0
    before: tuple[float, float] | None = None
    for row in machine:
        elapsed, power = amount(row.get("elapsed")), amount(row.get("power_watts"))
        if elapsed is None or power is None:
            continue
        if before is not None and elapsed > before[0]:
            joules += (elapsed - before[0]) * (power + before[1]) / 2
            seconds += elapsed - before[0]
        before = (elapsed, power)
    return joules, seconds
