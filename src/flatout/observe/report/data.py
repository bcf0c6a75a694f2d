"""What a report tells of runs, as plain values: figures, tables, curves, texts. No HTML here.

Contract: `report_data` takes histories and returns what JSON can hold; the same runs give the same values. Every text
that came from a run has lost its control characters and its excess of length. What an older run did not write is
missing, not zero. Nothing here guesses: a run without an end says that it has none.

Trap: records can be of any age and a file can be damaged, so no field is taken for granted.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import format_value
from flatout.errors import many
from flatout.observe.history import RunHistory, distinct_names, rows_with_step
from flatout.observe.human import human_bytes, printable
from flatout.observe.report.costs import cost_figures
from flatout.observe.report.facts import commands_of, facts_of, shown_config, summary_of
from flatout.observe.report.figures import eigenstate_part, figures_of, speed_groups, time_parts, whole_seconds
from flatout.observe.report.series import Places, amount, curves_of, finite, number, points_for
from flatout.observe.report.state import RunState, state_of
from flatout.records import WAITING

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
