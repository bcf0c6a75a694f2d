"""The figures of a run: the few on top of the page, of speed and memory, where the time went, what E blocks remember.

Contract: a figure is a label, a text and a note. Speed is a median over all steps, so that compilation and cold caches
do not count. What the run did not tell has no figure.

Targets are those people aim at: a card that is busy (90% or more), memory that stands still after the first steps. GPU
utilisation is the share of the time in which some kernel ran: below 90% the card waits for something. How much it
computes is MFU, so both are shown.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from flatout.observe.curves import amount, finite, number, short
from flatout.observe.eigenstates import QUANTILES, EigenstateHistory, LayerHistory, eigenstate_history, short_tokens
from flatout.observe.human import exposed_share, human_bytes, human_count, human_seconds, slowest_rank
from flatout.observe.runs import RunState
from flatout.observe.sinks import RunHistory, rows_with_step

_PARTS = (
    "steps",
    "wait",
    "forward",
    "backward",
    "micro-batch",
    "reduction",
    "optimizer",
    "evaluation",
    "sample",
    "checkpoint",
)
_FAR = 1e30  # stands for infinity in a bar, which ends at the edge anyway
_BESIDE = "data"  # the host's waiting for batches, which may have passed while the device was busy


def figures_of(history: RunHistory, state: RunState) -> list[dict[str, str]]:
    """The figures a person looks for first."""
    info, steps, evals = history.info, rows_with_step(history.steps), rows_with_step(history.evals)
    figures: list[dict[str, str]] = []

    def add(key: str, label: str, text: str, note: str = "") -> None:
        figures.append({"key": key, "label": label, "text": text, "note": note})

    judged = [row for row in evals if number(row.get("loss")) is not None]
    good = [row for row in judged if math.isfinite(row["loss"])]
    if good:
        best = min(good, key=lambda row: row["loss"])
        bits, perplexity = amount(best.get("bits_per_byte")), amount(best.get("perplexity"))
        notes = [f"step {best['step']:,}"]
        notes += [] if perplexity is None else [f"perplexity {perplexity:,.4g}"]
        notes += [] if bits is None else [f"{bits:.3f} bits/byte"]
        add("val_loss", "Best validation loss", f"{best['loss']:.4f}", ", ".join(notes))
        if judged[-1] is not best:
            add("last_val_loss", "Last validation loss", f"{judged[-1]['loss']:.4f}", f"step {judged[-1]['step']:,}")
    if steps and (loss := number(steps[-1].get("loss"))) is not None:
        add("loss", "Last training loss", f"{loss:.4f}", f"step {steps[-1]['step']:,}")
    epochs = amount(steps[-1].get("epoch")) if steps else None
    done = f"{state.step:,}" if state.steps is None else f"{state.step:,} of {state.steps:,}"
    add("steps", "Steps", done, "" if epochs is None else f"{epochs:.2f} epochs")
    tokens, size = amount(steps[-1].get("tokens")) if steps else None, amount(info.get("parameters"))
    if tokens is not None:
        add("tokens", "Tokens seen", human_count(tokens), f"{tokens:,}")
        if size and amount(info.get("batch_samples")) is None:  # of fine-tuning it says nothing
            note = "compute-optimal is about 20"
            add("tokens_per_parameter", "Tokens per parameter", f"{tokens / size:,.3g}", note)
    rates, seconds, shares, memory = (
        finite(history.column(field)) for field in ("tokens_per_second", "seconds", "mfu", "memory_bytes")
    )
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
    return figures


def speed_groups(history: RunHistory) -> list[dict[str, Any]]:
    """Speed, memory and machine as groups of [label, text, target]; the target is empty where there is none."""
    groups = {
        "Speed": _speed_rows(history),
        "Memory": _memory_rows(history),
        "Ranks": _rank_rows(history),
        "Machine": _machine_rows(rows_with_step(history.machine)),
    }
    return [{"group": name, "rows": rows} for name, rows in groups.items() if rows]


def _speed_rows(history: RunHistory) -> list[list[str]]:
    rows: list[list[str]] = []
    rates, seconds, shares, waits = (
        finite(history.column(field)) for field in ("tokens_per_second", "seconds", "mfu", "data_seconds")
    )
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
        if slowest is not None:
            rows.append(["Slowest step", _duration(slowest["seconds"]), f"step {slowest['step']:,}"])
        rows += _epoch_rows(history, median)
    if shares:
        rows.append(["MFU", f"{statistics.median(shares):.1%}", f"median; best step {max(shares):.1%}"])
    if waits and seconds:
        share = sum(waits) / max(sum(seconds), 1e-9)
        rows.append(["Waiting for data", f"{share:.1%} of the step time", "aim: below 5%"])
    return rows


def _memory_rows(history: RunHistory) -> list[list[str]]:
    rows: list[list[str]] = []
    known = [row for row in rows_with_step(history.steps) if amount(row.get("memory_bytes")) is not None]
    if not known:
        return rows
    peak = max(row["memory_bytes"] for row in known)
    on_host = _on_host(history.info)
    rows.append(["Peak", human_bytes(peak), "of the process" if on_host else "allocated by torch"])
    reserved = finite(history.column("reserved_bytes"))
    rows += [["Peak with torch's cache", human_bytes(max(reserved)), ""]] if reserved else []
    estimate = amount(history.info.get("memory_estimate_bytes"))
    if estimate is not None and not on_host:
        rows.append(["Estimated before the run", human_bytes(estimate), ""])
    settled = next(row["step"] for row in known if row["memory_bytes"] >= 0.99 * peak)
    rows.append(["Within 1% of the peak", f"from step {settled:,} on", "aim: steady after the first steps"])
    return rows


def _epoch_rows(history: RunHistory, step_seconds: float) -> list[list[str]]:
    epochs = finite([row.get("seconds") for row in history.epochs])
    windows, context = amount(history.info.get("windows")), amount(history.info.get("context"))
    batch, samples = amount(history.info.get("batch_tokens")), amount(history.info.get("batch_samples"))
    if windows and samples:  # a window is a sample
        context, batch = 1, samples
    if epochs:
        return [["Time per epoch", human_seconds(statistics.median(epochs)), "median"]]
    if windows and context and batch:
        return [["Time per epoch", human_seconds(windows * context / batch * step_seconds), "at this pace"]]
    return []


def _rank_rows(history: RunHistory) -> list[list[str]]:
    """How several ranks share the work, over the whole run."""
    told = [row for row in history.spans if isinstance(row.get("rank_seconds"), list | tuple)]
    count = len(told[-1]["rank_seconds"]) if told else 0
    rows = [row for row in told if len(finite(row["rank_seconds"])) == count]
    each = [finite(row["rank_seconds"]) for row in rows]
    if count < 2 or not each:
        return []
    totals = [sum(seconds) for seconds in zip(*each, strict=True)]
    spent = [row.get("seconds") for row in rows]
    waited = sum(sum(finite([seconds.get("reduction")])) for seconds in spent if isinstance(seconds, dict))
    return [
        ["Ranks", f"{count}", ""],
        ["Slowest rank", slowest_rank(totals), "aim: within 2%"],
        ["Waiting for gradients", f"{exposed_share(waited, totals[0]):.1%} of rank 0's time", "aim: below 10%"],
    ]


def _machine_rows(machine: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows: list[list[str]] = []

    def values(field: str) -> list[float]:
        return finite([row.get(field) for row in machine])

    if busy := values("utilisation"):
        rows.append(["GPU utilisation", f"{statistics.median(busy):.0%}", "median; aim: 90% or more"])
    if memory := values("memory_bytes"):
        whole = values("memory_total_bytes")
        of = f" of {human_bytes(max(whole))} ({max(memory) / max(whole):.0%})" if whole else ""
        rows.append(["Card memory in use", human_bytes(max(memory)) + of, "highest, by everybody"])
    if power := values("power_watts"):
        limits = values("power_limit_watts")
        limit = f" of {max(limits):,.0f} W" if limits else " W"
        rows.append(["Power", f"{statistics.median(power):,.0f}{limit}", "median"])
    if heat := values("temperature"):
        rows.append(["Temperature", f"{max(heat):.0f} °C", "highest"])
    if clock := values("clock_mhz"):
        rows.append(["Clock", f"{statistics.median(clock):,.0f} MHz", "median"])
    if busy or clock:
        held = sum(bool(row.get("throttled")) for row in machine)
        rows.append(["Clock held down", f"in {held / len(machine):.0%} of the readings", "aim: never"])
    return rows + _host_rows(values)


def _host_rows(values: Callable[[str], list[float]]) -> list[list[str]]:
    """Cores, load and memory of the host, from the fields of the machine's readings."""
    rows: list[list[str]] = []
    if (busy := values("cores_busy")) and (cores := values("cores")):
        others = values("cores_others")
        note = f"median; by others {statistics.median(others):.1f}" if others else "median"
        rows.append(["Host cores in use", f"{statistics.median(busy):.1f} of {max(cores):g}", note])
    if waiting := values("threads_waiting"):
        rows.append(["Threads waiting for cores", f"{statistics.median(waiting):.1f}", "median; aim: below 0.3"])
    if load := values("load"):
        rows.append(["Host load", f"{statistics.median(load):.1f}", "median, of everybody's processes"])
    if memory := values("process_bytes"):
        rows.append(["Host memory of the run", human_bytes(max(memory)), "highest; mapped files left out"])
    if (used := values("host_bytes")) and max(whole := values("host_total_bytes"), default=0):
        share = f"{human_bytes(max(used))} of {human_bytes(max(whole))} ({max(used) / max(whole):.0%})"
        rows.append(["Host memory in use", share, "highest, by everybody"])
    if max(swap := values("swap_bytes"), default=0):
        rows.append(["Swap", human_bytes(max(swap)), "highest, by everybody; aim: none"])
    return rows


