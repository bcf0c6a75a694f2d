"""Several ranks of a run: which is the slowest, and how long the others wait for it and for gradients."""

from collections.abc import Sequence

from flatout.records import slowest_over_median


def slowest_rank(seconds: Sequence[float]) -> str:
    """Which rank takes longest, against the median of all."""
    slowest, times = slowest_over_median(seconds)
    above = times - 1
    return f"rank {slowest}, {above:.1%} above the median" if above >= 0.005 else "none, all within 0.5%"


def exposed_share(reduction: float, busy: float) -> float:
    """The share of a rank's time in steps that it waits for the gradients of others."""
    whole = reduction + busy
    return reduction / whole if whole > 0 else 0.0


def ranks_line(seconds: Sequence[float], reduction: float) -> str:
    """A line for the terminal, by the first rank's own waiting."""
    share = exposed_share(reduction, seconds[0])
    return f"slowest rank: {slowest_rank(seconds)}; rank 0 waits {share:.1%} of its time for gradients"
