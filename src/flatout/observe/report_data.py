"""What a report tells of runs, as plain values: figures, tables, curves, texts. No HTML here.

Contract: `report_data` takes histories and returns what JSON can hold; the same runs give the same values. Every text
that came from a run has lost its control characters and its excess of length. What an older run did not write is
missing, not zero. Nothing here guesses: a run without an end says that it has none.

Trap: records can be of any age and a file can be damaged, so no field is taken for granted.

What a run came to: energy by the card's own readings, and cost by a price per hour.

Contract: nothing is guessed. Energy is the power between two readings of one start, so what passed before the first
and after the last of them is not in it. Cost counts steps, evaluations, samples and checkpoints; start-ups are not
recorded. Both cover all starts of a run that was resumed.

What was trained on what, and the commands that do it again: in words, for the top and the end of a report.

A fine-tuning run has other facts than pretraining: the model it started from, what is trained of it, and rows in place
of a text. What an older run did not write is left out.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import format_value
from flatout.errors import many
from flatout.observe.curves import Places, amount, curves_of, finite, number, points_for
from flatout.observe.human import human_bytes, human_count, human_parameters, human_seconds, printable
from flatout.observe.report_figures import eigenstate_part, figures_of, speed_groups, time_parts, whole_seconds
from flatout.observe.runs import RunState, state_of
from flatout.observe.sinks import RunHistory, distinct_names, rows_with_step
from flatout.records import WAITING


def cost_figures(history: RunHistory, seconds: float, price: float | None) -> list[dict[str, str]]:
    """Figures for the top of the page; `seconds` is what the run took, `price` what an hour costs."""
    figures = []
    joules, read = energy(history.machine)
    if read > 0:
        ranks = amount(history.info.get("ranks")) or 1
        whose = "of the first rank's card alone" if ranks > 1 else "of the card alone"
        note = f"{joules / read:,.0f} W in {human_seconds(read)} of readings, {whose}"
        figures.append({"key": "energy", "label": "Energy", "text": f"{joules / 3.6e6:,.3g} kWh", "note": note})
    if price is not None and seconds > 0:
        note = f"{human_seconds(seconds)} at {price:g} per hour, without start-up"
        figures.append({"key": "cost", "label": "Cost", "text": f"{seconds / 3600 * price:,.2f}", "note": note})
    return figures


def energy(machine: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(joules, seconds) between readings; a clock that goes back is another start of the run."""
    joules = seconds = 0.0
    before: tuple[float, float] | None = None
    for row in machine:
        elapsed, power = amount(row.get("elapsed")), amount(row.get("power_watts"))
        if elapsed is None or power is None:
            continue
        if before is not None and elapsed > before[0]:
            joules += (elapsed - before[0]) * (power + before[1]) / 2
            seconds += elapsed - before[0]
        before = (elapsed, power)
    return joules, seconds


Rows = list[tuple[str, Any]]


def summary_of(history: RunHistory, state: RunState) -> str:
    """The run in a sentence or two. It counts what was trained on so far, and beside it what there is."""
    info, size = history.info, amount(history.info.get("parameters"))
    parts = [amount(info.get(f"{name}_parameters")) for name in ("trained", "table")]
    what = f"{info.get('family', 'model')}" + ("" if size is None else f" with {human_parameters(size, *parts)}")
    where = f"on {info.get('device', 'an unknown device')}. {state.text}"
    if fine_tuned(info):
        source, there = _at(info, "chat.source"), amount(_samples(info).get("train", info.get("windows")))
        seen = _seen(_samples_seen(info, state.step), there, "sample", source)
        return f"{what}, fine-tuned from {_at(info, 'model.init_from')} on {seen}, {where}"
    source = _at(info, "data.source")
    from_where = source if isinstance(source, str) else "several sources" if isinstance(source, list) else "its data"
    steps = rows_with_step(history.steps)
    seen, there = amount(steps[-1].get("tokens")) if steps else 0, amount(info.get("train_tokens"))
    return f"{what}, trained on {_seen(seen, there, 'token', from_where)}, {where}"


