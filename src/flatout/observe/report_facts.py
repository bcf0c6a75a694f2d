"""What was trained on what: the words of a report.

A fine-tuning run has other facts than pretraining: the model it started from, what is trained of it, and rows in place
of a text. What an older run did not write is left out.
"""

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
    steps = rows_with_step(history.steps)
    last = steps[-1] if steps else {}
    if _fine_tuned(info):
        there = amount(_samples(info).get("train", info.get("windows")))
        epochs = amount(last.get("epoch"))
        seen = None if there is None or epochs is None else round(epochs * there)
        seen_of = _seen(seen, there, "sample", _at(info, "chat.source"))
        return f"{what}, fine-tuned from {_at(info, 'model.init_from')} on {seen_of}, {where}"
    source = _at(info, "data.source")
    from_where = source if isinstance(source, str) else "several sources" if isinstance(source, list) else "its data"
    seen, there = amount(last.get("tokens")) if steps else 0, amount(info.get("train_tokens"))
    return f"{what}, trained on {_seen(seen, there, 'token', from_where)}, {where}"


def _seen(seen: float | None, there: float | None, noun: str, source: Any) -> str:
    """How much of a source was trained on, and how much of it there is."""
    if seen is None:
        return f"{source}"
    if not there:
        return f"{human_count(seen)} {noun}s of {source}"
    times = f", {seen / there:.3g} times all of it" if seen >= there else ""
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
    pattern, flops = _at(info, "model.pattern"), amount(info.get("flops_per_token"))
    return [
        ("Family", info.get("family")),
        ("Parameters", _whole(info.get("parameters"))),
        ("In tables", _whole(info.get("table_parameters") or None, " of them")),
        ("Blocks, width, heads", None if None in shape else " × ".join(str(item) for item in shape)),
        ("Pattern of blocks", None if pattern == "A" else pattern),
        ("Window", _whole(_at(info, "model.window"), " tokens in each W block") if "W" in str(pattern) else None),
        ("States", _whole(_at(info, "model.states"), " in each E block") if "E" in str(pattern) else None),
        ("Context", _whole(info.get("context"), " tokens")),
        ("Vocabulary", _whole(info.get("vocab"), " ids")),
        ("Norm, positions, MLP", _joined(*(_at(info, f"model.{name}") for name in ("norm", "positions", "mlp")))),
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
    alpha, held = amount(_at(info, "lora.alpha")), _at(info, "lora.quantize")
    kind = "DoRA" if _at(info, "lora.dora") else "LoRA"
    return [
        *rows,
        ("Adapters", f"{kind}, rank {rank:g}, alpha {2 * rank if alpha is None else alpha:g}"),
        ("Adapters from", _at(info, "lora.init_from")),
        ("Base held in", None if held in (None, "none") else f"4 bits ({held})"),
    ]


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
    counts = _samples(info)
    rows, lost = amount(counts.get("rows")), amount(counts.get("rows_not_used"))
    train, val, labelled = (amount(counts.get(name)) for name in ("train", "val", "labelled"))
    tokens = amount(info.get("train_tokens"))
    return [
        ("Rows", _at(info, "chat.source")),
        ("Read as", counts.get("format")),
        ("Rows used", None if rows is None else f"{rows - (lost or 0):,} of {rows:,}"),
        ("Rows not used", f"{lost:,}; why is in problems.jsonl beside the samples" if lost else _whole(lost)),
        ("Samples", None if train is None else f"{train:,} to train on, {val or 0:,} to validate"),
        ("Learned", f"{labelled / tokens:.1%} of {tokens:,} tokens" if labelled is not None and tokens else None),
        ("Trained on", _at(info, "chat.train_on")),
        ("Template", counts.get("template") or _at(info, "chat.template")),
        ("Validation", _whole(info.get("val_tokens"), " tokens")),
        ("Fingerprint", _shortened(info.get("dataset"))),
    ]


def _training_rows(info: dict[str, Any]) -> Rows:
    names = ("steps", "batch_tokens", "parameters", "windows", "context", "batch_samples")
    steps, batch, size, windows, context, samples = (amount(info.get(name)) for name in names)
    planned = steps * batch if steps is not None and batch is not None else None
    of_window = samples if samples is not None else None if not batch or not context else batch / context
    epochs = steps * of_window / windows if steps is not None and of_window is not None and windows else None
    warmup = _at(info, "optim.warmup")
    return [
        ("Planned", None if planned is None else f"{steps:,} steps, {human_count(planned)} tokens"),
        ("Epochs", None if epochs is None else f"{epochs:.2f}"),
        ("Tokens per parameter", f"{planned / size:,.2f} planned" if planned and size and samples is None else None),
        ("Samples per step", _whole(samples)),
        ("Tokens per step", _whole(batch)),
        ("Learning rate", _joined(_at(info, "optim.learning_rate"), _at(info, "optim.schedule"))),
        ("Warm-up", f"{warmup:.3g} of the run" if isinstance(warmup, float) else _whole(warmup, " steps") or warmup),
        ("Weight decay, clip", _joined(_at(info, "optim.weight_decay"), _at(info, "optim.clip"))),
        ("Seed", _at(info, "train.seed")),
    ]


# --- small parts ------------------------------------------------------------------------------------------------------


def flat_config(config: Any) -> dict[str, str]:
    """The settings of a stored config by path, as YAML."""
    flat: dict[str, str] = {}
    for section, values in config.items() if isinstance(config, dict) else ():
        if isinstance(values, dict):
            flat |= {f"{section}.{name}": format_value(value) for name, value in values.items()}
        else:
            flat[str(section)] = format_value(values)
    return flat


def texts_of(rows: Iterable[tuple[str, Any]]) -> list[list[str]]:
    return [[label, str(value)] for label, value in rows if value is not None]


def _samples(info: Mapping[str, Any]) -> dict[str, Any]:
    counts = info.get("samples")
    return counts if isinstance(counts, dict) else {}


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
