"""The values of a report: figures, tables, curves and texts of runs, without HTML.

Contract: `report_data` takes histories and returns what JSON can hold; the same runs give the same values. Control
characters are removed from every text of a run, and long texts are cut. Records can be of any age and a file can be
damaged, so no field is taken for granted: what a run did not write is missing, not zero.

Speed is a median over all steps, so that compilation and cold caches do not count. The aims beside figures: a card that
is busy (90% or more), memory that is steady after the first steps. GPU utilisation is the share of the time in which
some kernel ran: below 90% the card waits for something. How much it computes is MFU, so both are shown.

Energy is the power between two readings of one start; what passed before the first and after the last of them is not
in it. Cost counts steps, evaluations, samples and checkpoints; start-ups are not recorded. Both cover all starts of a
resumed run.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from flatout.config.yaml_loader import format_sections
from flatout.errors import many
from flatout.observe.human import exposed_share, human_bytes, human_count, human_seconds, printable, slowest_rank
from flatout.observe.report_facts import facts_of, flat_config, summary_of, texts_of
from flatout.observe.runs import RunState, state_of
from flatout.observe.series import (
    QUANTILES,
    EigenstateHistory,
    LayerHistory,
    RunNumbers,
    amount,
    curves_of,
    finite,
    number,
    points_for,
    short,
    short_tokens,
)
from flatout.observe.sinks import RunHistory, distinct_names, incomparable, is_count, rows_with_step
from flatout.records import STEP_SPANS

Noted = list[list[str]]  # of a label, a text and a note

_MOST_SAMPLES, _MOST_NOTICES, _MOST_CHECKPOINTS = 60, 200, 100
_MOST_TEXT = 6000  # characters of one sample or message
_IN_THE_SUM = ("steps", *STEP_SPANS, "evaluation", "sample", "checkpoint")
_FAR = 1e30  # stands for infinity in a bar, which ends at the edge anyway


def report_data(histories: Sequence[RunHistory], *, live: bool = False, price: float | None = None) -> dict[str, Any]:
    """Everything the page shows of these runs, side by side where there are several; `price` is of an hour."""
    names = distinct_names([history.folder for history in histories])
    configs = [flat_config(history.info.get("config")) for history in histories]
    paths = dict.fromkeys(path for config in configs for path in config)
    different = [path for path in paths if len({config.get(path) for config in configs}) > 1]
    runs = [
        _run(history, name, list(config), len(histories), price)
        for history, name, config in zip(histories, names, configs, strict=True)
    ]
    apart = incomparable([history.info for history in histories])
    for run, history in zip(runs, histories, strict=True) if apart else ():
        run["figures"][:0] = _bits_per_byte(history)
    rows = [{"path": path, "values": [config.get(path, "–") for config in configs]} for path in different]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return _inert({"title": title, "live": live, "runs": runs, "differences": rows, "apart": apart})


def _run(history: RunHistory, name: str, paths: list[str], runs: int, price: float | None) -> dict[str, Any]:
    info, state, numbers = history.info, state_of(history), RunNumbers(history, name)
    resumes = [int(start) for row in history.infos[1:] if (start := amount(row.get("start_step")))]
    places = (numpy.nan_to_num(numbers.place(resumes, axis)).tolist() for axis in ("tokens", "seconds"))
    samples, notices = rows_with_step(history.samples), _notices(history)
    shown_samples = samples[-max(4, _MOST_SAMPLES // runs) :]
    checkpoints = rows_with_step(history.checkpoints)
    return {
        "name": name,
        "folder": str(history.folder),
        "state": {"kind": state.kind, "word": state.word, "text": state.text, "goes_on": state.goes_on},
        "summary": summary_of(history, state),
        "figures": figures_of(history, state, price),
        "facts": facts_of(info),
        "speed": _speed_groups(history),
        "tasks": _task_rows(history),
        "time": _time_parts(history),
        "eigenstates": _eigenstate_part(numbers.eigenstates),
        "curves": curves_of(numbers, points_for(runs)),
        "resumes": [list(place) for place in zip(resumes, *places, strict=True)],
        "throttled": [row["step"] for row in rows_with_step(history.machine) if row.get("throttled")][:500],
        "switches": _switches(info),
        "samples": [[row["step"], _cut(row.get("prompt")), _cut(row.get("text"))] for row in reversed(shown_samples)],
        "samples_left_out": len(samples) - len(shown_samples),
        "warnings": _warnings(history, state),
        "notices": notices[-_MOST_NOTICES:],
        "notices_left_out": max(0, len(notices) - _MOST_NOTICES),
        "checkpoints": [_checkpoint(row, history.folder) for row in reversed(checkpoints[-_MOST_CHECKPOINTS:])],
        "checkpoints_left_out": max(0, len(checkpoints) - _MOST_CHECKPOINTS),
        "environment": texts_of((label, info.get(label.lower())) for label in ("Flatout", "torch", "Device", "Folder")),
        "config": format_sections(info.get("config")),
        "paths": paths,
    }


# --- figures on top of the page ---------------------------------------------------------------------------------------


def figures_of(history: RunHistory, state: RunState, price: float | None = None) -> list[dict[str, str]]:
    """The figures a person looks for first; `price` is what an hour costs."""
    info, steps = history.info, rows_with_step(history.steps)
    figures: list[dict[str, str]] = []

    def add(key: str, label: str, text: str, note: str = "") -> None:
        figures.append({"key": key, "label": label, "text": text, "note": note})

    judged = [row for row in rows_with_step(history.evals) if number(row.get("loss")) is not None]
    good = [row for row in judged if math.isfinite(row["loss"])]
    if good:
        best = min(good, key=lambda row: row["loss"])
        bits, perplexity = amount(best.get("bits_per_byte")), amount(best.get("perplexity"))
        notes = [_at_step(best), "" if perplexity is None else f"perplexity {perplexity:,.4g}"]
        notes.append("" if bits is None else f"{bits:.3f} bits/byte")
        add("val_loss", "Best validation loss", f"{best['loss']:.4f}", ", ".join(filter(None, notes)))
        if judged[-1] is not best:
            add("last_val_loss", "Last validation loss", f"{judged[-1]['loss']:.4f}", _at_step(judged[-1]))
    last = steps[-1] if steps else {}
    if (loss := number(last.get("loss"))) is not None:
        add("loss", "Last training loss", f"{loss:.4f}", _at_step(last))
    epochs, tokens, size = (amount(value) for value in (last.get("epoch"), last.get("tokens"), info.get("parameters")))
    done = f"{state.step:,}" if state.steps is None else f"{state.step:,} of {state.steps:,}"
    add("steps", "Steps", done, "" if epochs is None else f"{epochs:.2f} epochs")
    if tokens is not None:
        add("tokens", "Tokens seen", human_count(tokens), f"{tokens:,}")
        if size and amount(info.get("batch_samples")) is None:  # of fine-tuning it says nothing
            note = "compute-optimal is about 20"
            add("tokens_per_parameter", "Tokens per parameter", f"{tokens / size:,.3g}", note)
    rates, seconds, shares, memory = _columns(history, "tokens_per_second", "seconds", "mfu", "memory_bytes")
    if rates:
        per_step = f"{_duration(statistics.median(seconds))} a step" if seconds else ""
        add("tokens_per_second", "Tokens per second", human_count(statistics.median(rates)), f"median, {per_step}")
    if shares:
        add("mfu", "MFU", f"{statistics.median(shares):.1%}", "median share of peak arithmetic")
    if memory:
        add("memory", "Peak memory", human_bytes(max(memory)), "of the process" if _on_host(info) else "allocated")
    if seconds:
        note = "without evaluation and saving"
        if state.goes_on and state.steps is not None:
            left = max(0, state.steps - state.step) * statistics.median(seconds[-50:])
            note = f"about {human_seconds(left)} to go"
        add("seconds", "Training time", human_seconds(sum(seconds)), note)
    joules, read = _energy(history.machine)
    if read > 0:
        whose = "of the first rank's card alone" if (amount(info.get("ranks")) or 1) > 1 else "of the card alone"
        note = f"{joules / read:,.0f} W in {human_seconds(read)} of readings, {whose}"
        add("energy", "Energy", f"{joules / 3.6e6:,.3g} kWh", note)
    spent = _seconds_by_part(history)[0]
    whole = sum(spent.get(name, 0.0) for name in _IN_THE_SUM)
    if price is not None and whole > 0:
        note = f"{human_seconds(whole)} at {price:g} per hour, without start-up"
        add("cost", "Cost", f"{whole / 3600 * price:,.2f}", note)
    return figures


def _bits_per_byte(history: RunHistory) -> list[dict[str, str]]:
    """The figure that leads where losses do not compare."""
    known = [row for row in rows_with_step(history.evals) if finite([row.get("bits_per_byte")])]
    best = min(known, key=lambda row: row["bits_per_byte"], default=None)
    if best is None:
        return []
    text = f"{best['bits_per_byte']:.4f}"
    return [{"key": "bits_per_byte", "label": "Best bits per byte", "text": text, "note": _at_step(best)}]


def _energy(machine: Sequence[dict[str, Any]]) -> tuple[float, float]:
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


# --- speed, memory, machine -------------------------------------------------------------------------------------------


def _speed_groups(history: RunHistory) -> list[dict[str, Any]]:
    """Speed, memory, ranks and machine as groups of [label, text, note]."""
    groups = {
        "Speed": _speed_rows(history),
        "Memory": _memory_rows(history),
        "Ranks": _rank_rows(history),
        "Machine": _machine_rows(rows_with_step(history.machine)),
    }
    return [{"group": name, "rows": rows} for name, rows in groups.items() if rows]


def _speed_rows(history: RunHistory) -> Noted:
    rows: Noted = []
    rates, seconds, shares, waits = _columns(history, "tokens_per_second", "seconds", "mfu", "data_seconds")
    if rates:
        ordered = sorted(rates)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        rows.append(["Tokens per second", f"{statistics.median(rates):,.0f}", "median"])
        rows.append(["Middle 80% of them", f"{low:,.0f} to {high:,.0f}", ""])
    if seconds:
        median = statistics.median(seconds)
        rows.append(["Step time", _duration(median), "median"])
        rows.append(["Steps per second", f"{1 / median:,.3g}" if median > 0 else "–", ""])
        timed = [row for row in rows_with_step(history.steps) if amount(row.get("seconds")) is not None]
        slowest = max(timed, key=lambda row: row["seconds"], default=None)
        rows += [["Slowest step", _duration(slowest["seconds"]), _at_step(slowest)]] if slowest is not None else []
        rows += _epoch_rows(history, median)
    if shares:
        rows.append(["MFU", f"{statistics.median(shares):.1%}", f"median; best step {max(shares):.1%}"])
    if waits and seconds:
        share = sum(waits) / max(sum(seconds), 1e-9)
        rows.append(["Waiting for data", f"{share:.1%} of the step time", "aim: below 5%"])
    return rows


def _epoch_rows(history: RunHistory, step_seconds: float) -> Noted:
    if epochs := finite(row.get("seconds") for row in history.epochs):
        return [["Time per epoch", human_seconds(statistics.median(epochs)), "median"]]
    names = ("windows", "context", "batch_tokens", "batch_samples")
    windows, context, batch, samples = (amount(history.info.get(name)) for name in names)
    if samples:  # a window is a sample
        context, batch = 1, samples
    if windows and context and batch:
        return [["Time per epoch", human_seconds(windows * context / batch * step_seconds), "at this pace"]]
    return []


def _memory_rows(history: RunHistory) -> Noted:
    known = [row for row in rows_with_step(history.steps) if amount(row.get("memory_bytes")) is not None]
    if not known:
        return []
    peak, on_host = max(row["memory_bytes"] for row in known), _on_host(history.info)
    rows = [["Peak", human_bytes(peak), "of the process" if on_host else "allocated by torch"]]
    if reserved := finite(history.column("reserved_bytes")):
        rows.append(["Peak with torch's cache", human_bytes(max(reserved)), ""])
    if (estimate := amount(history.info.get("memory_estimate_bytes"))) is not None and not on_host:
        rows.append(["Estimated before the run", human_bytes(estimate), ""])
    steady = next(row["step"] for row in known if row["memory_bytes"] >= 0.99 * peak)
    return [*rows, ["Within 1% of the peak", f"from step {steady:,} on", "aim: steady after the first steps"]]


def _rank_rows(history: RunHistory) -> Noted:
    """How several ranks share the work, over the whole run."""
    shares = [row for row in history.spans if isinstance(row.get("rank_seconds"), list | tuple)]
    count = len(shares[-1]["rank_seconds"]) if shares else 0
    rows = [row for row in shares if len(finite(row["rank_seconds"])) == count]
    if count < 2 or not rows:
        return []
    totals = [sum(seconds) for seconds in zip(*(row["rank_seconds"] for row in rows), strict=True)]
    spent = [row.get("seconds") for row in rows]
    waited = sum(sum(finite([seconds.get("reduction")])) for seconds in spent if isinstance(seconds, dict))
    return [
        ["Ranks", f"{count}", ""],
        ["Slowest rank", slowest_rank(totals), "aim: within 2%"],
        ["Waiting for gradients", f"{exposed_share(waited, totals[0]):.1%} of rank 0's time", "aim: below 10%"],
    ]


def _machine_rows(machine: Sequence[dict[str, Any]]) -> Noted:
    """The card and the host, from the readings of a run."""
    values = {reading.field: finite(row.get(reading.field) for row in machine) for reading in _READINGS}
    rows = [
        [reading.label, reading.form(reading.choose(values[reading.field])), reading.note]
        for reading in _READINGS
        if values[reading.field]
    ]
    if values["utilisation"] or values["clock_mhz"]:
        throttled = sum(bool(row.get("throttled")) for row in machine) / len(machine)
        rows.append(["Clock held down", f"in {throttled:.0%} of the readings", "aim: never"])
    return rows


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A field of `MachineRecord`, and how the readings of a run become one text."""

    label: str
    field: str
    choose: Callable[[list[float]], float]
    form: Callable[[float], str]
    note: str


