"""What a model of some size learns from so many tokens: a scaling law to choose sizes by. No torch here.

Idea: loss = E + A / N^a + B / D^b + C / S, with N dense parameters, D tokens of which repeated ones count less, and S
steps. Only the choice has to be right, not the loss: near the best size the curve is flat.

Where the constants come from:
- Words (a vocabulary like GPT-2's): fitted to the runs of `record` on enwik8 that `tests/unit/test_minutes.py` lists,
  of 16M to 353M parameters, 8M to 130M tokens, 0.3 to 5 epochs, ending between 2.65 and 3.65; off by 0.018 (root of
  the mean square) and by 0.049 at most. Steps smaller than the rule's are not in it: with 24,576 tokens, at lower
  rates, losses are up to 0.09 higher. Several powers fit about as well; these make 7 tokens for each parameter the best
  at 51M and 11 at 353M, near what longer runs have (12 in nanochat, `scripts/base_train.py`, 92d63d4).
- More than 15 parameters for each new token count for nothing: after 8M tokens 124M parameters were at 3.363, 353M at
  3.404.
- Characters: fitted to 8 runs of `record` on Shakespeare with tables of bigrams, 0.03M, 0.10M and 0.34M parameters
  after 0.7M to 3.3M characters, ending between 1.58 and 1.66 (`benchmarks/minutes.jsonl` and `small_tables.jsonl`); off
  by 0.007. Tables help small models most: without them 0.34M parameters were as good as 0.10M.
- Subwords (a small vocabulary learned from the text): the law of characters, times the 2.2 that a loss is larger by,
  with a floor that fits 0.16M parameters after two and three epochs of Shakespeare (3.357, 3.336).
- Repeated tokens: the form of Muennighoff et al. 2023, "Scaling data-constrained language models", with R* = 2 instead
  of their 15.4: by our runs a second epoch is worth 0.8 of a first, and ten of them 3. With it, ten epochs of 12.7M
  tokens differ by as much between 16M and 51M parameters as measured (3.77 and 3.57). Small vocabularies have runs of
  up to 2.5 epochs only.
- Tables of values and bigrams are worth more where text is read once: 0.06, by the same fit. Bigrams alone were worth
  0.02 there.
"""

import math
from dataclasses import dataclass

from flatout.config.sizes import SMALL_VOCAB

_REPEATS = 2.0  # epochs beyond the first after which repeated tokens teach hardly anything
_MOST_FOR_EACH = 15.0  # parameters for each new token that lower the loss
_CHARACTERS = 300  # vocabularies up to so many ids


@dataclass(frozen=True)
class Law:
    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    steps: float
    tables: float = 0.0  # what they take off the loss where text is read once, beyond what they do elsewhere

    def loss(self, parameters: float, tokens: float, steps: float) -> float:
        """The loss after `tokens` fresh tokens in so many steps."""
        return (
            self.floor
            + self.size / parameters**self.size_power
            + self.data / max(tokens, 1.0) ** self.data_power
            + self.steps / max(steps, 1.0)
        )


WORDS = Law(floor=1.81, size=1810.0, size_power=0.5, data=819.0, data_power=0.4, steps=20.0, tables=0.06)
CHARACTERS = Law(floor=1.282, size=35.0, size_power=0.5, data=231.0, data_power=0.5, steps=12.6)
SUBWORDS = Law(floor=2.58, size=77.0, size_power=0.5, data=508.0, data_power=0.5, steps=27.7)


def law_for(vocab: int) -> Law:
    return CHARACTERS if vocab <= _CHARACTERS else SUBWORDS if vocab <= SMALL_VOCAB else WORDS


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Fresh tokens that teach as much as `tokens` of a text that has `unique` ones."""
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    return unique * (1 + _REPEATS * (1 - math.exp(-repeats / _REPEATS)))


def effective_parameters(parameters: float, tokens: float, unique: float | None) -> float:
    """As many as so much text can teach."""
    return min(parameters, _MOST_FOR_EACH * (tokens if unique is None else min(tokens, unique)))
