"""Settings that earlier versions had: constants now, or parts of another one.

Who writes one gets an error with the way of today. Stored configs of earlier runs are translated, so that the runs
resume; a value that has no equal today is refused like a written one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flatout.errors import ConfigError

_ANY = object()  # a run resumes whatever it has stored, because the setting changes nothing that is learned


class Former(NamedTuple):
    way: str
    constant: Any = None  # the value that stored configs may have


_MUON = "leave it out: optim.muon_rate is what Muon needs"
_VALIDATION = "write {0}.validation=0.1, or {0}.validation and the name of a source"
_BETAS = "write optim.betas=[0.9, 0.95]"
FORMER: Mapping[str, Former] = {
    "model.state_heads": Former("leave it out: model.states has 8 groups, or as many as divide it", 8),
    "model.modulation": Former("leave it out: states decay alike at every token", 0.0),
    "model.scales": Former("leave it out: states read each token by itself", []),
    "model.convolution": Former("leave it out: states read each token by itself", 0),
    "model.resonance": Former("leave it out: states are read as they are", 0.0),
    "model.energy": Former("leave it out: the loss has no term for eigenvalues", 0.0),
    "model.embedding_std": Former("leave it out: it is 0.02, or with model.zero_init 1, for a tied head less", _ANY),
    "model.ignore_auto_map": Former("leave it out, and auto_map out of the files of a model without its code", False),
    "model.norm_weights": Former("write model.norm=rmsnorm, or plain-rmsnorm for norms without weights"),
    "model.qk_scale": Former("write model.qk_norm=1.2"),
    "data.shard_tokens": Former("leave it out: the size of shard files changes nothing", _ANY),
    "data.reshuffle": Former("write data.packing=reshuffle"),
    "data.val_source": Former(_VALIDATION.format("data")),
    "data.val_fraction": Former(_VALIDATION.format("data")),
    "clean.min_characters": Former("write clean.drop=[short]"),
    "clean.max_characters": Former("write clean.drop=[quality], which drops more than 100,000 words"),
    "clean.exact_duplicates": Former("write clean.drop=[exact_duplicates]"),
    "clean.near_duplicates": Former("write clean.drop=[near_duplicates]"),
    "clean.repetition": Former("write clean.drop=[repetition]"),
    "clean.quality": Former("write clean.drop=[quality]"),
    "clean.blocked_urls": Former("leave it out, and such pages out of the crawl before it is prepared"),
    "chat.format": Former("write chat.fields=[messages=messages], [text=text] or other columns"),
    "chat.too_long": Former("leave it out: samples are cut at chat.max_tokens, and counted", "truncate"),
    "chat.val_source": Former(_VALIDATION.format("chat")),
    "chat.val_fraction": Former(_VALIDATION.format("chat")),
    "lora.also": Former("leave it out: adapters train projections alone, lora.rank=0 all weights", []),
    "optim.beta1": Former(_BETAS),
    "optim.beta2": Former(_BETAS),
    "optim.warmup_steps": Former("write optim.warmup=100"),
    "optim.weight_decay_end": Former("leave it out: optim.weight_decay holds for the whole run"),
    "optim.normuon": Former("write optim.optimizer=normuon"),
    "optim.cautious": Former("leave it out: optim.optimizer=normuon decays cautiously, muon does not"),
    "optim.eps": Former("leave it out: it is 1e-8, beside NorMuon 1e-10"),
    "optim.momentum": Former(_MUON, 0.95),
    "optim.momentum_start": Former(_MUON, 0.85),
    "optim.momentum_warmup_steps": Former(_MUON, 100),
    "optim.momentum_cooldown_steps": Former(_MUON, 0),
    "speed.activation_offload": Former("leave it out: speed.checkpointing=full keeps little on the GPU", _ANY),
    "train.batch_rate_power": Former("leave it out: rates go with the root of the batch", 0.5),
    "eval.epoch_end": Former("write eval.every='1 epoch'", False),
    "eval.min_delta": Former("leave it out: eval.patience counts evaluations without a lower loss", _ANY),
    "checkpoint.minutes": Former("write checkpoint.every='10 minutes'", 0.0),
    "checkpoint.epochs": Former("write checkpoint.every='2 epochs'", 0),
    "checkpoint.asynchronous": Former("leave it out: 64 MiB and more are written beside training", _ANY),
    "checkpoint.best": Former("leave it out: it is kept unless checkpoint.every is 0 and eval.patience 0", _ANY),
    "checkpoint.full_disk_wait": Former("leave it out: resume the run once there is room", _ANY),
    "parallel.join": Former("leave it out: hosts have parallel.timeout to come", _ANY),
    "parallel.check_every": Former("leave it out: weights are compared every 1000 steps", _ANY),
    "output.plots": Former("leave it out: runs of 20 steps and more are drawn", _ANY),
}
_RULES = {  # by the former name: in `clean.drop`, switched on, switched off
    "min_characters": ("short", 200, 0),
    "exact_duplicates": ("exact_duplicates", True, False),
    "near_duplicates": ("near_duplicates", 0.8, None),
    "repetition": ("repetition", True, False),
    "quality": ("quality", True, False),
}
_COLUMNS = {  # by `chat.format`
    "auto": [],
    "messages": ["messages"],
    "sharegpt": ["conversations"],
    "alpaca": ["instruction", "output"],
    "prompt-completion": ["prompt", "completion"],
    "text": ["text"],
}


def refusal(path: str, where: str) -> ConfigError | None:
    """The error for a setting that earlier versions had; None for any other key."""
    former = FORMER.get(path)
    return None if former is None else ConfigError(f"{where}: {path} is no setting any more", former.way)


def as_now(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config as this version writes it."""
    return {name: _section_now(name, one) if isinstance(one, Mapping) else one for name, one in stored.items()}