_READINGS = (
    _Reading("GPU utilisation", "utilisation", statistics.median, "{:.0%}".format, "median; aim: 90% or more"),
    _Reading("Card memory in use", "memory_bytes", max, human_bytes, "highest, of all processes"),
    _Reading("Power", "power_watts", statistics.median, "{:,.0f} W".format, "median"),
    _Reading("Power limit", "power_limit_watts", max, "{:,.0f} W".format, ""),
    _Reading("Temperature", "temperature", max, "{:.0f} °C".format, "highest"),
    _Reading("Clock", "clock_mhz", statistics.median, "{:,.0f} MHz".format, "median"),
    _Reading("Host cores in use", "cores_busy", statistics.median, "{:.1f}".format, "median, of all processes"),
    _Reading("Host cores in use by others", "cores_others", statistics.median, "{:.1f}".format, "median"),
    _Reading("Threads waiting for cores", "threads_waiting", statistics.median, "{:.1f}".format, "aim: below 0.3"),
    _Reading("Host memory of the run", "process_bytes", max, human_bytes, "highest; mapped files left out"),
    _Reading("Host memory in use", "host_bytes", max, human_bytes, "highest, of all processes"),
    _Reading("Swap", "swap_bytes", max, human_bytes, "highest; aim: none"),
)


