"""Rules of thumb about a plan: what works as it was asked for, and would go better otherwise. For the doctor.

What is certain stands in `resolve/checks.py`, and every run says it. A rule here is silent where the run itself speaks
of the same thing.
"""

import functools
import math
from collections.abc import Iterator

from flatout.checkpoints.base_and_adapter import adapter_plan
from flatout.config.optimizers import FAR_ABOVE, FAR_BELOW, found_by_range_test, usual_rate
from flatout.errors import many
from flatout.finding import Check, Finding
from flatout.model.adapter_targets import choose, needless_rank, targets_of
from flatout.model.count import parameter_count
from flatout.model.gpt import empty_model
from flatout.resolve.checks import shorter_warmup
from flatout.resolve.length import Visits, visits_of
from flatout.resolve.memory import trained_count
from flatout.resolve.plan import RunPlan

_data, _check = functools.partial(Check, "data"), functools.partial(Check, "config")

# About twenty tokens per parameter give the lowest loss for a given amount of computing (Hoffmann and others, 2022).
BALANCED = 20
_MANY_EPOCHS, _SOME_EPOCHS = 10.0, 4.2
_FEW_TARGETS = 1_000
_SPREAD = 2.0  # of the loss of single tokens, roughly, in nats
_BIG_SHARE = 0.2  # of a run's time for anything but training


def advice_on(plan: RunPlan, *, about: str = "") -> Iterator[Finding]:
    """`about` stands before numbers of tokens that are estimates."""
    printed = {(check.area, check.name) for check in plan.checks}
    found = [*_on_switches(plan), *_on_settings(plan)]
    found += _on_samples(plan) if plan.fine_tunes else _on_tokens(plan, about)
    yield from (one for one in found if one is not None and (one.area, one.name) not in printed)


def known_steps(plan: RunPlan) -> int | None:
    """None for a length in minutes, or in epochs of text of unknown size."""
    unplanned = plan.train.minutes is not None and plan.train.steps is None
    return None if unplanned else plan.steps or None


def step_tokens(plan: RunPlan) -> float:
    """Tokens of a step, on average."""
    return plan.data.facts.step_tokens or plan.train.mean_batch


def _on_switches(plan: RunPlan) -> Iterator[Finding]:
    """Switches that came out as something else than was asked for, where that costs something."""
    features = [one for one in plan.speed.features if one.why and one.asked not in ("auto", "null", one.used)]
    changed = [one for one in features if one.name not in ("workers", "loss_chunk")]
    if changed:
        listed = "; ".join(f"speed.{one.name} {one.asked} becomes {one.used}: {one.why}" for one in changed)
        yield _check("switches").note(listed, "A preset or overlay asked for them; the run goes on without.")
        return
    shown = [one for one in plan.speed.features if one.name in ("precision", "kernels", "attention", "compile")]
    yield _check("switches").ok(", ".join(f"{one.name} {one.used}" for one in shown))


# --- tokens of text ---------------------------------------------------------------------------------------------------


def _on_tokens(plan: RunPlan, about: str) -> Iterator[Finding | None]:
    windows, steps = plan.data.facts.windows, known_steps(plan)
    if windows:
        yield _windows(plan, windows, about)
        if steps:
            yield _epochs(plan, windows, steps, about)
    if steps:
        yield _per_parameter(plan, steps)
    yield _validation(plan, about)


def _windows(plan: RunPlan, windows: int, about: str) -> Finding:
    sequences, context = plan.schedule.at(plan.steps).windows, plan.model.context
    found = f"{about}{windows:,} windows of {context} tokens, {sequences:,} in a step"
    if sequences > windows:
        return _data("windows").warn(
            found,
            "A step then holds every window more than once, which only repeats its gradient. Lower "
            f"train.batch_tokens to {max(1, windows // 10) * context:,} or less, or use more text.",
        )
    return _data("windows").ok(found)


def _epochs(plan: RunPlan, windows: int, steps: int, about: str) -> Finding:
    read = plan.schedule.at(steps).start
    epochs = read / windows
    found = f"{steps:,} steps are {read * plan.model.context:,} tokens: {about}{_times(epochs)} passes over the text"
    few = "Repeats beyond about four bring less and less"
    if epochs > _MANY_EPOCHS:
        fitting = plan.schedule.steps_until(_SOME_EPOCHS * windows) - 1
        shorter = f", or set train.steps={fitting}" if fitting >= 20 else ""
        return _data("epochs").finding(
            "note" if plan.settings.sources["train.epochs"].by_user else "warn",
            found,
            f"{few}, and the model learns the text by heart: watch the validation loss, and stop with eval.patience. "
            f"Use more text{shorter}.",
        )
    if epochs > _SOME_EPOCHS:
        return _data("epochs").note(found, f"{few}; more text would bring more.")
    return _data("epochs").ok(found)