def _samples_seen(info: dict[str, Any], step: int) -> float | None:
    """Samples of so many steps: the last one of an epoch has what is left."""
    batch, train = amount(info.get("batch_samples")), amount(_samples(info).get("train"))
    if not batch or not train:
        return None if batch is None else batch * step
    epochs, steps = divmod(step, math.ceil(train / batch))
    return epochs * train + steps * batch


def _seen(seen: float | None, there: float | None, noun: str, source: Any) -> str:
    """How much of a source was trained on: a share of it, or how often all of it."""
    if seen is None:
        return f"{source}"
    count = f"{human_count(seen)} {noun}s"
    if not there:
        return f"{count} of {source}"
    times = (
        ""
        if seen < 0.995 * there
        else f", {seen / there:.3g} times all of it"
        if seen > 1.005 * there
        else ", all of it"
    )
    return f"{count} of {source} ({human_count(there)} {noun}s{times})"


def facts_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    """What was trained on what, in three groups of label and text; unknown things are left out."""
    tuned = fine_tuned(info)
    start = _base_rows(info) if tuned else [("Started from", _at(info, "model.init_from"))]
    groups = {
        "Model": [*start, *_model_rows(info)],
        "Data": _sample_rows(info) if tuned else _text_rows(info),
        "Training": _training_rows(info),
    }
    return [
        {"group": group, "rows": [[label, str(value)] for label, value in rows if value is not None]}
        for group, rows in groups.items()
    ]


def fine_tuned(info: dict[str, Any]) -> bool:
    return _at(info, "chat.source") is not None


def _model_rows(info: dict[str, Any]) -> Rows:
    shape = [_at(info, f"model.{name}") for name in ("layers", "width", "heads")]
    flops = amount(info.get("flops_per_token"))
    return [
        ("Family", info.get("family")),
        ("Parameters", _whole(info.get("parameters"))),
        ("In tables", _whole(info.get("table_parameters") or None, " of them")),
        ("Blocks, width, heads", None if None in shape else " × ".join(str(item) for item in shape)),
        *_mixer_rows(info),
        ("Context", _whole(info.get("context"), " tokens")),
        ("Vocabulary", _whole(info.get("vocab"), " ids")),
        _parts_row(info),
        ("Arithmetic per token", None if flops is None else f"{human_count(flops)} FLOP, forward and backward"),
    ]


def _parts_row(info: dict[str, Any]) -> tuple[str, Any]:
    """What blocks are made of. Rotary positions are attention's, so that a model without it has none."""
    norm, positions, mlp = (_at(info, f"model.{name}") for name in ("norm", "positions", "mlp"))
    if positions == "rope" and not _attends(info):
        return "Norm, MLP", _joined(norm, mlp)
    return "Norm, positions, MLP", _joined(norm, positions, mlp)


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


