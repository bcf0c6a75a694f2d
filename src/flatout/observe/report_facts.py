"""What was trained on what, the config, and the commands that do it again: the words of a report.

A fine-tuning run has other facts than pretraining: the model it started from, what is trained of it, and rows in place
of a text. What an older run did not write is left out.
"""

import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from flatout.config.yaml_loader import format_value
from flatout.observe.human import human_count, human_parameters
from flatout.observe.runs import RunState
from flatout.observe.series import amount
from flatout.observe.sinks import RunHistory, rows_with_step

Rows = list[tuple[str, Any]]  # of a label and its value; those without a value are left out


def summary_of(history: RunHistory, state: RunState) -> str:
    """The run in a sentence or two: what was trained on so far, and beside it how much of it there is."""
    info, size = history.info, amount(history.info.get("parameters"))
    parts = [amount(info.get(f"{name}_parameters")) for name in ("trained", "table")]
    what = f"{info.get('family', 'model')}" + ("" if size is None else f" with {human_parameters(size, *parts)}")
    where = f"on {info.get('device', 'an unknown device')}. {state.text}"
    if _fine_tuned(info):
        there = amount(_samples(info).get("train", info.get("windows")))
        seen = _seen(_samples_seen(info, state.step), there, "sample", _at(info, "chat.source"))
        return f"{what}, fine-tuned from {_at(info, 'model.init_from')} on {seen}, {where}"
    source = _at(info, "data.source")
    from_where = source if isinstance(source, str) else "several sources" if isinstance(source, list) else "its data"
    steps = rows_with_step(history.steps)
    seen, there = amount(steps[-1].get("tokens")) if steps else 0, amount(info.get("train_tokens"))
    return f"{what}, trained on {_seen(seen, there, 'token', from_where)}, {where}"


def _samples_seen(info: dict[str, Any], step: int) -> float | None:
    """The samples of `step` steps: the last step of an epoch has only the rest."""
    batch, train = amount(info.get("batch_samples")), amount(_samples(info).get("train"))
    if not batch or not train:
        return None if batch is None else batch * step
    epochs, steps = divmod(step, math.ceil(train / batch))
    return epochs * train + steps * batch


def _seen(seen: float | None, there: float | None, noun: str, source: Any) -> str:
    """How much of a source was trained on: a share of it, or how often all of it."""
    if seen is None:
        return f"{source}"
    if not there:
        return f"{human_count(seen)} {noun}s of {source}"
    times = ""
    if seen >= 0.995 * there:
        times = ", all of it" if seen <= 1.005 * there else f", {seen / there:.3g} times all of it"
    return f"{human_count(seen)} {noun}s of {source} ({human_count(there)} {noun}s{times})"


def facts_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    """What was trained on what, in three groups of label and text."""
    tuned = _fine_tuned(info)
    start = _base_rows(info) if tuned else [("Started from", _at(info, "model.init_from"))]
    groups = {
        "Model": [*start, *_model_rows(info)],
        "Data": _sample_rows(info) if tuned else _text_rows(info),
        "Training": _training_rows(info),
    }
    return [{"group": group, "rows": texts_of(rows)} for group, rows in groups.items()]


def _model_rows(info: dict[str, Any]) -> Rows:
    shape = [_at(info, f"model.{name}") for name in ("layers", "width", "heads")]
    norm, positions, mlp = (_at(info, f"model.{name}") for name in ("norm", "positions", "mlp"))
    kinds, flops = _kinds(info), amount(info.get("flops_per_token"))
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rotary_unused = positions == "rope" and not _attends(info)
    return [
        ("Family", info.get("family")),
        ("Parameters", _whole(info.get("parameters"))),
        ("In tables", _whole(info.get("table_parameters") or None, " of them")),
        ("Blocks, width, heads", None if None in shape else " × ".join(str(item) for item in shape)),
        ("Pattern of blocks", f"{_at(info, 'model.pattern')} ({counts})" if set(kinds) - {"A"} else None),
        ("Window", _whole(_at(info, "model.window"), " tokens in each W block") if "W" in kinds else None),
        ("States", _whole(_at(info, "model.states"), " in each E block") if "E" in kinds else None),
        ("Context", _whole(info.get("context"), " tokens")),
        ("Vocabulary", _whole(info.get("vocab"), " ids")),
        ("Norm, MLP", _joined(norm, mlp)) if rotary_unused else ("Norm, positions, MLP", _joined(norm, positions, mlp)),
        ("Arithmetic per token", None if flops is None else f"{human_count(flops)} FLOP, forward and backward"),
    ]


