"""The time that a ladder may take, and how much of it a rung gets.

Contract: the first rung is always measured. No rung is begun that could not be judged in the time that is left, and one
that is under way ends at the limit with what it has.
"""

import math
import time
from typing import final

from flatout.errors import UsageError
from flatout.tuning.compare import LOOKS
from flatout.tuning.plan import Plan

SITTING_SECONDS = 30.0  # over one rung
PATIENCE = 3  # how many times as long a slow rung may take for ten pairs of turns


@final
class Clock:
    """The seconds that the whole ladder may take, if there is such a limit, and how they are dealt out."""

    def __init__(self, limit: float | None, parity_steps: int) -> None:
        self.limit = limit
        self.began = time.monotonic()
        # A rung needs the steps of its gate, and ten pairs of turns before anything can be said of it.
        self.steps = parity_steps + 2 * LOOKS[0]
        self.typical = 0.0  # seconds of a step, as far as is known

    @property
    def left(self) -> float:
        return math.inf if self.limit is None else self.limit - (time.monotonic() - self.began)

    @property
    def up(self) -> bool:
        """Whether the time that is left is too short for another rung."""
        return self.left < self.steps * self.typical

    def sitting(self, rungs: int) -> tuple[float, float]:
        """About how many seconds to sit over a rung, of so many that are to come, and how many at the very most."""
        share = self.left / rungs - self.steps * self.typical
        enough = max(share, 2 * LOOKS[0] * self.typical)
        return min(SITTING_SECONDS, enough), min(PATIENCE * SITTING_SECONDS, max(self.left, 0.0))

    def check(self, plan: Plan, seconds: float) -> None:
        """Refuses a limit that cannot hold the reference and one rung, when a step takes so many seconds."""
        self.typical = seconds
        self.steps = plan.parity_steps + 2 * LOOKS[0] * max(1, len(plan.chosen))  # a turn takes all chosen steps
        needed = (plan.parity_steps + self.steps) * seconds
        if self.limit is None or needed <= self.limit:
            return
        context, tokens = plan.settings.config.model.context, plan.batch_tokens
        fewer = int(tokens * self.limit / needed) // context * context
        smaller = f", or a smaller step: --batch-tokens {fewer}" if fewer else ""
        if plan.chosen:
            smaller = ", or a smaller step: chat.batch_samples"
        raise UsageError(
            f"a step of {tokens:,} tokens takes {seconds:.3g} s here, and one rung with its parity check about "
            f"{needed:.1f} s: more than --seconds {self.limit:g}",
            f"give it more --seconds{smaller}",
        )
