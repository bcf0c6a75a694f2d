"""The tokens against the config: vocabulary, windows, epochs, tokens per parameter, validation. No torch here."""

import functools
import math
from collections.abc import Iterator

from flatout.config.schema import RunConfig
from flatout.data.sampler import window_count
from flatout.diagnose.doctor import Check, DataFacts, Finding

_check = functools.partial(Check, "data")

# About twenty tokens per parameter give the lowest loss for a given amount of computing (Hoffmann and others, 2022).
BALANCED = 20
_MANY_EPOCHS, _SOME_EPOCHS = 10.0, 4.2
_FEW_TARGETS, _ENOUGH_TARGETS = 1_000, 10_000
_SPREAD = 2.0  # of the loss of single tokens, roughly, in nats


def windows_of(config: RunConfig, data: DataFacts) -> int | None:
    """Training windows, each seen once per epoch; None where nobody knows."""
    if data.train_tokens is None or config.data.streaming:
        return None
    context = config.model.context
    if config.data.packing == "best_fit":  # about: padding is small
        return max(0, data.train_tokens // (context + 1))
    return window_count(data.train_tokens, context, config.data.stride or context)


def steps_of(config: RunConfig, data: DataFacts) -> int | None:
    """Optimizer steps of the run; None for a length in minutes, or in epochs of text that nobody has counted."""
    train, batch = config.train, config.train.batch_tokens // config.model.context
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return -(-train.tokens // train.batch_tokens)
    windows = windows_of(config, data)
    return None if windows is None or train.epochs is None else math.ceil(train.epochs * windows / batch)


def check_tokens(
    config: RunConfig, data: DataFacts, parameters: int | None, wrote_epochs: bool
) -> Iterator[Finding | None]:
    """`parameters` is None where torch is needed to count them and is not there."""
    yield _vocabulary(config, data)
    windows, steps = windows_of(config, data), steps_of(config, data)
    if windows is not None:
        yield _windows(config, data, windows)
        if windows and steps:
            yield _epochs(config, data, windows, steps, wrote_epochs)
    if steps and parameters:
        yield _per_parameter(config, steps, parameters)
    yield _validation(config, data)
    yield _documents(config, data)


def _about(data: DataFacts) -> str:
    return "" if data.exact else "about "


def _vocabulary(config: RunConfig, data: DataFacts) -> Finding | None:
    asked, known = config.model.vocab, data.vocab
    if known is None or asked is None:
        return None
    sure = data.exact or config.data.tokenizer != "char"
    if asked < known:
        # training raises a ConfigError for it
        return Check("config", "vocabulary").bad(
            f"model.vocab is {asked:,}, but the tokenizer has {'' if sure else 'at least '}{known:,} ids",
            "Ids beyond the vocabulary have no row in the model. Leave model.vocab at null, which takes the "
            f"tokenizer's, or set model.vocab={known}.",
        )
    if sure and asked > 1.5 * known + 1024:
        return _check("vocabulary").note(
            f"model.vocab is {asked:,}, and the tokenizer has {known:,} ids",
            "Rows that no token ever reaches cost memory and time in the head. Leave model.vocab at null; "
            "speed.pad_vocab rounds up where that is faster.",
        )
    return _check("vocabulary").ok(f"{asked:,} for a tokenizer of {known:,} ids")


def _windows(config: RunConfig, data: DataFacts, windows: int) -> Finding | None:
    context, tokens = config.model.context, data.train_tokens or 0
    if windows == 0:
        return _check("windows").bad(
            f"{_about(data)}{tokens:,} tokens to train on are not one window of model.context {context} and a target",
            "Use more text." if tokens < 256 else f"Use more text, or set model.context to {tokens // 16} or less.",
        )
    sequences = config.train.batch_tokens // context
    found = f"{_about(data)}{windows:,} windows of {context} tokens, {sequences:,} in a step"
    if sequences > windows:
        return _check("windows").warn(
            found,
            "A step then holds every window more than once, which only repeats its gradient. Lower "
            f"train.batch_tokens to {max(1, windows // 10) * context:,} or less, or use more text.",
        )
    return _check("windows").ok(found)


def _epochs(config: RunConfig, data: DataFacts, windows: int, steps: int, wrote_epochs: bool) -> Finding:
    epochs = steps * (config.train.batch_tokens // config.model.context) / windows
    seen = steps * config.train.batch_tokens
    found = f"{steps:,} steps are {seen:,} tokens: {_about(data)}{_times(epochs)} passes over the text"
    if epochs > _MANY_EPOCHS:
        fitting = int(_SOME_EPOCHS * windows // (config.train.batch_tokens // config.model.context))
        shorter = f", or set train.steps={fitting}" if fitting >= 20 else ""
        return _check("epochs").told(
            "note" if wrote_epochs else "warn",
            found,
            "Repeats beyond about four bring less and less, and the model learns the text by heart: watch the "
            f"validation loss, and stop with eval.patience. Use more text{shorter}.",
        )
    if epochs > _SOME_EPOCHS:
        return _check("epochs").note(
            found, "Repeats beyond about four bring less and less; more text would bring more."
        )
    return _check("epochs").ok(found)


def _times(value: float) -> str:
    """A ratio with two digits or more, so that a small one is not told as 0.0."""
    return f"{value:,.{2 if value < 1 else 1 if value < 100 else 0}f}"


def _per_parameter(config: RunConfig, steps: int, parameters: int) -> Finding:
    ratio = steps * config.train.batch_tokens / parameters
    found = f"{_times(ratio)} tokens for each of {parameters:,} parameters"
    rule = f"About {BALANCED} tokens per parameter give the lowest loss for a given amount of computing."
    if ratio < 0.25 * BALANCED:
        return _check("tokens per parameter").note(
            found,
            f"{rule} With fewer, as here, a smaller model would learn more in the same time, or this one from more "
            "tokens.",
        )
    if ratio > 10 * BALANCED:
        return _check("tokens per parameter").ok(
            found,
            f"{rule} More, as here, is right for a small model that is to be cheap to use; a larger one would learn "
            "more from the same computing.",
        )
    return _check("tokens per parameter").ok(f"{found}; about {BALANCED} are well balanced")


def _validation(config: RunConfig, data: DataFacts) -> Finding | None:
    if data.val_tokens is None:
        return None
    used = data.val_tokens - 1 if config.eval.tokens is None else min(config.eval.tokens, data.val_tokens - 1)
    spread = _SPREAD / math.sqrt(max(1, used))
    found = f"{_about(data)}{max(0, used):,} validation tokens; the loss they give is sure to about ±{spread:.2g}"
    raise_share = f"Raise data.val_fraction (now {config.data.val_fraction:g}), or use more text"
    if config.eval.tokens is not None and config.eval.tokens < data.val_tokens - 1:
        raise_share = "Raise eval.tokens"
    if data.val_tokens < 2:
        return _check("validation").bad(
            f"{_about(data)}{data.val_tokens} validation tokens: there is nothing to evaluate on",
            f"{raise_share}, or name another text with data.val_source.",
        )
    if used < max(_FEW_TARGETS, 2 * config.model.context):
        return _check("validation").warn(
            found, f"That is too few to compare two runs by, or to choose the best checkpoint. {raise_share}."
        )
    if used < _ENOUGH_TARGETS:
        return _check("validation").note(found, f"Small differences between runs drown in that. {raise_share}.")
    return _check("validation").ok(found)


def _documents(config: RunConfig, data: DataFacts) -> Finding | None:
    length, context = data.document_tokens, config.model.context
    if length is None:
        return None
    found = f"half of the documents have at most {length:,.0f} tokens, and a window has {context}"
    packed = config.data.packing == "best_fit"
    if length * 16 < context and not packed:
        return _check("documents").warn(
            found,
            "A window is then a row of unrelated short texts, and attention over them is mostly wasted. Set "
            f"model.context={_power_above(2 * length)}, or data.packing=best_fit to keep documents whole.",
        )
    if length * 2 < context and not packed:
        return _check("documents").note(
            found,
            "Several documents share a window. data.packing=best_fit keeps each of them whole; a shorter model.context "
            "is faster.",
        )
    return _check("documents").ok(found)


def _power_above(number: float) -> int:
    return 2 ** max(4, math.ceil(math.log2(max(1.0, number))))
