"""A config that is valid and still not what somebody meant: warm-up, learning rate, evaluation, saving, batches.

What no run could do is refused by the schema; what this machine cannot do by `check_fit`. Here is the rest: values that
work and waste time, or never take effect. No torch here; what torch has to count may be None.
"""

import functools
import math
from collections.abc import Callable, Iterator

from flatout.config.schema import RunConfig, micro_batch_of
from flatout.config.unused import cut_pattern, wide_window
from flatout.config.usual import FAR_ABOVE, FAR_BELOW, SMALL_BASE, USUAL_MUON_RATE, usual_rate, usual_tuning_rate
from flatout.diagnose.check_tokens import steps_of
from flatout.diagnose.doctor import Check, DataFacts, Disk, Finding
from flatout.errors import many

_check = functools.partial(Check, "config")

MOST_STEPS = 20_000_000
_BIG_SHARE = 0.2  # of a run's time for anything but training
_BIG_BOUND = 1 / 3  # the same where the share is an upper bound, as it rests on the least time of a step


def check_config(
    config: RunConfig,
    data: DataFacts,
    *,
    parameters: int | None,
    step_seconds: float | None,
    disk: Disk | None,
    written: Callable[[str], bool],
    tested_rate: bool = False,
) -> Iterator[Finding | None]:
    """`written(path)` says whether the user wrote a field; `step_seconds` is the least time of a step, if known.

    `tested_rate`: the learning rate is what `flatout tune lr` found.
    """
    steps = steps_of(config, data)
    yield from _pattern(config)
    yield _batch(config)
    if steps is not None:
        yield _length(config, steps)
        yield _warmup(config, data, steps)
    if parameters is not None:
        yield _learning_rate(config, parameters, tested=tested_rate)
    yield from _stability(config)
    if steps:
        yield from _evaluation(config, data.val_tokens, steps, config.train.batch_tokens)
        yield _sampling(config, steps, step_seconds)
        yield _saving(config, steps, parameters, step_seconds, disk)
    yield _deterministic(config, written)


def check_fine_tuning(
    config: RunConfig, *, parameters: int, steps: int, step_tokens: float, val_tokens: int, tested_rate: bool = False
) -> Iterator[Finding | None]:
    """The same of a config with chat.source: learning rate, evaluation, saving. `step_tokens` is the mean of a step.

    `parameters` are those of the base, `val_tokens` those held out.
    """
    yield _fine_tuning_rate(config, parameters, tested=tested_rate)
    if steps:
        yield from _evaluation(config, val_tokens, steps, step_tokens)
        yield _saving(config, steps, None, None, None)


