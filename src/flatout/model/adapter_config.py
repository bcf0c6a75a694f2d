"""PEFT's adapter_config.json, field by field: what adapter it describes.

Contract: nothing in a config is passed over in silence. A field that would change the result and is not known here is
refused by its name.
"""

from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError, ConfigError
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.whole import BIASES, MODULES

# Fields of a config that have no say in what an adapter computes.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "loftq_config", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "target_modules", "rank_pattern",
    "alpha_pattern", "exclude_modules", "layers_to_transform", "modules_to_save", "init_lora_weights", "lora_bias",
}  # fmt: skip
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
            targets=_names(values, "target_modules", path),
            rank_stabilised=_typed(values, "use_rslora", bool, False, path),
            dora=_typed(values, "use_dora", bool, False, path),
            ranks=tuple(_typed(values, "rank_pattern", dict, {}, path).items()),
            alphas=tuple(_typed(values, "alpha_pattern", dict, {}, path).items()),
            exclude=_names(values, "exclude_modules", path),
            layers=_layers(values, path),
            also=_also(values, path),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}", "fetch the adapter again, or mend its config") from error


def _refuse_unknown(values: dict[str, Any], path: Path) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{path}: peft_type is {_told(kind)}", "only LORA adapters, DoRA among them, can be loaded"
        )
    if values.get("lora_bias"):
        raise CheckpointError(
            f"{path}: lora_bias is {_told(values['lora_bias'])}",
            "biases of adapters cannot be loaded; merge with PEFT first",
        )
    start = values.get("init_lora_weights", True)
    if not any(start is plain or (isinstance(start, str) and start == plain) for plain in _PLAIN_STARTS):
        raise CheckpointError(
            f"{path}: init_lora_weights is {_told(start)}, which changes the base weights too",
            "convert it to a plain adapter with PEFT (path_initial_model_for_weight_conversion)",
        )
    for name, value in values.items():
        if name not in _READ | _WITHOUT_EFFECT and value:
            raise CheckpointError(
                f"{path}: {name} is {_told(value)}, which is not known here", "merge the adapter with PEFT first"
            )


def _told(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else shorten(value)


def _typed(values: dict[str, Any], name: str, kind: Any, default: Any, path: Path) -> Any:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{path}: {name} is {_told(value)}, which it cannot be", "fetch the adapter again")
    return value


def _names(values: dict[str, Any], name: str, path: Path) -> tuple[str, ...] | str:
    value = values.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{path}: {name} is {_told(value)}, not a list of names", "fetch the adapter again")
    return tuple(value)


def _also(values: dict[str, Any], path: Path) -> tuple[str, ...]:
    """What is trained whole. PEFT's `lora_only` is its `all` where every bias has an adapter beside it; elsewhere the
    file lacks the others, and is refused for that."""
    modules = _names(values, "modules_to_save", path)
    unknown = [name for name in modules if name not in MODULES]
    if isinstance(modules, str) or unknown:
        raise CheckpointError(
            f"{path}: modules_to_save is {_told(values['modules_to_save'])}",
            f"of whole modules only {', '.join(MODULES)} can be loaded; merge with PEFT first",
        )
    bias = values.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise CheckpointError(f"{path}: bias is {_told(bias)}", "it is none, all or lora_only; fetch the adapter again")
    return (*dict.fromkeys(MODULES[name] for name in modules), *((BIASES,) if bias != "none" else ()))


def _layers(values: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    value = values.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise CheckpointError(f"{path}: layers_to_transform is {_told(value)}, not numbers", "fetch the adapter again")
    return tuple(layers)