def whole_seconds(history: RunHistory) -> float:
    """What steps, evaluations, samples and checkpoints took together."""
    seconds, _, _ = _seconds_by_part(history)
    return sum(value for name, value in seconds.items() if name != _BESIDE)


def time_parts(history: RunHistory) -> dict[str, Any]:
    """Seconds by part of the work, and in a sentence what they are; of runs without spans, what other records tell."""
    seconds, calls, note = _seconds_by_part(history)
    others = [name for name in seconds if name not in _PARTS and name != _BESIDE]
    order = [*(name for name in _PARTS if name in seconds), *others, *([_BESIDE] if _BESIDE in seconds else [])]
    total = sum(value for name, value in seconds.items() if name != _BESIDE) or 1.0
    parts = [
        {
            "name": name,
            "share": round(seconds[name] / total, 5),
            "text": _duration(seconds[name]),
            "calls": calls.get(name, 0),
            "beside": name == _BESIDE,
        }
        for name in order
    ]
    return {"parts": parts[:24], "note": note if parts else ""}


def _seconds_by_part(history: RunHistory) -> tuple[dict[str, float], dict[str, int], str]:
    """Seconds and calls of every part of the work, and in a sentence what they are."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for row in history.spans:
        spent, often = row.get("seconds"), row.get("calls")
        for name, value in spent.items() if isinstance(spent, dict) else ():
            seconds[str(name)] = seconds.get(str(name), 0.0) + sum(finite([value]))
        for name, value in often.items() if isinstance(often, dict) else ():
            calls[str(name)] = calls.get(str(name), 0) + int(sum(finite([value])))
    note = (
        "Wait, forward, backward, micro-batch, reduction and optimizer are on the device's clock and add up to the "
        "steps; wait is what it stood still, reduction its waiting for other ranks' gradients. Evaluation, sample and "
        "checkpoint come on top."
    )
    if _BESIDE in seconds:
        note += " Data is how long the host waited for batches, perhaps while the device was busy; not in the sum."
    if not seconds:
        note = "This run kept no spans: whole steps, evaluations and checkpoints, as their records tell."
        told = {"steps": history.steps, "evaluation": history.evals, "checkpoint": history.checkpoints}
        for name, rows in told.items():
            spent = finite([row.get("seconds") for row in rows])
            if spent:
                seconds[name], calls[name] = sum(spent), len(spent)
    return seconds, calls, note


# --- eigenstate blocks ------------------------------------------------------------------------------------------------


def eigenstate_part(history: RunHistory) -> dict[str, Any] | None:
    """Sentence, rows from the first layer to the last, and a note."""
    found = eigenstate_history(history.eigenstates)
    if not found.layers:
        return None
    return {
        "context": found.context,
        "sentence": f"{found.sentence[:1].upper()}{found.sentence[1:]}." if found.sentence else "",
        "layers": [_layer_row(layer) for layer in found.layers],
        "note": _layers_note(found),
    }


def _layer_row(layer: LayerHistory) -> dict[str, Any]:
    ends = [layer.last("horizon", name) for name in ("10%", "90%")]
    beyond = layer.beyond[-1]
    return {
        "layer": layer.layer,
        "states": "–" if layer.states is None else f"{layer.states:,}",
        "bar": [_place(layer.last("horizon", name)) for name in QUANTILES],
        "median": _tokens(layer.last("horizon")),
        "middle": " to ".join(dict.fromkeys(map(_tokens, ends))),
        "longest": _tokens(layer.last("horizon", "max")),
        "beyond": "–" if beyond is None or not 0 <= beyond <= 1 else f"{beyond:.0%}",
        "start": _tokens(layer.first("horizon")),
        "period": _tokens(layer.last("period")),
    }


def _layers_note(found: EigenstateHistory) -> str:
    words = (
        "A state's horizon is the number of tokens after which 1/e of it is left, -1 / ln |λ|; its period is the "
        "tokens of a whole turn. Bars reach from the shortest to the longest horizon of a layer's states, with the "
        "middle 80% strong and a mark at the median, on a logarithmic scale."
    )
    return words + (" The upright line is the context." if found.context else "")


def _tokens(value: float | None) -> str:
    return "–" if value is None else short_tokens(value)


def _place(value: float | None) -> float | int | str | None:
    if value is None or math.isnan(value):
        return None
    return short(min(value, _FAR))


# --- words ------------------------------------------------------------------------------------------------------------


def _on_host(info: dict[str, Any]) -> bool:
    return info.get("device") == "cpu"


def _duration(seconds: float) -> str:
    if seconds >= 90:
        return human_seconds(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms"
