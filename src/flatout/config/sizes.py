"""Sizes of presets: what follows from one name, such as shape, batch, rates, decay and length. No torch.

Idea: a preset's file holds what is the same at every size; what depends on size or length is derived here, by rules.
The presets of 32,768 tokens have three sizes, which are settled at once (`_long_layer`). `modern` and `record` have
any, and are derived again when the data is known. The rules of these were found at 60m on 26 million tokens of enwik8
(`lab/recipe.md`) and are carried to other sizes and lengths by the exponents of nanochat's `scripts/base_train.py`
(92d63d4):
- dense parameters N are the matrices of the blocks plus the head, without embedding tables; D are the run's tokens
- D is 20 N, and at most two epochs, where the user says nothing
- batch: 32,768 tokens at 26M, rising with D^0.4; below, as many as make about 800 steps, or 500 where that would be
  fewer than 1,024
- rates are the lab's where the batch is the rule's and the run is short; a smaller batch lowers them by its root;
  AdamW's fall with the square root of the width, from 256 on
- decay is 0.1 up to 26M tokens, and falls with 26M / D
Above two and a half epochs the data is no longer fresh, and the settings turn to regularisation.

Contract: what the user wrote wins, and the rest is derived from it: another batch brings other rates.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.config.optimizers import kind_of
from flatout.config.source import Layer, Setting, Source
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError

SIZED = ("modern", "record")  # the presets whose settings follow from size, text and length
DEFAULT_SIZE = "124m"
LONG = ("32k", "32k-hybrid", "32k-eigenstate")  # those of 32,768 tokens, which have three sizes
# Blocks, peak rate, and a micro-batch for a card with 80 GB; `flatout tune` finds what another one can take.
LONG_SIZES = {"small": (12, 6e-4, 4), "medium": (16, 4e-4, 2), "large": (20, 3e-4, 1)}
# Names of both, such as small-32k: presets had them before there were sizes, and runs have them.
LONG_NAMES = {f"{size}-{preset}": (preset, size) for preset in LONG for size in LONG_SIZES}
AUTO = "auto"  # the size is chosen by the machine's speed, for a run whose length is given in minutes
_NAMED = {
    "15m": (4, 256),
    "60m": (8, 512),
    "124m": (12, 768),
    "350m": (24, 1024),
    "760m": (24, 1536),
    "1.3b": (24, 2048),
}
GPT2_VOCAB = 50257  # also where the vocabulary's size is not known yet
_USUAL_VOCABS = {"char": 128, "bytes": 257}
SMALL_VOCAB = 8000  # ids: tables of a vocabulary like that, learned from the text, are small

REFERENCE_BATCH, REFERENCE_TOKENS, REFERENCE_WIDTH = 32_768, 26e6, 512
_ADAM_RATES = {"embedding_rate": 0.3, "head_rate": 0.008, "learning_rate": 0.02}
_VALUE_RATE, _BIGRAM_RATE = 0.1, 0.3
_BIGRAM_ROWS, _BIGRAM_ROWS_SMALL = 5, 20  # for each id, of a large and of a small vocabulary
_FEWEST_BIGRAMS = 20_480  # rows, unless there are fewer pairs
_TIED_RATE = 0.03  # of an embedding that is the head, too
_OPTIMIZER, _TIED = "optim.optimizer", "model.tied"
_GROUP_RATES = ("optim.embedding_rate", "optim.head_rate", "optim.table_rate")
SHORT_STEPS, SHORTEST_STEPS, SMALL_BATCH = 800, 500, 1024
TOKENS_PER_PARAMETER, MOST_EPOCHS = 20, 2.0
ONCE = 1.1  # epochs: in a second one tables memorise the text
_VALUE_DECAY = 0.03  # of value tables that see text again
MOST_DECAY = 10.0  # of a config
_MOST_FORGOTTEN, _MOST_AT_ONCE = 3.0, 0.02  # of repeated data: decay times rate, in an epoch and in a step
_BIGRAMS_FORGET = 6  # times as fast as the rest
# Above, data counts as repeated. In 1.6 epochs of Shakespeare a decay of embedding and head cost 0.034, in 2.8 epochs
# in 0.16M parameters it gained 0.065 on one cut of the text and nothing on another (CPU).
FRESH_EPOCHS = 2.5


@dataclass(frozen=True)
class Sized:
    """A preset that has sizes, and the size that was asked for."""

    preset: str
    name: str

    @property
    def source(self) -> Source:
        return Source("size", f"size {self.name}")


@dataclass(frozen=True)
class Shape:
    """The shape of a model by its blocks and its width."""

    layers: int
    width: int

    @property
    def name(self) -> str:
        found = (name for name, shape in _NAMED.items() if shape == (self.layers, self.width))
        return next(found, f"{self.layers}x{self.width}")

    @property
    def heads(self) -> int:
        """Heads of 128, which attention kernels like best, or smaller ones where there would be too few."""
        return self.width // (128 if self.width >= 512 else 64 if self.width >= 256 else 32)

    @property
    def context(self) -> int:
        return 1024 if self.width >= 256 else 256

    @property
    def settings(self) -> dict[str, int]:
        return {"model.layers": self.layers, "model.width": self.width, "model.heads": self.heads}

    def dense(self, vocab: int) -> int:
        """Matrices of the blocks plus the head; the MLP's are 8 times width squared in every kind."""
        return 12 * self.layers * self.width**2 + vocab * self.width