def _task_rows(history: RunHistory) -> Noted:
    """The newest score of every metric, and the first one beside it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in rows_with_step(history.tasks):
        value, error = number(row.get("value")), amount(row.get("error"))
        shots = f", {row['shots']}-shot" if is_count(row.get("shots"), 1) else ""
        text = ("–" if value is None else f"{value:.4f}") + ("" if error is None else f" ±{error:.4f}")
        label = f"{_cut(row.get('task'))} {_cut(row.get('metric'))}{shots}"
        found.setdefault(label, []).append((text, _at_step(row)))
    return [
        [label, own[-1][0], own[-1][1] + (f"; {own[0][0]} at {own[0][1]}" if len(own) > 1 else "")]
        for label, own in found.items()
    ]


def _time_parts(history: RunHistory) -> dict[str, Any]:
    """Seconds by part of the work, and a sentence that explains them; of runs without spans, from other records."""
    seconds, calls, note = _seconds_by_part(history)
    total = sum(seconds.get(name, 0.0) for name in _IN_THE_SUM) or 1.0
    own = [name for name in seconds if name not in (*_IN_THE_SUM, "data")]
    parts = [
        {
            "name": name,
            "share": round(seconds[name] / total, 5),
            "text": _duration(seconds[name]),
            "calls": calls.get(name, 0),
            "beside": name not in _IN_THE_SUM,
        }
        for name in (*_IN_THE_SUM, *own, "data")
        if name in seconds
    ]
    if own:
        note += " Spans of your own code lie inside the steps; not in the sum."
    return {"parts": parts[:24], "note": note if parts else ""}


def _seconds_by_part(history: RunHistory) -> tuple[dict[str, float], dict[str, int], str]:
    """Seconds and calls of every part of the work, and a sentence that explains them."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for row in history.spans:
        for field, totals in (("seconds", seconds), ("calls", calls)):
            found = row.get(field)
            for name, value in found.items() if isinstance(found, dict) else ():
                totals[str(name)] = totals.get(str(name), 0) + sum(finite([value]))  # pyright: ignore[reportArgumentType]
    note = (
        "Wait, forward, backward, micro-batch, reduction and optimizer are on the device's clock and add up to the "
        "steps; wait is what it stood still, reduction its waiting for other ranks' gradients. Evaluation, sample and "
        "checkpoint come on top."
    )
    if "data" in seconds:
        note += " Data is how long the host waited for batches, perhaps while the device was busy; not in the sum."
    if not seconds:
        note = "This run kept no spans: whole steps, evaluations and checkpoints, by their records."
        timed = {"steps": history.steps, "evaluation": history.evals, "checkpoint": history.checkpoints}
        for name, rows in timed.items():
            if spent := finite(row.get("seconds") for row in rows):
                seconds[name], calls[name] = sum(spent), len(spent)
    return seconds, calls, note