def _mixer_rows(info: dict[str, Any]) -> Rows:
    """What is in the place of full attention, of models where something is."""
    kinds = _kinds(info)
    if set(kinds) <= {"A"}:
        return []
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return [
        ("Pattern of blocks", f"{_at(info, 'model.pattern')} ({counts})"),
        ("Window", _whole(_at(info, "model.window"), " tokens in each W block") if "W" in kinds else None),
        ("States", _whole(_at(info, "model.states"), " in each E block") if "E" in kinds else None),
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
    targets = _at(info, "lora.targets")
    kind = "DoRA" if _at(info, "lora.dora") else "LoRA"
    more = [f"{kind}, rank {rank:g}", f"alpha {2 * rank if alpha is None else alpha:g}"]
    more += ["rank-stabilised"] if _at(info, "lora.rank_stabilised") else []
    more += [f"dropout {dropout:g}"] if dropout else []
    rows.append(("Adapters", ", ".join(more)))
    for label, name in (("Ranks by name", "ranks"), ("Alphas by name", "alphas"), ("Trained whole", "also")):
        values = _at(info, f"lora.{name}")
        rows.append((label, ", ".join(map(str, values)) if isinstance(values, list) and values else None))
    rows.append(("Targets", ", ".join(map(str, targets)) if isinstance(targets, list) else None))
    rows.append(("Went on from", _at(info, "lora.init_from")))
    if _at(info, "lora.quantize") not in (None, "none"):
        rows.append(("Base held in", f"4 bits ({_at(info, 'lora.quantize')})"))
    return rows


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
    used, template = _rows_used(info), told.get("template") or _at(info, "chat.template")
    return [
        ("Rows", f"{_at(info, 'chat.source')}" + (f" ({files:,} files)" if files and files > 1 else "")),
        ("Held-out rows", val_source),
        ("Read as", told.get("format")),
        ("Rows used", None if used is None else f"{used:,} of {rows:,}"),
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
    steps, batch = amount(info.get("steps")), amount(info.get("batch_tokens"))
    size, windows, context = (amount(info.get(name)) for name in ("parameters", "windows", "context"))
    samples = amount(info.get("batch_samples"))
    planned = steps * batch if steps is not None and batch is not None else None
    mixture = [info.get(name) for name in ("micro_batch", "context", "accumulation")]
    if samples is not None:
        about = "" if planned is None else f", about {human_count(planned)} tokens"
        epochs = f"{steps * samples / windows:.2f}" if steps is not None and windows else None
        rows: Rows = [
            ("Planned", None if steps is None else f"{steps:,} steps{about}"),
            ("Epochs", epochs),
            ("Samples per step", f"{samples:,}" + ("" if batch is None else f", about {batch:,} tokens")),
        ]
    else:
        rows = [
            ("Planned", None if planned is None else f"{steps:,} steps, {human_count(planned)} tokens"),
            ("Epochs", f"{planned / (windows * context):.2f}" if planned and windows and context else None),
            ("Tokens per parameter", f"{planned / size:,.2f} planned" if planned and size else None),
            ("Tokens per step", None if batch is None or None in mixture else
             f"{batch:,} ({' × '.join(str(item) for item in mixture)})"),
        ]  # fmt: skip
    return [
        *rows,
        ("Learning rate", _joined(_at(info, "optim.learning_rate"), _at(info, "optim.schedule"))),
        ("Warm-up", _warmup(info)),
        ("Weight decay, clip", _joined(_at(info, "optim.weight_decay"), _at(info, "optim.clip"))),
        ("Seed", _at(info, "train.seed")),
    ]


def _warmup(info: dict[str, Any]) -> str | None:
    """The warm-up as it was told: in steps, as a share of the run, or in epochs."""
    told = _at(info, "optim.warmup")
    if isinstance(told, float):
        return f"{told:.3g} of the run"
    if told is None:  # an earlier version wrote it
        told = _at(info, "optim.warmup_steps")
    return told if isinstance(told, str) else _whole(told, " steps")


def commands_of(history: RunHistory, state: RunState) -> list[list[str]]:
    """Commands that make, continue and use the run. They are for the folder that it was started in."""
    folder, info = str(history.folder), history.info
    quoted, tuned = shlex.quote(folder), fine_tuned(info)
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
            whole = "merge" if amount(_at(info, "lora.rank")) else "export"
            target = shlex.quote(f"{folder}-{'merged' if whole == 'merge' else 'exported'}")
            commands.append(["One folder of weights, for any tool", f"flatout {whole} {quoted} {target}"])
    commands.append(["This page", f"flatout report {quoted}"])
    return commands


def _samples(info: dict[str, Any]) -> dict[str, Any]:
    told = info.get("samples")
    return told if isinstance(told, dict) else {}


def _rows_used(info: dict[str, Any]) -> float | None:
    rows, lost = (amount(_samples(info).get(name)) for name in ("rows", "rows_not_used"))
    return None if rows is None else rows - (lost or 0)


def _at(info: dict[str, Any], path: str) -> Any:
    value = info.get("config")
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _whole(value: Any, unit: str = "") -> str | None:
    return None if amount(value) is None else f"{value:,}{unit}"


def _joined(*values: Any) -> str | None:
    known = [str(value) for value in values if value is not None]
    return ", ".join(known) or None


def _shortened(value: Any) -> str | None:
    return None if value is None else str(value)[:16]


_MOST_SAMPLES, _MOST_NOTICES, _MOST_CHECKPOINTS = 60, 200, 100
_MOST_TEXT = 6000  # characters of one sample or message


def report_data(histories: Sequence[RunHistory], *, live: bool = False, price: float | None = None) -> dict[str, Any]:
    """Everything the page shows of these runs, side by side where there are several; `price` is of an hour."""
    names = distinct_names([history.folder for history in histories])
    states = [state_of(history) for history in histories]
    configs = [_flat_config(shown_config(history.info)) for history in histories]
    paths = dict.fromkeys(path for config in configs for path in config)
    different = [path for path in paths if len({config.get(path) for config in configs}) > 1]
    samples = max(4, _MOST_SAMPLES // max(len(histories), 1))
    runs = [
        _run(history, name, state, config, points_for(len(histories)), samples, price)
        for history, name, state, config in zip(histories, names, states, configs, strict=True)
    ]
    rows = [{"path": path, "values": [config.get(path, "–") for config in configs]} for path in different]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return _inert({"title": title, "live": live, "runs": runs, "differences": rows})


def _run(
    history: RunHistory,
    name: str,
    state: RunState,
    config: dict[str, str],
    points: int,
    samples: int,
    price: float | None,
) -> dict[str, Any]:
    info, steps = history.info, rows_with_step(history.steps)
    places = Places(steps)
    resumes = [start for row in history.infos[1:] if (start := amount(row.get("start_step")))]
    shown, left_out = _spread(rows_with_step(history.samples), samples)
    notices, notices_left_out = _notices(history)
    checkpoints = rows_with_step(history.checkpoints)
    return {
        "name": name,
        "folder": str(history.folder),
        "state": {"kind": state.kind, "word": state.word, "text": state.text, "goes_on": state.goes_on},
        "summary": summary_of(history, state),
        "figures": [*figures_of(history, state), *cost_figures(history, whole_seconds(history), price)],
        "facts": facts_of(info),
        "speed": speed_groups(history),
        "time": time_parts(history),
        "eigenstates": eigenstate_part(history),
        "curves": curves_of(history, points),
        "resumes": [[int(step), *places.at(int(step))] for step in resumes],
        "throttled": [row["step"] for row in rows_with_step(history.machine) if row.get("throttled")][:500],
        "switches": _switches(info),
        "samples": [[row["step"], _cut(row.get("prompt")), _cut(row.get("text"))] for row in reversed(shown)],
        "samples_left_out": left_out,
        "warnings": _warnings(history, state),
        "notices": notices,
        "notices_left_out": notices_left_out,
        "checkpoints": [_checkpoint(row, history.folder) for row in reversed(checkpoints[-_MOST_CHECKPOINTS:])],
        "checkpoints_left_out": max(0, len(checkpoints) - _MOST_CHECKPOINTS),
        "environment": _environment(info),
        "starts": _starts(history),
        "commands": commands_of(history, state),
        "config": _yaml(shown_config(info)),
        "paths": list(config),
    }


def _switches(info: dict[str, Any]) -> list[list[str]]:
    features = info.get("features")
    rows = [row for row in features if isinstance(row, dict)] if isinstance(features, list) else []
    return [[str(row.get(name, "")) for name in ("name", "asked", "used", "why")] for row in rows]


def _warnings(history: RunHistory, state: RunState) -> list[str]:
    """What should not be overlooked, found in the numbers themselves."""
    found: list[str] = []
    steps = rows_with_step(history.steps)
    if state.kind == "stopped":
        found.append(state.text)
    bad = [row["step"] for row in steps if (loss := number(row.get("loss"))) is not None and not math.isfinite(loss)]
    if bad:
        found.append(f"The loss was not a finite number in {many(len(bad), 'step')}, first in step {bad[0]:,}.")
    skipped = [row["step"] for row in steps if row.get("applied") is False]
    if skipped:
        found.append(f"{many(len(skipped), 'update')} skipped, first in step {skipped[0]:,}; weights stayed clean.")
    held = [row for row in rows_with_step(history.machine) if row.get("throttled")]
    if held:
        share = len(held) / max(len(history.machine), 1)
        why = ", ".join(sorted({str(row["throttled"]) for row in held}))
        found.append(f"The card's clock was held down ({why}) in {share:.0%} of the readings.")
    waits = finite([row.get("threads_waiting") for row in history.machine])
    short = sum(value >= WAITING for value in waits)
    if history.info.get("device") == "cpu" and 2 * short > len(waits):
        share = short / len(waits)
        found.append(f"Threads waited for cores in {share:.0%} of the readings: too many threads, or a busy machine.")
    sizes = {size for row in steps if (size := amount(row.get("micro_batch"))) is not None}
    if len(sizes) > 1:
        found.append(f"The device ran out of memory: the micro-batch went from {max(sizes):g} to {min(sizes):g}.")
    return found


def _notices(history: RunHistory) -> tuple[list[list[Any]], int]:
    """[step, message, how often] of each message, in order of its first time; the first and the last of very many."""
    seen: dict[str, list[Any]] = {}
    for row in rows_with_step(history.notices):
        message = _cut(row.get("message"))
        if message in seen:
            seen[message][2] += 1
        else:
            seen[message] = [row["step"], message, 1]
    rows = list(seen.values())
    if len(rows) <= _MOST_NOTICES:
        return rows, 0
    half = _MOST_NOTICES // 2
    return rows[:half] + rows[-half:], len(rows) - _MOST_NOTICES


def _checkpoint(row: dict[str, Any], folder: Path) -> list[Any]:
    """[step, folder, size, seconds, whether it was the best so far, whether it is still there]."""
    size, seconds = amount(row.get("bytes")), amount(row.get("seconds"))
    name = f"step-{row['step']:08d}"  # where it lies now, which need not be where it was written
    return [
        row["step"],
        f"checkpoints/{name}",
        "–" if size is None else human_bytes(size),
        "–" if seconds is None else f"{seconds:.2f} s",
        bool(row.get("best")),
        (folder / "checkpoints" / name).is_dir(),
    ]


def _environment(info: dict[str, Any]) -> list[list[str]]:
    names = {"Flatout": "flatout", "torch": "torch", "Device": "device", "Folder": "folder"}
    return [[label, str(info[key])] for label, key in names.items() if info.get(key) is not None]


def _starts(history: RunHistory) -> list[list[str]]:
    """Every time the run was started: step, what it went on from, and with what; empty for a run started once."""
    if len(history.infos) < 2:
        return []
    return [
        [
            f"{row.get('start_step', 0)}",
            str(row.get("resumed_from") or "from the beginning"),
            *(str(row.get(name, "–")) for name in ("flatout", "torch", "device")),
        ]
        for row in history.infos
    ]


def _yaml(config: Any) -> str:
    """The stored config as a config file, section by section."""
    if not isinstance(config, dict):
        return ""
    lines: list[str] = []
    for section, values in config.items():
        if not isinstance(values, dict) or not values:
            lines.append(f"{section}: {format_value(values)}")
            continue
        lines.append(f"{section}:")
        lines += [f"  {name}: {format_value(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _flat_config(config: Any) -> dict[str, str]:
    flat: dict[str, str] = {}
    for section, values in config.items() if isinstance(config, dict) else ():
        if isinstance(values, dict):
            flat |= {f"{section}.{name}": format_value(value) for name, value in values.items()}
        else:
            flat[str(section)] = format_value(values)
    return flat


def _spread(rows: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """At most so many of them, evenly over time, first and last among them; and how many are left out."""
    if len(rows) <= most:
        return rows, 0
    chosen = sorted({round(index * (len(rows) - 1) / (most - 1)) for index in range(most)})
    return [rows[index] for index in chosen], len(rows) - len(chosen)


def _cut(text: Any) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} … ({len(text) - _MOST_TEXT:,} characters more)"


def _inert(value: Any) -> Any:
    """The same value without characters that could move, hide or reorder text around them."""
    if isinstance(value, str):
        return printable(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_inert(key): _inert(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inert(item) for item in value]
    return value
