"""What a model of some size learns from so many tokens: a scaling law to choose sizes by. No torch here.

Idea: loss = E + A / N^a + B / D^b + C / S, with N dense parameters, D tokens of which repeated ones count less, and S
steps. Only the choice has to be right, not the loss: near the best size the curve is flat.

Where the constants come from:
- Words (a vocabulary like GPT-2's): a = b = 0.3, and A and B such that 12 tokens per parameter are best, as nanochat
  found (`scripts/base_train.py`, 92d63d4), and that 51M parameters on 26M tokens of enwik8 end at 3.10, as in
  `benchmarks/lab.jsonl`. C is from the batches of that size there, 32K to 262K.
- Characters: fitted to 15 runs of `record` on Shakespeare, 0.10M, 0.34M and 0.79M parameters after 0.4M to 2.5M
  characters in 113 to 1,573 steps, ending between 1.63 and 1.86; off by 0.013 (root of the mean square). Ten of them
  are the grid of `docs/minutes.md`.
- Subwords (a small vocabulary learned from the text): the law of characters, times the 2.2 that a loss is larger by. Of
  two runs of 90 s the smaller model was better, as it says: 3.471 with 0.16M parameters, 3.550 with 0.43M.
- Repeated tokens: Muennighoff et al. 2023, "Scaling data-constrained language models", R* = 15.4.
"""

import math
from dataclasses import dataclass

_REPEATS = 15.4  # epochs beyond the first after which repeated tokens teach hardly anything
_CHARACTERS, _SUBWORDS = 300, 8000  # vocabularies up to so many ids


@dataclass(frozen=True)
class Law:
    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    steps: float

    def loss(self, parameters: float, tokens: float, steps: float) -> float:
        """The loss after `tokens` fresh tokens in so many steps."""
        return (
            self.floor
            + self.size / parameters**self.size_power
            + self.data / max(tokens, 1.0) ** self.data_power
            + self.steps / max(steps, 1.0)
        )


WORDS = Law(floor=2.0, size=63.0, size_power=0.3, data=133.0, data_power=0.3, steps=59.0)
CHARACTERS = Law(floor=1.256, size=70.0, size_power=0.5, data=203.5, data_power=0.5, steps=19.7)
SUBWORDS = Law(floor=2.76, size=154.0, size_power=0.5, data=448.0, data_power=0.5, steps=43.3)


def law_for(vocab: int) -> Law:
    return CHARACTERS if vocab <= _CHARACTERS else SUBWORDS if vocab <= _SUBWORDS else WORDS


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Fresh tokens that teach as much as `tokens` of a text that has `unique` ones."""
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    return unique * (1 + _REPEATS * (1 - math.exp(-repeats / _REPEATS)))
