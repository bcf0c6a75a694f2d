"""Settings that earlier versions had: constants now, or parts of another one.

A file or a stored config that still has one is read where it says what holds now, so that those of earlier versions
load. Any other value is refused with what it is now, and on a command line each of them is. What a run has stored may
say anything of a setting that changes nothing that is learned, so that the run resumes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError

Written = Mapping[str, Any]  # a section, by name


class Constant(NamedTuple):
    value: Any  # a function where it follows from other settings of its section
    why: str  # a clause


class Moved(NamedTuple):
    """What another field says now.

    `value` gives what stands there, from the value here and the rest of the section; or `NOTHING` or `REFUSED`.
    """

    field: str
    value: Callable[[Any, Written], Any]
    written: str  # how it is written now


NOTHING, REFUSED = object(), object()  # it says what holds anyway; what it says depends on what the file leaves out


def _by_optimizer(beside_normuon: Any, otherwise: Any) -> Callable[[Written], Any]:
    def value(optim: Written) -> Any:
        if "optimizer" not in optim:
            return REFUSED
        return beside_normuon if "normuon" in (optim["optimizer"], optim.get("normuon") and "normuon") else otherwise

    return value


def _embedding_std(model: Written) -> Any:
    if not {"zero_init", "tied", "width"} <= model.keys():
        return REFUSED
    head = float(f"{0.5 / math.sqrt(model['width']):.3g}")
    return None if not model["zero_init"] else head if model["tied"] else 1.0


def _best(saving: Written) -> Any:
    return saving["every"] != 0 if "every" in saving else REFUSED


_TOKENS = "states read each token by itself"
_MUON = "optim.muon_rate is what Muon needs"
CONSTANTS: Mapping[str, Constant] = {
    "model.state_heads": Constant(8, "horizons are dealt out to 8 groups of states, or as many as divide model.states"),
    "model.modulation": Constant(0.0, "states decay alike at every token"),
    "model.scales": Constant([], _TOKENS),
    "model.convolution": Constant(0, _TOKENS),
    "model.resonance": Constant(0.0, "states are read as they are"),
    "model.energy": Constant(0.0, "the loss has no term for eigenvalues"),
    "model.embedding_std": Constant(_embedding_std, "it is 0.02, or with model.zero_init 1, for a tied head less"),
    "model.ignore_auto_map": Constant(False, "take auto_map out of the model's files to use it without its code"),
    "data.shard_tokens": Constant(100_000_000, "the size of shard files changes nothing"),
    "clean.max_characters": Constant(None, "clean.drop=[quality] drops documents of more than 100,000 words"),
    "clean.blocked_urls": Constant(None, "take such pages out of the crawl before it is prepared"),
    "chat.too_long": Constant("truncate", "samples are cut at chat.max_tokens, and the report counts them"),
    "optim.weight_decay_end": Constant(None, "optim.weight_decay holds for the whole run"),
    "optim.cautious": Constant(_by_optimizer(True, False), "optim.optimizer=normuon decays cautiously, muon does not"),
    "optim.momentum": Constant(0.95, _MUON),
    "optim.momentum_start": Constant(0.85, _MUON),
    "optim.momentum_warmup_steps": Constant(100, _MUON),
    "optim.momentum_cooldown_steps": Constant(0, "a cool-down of the momentum gained nothing"),
    "optim.eps": Constant(_by_optimizer(1e-10, 1e-8), "it is 1e-8, beside NorMuon 1e-10"),
    "train.batch_rate_power": Constant(0.5, "rates go with the root of the batch"),
    "eval.epoch_end": Constant(False, "eval.every takes epochs, too, such as `1 epoch`"),
    "eval.min_delta": Constant(0.0, "eval.patience counts evaluations without a lower loss"),
    "checkpoint.minutes": Constant(0.0, "checkpoint.every takes minutes, too, such as `10 minutes`"),
    "checkpoint.epochs": Constant(0, "checkpoint.every takes epochs, too, such as `2 epochs`"),
    "checkpoint.asynchronous": Constant("auto", "where memory is free, 64 MiB and more are written beside training"),
    "checkpoint.best": Constant(_best, "it is kept unless checkpoint.every is 0 and eval.patience 0"),
    "checkpoint.full_disk_wait": Constant(300.0, "a run that ended on a full disk is resumed once there is room"),
    "speed.activation_offload": Constant(False, "speed.checkpointing=full keeps little on the GPU"),
    "parallel.join": Constant(lambda _: 25.0, "hosts have parallel.timeout to come, processes of one host 60 s"),
    "parallel.check_every": Constant(1000, "to compare the weights takes no time that could be seen"),
    "output.plots": Constant(lambda _: True, "runs of 20 steps and more are drawn, others by `flatout plot`"),
}
# These change nothing that is learned.
HARMLESS = (
    "eval.min_delta",
    "checkpoint.asynchronous",
    "checkpoint.best",
    "parallel.join",
    "output.plots",
    "speed.activation_offload",
)


_RULES = {  # by the former name: in `clean.drop`, switched on, switched off
    "min_characters": ("short", 200, 0),
    "exact_duplicates": ("exact_duplicates", True, False),
    "near_duplicates": ("near_duplicates", 0.8, None),
    "repetition": ("repetition", True, False),
    "quality": ("quality", True, False),
}
_OF_A_SOURCE = ("field", "document_start")  # which each source of a mixture had, besides those of `data`


def _drop(_: Any, clean: Written) -> Any:
    if any(clean.get(name, "") not in switch for name, (_, *switch) in _RULES.items()):
        return REFUSED
    return [rule for name, (rule, *_) in _RULES.items() if clean[name]]


def _source(source: Any, _: Written) -> Any:
    if not isinstance(source, list):
        return source
    return [
        {name: value for name, value in one.items() if value is not None or name not in _OF_A_SOURCE}
        if isinstance(one, Mapping)
        else one
        for one in source
    ]


def _packing(reshuffles: Any, data: Written) -> Any:
    return REFUSED if "packing" not in data else "reshuffle" if reshuffles else NOTHING


def _optimizer(normuon: Any, optim: Written) -> Any:
    return REFUSED if "optimizer" not in optim else "normuon" if normuon and optim["optimizer"] == "muon" else NOTHING


def _share(share: Any, section: Written) -> Any:
    return share if section.get("val_source") is None else NOTHING


def _validation(section: str) -> dict[str, Moved]:
    way = f"{section}.validation=0.1, or the name of a source"
    return {
        f"{section}.val_source": Moved(f"{section}.validation", lambda path, _: NOTHING if path is None else path, way),
        f"{section}.val_fraction": Moved(f"{section}.validation", _share, way),
    }


_COLUMNS = {  # by which rows of each format are known
    "messages": ["messages"],
    "sharegpt": ["conversations"],
    "alpaca": ["instruction", "output"],
    "prompt-completion": ["prompt", "completion"],
    "text": ["text"],
}


def _fields(format: Any, chat: Written) -> Any:
    if format not in _COLUMNS:
        return NOTHING if format == "auto" else REFUSED
    given = chat.get("fields") or []
    named = {str(pair).partition("=")[0] for pair in given}
    return [*given, *(f"{name}={name}" for name in _COLUMNS[format] if name not in named)]


def _betas(_: Any, optim: Written) -> Any:
    return [optim["beta1"], optim["beta2"]] if {"beta1", "beta2"} <= optim.keys() else REFUSED


def _qk_norm(scale: Any, model: Written) -> Any:
    return REFUSED if "qk_norm" not in model else scale if model["qk_norm"] and scale != 1.0 else NOTHING


def _norm(weights: Any, model: Written) -> Any:
    if model.get("norm", "layernorm") == "layernorm":  # whose weights are not left out any more
        return NOTHING if weights and "norm" in model else REFUSED
    return NOTHING if weights else "plain-rmsnorm"


PARTS: Mapping[str, Moved] = {
    **{f"clean.{name}": Moved("clean.drop", _drop, f"clean.drop=[{rule}]") for name, (rule, *_) in _RULES.items()},
    "chat.format": Moved("chat.fields", _fields, "chat.fields=[messages=messages], [text=text] or other columns"),
    "data.reshuffle": Moved("data.packing", _packing, "data.packing=reshuffle"),
    "data.source": Moved("data.source", _source, "data.source"),
    **_validation("data"),
    **_validation("chat"),
    "model.norm_weights": Moved("model.norm", _norm, "model.norm=rmsnorm, or plain-rmsnorm for norms without weights"),
    "model.qk_scale": Moved("model.qk_norm", _qk_norm, "model.qk_norm=1.2"),
    "optim.beta1": Moved("optim.betas", _betas, "optim.betas=[0.9, 0.95]"),
    "optim.beta2": Moved("optim.betas", _betas, "optim.betas=[0.9, 0.95]"),
    "optim.normuon": Moved("optim.optimizer", _optimizer, "optim.optimizer=normuon"),
    "optim.warmup": Moved("optim.warmup", lambda warmup, _: NOTHING if warmup is None else warmup, "optim.warmup"),
    "optim.warmup_steps": Moved("optim.warmup", lambda steps, _: steps, "optim.warmup=100"),
}


def refusal(path: str, where: str) -> ConfigError | None:
    """What to say to somebody who sets what is no setting any more; None for any other key."""
    if path in PARTS:
        part = PARTS[path]
        return ConfigError(f"{where}: {path} is part of {part.field} now", f"write {part.written}")
    constant = CONSTANTS.get(path)
    if constant is None:
        return None
    always = "it follows from others" if callable(constant.value) else f"it is always {format_value(constant.value)}"
    return ConfigError(f"{where}: {path} is no setting any more: {always}", f"leave it out: {constant.why}")


def section_now(section: str, values: Written, *, stored: bool = False) -> dict[str, tuple[Any, str]]:
    """A section of a file as this version has it: by path, each value and the name that it stands under there.

    Names that are no fields stay, for whoever reads them to refuse. `stored`: a run wrote it, not a person.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in sorted(values, key=lambda name: f"{section}.{name}" in PARTS):  # parts win over the field that has them
        path, value = f"{section}.{name}", values[name]
        if path in CONSTANTS:
            constant = CONSTANTS[path].value
            if (stored and path in HARMLESS) or value == (constant(values) if callable(constant) else constant):
                continue
        elif path in PARTS:
            there = PARTS[path].value(value, values)
            if there is NOTHING:
                continue
            if there is not REFUSED:
                path, value = PARTS[path].field, there
        found[path] = value, name
    return found


def as_now(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config as this version writes it."""
    return {
        section: {
            path.removeprefix(f"{section}."): value
            for path, (value, _) in section_now(section, values, stored=True).items()
        }
        if isinstance(values, Mapping)
        else values
        for section, values in stored.items()
    }