def _eigenstate_part(found: EigenstateHistory) -> dict[str, Any] | None:
    """Sentence, rows from the first layer to the last, and a note."""
    if not found.layers:
        return None
    note = (
        "A state's horizon is the number of tokens after which 1/e of it is left, -1 / ln |λ|; its period is the "
        "tokens of a whole turn. Bars reach from the shortest to the longest horizon of a layer's states, with the "
        "middle 80% strong and a mark at the median, on a logarithmic scale."
    )
    return {
        "context": found.context,
        "sentence": f"{found.sentence[:1].upper()}{found.sentence[1:]}." if found.sentence else "",
        "layers": [_layer_row(layer) for layer in found.layers],
        "note": note + (" The upright line is the context." if found.context else ""),
    }


def _layer_row(layer: LayerHistory) -> dict[str, Any]:
    def tokens(value: float | None) -> str:
        return "–" if value is None else short_tokens(value)

    ends = [tokens(layer.last("horizon", name)) for name in ("10%", "90%")]
    bar = [layer.last("horizon", name) for name in QUANTILES]
    beyond = layer.beyond[-1]
    return {
        "layer": layer.layer,
        "states": "–" if layer.states is None else f"{layer.states:,}",
        "bar": [None if value is None or math.isnan(value) else short(min(value, _FAR)) for value in bar],
        "median": tokens(layer.last("horizon")),
        "middle": " to ".join(dict.fromkeys(ends)),
        "longest": tokens(layer.last("horizon", "max")),
        "beyond": "–" if beyond is None or not 0 <= beyond <= 1 else f"{beyond:.0%}",
        "start": tokens(layer.first("horizon")),
        "period": tokens(layer.last("period")),
    }


