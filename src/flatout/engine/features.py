"""Asked, used, why: each switch of the `speed` section meets the device here.

A switch this machine cannot serve is an error when the user wrote it, and a fallback with a reason when a preset or a
default did. Nothing falls back in silence: every answer becomes a `Feature` of the run's first record. The rules stand
in `switches.py`, one row per switch; what only a trial can show (does this attention kernel take these shapes, does
the compiler work) is tried through `Probes`.
"""

import dataclasses
from collections.abc import Callable

from flatout.config.schema import RunConfig, SpeedConfig
from flatout.config.source import Source
from flatout.device import Device
from flatout.engine.case import Answer, Case, Dealing, Probes, Speed
from flatout.engine.switches import ROWS
from flatout.errors import HardwareError
from flatout.records import Feature


def resolve_speed(
    config: RunConfig,
    device: Device,
    corpus_bytes: int | None,
    source: Callable[[str], Source],
    *,
    vocab: int | None = None,
    step_tokens: float | None = None,
    ranks: int = 1,
    ranks_here: int = 1,
    threads_before: int | None = None,
    dealing: Dealing | None = None,
    own_model: bool = False,
    own_optimizer: bool = False,
    probes: Probes | None = None,
) -> Speed:
    """Decides every switch in the order of the table; `source(path)` tells where a field's value comes from.

    `corpus_bytes` is the size of the tokens, None where they are streamed. `vocab` is the model's vocabulary,
    `step_tokens` what the samples of a step hold on average, `ranks` how many processes share a step, of
    which `ranks_here` are on this host, `dealing` how they share the model. `threads_before` is how many CPU threads a
    run had that is resumed. `own_model` and `own_optimizer` say that they come from Python.
    """
    case = Case(
        config=config,
        device=device,
        corpus_bytes=corpus_bytes,
        vocab=vocab,
        step_tokens=step_tokens,
        ranks=ranks,
        ranks_here=ranks_here,
        threads_before=threads_before,
        dealing=dealing or Dealing(),
        own_model=own_model,
        own_optimizer=own_optimizer,
        probes=probes or Probes(),
    )
    features: list[Feature] = []
    for row in ROWS:
        asked = getattr(config.speed, row.name) if row.asked is None else row.asked(case)
        answer = Answer(asked) if asked in row.works else row.resolve(case)
        feature = Feature(name=row.name, asked=_text(asked), used=_text(answer.used, asked), why=answer.why)
        if not row.harmless:
            _check_wanted(feature, source(f"speed.{row.name}"))
        if answer.listed:
            features.append(feature if answer.shown is None else dataclasses.replace(feature, used=answer.shown))
        vars(case.used)[row.name] = answer.used
    used = vars(case.used)
    scan = "chunked" if used["scan"] == "auto" else used["scan"]
    shared = {"sharded": case.sharded, "shards": case.dealing.shards}
    return Speed(**{**used, **shared, "device": device, "scan": scan, "features": tuple(features)})


def _check_wanted(feature: Feature, source: Source) -> None:
    """Refuses a fallback from what the user wrote."""
    name, used = feature.name, feature.used
    if feature.why and feature.asked not in ("auto", used) and source.by_user:
        ways = dict.fromkeys([used] if SpeedConfig.model_fields[name].default != "auto" else ["auto", used])
        raise HardwareError(
            f"{source.prefix}speed.{name} is {feature.asked}, but {feature.why}",
            f"set speed.{name}={', or '.join(ways)}",
        )


def _text(value: object, asked: object = None) -> str:
    """A value as a config file has it; a yes or no of a switch that also has `auto` is on or off."""
    if isinstance(value, bool):
        words = ("off", "on") if isinstance(asked, str) else ("false", "true")
        return words[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