def _pattern(config: RunConfig) -> Iterator[Finding]:
    cut = cut_pattern(config.model)
    if cut is not None:
        whole = len(config.model.pattern)
        yield _check("pattern").warn(
            cut, f"Set model.layers={whole} for the whole pattern, or a pattern that is as short."
        )
    wide = wide_window(config.model)
    if wide is not None:
        shorter = max(1, config.model.context // 4)
        yield _check("window").warn(wide, f"Set a shorter one, such as model.window={shorter}.")


def _batch(config: RunConfig) -> Finding:
    size, count = micro_batch_of(config)
    sequences, context = config.train.batch_tokens // config.model.context, config.model.context
    tokens = config.train.batch_tokens
    split = "all at once" if count == 1 else f"{size} at once, {count} times"
    found = f"{tokens:,} tokens a step: {many(sequences, 'sequence')} of {context}, {split}"
    asked = config.speed.micro_batch
    if asked is not None and size < asked <= sequences:
        divisors = [number for number in range(1, sequences + 1) if sequences % number == 0]
        above = next((number for number in divisors if number > asked), sequences)
        return _check("batch").warn(
            f"{found}; speed.micro_batch is {asked}, which does not divide {sequences}",
            f"The next smaller divisor, {size}, is used. Set speed.micro_batch to {size} or {above}, or "
            f"train.batch_tokens={max(1, round(sequences / asked)) * asked * context}, of which {asked} is a divisor.",
        )
    if tokens < 512:
        return _check("batch").note(
            found,
            "So few tokens give a noisy gradient. A few thousand a step are usual for small models, half a million for "
            "124M parameters (train.batch_tokens).",
        )
    return _check("batch").ok(found)


def _length(config: RunConfig, steps: int) -> Finding:
    found = f"{many(steps, 'step')}, {steps * config.train.batch_tokens:,} tokens"
    if steps > MOST_STEPS:
        return _check("length").bad(found, f"A run has at most {MOST_STEPS:,} steps. Raise train.batch_tokens.")
    if steps < 20:
        return _check("length").note(
            found, "That is a try-out: a learning rate schedule needs some hundred steps to show what it is worth."
        )
    return _check("length").ok(found)


def _warmup(config: RunConfig, data: DataFacts, steps: int) -> Finding:
    tokens, batch = data.train_tokens or 0, config.train.batch_tokens
    warmup = config.optim.with_warmup_steps(steps, lambda epochs: math.ceil(epochs * tokens / batch)).warmup_steps
    found = f"{warmup:,} of {steps:,} steps"
    usual = max(1, steps // 20)
    if warmup >= steps:
        return _check("warm-up").warn(
            f"{found}: it is as long as the run, or longer",
            "It is cut to the run: the learning rate reaches its peak at the end, and never falls. Set "
            f"optim.{_shorter(config, usual)}, a twentieth of the run, or train longer.",
        )
    if warmup > steps // 2 and warmup > 20:
        return _check("warm-up").warn(
            f"{found}: more than half of the run",
            f"Little is left for the peak and the decay. 1 to 10% is usual: set optim.{_shorter(config, usual)}.",
        )
    decay = config.optim.decay_fraction * steps
    if config.optim.schedule == "wsd" and warmup + decay > steps:
        return _check("warm-up").warn(
            f"{found}, and optim.decay_fraction takes the last {decay:,.0f}: together more than the run",
            "The schedule has no stable part. Lower one of them.",
        )
    return _check("warm-up").ok(found)


def _shorter(config: RunConfig, steps: int) -> str:
    return f"warmup_steps={steps}" if config.optim.warmup is None else "warmup=0.05"


def _learning_rate(config: RunConfig, parameters: int, *, tested: bool) -> Finding:
    field, rate = next(iter(config.optim.rates.items()))
    usual, whose = usual_rate(parameters), f"{parameters / 1e6:.3g}M parameters"
    if config.optim.optimizer == "muon":
        usual, whose = USUAL_MUON_RATE, "Muon"
    found = f"{rate:g}; about {usual:.1g} is usual for {whose}"
    if tested:  # on this model and its data, of which a usual rate knows nothing
        return _check("learning rate").ok(f"{found}, and `flatout tune lr` found this one")
    if rate > FAR_ABOVE * usual:
        return _check("learning rate").warn(
            found,
            f"That is {rate / usual:.0f} times as much: the loss will likely jump or become NaN. Set "
            f"optim.{field}={usual:.1g}, or let `flatout tune lr` find one.",
        )
    if rate < usual / FAR_BELOW and config.model.init_from is None:
        return _check("learning rate").warn(
            found,
            f"That is {usual / rate:.0f} times less: training will be very slow. Set optim.{field}={usual:.1g}, "
            "or let `flatout tune lr` find one.",
        )
    return _check("learning rate").ok(found)


def _fine_tuning_rate(config: RunConfig, parameters: int, *, tested: bool) -> Finding:
    """Trained weights bear small rates only; adapters, which begin at nothing, ten times as much."""
    rate, adapters = config.optim.learning_rate, config.lora.rank > 0
    if config.optim.optimizer == "muon":
        return _check("learning rate").ok(f"{config.optim.muon_rate:g} of Muon, {rate:g} of the rest")
    usual = usual_tuning_rate(parameters, adapters=adapters)
    whose = "all weights of a trained model"
    if adapters:
        whose = "adapters on a base this small" if parameters < SMALL_BASE else "adapters"
    found = f"{rate:g}; about {usual:g} is usual for {whose}"
    if tested:
        return _check("learning rate").ok(f"{found}, and `flatout tune lr` found this one")
    if rate > FAR_ABOVE * usual:
        return _check("learning rate").warn(
            found,
            f"That is {rate / usual:.0f} times as much: the loss will likely jump, or the model forget what it knows. "
            f"Set optim.learning_rate={usual:g}.",
        )
    if rate < usual / FAR_BELOW:
        return _check("learning rate").warn(
            found,
            f"That is {usual / rate:.0f} times less: little will be learned. Set optim.learning_rate={usual:g}.",
        )
    return _check("learning rate").ok(found)


def _stability(config: RunConfig) -> Iterator[Finding]:
    if config.optim.clip == 0 and config.optim.optimizer == "adamw":  # the size of Muon's updates is fixed
        yield _check("clipping").note(
            "optim.clip is 0: gradients are never clipped",
            "One bad batch can then throw the weights far off. 1.0 is usual, and costs nothing.",
        )
    if config.optim.beta2 > 0.99 and config.train.batch_tokens >= 2**18:
        yield _check("beta2").note(
            f"optim.beta2 is {config.optim.beta2:g} with a batch of {config.train.batch_tokens:,} tokens",
            "Large batches mean few steps, and so long a memory follows a spike for hundreds of them. 0.95 is usual.",
        )


def _evaluation(config: RunConfig, val_tokens: int | None, steps: int, step_tokens: float) -> Iterator[Finding]:
    every, patience = config.eval.every, config.eval.patience
    ends = "the ends of epochs and of the run" if config.eval.epoch_end else "the end"
    if every > steps:
        yield _check("evaluation").warn(
            f"eval.every is {every:,}, which a run of {many(steps, 'step')} never reaches",
            f"Only {ends} would be evaluated. Set eval.every={max(1, steps // 10)} to see the run learn.",
        )
        return
    count = 1 + (0 if every == 0 else (steps - 1) // every)
    if patience and count <= patience:
        yield _check("patience").note(
            f"eval.patience is {patience}, and the run has {many(count, 'evaluation')}",
            "Early stopping can never happen. Lower it, or evaluate more often.",
        )
    if val_tokens is None:
        return
    tokens = val_tokens if config.eval.tokens is None else min(config.eval.tokens, val_tokens)
    # Forward only: a third of what a training token costs.
    spent, trained = count * tokens / 3, steps * step_tokens
    share = spent / (spent + trained)
    found = f"{many(count, 'time')} {tokens:,} tokens: {_percent(share)} of the run's time"
    ways: list[str] = []
    if share > _BIG_SHARE:
        times = _times_rarer(share)
        least = config.model.context if config.chat.source is None else 1  # of samples, whole ones are taken
        fewer = max(least, int(tokens / times))
        ways += [f"eval.every={min(round(every * times), steps)}"] if every else []
        ways += [f"eval.tokens={fewer}"] if fewer < tokens else []
    if ways:  # there are none for one window at the end, which is the least that there is
        advice = f"Evaluation eats the time. Set {' or '.join(ways)}, which makes it about 5%."
        yield _check("evaluation").warn(found, advice)
    else:
        yield _check("evaluation").ok(found)


def _sampling(config: RunConfig, steps: int, step_seconds: float | None) -> Finding | None:
    every, tokens = config.eval.sample_every, config.eval.sample_tokens
    if tokens == 0 or every == 0 or step_seconds is None:
        return None
    # A sampled token is a whole forward pass for one position: the host's launches, not arithmetic, take the time.
    one = tokens * config.model.layers * 2.5e-4
    share = one / (one + every * step_seconds)
    count = steps // every
    found = f"{many(count, 'sample')} of {many(tokens, 'token')}: {_percent(share, 'up to about')} of the run's time"
    if share > _BIG_BOUND:
        return _check("samples").warn(
            found,
            f"Sampling eats the time. Set eval.sample_every={round(every * _times_rarer(share))}, or fewer "
            "eval.sample_tokens.",
        )
    return _check("samples").ok(found)


def _saving(
    config: RunConfig, steps: int, parameters: int | None, step_seconds: float | None, disk: Disk | None
) -> Finding:
    every, minutes, epochs = config.checkpoint.every, config.checkpoint.minutes, config.checkpoint.epochs
    if (minutes or epochs) and (every > steps or every == 0):
        told = [f"every {many(minutes, 'minute')}"] if minutes else []
        told += ["at the end of every epoch" if epochs == 1 else f"every {epochs:,} epochs"] if epochs else []
        return _check("saving").ok(" and ".join(told))
    if every > steps:
        evaluated = 0 < config.eval.every < steps or config.eval.epoch_end
        lost = "everything since its best evaluation" if config.checkpoint.best and evaluated else "everything"
        return _check("saving").warn(
            f"checkpoint.every is {every:,}, which a run of {many(steps, 'step')} never reaches",
            f"A run that is killed loses {lost}. Set checkpoint.every={max(1, steps // 4)}.",
        )
    long_run = step_seconds is not None and steps * step_seconds > 1800
    if every == 0:
        return _check("saving").told(
            "warn" if long_run else "note",
            "checkpoint.every is 0: only the end is saved, and a run that is stopped by a signal",
            f"A crash or a lost machine costs the whole run. Set checkpoint.every={max(1, steps // 10)}.",
        )
    rate = None if disk is None else disk.write_rate
    if parameters is None or step_seconds is None or rate is None:
        return _check("saving").ok(f"every {many(every, 'step')}")
    from flatout.engine.saver import SMALL  # the doctor starts without torch
    from flatout.engine.trained import checkpoint_size

    size = checkpoint_size(parameters, config, config.speed)
    one = size / rate
    share = one / (one + every * step_seconds)
    if config.checkpoint.asynchronous != "off" and size >= SMALL and one < every * step_seconds:
        return _check("saving").ok(f"every {many(every, 'step')}, about {one:.2g} s each, written beside training")
    found = f"every {many(every, 'step')}, about {one:.2g} s each: {_percent(share, 'up to about')} of the run's time"
    if share > _BIG_BOUND and one > 0.5:
        return _check("saving").warn(
            found,
            f"Saving eats the time. Set checkpoint.every={round(every * _times_rarer(share))}, or output.folder to a "
            "faster disk.",
        )
    return _check("saving").ok(found)


def _deterministic(config: RunConfig, written: Callable[[str], bool]) -> Finding | None:
    if not config.train.deterministic:
        return None
    fast = [
        f"speed.{name}"
        for name in ("attention", "products", "compile", "cuda_graphs", "fp8", "kernels")
        if written(f"speed.{name}") and str(getattr(config.speed, name)) not in ("off", "torch", "[]", "reference")
    ]
    if fast:
        return _check("deterministic").warn(
            f"train.deterministic is set beside {', '.join(fast)}",
            "Kernels that repeat bit for bit are slower ones, and some fast ones are left out. Take one or the other: "
            "set train.deterministic=false for speed.",
        )
    return _check("deterministic").note(
        "train.deterministic is set",
        "The result repeats bit for bit on this machine, at some cost in speed; cuDNN's attention and tuned "
        "products are left out.",
    )


def _times_rarer(share: float) -> float:
    """How many times rarer something that takes this share of a run has to be, to take a twentieth of it."""
    return share / (1 - share) / (0.05 / 0.95)


def _percent(share: float, about: str = "about") -> str:
    return "under 1%" if share < 0.01 else f"{about} {share:.0%}"
