"""Adapters to and from disk in PEFT's format: adapter_config.json and adapter_model.safetensors.

Our stacked and fused tensors are written as separate projections under PEFT's names, so PEFT, vLLM and others load our
files and we load theirs. A folder is written whole or not at all. All of it is checked before the first value is copied
into a model. adapter_model.bin is a pickle and never read.

Contract: tensors are fp32 on disk, as in PEFT; fp16, bf16 and fp64 are read too. A field of adapter_config.json that
would change the result and is unknown here is refused by its name.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError, ConfigError
from flatout.files import canonical_json, disk_errors, write_new
from flatout.folders import foreign_entry, sweep, whole_folder
from flatout.model.adapter_targets import ALL_LINEAR, AdapterPlan, Choice, choose, targets_of
from flatout.model.adapters import (
    Adapters,
    attach,
)
from flatout.model.gpt import GPT
from flatout.model.hub import read_json
from flatout.model.seal import SEAL, check_seal, refuse_link, seal, sealed_names
from flatout.model.weights import read_safetensors, stored_shapes, write_tensors

# Fields of a config that do not change the result.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "loftq_config", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "rank_pattern",
    "alpha_pattern", "init_lora_weights",
}  # fmt: skip
_PLAIN = re.compile(r"[\w.]+")
# Ways to draw the first values that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ) change it.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


def read_plan(values: dict[str, Any], path: Path) -> AdapterPlan:
    """The plan in the `values` of an adapter_config.json at `path`."""
    _refuse_unknown(values, path)
    try:
        return AdapterPlan(
            rank=_typed(values, "r", int, 8, path),
            alpha=_typed(values, "lora_alpha", (int, float), 8, path),
            dropout=_typed(values, "lora_dropout", (int, float), 0.0, path),
            targets=_targets(values, path),
            rank_stabilised=_typed(values, "use_rslora", bool, False, path),
            dora=_typed(values, "use_dora", bool, False, path),
            ranks=_numbers(values, "rank_pattern", path),
            alphas=_numbers(values, "alpha_pattern", path),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}", "fetch the adapter again, or mend its config") from error


def _refuse_unknown(values: dict[str, Any], path: Path) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{path}: peft_type is {_shown(kind)}", "only LORA adapters, DoRA among them, can be loaded"
        )
    start = values.get("init_lora_weights", True)
    if not any(start is plain or (isinstance(start, str) and start == plain) for plain in _PLAIN_STARTS):
        raise CheckpointError(
            f"{path}: init_lora_weights is {_shown(start)}, which changes the base weights too",
            "convert it to a plain adapter with PEFT (path_initial_model_for_weight_conversion)",
        )
    for name, value in values.items():
        if name not in _READ | _WITHOUT_EFFECT and value and (name, value) != ("bias", "none"):
            raise CheckpointError(
                f"{path}: {name} is {_shown(value)}, which is not known here", "merge the adapter with PEFT first"
            )


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else shorten(value)


def _typed(values: dict[str, Any], name: str, kind: Any, default: Any, path: Path) -> Any:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{path}: {name} is {_shown(value)}, which it cannot be", "fetch the adapter again")
    return value


def _targets(values: dict[str, Any], path: Path) -> tuple[str, ...]:
    value = values.get("target_modules")
    if value == ALL_LINEAR:
        return (ALL_LINEAR,)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(
            f"{path}: target_modules is {_shown(value)}, not a list of names", "merge the adapter with PEFT first"
        )
    return tuple(value)


def _numbers(values: dict[str, Any], name: str, path: Path) -> tuple[tuple[str, Any], ...]:
    numbers = _typed(values, name, dict, {}, path)
    for pattern in numbers:
        if not _PLAIN.fullmatch(pattern):  # regular expressions of strangers may take exponential time
            raise CheckpointError(
                f"{path}: {name} has the pattern {_shown(pattern)}, and only plain names are known here",
                "merge the adapter with PEFT first",
            )
    return tuple(numbers.items())


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS = {"lora_A": ".lora_A.weight", "lora_B": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOrigin:
    """An adapter's folder and config."""

    folder: Path
    plan: AdapterPlan
    base: str | None  # the model it was trained on, by its name in the config; only for people to read


# --- writing ----------------------------------------------------------------------------------------------------------


class OccupiedError(CheckpointError):
    """A folder to be replaced holds foreign files."""