def _base_rows(info: dict[str, Any]) -> Rows:
    """The model that a run started from, and what is trained of it."""
    rank, size = amount(_at(info, "lora.rank")), amount(info.get("parameters"))
    trained = amount(info.get("trained_parameters"))
    rows: Rows = [("Base", _at(info, "model.init_from")), ("Base's fingerprint", _shortened(info.get("base")))]
    if not rank:
        return [*rows, ("Trained", None if size is None else f"all {size:,} parameters")]
    if trained is not None and size is not None:
        share = trained / max(1, size + trained)
        rows.append(("Trained", f"{trained:,} parameters in adapters, {share:.2%} of all; {size:,} are frozen"))
    alpha, dropout = (amount(_at(info, f"lora.{name}")) for name in ("alpha", "dropout"))
    kind = "DoRA" if _at(info, "lora.dora") else "LoRA"
    more = [f"{kind}, rank {rank:g}", f"alpha {2 * rank if alpha is None else alpha:g}"]
    more += ["rank-stabilised"] if _at(info, "lora.rank_stabilised") else []
    more += [f"dropout {dropout:g}"] if dropout else []
    rows.append(("Adapters", ", ".join(more)))
    labels = {"ranks": "Ranks by name", "alphas": "Alphas by name", "targets": "Targets"}
    for name, label in labels.items():
        values = _at(info, f"lora.{name}")
        rows.append((label, ", ".join(map(str, values)) if isinstance(values, list) and values else None))
    held = _at(info, "lora.quantize")
    rows.append(("Went on from", _at(info, "lora.init_from")))
    return [*rows, ("Base held in", None if held in (None, "none") else f"4 bits ({held})")]


def _text_rows(info: dict[str, Any]) -> Rows:
    source = _at(info, "data.source")
    return [
        ("Source", format_value(source) if isinstance(source, list | dict) else source),
        ("Tokenizer", info.get("tokenizer")),
        ("Training", _whole(info.get("train_tokens"), " tokens") or "streamed, length not known"),
        ("Validation", _whole(info.get("val_tokens"), " tokens")),
        ("Windows", _whole(info.get("windows"))),
        ("Packing", _at(info, "data.packing")),
        ("Documents", "apart: a token sees its own alone" if _at(info, "data.documents") == "apart" else None),
        ("Fingerprint", _shortened(info.get("dataset"))),
    ]


def _sample_rows(info: dict[str, Any]) -> Rows:
    """The rows of a fine-tuning run, and what became of them."""
    told = _samples(info)
    files, rows, lost = (amount(told.get(name)) for name in ("files", "rows", "rows_not_used"))
    train, val, labelled = (amount(told.get(name)) for name in ("train", "val", "labelled"))
    tokens, val_source = amount(info.get("train_tokens")), _at(info, "chat.validation")
    val_source = val_source if isinstance(val_source, str) else None
    held = f"from {val_source}" if val_source is not None else "held out"
    template = told.get("template") or _at(info, "chat.template")
    return [
        ("Rows", f"{_at(info, 'chat.source')}" + (f" ({files:,} files)" if files and files > 1 else "")),
        ("Held-out rows", val_source),
        ("Read as", told.get("format")),
        ("Rows used", None if rows is None else f"{rows - (lost or 0):,} of {rows:,}"),
        ("Rows not used", f"{lost:,}; why is in problems.jsonl beside the samples" if lost else _whole(lost)),
        ("Samples", None if train is None else f"{train:,} to train on, {val or 0:,} {held}"),
        ("Learned", f"{labelled / tokens:.1%} of {tokens:,} tokens" if labelled is not None and tokens else None),
        ("Trained on", _at(info, "chat.train_on")),
        ("Template", "the model's own" if template == "model" else template),
        ("Packing", "a row for each sample" if _at(info, "chat.packing") is False else "samples share rows"),
        ("Validation", _whole(info.get("val_tokens"), " tokens")),
        ("Fingerprint", _shortened(info.get("dataset"))),
    ]