# --- what happened ----------------------------------------------------------------------------------------------------


def _switches(info: dict[str, Any]) -> list[list[str]]:
    features = info.get("features")
    rows = [row for row in features if isinstance(row, dict)] if isinstance(features, list) else []
    return [[str(row.get(name, "")) for name in ("name", "asked", "used", "why")] for row in rows]


def _warnings(history: RunHistory, state: RunState) -> list[str]:
    """What a reader should see first, from the numbers of the run."""
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
    sizes = {size for row in steps if (size := amount(row.get("micro_batch"))) is not None}
    if len(sizes) > 1:
        found.append(f"The device ran out of memory: the micro-batch went from {max(sizes):g} to {min(sizes):g}.")
    return found


def _notices(history: RunHistory) -> list[list[Any]]:
    """[step, message, how often] of each message, in order of its first time."""
    seen: dict[str, list[Any]] = {}
    for row in rows_with_step(history.notices):
        message = _cut(row.get("message"))
        seen.setdefault(message, [row["step"], message, 0])[2] += 1
    return list(seen.values())


def _checkpoint(row: dict[str, Any], folder: Path) -> list[Any]:
    """[step, folder, size, seconds, whether it was the best so far, whether it is still there]."""
    size, seconds = amount(row.get("bytes")), amount(row.get("seconds"))
    name = f"checkpoints/step-{row['step']:08d}"  # where it lies now, which need not be where it was written
    texts = ["–" if size is None else human_bytes(size), "–" if seconds is None else f"{seconds:.2f} s"]
    return [row["step"], name, *texts, bool(row.get("best")), (folder / name).is_dir()]


# --- small parts ------------------------------------------------------------------------------------------------------


def _columns(history: RunHistory, *fields: str) -> list[list[float]]:
    return [finite(history.column(field)) for field in fields]


def _at_step(row: Mapping[str, Any]) -> str:
    return f"step {row['step']:,}"


def _on_host(info: Mapping[str, Any]) -> bool:
    return info.get("device") == "cpu"


def _duration(seconds: float) -> str:
    if seconds >= 90:
        return human_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


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