def _section_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    if section in ("data", "chat"):
        _translate_validation(found)
    if section in _TRANSLATIONS:
        _TRANSLATIONS[section](found)
    for name, value in values.items():
        former = FORMER.get(f"{section}.{name}")
        if former is not None and (former.constant is _ANY or value == former.constant):
            found.pop(name, None)
    return found


def _translate_validation(values: dict[str, Any]) -> None:
    source, share = values.pop("val_source", None), values.pop("val_fraction", None)
    if source is not None or share is not None:
        values["validation"] = share if source is None else source


def _translate_model(model: dict[str, Any]) -> None:
    if model.get("norm_weights") is True:
        del model["norm_weights"]
    elif model.get("norm_weights") is False and model.get("norm") == "rmsnorm":
        del model["norm_weights"]
        model["norm"] = "plain-rmsnorm"
    scale = model.pop("qk_scale", 1.0)
    if model.get("qk_norm") and scale != 1.0:
        model["qk_norm"] = scale


def _translate_data(data: dict[str, Any]) -> None:
    if data.pop("reshuffle", False):
        data["packing"] = "reshuffle"
    if isinstance(data.get("source"), list):  # each source had settings that only `data` has now
        data["source"] = [
            {name: value for name, value in one.items() if value is not None} if isinstance(one, Mapping) else one
            for one in data["source"]
        ]


def _translate_clean(clean: dict[str, Any]) -> None:
    if all(name in clean and clean[name] in (on, off) for name, (_, on, off) in _RULES.items()):
        clean["drop"] = [rule for name, (rule, on, _) in _RULES.items() if clean.pop(name) == on]


def _translate_chat(chat: dict[str, Any]) -> None:
    if chat.get("format") in _COLUMNS:
        columns, fields = _COLUMNS[chat.pop("format")], chat.get("fields") or []
        named = [str(pair).partition("=")[0] for pair in fields]
        chat["fields"] = [*fields, *(f"{name}={name}" for name in columns if name not in named)]


def _translate_optim(optim: dict[str, Any]) -> None:
    if {"beta1", "beta2"} <= optim.keys():
        optim["betas"] = [optim.pop("beta1"), optim.pop("beta2")]
    if "warmup_steps" in optim:
        steps = optim.pop("warmup_steps")
        optim["warmup"] = steps if optim.get("warmup") is None else optim["warmup"]
    if optim.pop("normuon", False) and optim.get("optimizer") == "muon":
        optim["optimizer"] = "normuon"
    is_normuon = optim.get("optimizer") == "normuon"
    for name, constant in {"cautious": is_normuon, "eps": 1e-10 if is_normuon else 1e-8}.items():
        if optim.get(name) == constant:
            del optim[name]


_TRANSLATIONS = {
    "model": _translate_model,
    "data": _translate_data,
    "clean": _translate_clean,
    "chat": _translate_chat,
    "optim": _translate_optim,
}