def _training_rows(info: dict[str, Any]) -> Rows:
    names = ("steps", "batch_tokens", "parameters", "windows", "context", "batch_samples")
    steps, batch, size, windows, context, samples = (amount(info.get(name)) for name in names)
    planned = steps * batch if steps is not None and batch is not None else None
    mixture = [info.get(name) for name in ("micro_batch", "context", "accumulation")]
    if samples is not None:
        about = "" if planned is None else f", about {human_count(planned)} tokens"
        rows: Rows = [
            ("Planned", None if steps is None else f"{steps:,} steps{about}"),
            ("Epochs", f"{steps * samples / windows:.2f}" if steps is not None and windows else None),
            ("Samples per step", f"{samples:,}" + ("" if batch is None else f", about {batch:,} tokens")),
        ]
    else:
        known = batch is not None and None not in mixture
        rows = [
            ("Planned", None if planned is None else f"{steps:,} steps, {human_count(planned)} tokens"),
            ("Epochs", f"{planned / (windows * context):.2f}" if planned and windows and context else None),
            ("Tokens per parameter", f"{planned / size:,.2f} planned" if planned and size else None),
            ("Tokens per step", f"{batch:,} ({' × '.join(str(item) for item in mixture)})" if known else None),
        ]
    return [
        *rows,
        ("Learning rate", _joined(_at(info, "optim.learning_rate"), _at(info, "optim.schedule"))),
        ("Warm-up", _warmup(info)),
        ("Weight decay, clip", _joined(_at(info, "optim.weight_decay"), _at(info, "optim.clip"))),
        ("Seed", _at(info, "train.seed")),
    ]


def _warmup(info: dict[str, Any]) -> str | None:
    """The warm-up as it was set: in steps, as a share of the run, or in epochs."""
    told = _at(info, "optim.warmup")
    if isinstance(told, float):
        return f"{told:.3g} of the run"
    if told is None:  # an earlier version wrote it
        told = _at(info, "optim.warmup_steps")
    return told if isinstance(told, str) else _whole(told, " steps")


# --- the config and the commands --------------------------------------------------------------------------------------


def shown_config(info: dict[str, Any]) -> Any:
    """The stored config, without the settings of rotary positions where no block has attention to read them."""
    config = info.get("config")
    if not isinstance(config, dict) or _attends(info):
        return config
    model = {name: value for name, value in config["model"].items() if not str(name).startswith("rope_")}
    return {**config, "model": model}


def _attends(info: dict[str, Any]) -> bool:
    return set(_kinds(info)) != {"E"}


def _kinds(info: dict[str, Any]) -> str:
    """The letter of every block; nothing where it is not known. A damaged record may hold anything."""
    pattern, layers = _at(info, "model.pattern"), amount(_at(info, "model.layers"))
    if not isinstance(pattern, str) or not pattern or layers is None or not 1 <= layers <= 1000:
        return ""
    return (pattern * (int(layers) // len(pattern) + 1))[: int(layers)]


def flat_config(config: Any) -> dict[str, str]:
    flat: dict[str, str] = {}
    for section, values in config.items() if isinstance(config, dict) else ():
        if isinstance(values, dict):
            flat |= {f"{section}.{name}": format_value(value) for name, value in values.items()}
        else:
            flat[str(section)] = format_value(values)
    return flat


def commands_of(history: RunHistory, state: RunState) -> list[list[str]]:
    """Commands that make, continue and use the run. They are for the folder that it was started in."""
    folder, info = str(history.folder), history.info
    quoted, tuned = shlex.quote(folder), _fine_tuned(info)
    verb = "finetune" if tuned else "train"
    config, again = shlex.quote(str(history.folder / "config.yaml")), shlex.quote(f"{folder}-again")
    commands = [["The same run again, in a new folder", f"flatout {verb} {config} output.folder={again}"]]
    if state.kind in ("interrupted", "stopped"):
        commands.append(["Go on with it", f"flatout {verb} --resume {quoted}"])
    if history.checkpoints:
        commands.append(
            ["Talk to it", f"flatout chat {quoted}"] if tuned else ["Text from it", f"flatout generate {quoted}"]
        )
        commands.append(["Its loss once more", f"flatout eval {quoted}"])
        if tuned:
            target = shlex.quote(f"{folder}-exported")
            commands.append(["One folder of weights, for any tool", f"flatout export {quoted} {target}"])
    commands.append(["This page", f"flatout report {quoted}"])
    return commands


# --- small parts ------------------------------------------------------------------------------------------------------


def texts_of(rows: Iterable[tuple[str, Any]]) -> list[list[str]]:
    return [[label, str(value)] for label, value in rows if value is not None]


def _samples(info: Mapping[str, Any]) -> dict[str, Any]:
    told = info.get("samples")
    return told if isinstance(told, dict) else {}


def _fine_tuned(info: dict[str, Any]) -> bool:
    return _at(info, "chat.source") is not None


def _at(info: Mapping[str, Any], path: str) -> Any:
    value = info.get("config")
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _whole(value: Any, unit: str = "") -> str | None:
    return None if amount(value) is None else f"{value:,}{unit}"


def _joined(*values: Any) -> str | None:
    return ", ".join(str(value) for value in values if value is not None) or None


def _shortened(value: Any) -> str | None:
    return None if value is None else str(value)[:16]
