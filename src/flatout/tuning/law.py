"""What a model of some size learns from so many tokens: a scaling law to choose sizes by. No torch here.

Idea: loss = E + A / N^a + B / D^b + C / S, with N dense parameters, D tokens of which repeated ones count less, and S
steps. Only the choice has to be right, not the loss: near the best size the curve is flat.

Where the constants come from:
- Words (a vocabulary like GPT-2's): fitted to runs of `record` on enwik8, 16M, 51M and 124M parameters after 8M tokens,
  124M after 10M, 51M after 26M, which end between 2.90 and 3.65 (`benchmarks/time_to_loss.jsonl`); off by 0.03 at most,
  and by 0.05 with 353M after 26M.
  With powers of 0.5 it fits as well; 0.4 makes 7 tokens per parameter the best, nearer to the 12 of longer runs
  (nanochat, `scripts/base_train.py`, 92d63d4). C is from the batches of 51M parameters in `benchmarks/lab.jsonl`, 32K
  to 262K.
- Characters: fitted to 15 runs of `record` on Shakespeare, 0.10M, 0.34M and 0.79M parameters after 0.4M to 2.5M
  characters in 113 to 1,573 steps, ending between 1.63 and 1.86; off by 0.013 (root of the mean square). Ten of them
  are the grid of `docs/minutes.md`.
- Subwords (a small vocabulary learned from the text): the law of characters, times the 2.2 that a loss is larger by. Of
  two runs of 90 s the smaller model was better, as it says: 3.471 with 0.16M parameters, 3.550 with 0.43M.
- Repeated tokens: Muennighoff et al. 2023, "Scaling data-constrained language models", R* = 15.4, and less where there
  are many parameters for each token: the second epoch of enwik8, two parameters for each of its tokens, taught 51M of
  them as much as 0.45 of a fresh one (2.776 after two, 2.899 after one). Above two and a half epochs the presets turn
  to a strong decay, and a large model gets more out of a text that it has read: ten epochs of 12.7M tokens ended at
  3.77 with 16M parameters and at 3.57 with 51M, which a law with R* = 3 for both tells apart.
"""

import math
from dataclasses import dataclass

from flatout.config.sizes import FRESH_EPOCHS

# Epochs beyond the first after which repeated tokens teach hardly anything: so many, and fewer for a large model, but
# not fewer than the last where settings are those for repeated data.
_REPEATS, _REPEATS_BY_SIZE, _REPEATS_DECAYED = 15.4, 1.85, 3.0
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


WORDS = Law(floor=1.82, size=9866.0, size_power=0.6, data=778.0, data_power=0.4, steps=20.0)
CHARACTERS = Law(floor=1.256, size=70.0, size_power=0.5, data=203.5, data_power=0.5, steps=19.7)
SUBWORDS = Law(floor=2.76, size=154.0, size_power=0.5, data=448.0, data_power=0.5, steps=43.3)


def law_for(vocab: int) -> Law:
    return CHARACTERS if vocab <= _CHARACTERS else SUBWORDS if vocab <= _SUBWORDS else WORDS


def effective_tokens(tokens: float, unique: float | None, parameters: float) -> float:
    """Fresh tokens that teach a model as much as `tokens` of a text that has `unique` ones."""
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    least = _REPEATS_DECAYED * min(1.0, max(0.0, repeats + 1.5 - FRESH_EPOCHS))  # no jump between the settings
    most = min(_REPEATS, max(least, _REPEATS_BY_SIZE * unique / parameters))
    return unique * (1 + most * (1 - math.exp(-repeats / most)))