# Sizes that a run with a length in minutes chooses from: about 64 of width for each block, as the named sizes.
LADDER = tuple(
    Shape(*shape)
    for shape in (
        (2, 32), (2, 64), (3, 96), (4, 128), (4, 192), (4, 256), (6, 384), (8, 512), (10, 640), (12, 768), (16, 1024),
        (24, 1024), (24, 1536), (24, 2048),
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run when its settings are derived; None where it is not known yet."""

    vocab: int
    unique: int | None = None  # training tokens of the data
    tokens: int | None = None  # training tokens of the run, and of a step, where they follow from its minutes
    batch: int | None = None
    ranks: int = 1  # processes that share a step evenly


@dataclass(frozen=True)
class Derived:
    """Settings by path, in two layers: those of the size, and those of repeated data."""

    size: dict[str, Any]
    repeated: dict[str, Any]
    epochs: float | None


def size_names() -> tuple[str, ...]:
    return tuple(_NAMED)


def size_words() -> str:
    """All sizes that have names, in words."""
    return f"of {' or '.join(SIZED)}: {', '.join(size_names())}; of {LONG[0]} presets: {', '.join(LONG_SIZES)}"


def usual_vocab(tokenizer: str) -> int:
    """The ids of a tokenizer before it is read."""
    return _USUAL_VOCABS.get(tokenizer) or learned_vocab(tokenizer) or GPT2_VOCAB


def learned_vocab(tokenizer: str) -> int | None:
    """How many ids a tokenizer may have that is learned from the text it is for, as `bpe-512`; None for others."""
    found = re.fullmatch(r"bpe-(\d{1,6})", tokenizer)
    return None if found is None else int(found[1])


def shape_of(name: str, where: str) -> Shape:
    """The shape of a size; `where` says in the error who named it."""
    if name.lower() in _NAMED:
        return Shape(*_NAMED[name.lower()])
    found = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{1,4})", name)
    if found is None or int(found[2]) % 32 or int(found[2]) > 65536:
        raise ConfigError(
            f"{where}: there is no size {shorten(name)}",
            f"use one of {', '.join(_NAMED)}, or LAYERSxWIDTH with a width that is a multiple of 32, such as 4x128",
        )
    return Shape(int(found[1]), int(found[2]))


def preset_and_size(name: str | None, size: str | None, where: str) -> tuple[str | None, str | None]:
    """The preset and the size that are meant by what was named; those of `LONG` have a size in any case."""
    preset, own = LONG_NAMES.get(name or "", (name, None))
    if preset not in LONG:
        return preset, size
    found = own or next(iter(LONG_SIZES)) if size is None else size.lower()
    if found not in LONG_SIZES or own not in (None, found):
        raise ConfigError(
            f"{where}: the preset {name} has no size {shorten(size)}",
            f"leave the size out, or give {preset} one of its sizes: {', '.join(LONG_SIZES)}",
        )
    return preset, found


def size_layer(
    preset: str | None, size: str | None, where: str, *, merged: Layer, written: Layer
) -> tuple[Sized | None, Layer]:
    """The size of a preset while it waits for the data, and what a size sets as long as that is not known.

    `merged` has what preset and user say, `written` the user's alone.
    """
    if size is not None and preset not in (*SIZED, *LONG):
        named = "a config without a preset" if preset is None else f"the preset {preset}"
        *others, last = LONG if size.lower() in LONG_SIZES else SIZED
        raise ConfigError(
            f"{where}: size {shorten(size)} is for the presets {', '.join(others)} and {last}, not for {named}",
            f"use {', '.join(others)} or {last}, or set model.layers, model.width and the rest yourself",
        )
    if preset in LONG and size is not None:
        return None, _long_layer(Sized(preset, size))
    if preset not in SIZED:
        return None, {}
    minutes = "train.minutes" in written and written["train.minutes"].value is not None
    sized = Sized(preset, (AUTO if minutes else DEFAULT_SIZE) if size is None else size)
    shape = shape_of(DEFAULT_SIZE if sized.name == AUTO and minutes else sized.name, where)
    tokenizer = merged["data.tokenizer"].value if "data.tokenizer" in merged else ""
    known = Known(vocab=usual_vocab(tokenizer if isinstance(tokenizer, str) else ""))
    values = rule_inputs({path: setting.value for path, setting in written.items()})
    derived = derive(preset, shape, values, known).size
    return sized, {path: Setting(value, sized.source) for path, value in derived.items()}


def _long_layer(sized: Sized) -> Layer:
    """The settings of a preset of 32,768 tokens at its size.

    Blocks of eigenstates alone are the shapes of guide 003. Beside attention they have states for about as many
    parameters as attention has.
    """
    layers, rate, micro_batch = LONG_SIZES[sized.name]
    shape, states = Shape(layers, 64 * layers), {}
    if sized.preset == "32k-hybrid":
        states = {"model.states": 2 * shape.width // 3 // 64 * 64}
    elif sized.preset == "32k-eigenstate":
        shape = Shape(layers - 4, shape.width + 256)
        states = {"model.states": shape.width // 8}
    values = {**shape.settings, **states, "optim.learning_rate": rate, "speed.micro_batch": micro_batch}
    return {path: Setting(value, sized.source) for path, value in values.items()}


def rule_inputs(written: Mapping[str, Any]) -> dict[str, Any]:
    """The user's values that rules depend on, by path: positive numbers, how the matrices are trained, and
    whether the head is a matrix of its own.

    Where a rate is null, `optim.learning_rate` is meant. What is wrong, validation refuses.
    """
    numbers = {
        path: value
        for path, value in written.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
    null = {path: None for path in _GROUP_RATES if path in written and written[path] is None}
    return {**numbers, **null, _OPTIMIZER: written.get(_OPTIMIZER, "normuon"), _TIED: written.get(_TIED) is True}


def derive(preset: str, shape: Shape, written: Mapping[str, Any], known: Known) -> Derived:
    """The settings of a size, given what the user has `written`, by path, as far as rules depend on it."""
    width, layers = written.get("model.width", shape.width), written.get("model.layers", shape.layers)
    shape = Shape(layers, width)
    context = written.get("model.context", shape.context)
    steps, batch = written.get("train.steps"), written.get("train.batch_tokens") or known.batch
    if steps is not None and batch is None and known.tokens is None:
        batch = _shared(_batch_of_steps(int(steps), context), context, known.ranks)
    tokens, given = run_tokens(shape, {**written, "train.batch_tokens": batch}, known)
    batch = batch or batch_of(tokens, context, known.ranks)
    epochs = None if known.unique is None else tokens / max(known.unique, 1)
    tables = _tables(shape, known.vocab, epochs) if preset == "record" else {}
    tied = bool(written.get(_TIED))
    values: dict[str, Any] = {
        **shape.settings,
        "model.context": context,
        "train.batch_tokens": batch,
        **dict(_rates(shape, batch, tokens, context, bigrams=bool(tables.get("model.bigram_rows")), tied=tied)),
        **tables,
        **_again(preset, epochs),
        **({} if given else {"train.tokens": tokens}),
    }
    repeated = {}
    if epochs is not None and epochs > FRESH_EPOCHS:
        repeated = _repeated(preset, {**values, **written}, shape.dense(known.vocab), known)
    return Derived(values, repeated, epochs)


def run_tokens(shape: Shape, written: Mapping[str, Any], known: Known) -> tuple[int, bool]:
    """Training tokens of the run, and whether the user has given its length."""
    usual = TOKENS_PER_PARAMETER * shape.dense(known.vocab)
    if known.tokens is not None:
        return known.tokens, True
    if (tokens := written.get("train.tokens")) is not None:
        return int(tokens), True
    if (epochs := written.get("train.epochs")) is not None:
        return (usual if known.unique is None else max(1, round(epochs * known.unique))), True
    if (steps := written.get("train.steps")) is not None:
        return int(steps) * written["train.batch_tokens"], True
    most = usual if known.unique is None else max(1, round(MOST_EPOCHS * known.unique))
    return min(usual, most), written.get("train.minutes") is not None


def batch_of(tokens: int, context: int, ranks: int = 1) -> int:
    """Tokens of a step, from the tokens of the run: whole windows, a power of two of them or three times one."""
    short = max(tokens / SHORT_STEPS, min(SMALL_BATCH, tokens / SHORTEST_STEPS))
    long = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** 0.4
    return _shared(_nearest(max(min(short, long), 1.0) / context) * context, context, ranks)


def _shared(batch: int, context: int, ranks: int) -> int:
    """A batch, raised to a number of windows that the processes can share."""
    return -(-batch // (context * ranks)) * context * ranks


def _nearest(windows: float) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, ... by ratio."""
    power = 2 ** max(0, math.floor(math.log2(max(windows, 1.0))))
    near = (power, 2 * power, *((3 * power // 2,) if power > 1 else ()))
    return min(near, key=lambda count: abs(math.log(count / windows)))


def _batch_of_steps(steps: int, context: int) -> int:
    """Tokens of a step, from the steps of the run: the batch at which the rule for its tokens gives that very batch."""
    ideal = (REFERENCE_BATCH * (steps / REFERENCE_TOKENS) ** 0.4) ** (1 / 0.6)
    return _nearest(ideal / context) * context


def batch_factor(batch: int, tokens: int, context: int) -> float:
    """How much a batch changes rates.

    That of the rule has the lab's rates in short runs, since they have as many steps. In longer ones its root counts,
    for a fifth at most: records with batches of 131K to 524K have Muon's rate between 0.015 and 0.023. A smaller batch
    lowers rates by its root; a larger one leaves them: in the lab, twice the batch did worse with rates 1.4 times as
    high (3.442 against 3.421), and half of it better with 0.7 times (3.188 against 3.274).
    """
    usual = batch_of(tokens, context)
    return min(1.0, math.sqrt(batch / usual)) * min(1.2, max(1.0, math.sqrt(usual / REFERENCE_BATCH)))


def _rates(
    shape: Shape, batch: int, tokens: int, context: int, *, bigrams: bool, tied: bool
) -> Iterator[tuple[str, float]]:
    """Peak rates and decay.

    A head that is the embedding wants the embedding to begin and to move like a head: `record` of 2x64 ended at 5.161
    with the rate and the spread of an embedding, at 3.308 with about these, and at 3.225 untied (CPU, 0.5M tokens).
    """
    factor, thin = batch_factor(batch, tokens, context), math.sqrt(REFERENCE_WIDTH / max(shape.width, 256))
    yield "optim.muon_rate", _short(0.02 * factor)
    other = {"table_rate": _BIGRAM_RATE if bigrams else _VALUE_RATE} | ({"embedding_rate": _TIED_RATE} if tied else {})
    for name, rate in {**_ADAM_RATES, **other}.items():
        yield f"optim.{name}", _short(rate * factor * thin)
    yield "optim.weight_decay", _short(0.1 * factor * min(1.0, REFERENCE_TOKENS / tokens))


def _tables(shape: Shape, vocab: int, epochs: float | None) -> dict[str, Any]:
    """Tables of values for two blocks from either end, and of bigrams with some rows for each id.

    Bigrams of a large vocabulary are for text that is read once: over two epochs of enwik8 `record` at 60m ended at
    2.908 with them, and at 2.811 without and in smaller steps. Those of a small one helped in three epochs, too
    (`lab/recipe.md`).
    """
    small = vocab <= SMALL_VOCAB
    rows = min(vocab**2, max(_FEWEST_BIGRAMS, _BIGRAM_ROWS_SMALL * vocab)) if small else _BIGRAM_ROWS * vocab
    kept = small or epochs is None or epochs <= ONCE
    return {"model.value_tables": min(2, shape.layers // 2), "model.bigram_rows": 64 * round(rows / 64) if kept else 0}


def _again(preset: str, epochs: float | None) -> dict[str, Any]:
    """What pays in a second epoch: documents in another order, and a decay of value tables.

    Two epochs of enwik8, `record` at 60m: 2.757 with the former alone, 2.751 with a decay of 0.01, 2.738 with 0.03.
    """
    if epochs is None or epochs <= ONCE:
        return {}
    return {"data.packing": "reshuffle", **({"optim.table_decay": _VALUE_DECAY} if preset == "record" else {})}


def _short(value: float) -> float:
    """A rate as people write it."""
    return float(f"{value:.3g}")


def _repeated(preset: str, values: Mapping[str, Any], dense: int, known: Known) -> dict[str, Any]:
    """What pays where the data is read many times: a decay that makes a model forget within an epoch, and no tables but
    the bigrams of a small vocabulary, which forget faster.

    All that is trained decays alike: by so much in an epoch, whatever its rate and the batch; Muon's matrices where
    update and weight agree in sign (normuon). Ten epochs of 12.7M tokens ended at 3.814 with 1.1 in an epoch,
    3.769 with 2.2 and 3.810 with 3.4 in 16M parameters, at 3.567 with 2.0 and 3.574 with 4.0 in 51M (H200, one seed;
    `lab/recipe.md`). At that pace bigrams would still memorise the text.
    """
    unique = max(known.unique or 0, 1)
    forgotten = min(_MOST_FORGOTTEN, 2 * math.sqrt(dense / unique))
    each = min(_MOST_AT_ONCE, forgotten * values["train.batch_tokens"] / unique)

    def decay(of_step: float, rate: float | None) -> float:
        return _short(min(MOST_DECAY, of_step / (rate or values["optim.learning_rate"])))

    found: dict[str, Any] = {
        "optim.weight_decay": decay(each, values[f"optim.{kind_of(values.get(_OPTIMIZER, 'normuon')).rate}"]),
        "optim.embedding_decay": decay(each, values["optim.embedding_rate"]),
        "optim.head_decay": decay(each, values["optim.head_rate"]),
        "model.mlp": "swiglu",
        "optim.ema": 0.995,
    }
    if preset != "record":
        return found
    found["model.value_tables"] = 0
    if known.vocab > SMALL_VOCAB:
        return found | {"model.bigram_rows": 0}
    return found | {"optim.table_decay": decay(_BIGRAMS_FORGET * each, values["optim.table_rate"])}