def _times(value: float) -> str:
    """A ratio with two digits or more, so that a small one is not printed as 0.0."""
    return f"{value:,.{2 if value < 1 else 1 if value < 100 else 0}f}"


def _per_parameter(plan: RunPlan, steps: int) -> Finding:
    parameters = parameter_count(plan.model, plan.vocab)
    ratio = plan.schedule.at(steps).start * plan.model.context / parameters
    found = f"{_times(ratio)} tokens for each of {parameters:,} parameters"
    rule = f"About {BALANCED} tokens per parameter give the lowest loss for a given amount of computing."
    if ratio < 0.25 * BALANCED:
        return _data("tokens per parameter").note(
            found,
            f"{rule} With fewer, as here, a smaller model would learn more in the same time, or this one from more "
            "tokens.",
        )
    return _data("tokens per parameter").ok(f"{found}; about {BALANCED} are well balanced")


def _validation(plan: RunPlan, about: str) -> Finding | None:
    """How sure the validation loss is."""
    there, asked = plan.data.val.tokens - 1, plan.eval.tokens
    if there < 1:
        return None
    used = there if asked is None else min(asked, there)
    found = f"{about}{used:,} validation tokens; the loss they give is sure to about ±{_SPREAD / math.sqrt(used):.2g}"
    share = plan.settings.config.data.val_fraction
    more = f"Raise data.validation (now {share:g}), or use more text" if used == there else "Raise eval.tokens"
    if used < max(_FEW_TARGETS, 2 * plan.model.context):
        return _data("validation").warn(
            found, f"That is too few to compare two runs by, or to choose the best checkpoint. {more}."
        )
    return _data("validation").ok(found)


# --- samples ----------------------------------------------------------------------------------------------------------


def _on_samples(plan: RunPlan) -> Iterator[Finding]:
    """What is learned, and where adapters have more rank than the weights beside them."""
    config, lora = plan.settings.config, plan.lora
    count = f"{trained_count(config, plan.vocab):,} parameters"
    if not lora.rank:
        yield _check("trained").ok(f"all {count} (lora.rank is 0)")
        return
    choices = choose(adapter_plan(lora), targets_of(empty_model(plan.model, plan.vocab, device="meta")))
    names = ", ".join(sorted({choice.target.name for choice in choices}))
    held = "" if lora.quantize == "none" else f", the base in 4 bits ({lora.quantize})"
    yield _check("trained").ok(f"adapters of rank {lora.rank} on {names}: {count}{held}")
    yield from (_check("rank").note(found) for found in needless_rank(choices))


# --- settings ---------------------------------------------------------------------------------------------------------


def _on_settings(plan: RunPlan) -> Iterator[Finding | None]:
    facts, steps = plan.data.facts, known_steps(plan)
    if not plan.fine_tunes:
        yield _batch(plan)
    if steps:
        yield _length(plan, steps)
        yield _warmup(plan, steps)
    yield _learning_rate(plan)
    if plan.optim.clip == 0 and not plan.optim.kind.bounded:
        yield _check("clipping").note(
            "optim.clip is 0: gradients are never clipped",
            "One bad batch can then throw the weights far off. 1.0 is usual, and costs nothing.",
        )
    if steps:
        sequences = facts.batch_samples or plan.schedule.at(0).windows
        visits = visits_of(plan.eval, plan.checkpoint, steps, facts.windows, sequences)
        yield _evaluation(plan, steps, visits)
        yield _saving(plan, steps)


def _batch(plan: RunPlan) -> Finding:
    size, count, context = plan.speed.micro_batch, plan.speed.accumulation, plan.model.context
    sequences = plan.schedule.at(plan.steps).windows
    split = "all at once" if count == 1 else f"{size} at once, {count} times"
    found = f"{sequences * context:,} tokens a step: {many(sequences, 'sequence')} of {context}, {split}"
    if sequences * context < 512:
        return _check("batch").note(
            found,
            "So few tokens give a noisy gradient. A few thousand a step are usual for small models, half a million for "
            "124M parameters (train.batch_tokens).",
        )
    return _check("batch").ok(found)