def save_adapter(
    adapters: Adapters,
    folder: Path,
    *,
    base: str | None = None,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> int:
    """Writes the adapter and other `files` (a tokenizer, a template); returns the bytes written.

    An existing adapter of ours is replaced. A folder with foreign files is an `OccupiedError` and stays as it is.
    `facts` go into flatout.json beside the hashes. `tensors`: from an earlier call of `adapter_tensors`.
    """
    folder = Path(os.path.abspath(folder))
    content = {CONFIG: canonical_json(peft_config(adapters, base)), **(files or {})}
    own = _own_names(folder, content)
    if os.path.lexists(folder):
        found = folder.name if folder.is_symlink() or not folder.is_dir() else foreign_entry(folder, own)
        if found is not None:
            raise _occupied(folder, found)
    tensors = adapter_tensors(adapters) if tensors is None else tensors
    with disk_errors(f"adapter {folder}", safe=""):
        sweep(folder.parent, re.escape(folder.name), locked=False)
        with whole_folder(folder, replaces=own, occupied=_occupied) as work:
            known = {WEIGHTS: write_tensors(work / WEIGHTS, tensors, {"format": "pt"})}
            for name, raw in content.items():
                (work / name).parent.mkdir(exist_ok=True)
                write_new(work / name, raw)
            return seal(work, facts or {}, known)


def _own_names(folder: Path, content: Iterable[str]) -> set[str]:
    """Files that may be replaced: those named in our manifest. If it is damaged or of an earlier version and names
    none, the files that are written now."""
    if not os.path.isfile(folder / SEAL):
        return set()
    named = sealed_names(folder)
    return named if len(named) > 1 else {SEAL, WEIGHTS, *content}


def _occupied(folder: Path, name: str) -> OccupiedError:
    what = "is no folder of ours" if name == folder.name else f"holds {shorten(name)}, which we did not write"
    return OccupiedError(f"{folder} is there already, and {what}: it is not replaced", "choose another folder")


def adapter_tensors(adapters: Adapters) -> dict[str, Tensor]:
    """Copies of all tensors on the CPU, under PEFT's names."""
    named = _named(adapters).items()
    return {name: value.detach().to("cpu", torch.float32, copy=True).contiguous() for name, value in named}


def _named(adapters: Adapters) -> dict[str, Tensor]:
    """All tensors (no copies) under PEFT's names."""
    tensors: dict[str, Tensor] = {}
    for part in adapters.tensors():
        for kind, value in {"lora_A": part.a, "lora_B": part.b, "magnitude": part.magnitude}.items():
            if value is not None:
                tensors[_PREFIX + part.choice.target.path + _KINDS[kind]] = value
    return tensors


def peft_config(adapters: Adapters, base: str | None) -> dict[str, Any]:
    """adapter_config.json. `all-linear` is written as a list of names, because not all programs know the word."""
    plan, model = adapters.plan, adapters.model.config
    targets = list(plan.targets)
    ranks, alphas = _patterns(adapters)
    if targets == [ALL_LINEAR]:
        targets = sorted({choice.target.name for choice in adapters.choices})
    return {
        "alpha_pattern": {pattern: _whole(alpha) for pattern, alpha in alphas.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": model.family == "gpt2",
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _whole(plan.alpha),
        "lora_dropout": plan.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": plan.rank,
        "rank_pattern": ranks,
        "revision": None,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": plan.dora,
        "use_rslora": plan.rank_stabilised,
    }


def _patterns(adapters: Adapters) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks and alphas by name. The first match counts, and files have them sorted, as PEFT's own. If sorting would
    change the result, every target gets a name of its own."""
    plan = adapters.plan
    filed = dataclasses.replace(plan, ranks=tuple(sorted(plan.ranks)), alphas=tuple(sorted(plan.alphas)))
    if filed == plan or choose(filed, targets_of(adapters.model), strict=False) == adapters.choices:
        return dict(plan.ranks), dict(plan.alphas)
    ranks = {one.target.path: one.rank for one in adapters.choices if one.rank != plan.rank}
    return ranks, {one.target.path: one.alpha for one in adapters.choices if one.alpha != plan.alpha}


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


# --- reading ----------------------------------------------------------------------------------------------------------


def read_origin(folder: Path) -> AdapterOrigin:
    """Reads the config, not the tensors."""
    path = folder / CONFIG
    check_seal(folder)
    refuse_link(folder / WEIGHTS, folder)
    values = read_json(path, f"name a folder with {CONFIG} and {WEIGHTS}")
    plan = read_plan(values, path)
    base = values.get("base_model_name_or_path")
    return AdapterOrigin(folder=folder, plan=plan, base=str(base) if base else None)


def load_adapter(model: GPT, folder: Path, *, dropout: float | None = None) -> tuple[Adapters, AdapterOrigin]:
    """Attaches a stored adapter to a model. `dropout` replaces the stored value."""
    origin = read_origin(folder)
    plan = origin.plan if dropout is None else dataclasses.replace(origin.plan, dropout=dropout)
    try:
        check_stored(origin, model, choose(plan, targets_of(model), strict=False))
        tensors = read_safetensors(_weights_of(folder))
        adapters = attach(model, plan, 0, strict=False)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error.message}", error.hint) from error
    try:
        _assign(adapters, tensors, folder / WEIGHTS)
    except BaseException:
        adapters.detach()
        raise
    return adapters, origin


def load_into(adapters: Adapters, folder: Path) -> AdapterOrigin:
    """Loads stored values into attached adapters. Ranks, targets, scales and kind must be the same."""
    origin = read_origin(folder)
    theirs, ours = origin.plan, adapters.plan
    same = choose(theirs, targets_of(adapters.model), strict=False) == adapters.choices
    for name in ("dora", "rank_stabilised", "rank", "alpha", *(() if same else ("ranks", "alphas"))):
        if getattr(theirs, name) != getattr(ours, name):
            raise CheckpointError(
                f"{folder / CONFIG}: {name} is {getattr(theirs, name)!r}, here it is {getattr(ours, name)!r}",
                "use the settings that the adapter was trained with",
            )
    _assign(adapters, read_safetensors(_weights_of(folder)), folder / WEIGHTS)
    return origin


def _weights_of(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not os.path.isfile(path):
        old_kind = folder / "adapter_model.bin"
        if old_kind.exists():
            raise CheckpointError(
                f"{old_kind} is of a kind that can run code when it is read, and never is",
                f"convert it to {WEIGHTS} with PEFT",
            )
        raise CheckpointError(f"{path} does not exist", f"name a folder with {CONFIG} and {WEIGHTS}")
    return path


def check_stored(origin: AdapterOrigin, model: GPT, choices: list[Choice]) -> None:
    """Refuses an adapter whose tensors do not match its config, before memory is allocated for them.

    `model` may be on the meta device.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for choice in choices:
        prefix, target = _PREFIX + choice.target.path, choice.target
        needed[prefix + _KINDS["lora_A"]] = (choice.rank, target.inputs)
        needed[prefix + _KINDS["lora_B"]] = (target.rows, choice.rank)
        if origin.plan.dora:
            needed[prefix + _KINDS["magnitude"]] = (target.rows,)
    path = _weights_of(origin.folder)
    _check_shapes(needed, stored_shapes(path), path)


def _check_shapes(needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    unexpected = sorted(found.keys() - needed.keys())
    if unexpected:
        raise CheckpointError(f"{path} holds {_several(unexpected)}, for which there is no place", _why(unexpected[0]))
    missing = sorted(needed.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{path} has no {_several(missing)}", "it belongs to another base model or config, or is not complete"
        )
    for name, shape in needed.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {found[name]}, this model and config need {shape}",
                "the adapter belongs to another base model, or its config has other ranks",
            )


@torch.no_grad()
def _assign(adapters: Adapters, tensors: dict[str, Tensor], path: Path) -> None:
    places = _named(adapters)
    needed, found = ({name: tuple(tensor.shape) for name, tensor in these.items()} for these in (places, tensors))
    _check_shapes(needed, found, path)
    for name in places:
        tensor = tensors[name]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(f"{path}: {name} is of type {tensor.dtype}", "adapters are fp32, bf16, fp16 or fp64")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path}: {name} holds values that are not finite", "the adapter is of no use")
    for name, place in places.items():
        place.copy_(tensors[name])
    adapters.forget()


def _several(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


def _why(name: str) -> str:
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "embeddings and the output head cannot have an adapter here; merge it with PEFT first"
    if name.endswith(_KINDS["magnitude"]):
        return "it has DoRA's magnitudes, but its config does not say use_dora"
    return "the adapter belongs to another base model, or its config does not name all of its targets"