def _length(plan: RunPlan, steps: int) -> Finding:
    samples = plan.data.facts.batch_samples
    tokens = f"{plan.schedule.at(steps).start * plan.model.context:,} tokens"
    if samples is not None:
        return _check("length").ok(f"{many(steps, 'step')} of {many(samples, 'sample')}")
    if steps < 20:
        return _check("length").note(
            f"{many(steps, 'step')}, {tokens}",
            "That is a try-out: a learning rate schedule needs some hundred steps to show what it is worth.",
        )
    return _check("length").ok(f"{many(steps, 'step')}, {tokens}")


def _warmup(plan: RunPlan, steps: int) -> Finding:
    warmup = plan.optim.warmup_steps
    found = f"{warmup:,} of {steps:,} steps"
    if warmup > steps // 2 and warmup > 20:
        return _check("warm-up").warn(
            f"{found}: more than half of the run",
            f"Little is left for the peak and the decay. 1 to 10% is usual: set {shorter_warmup(plan)}.",
        )
    return _check("warm-up").ok(found)


def _learning_rate(plan: RunPlan) -> Finding:
    """The rate that decides whether a run is stable. Trained weights bear small ones only; adapters, which begin at
    nothing, ten times as much."""
    check, parameters = _check("learning rate"), parameter_count(plan.model, plan.vocab)
    (field, rate), kind, adapters = next(iter(plan.optim.rates.items())), plan.optim.kind, plan.lora.rank > 0
    usual = usual_rate(kind, parameters, tunes=plan.fine_tunes, adapters=adapters)
    if usual is None:
        return check.ok(f"{rate:g} of {kind.called}, {plan.optim.learning_rate:g} of the rest")
    whose = f"{parameters / 1e6:.3g}M parameters" if kind.usual is None else kind.called
    if plan.fine_tunes:
        whose = f"adapters on {whose}" if adapters else "all weights of a trained model"
    found = f"{rate:g}; about {usual:.1g} is usual for {whose}"
    if found_by_range_test(
        plan.settings.sources[f"optim.{field}"]
    ):  # on this model, of which a usual rate knows nothing
        return check.ok(f"{found}, and `flatout tune lr` found this one")
    way = f"Set optim.{field}={usual:.1g}{'' if plan.fine_tunes else ', or let `flatout tune lr` find one'}."
    if rate > FAR_ABOVE * usual:
        return check.warn(found, f"That is {rate / usual:.0f} times as much: the loss will likely jump. {way}")
    if rate < usual / FAR_BELOW and (plan.fine_tunes or plan.model.init_from is None):
        return check.warn(found, f"That is {usual / rate:.0f} times less: little will be learned. {way}")
    return check.ok(found)


def _evaluation(plan: RunPlan, steps: int, visits: Visits) -> Finding | None:
    every, patience, count = plan.eval.steps, plan.eval.patience, visits.evaluations
    if patience and count <= patience:
        return _check("evaluation").note(
            f"eval.patience is {patience}, and the run has {many(count, 'evaluation')}",
            "Early stopping can never happen. Lower it, or evaluate more often.",
        )
    there = plan.data.val.tokens
    if not there:
        return None
    tokens = there if plan.eval.tokens is None else min(plan.eval.tokens, there)
    # Forward only: a third of what a training token costs.
    spent, trained = count * tokens / 3, steps * step_tokens(plan)
    share = spent / (spent + trained)
    found = f"{many(count, 'time')} {tokens:,} tokens: about {share:.0%} of the run's time"
    ways: list[str] = []
    if share > _BIG_SHARE:
        times = _times_rarer(share)
        fewer = max(1 if plan.fine_tunes else plan.model.context, int(tokens / times))  # of samples, whole ones
        ways += [f"eval.every={min(round(every * times), steps)}"] if every else []
        ways += [f"eval.tokens={fewer}"] if fewer < tokens else []
    if ways:  # there are none for one window at the end, which is the least that there is
        advice = f"Evaluation eats the time. Set {' or '.join(ways)}, which makes it about 5%."
        return _check("evaluation").warn(found, advice)
    return _check("evaluation").ok(found)


def _saving(plan: RunPlan, steps: int) -> Finding:
    every = plan.checkpoint.every
    if every == 0:
        return _check("saving").note(
            "checkpoint.every is 0: only the end is saved, and a run that is stopped by a signal",
            f"A crash or a lost machine costs the whole run. Set checkpoint.every={max(1, steps // 10)}.",
        )
    return _check("saving").ok(f"every {every if isinstance(every, str) else many(every, 'step')}")


def _times_rarer(share: float) -> float:
    """How many times rarer something that takes this share of a run has to be, to take a twentieth of it."""
    return share / (1 - share) / (0.05 / 0.95)
