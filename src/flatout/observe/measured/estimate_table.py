"""What a run will be like, for people: the sheet of `flatout estimate`, and one sentence for the start of a long run.

Contract: it reads the JSON form of an estimate (`EstimateResult.to_json`), so a stored line is shown like a fresh one,
and neither torch nor the engine is needed. Every figure stands beside the word that says how it came about.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from flatout.errors import many
from flatout.observe.human import Terminal, human_bytes, human_count, human_seconds, printable, say
from flatout.records import RunInfo

SKIPPED = 4  # first steps of a run, which compile and warm up
FEWEST = 3  # steps after those that a sentence needs
_MEMORY_PARTS = {
    "process": "the process before the model",
    "optimizer": "optimizer's state",
    "activations": "activations",
    "working": "alive for a moment",
    "later": "gradients in their place",
    "graphs": "CUDA graphs",
}


def print_estimate(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """The whole sheet, to stdout unless told otherwise."""
    console = Terminal(stream, width_of_files=160)
    shape = f"{body['micro_batch']} x {body['context']} x {body['accumulation']}"
    steps = f"{body['steps']['value']:,.0f} steps of {body['batch_tokens']:,} tokens ({shape})"
    say(console, f"{body['config']}: {steps}, on {body['device']}, torch {body['torch']}")
    say(console, f"data: {body['data']}")
    console.print()
    sheet = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    sheet.add_column(no_wrap=True)
    sheet.add_column(justify="right", no_wrap=True)
    sheet.add_column(no_wrap=True, style="dim")
    sheet.add_column(style="dim", overflow="fold")
    for cells in _rows(body):
        sheet.add_row(*(printable(cell) for cell in cells), style="bold" if cells[0] == "time to finish" else "")
    console.print(sheet)
    console.print()
    if body.get("layers"):
        console.print(Text("layers, each; what is kept for backward is of one micro-batch"), style="bold")
        console.print(_layer_table(body))
        console.print()
    console.print(Text("memory of a step by micro-batch and context, estimated"), style="bold")
    console.print(_memory_table(body))
    for line in _closing(body):
        say(console, line)


def _rows(body: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, value, how, note) of every figure."""
    rows = [_row("time to finish", body["seconds"], _seconds)]
    for part in body["parts"]:
        each, count = part["each"], part["times"]
        times = "" if count == 1 or each["value"] is None else f"{count:,} x {_seconds(each['value'])}"
        once = f"{_seconds(part['once'])} more the first time" if part["once"] >= 0.05 and count else ""
        # A part's sum is its own figure times a count; how that figure came about is what there is to say.
        note = ", ".join(word for word in (times, each["note"], once) if word)
        name, shown = f"  {part['name']}", {**part["seconds"], "how": each["how"], "note": note}
        rows.append(_row(name, shown, _seconds))
    spread = "" if body["spread"] is None else f", quartiles {100 * body['spread']:.0f}% apart"
    speed = body["tokens_per_second"]
    rows.append(_row("speed", {**speed, "note": speed["note"] + spread}, lambda value: f"{value:,.0f} tokens/s"))
    if body["mfu"]["value"] is not None:
        rows.append(_row("  of the card's peak", body["mfu"], lambda value: f"{100 * value:.1f}%"))
    rows.append(_row("tokens", body["tokens"], human_count))
    rows.append(_row("  epochs", body["epochs"], lambda value: f"{value:.2f}"))
    parameters = f"{body['parameters']['value']:,.0f} parameters"
    if body["tokens_per_parameter"]["value"] is not None and body["parameters"]["note"]:
        parameters += f" ({body['parameters']['note']})"
    rows.append(_row("  per parameter", body["tokens_per_parameter"], lambda value: f"{value:.2f}", parameters))
    have = "" if body["device_bytes"] is None else f"of {human_bytes(body['device_bytes'])}"
    rows.append(_row("peak memory", body["peak_measured"], human_bytes, have))
    rows.append(_row("  by formula", body["peak_estimate"], human_bytes))
    for name, size in body.get("memory_parts", {}).items():  # a line that was stored earlier has none
        if size:
            sign = "-" if name == "later" else ""
            rows.append((f"    {_MEMORY_PARTS.get(name, name)}", f"{sign}{human_bytes(size)}", "estimated", ""))
    rows.append(_row("checkpoint", body["checkpoint_bytes"], human_bytes))
    rows.append(_row("  on disk at most", body["disk_bytes"], human_bytes))
    watts = "" if body["watts"]["value"] is None else f"{body['watts']['value']:.0f} W"
    rows.append(_row("energy", body["kilowatt_hours"], lambda value: f"{value:.3g} kWh", watts))
    price = "" if body["price"] is None else f"at {body['price']:g} per hour"
    rows.append(_row("cost", body["cost"], lambda value: f"{value:,.2f}", price))
    return rows


def _row(name: str, figure: Mapping[str, Any], form: Any, note: str = "") -> tuple[str, str, str, str]:
    value = figure["value"]
    notes = [note, figure["note"]] if value is not None else [figure["note"] or note]
    return name, "-" if value is None else form(value), figure["how"], ", ".join(word for word in notes if word)


def _memory_table(body: Mapping[str, Any]) -> Table:
    cells = {(cell["context"], cell["micro_batch"]): cell for cell in body["table"]}
    sizes = sorted({size for _, size in cells})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("context", justify="right", no_wrap=True)
    for size in sizes:
        table.add_column(f"micro-batch {size}", justify="right", no_wrap=True)
    for context in sorted({context for context, _ in cells}):
        row = [Text(f"{context:,}")]
        for size in sizes:
            mark, style, cell = "", "", cells.get((context, size))
            if cell is not None and (cell["own"] or cell["fits"] is False):
                mark, style = ("* ", "bold") if cell["own"] else ("! ", "red")
            row.append(Text("-" if cell is None else mark + human_bytes(cell["bytes"]), style=style))
        table.add_row(*row)
    return table


def _layer_table(body: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", no_wrap=True)
    for heading in ("times", "parameters", "FLOP per token", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in body["layers"]:
        cells = (
            f"{row['times']:,}",
            f"{row['parameters']:,}",
            human_count(row["flops"]),
            human_bytes(row["kept_bytes"]),
        )
        table.add_row(printable(row["name"]), *cells)
    return table


def _meanings(body: Mapping[str, Any]) -> str:
    """What the words in the sheet's second column mean, of those that stand there."""
    used = {how for _, value, how, _ in _rows(body) if value != "-"}
    meanings = {
        "counted": "exact",
        "measured": "here, just now",
        "projected": f"{'measured' if 'measured' in used else 'estimated'}, times how often",
        "estimated": "by formula",
    }
    return "; ".join(f"{how}: {meaning}" for how, meaning in meanings.items() if how in used)


def _closing(body: Mapping[str, Any]) -> list[str]:
    own = next((cell for cell in body["table"] if cell["own"]), None)
    rate = "" if own is None or own["tokens_per_second"] is None else f", {own['tokens_per_second']:,.0f} tokens/s"
    too_large = any(cell["fits"] is False for cell in body["table"])
    return [
        f"* the config's own{rate}" + ("; ! does not fit" if too_large else ""),
        "",
        _meanings(body),
        *(f"note: {note}" for note in body["notes"]),
    ]


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.1f}s" if value < 90 else human_seconds(value)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is left of a run, by its own first steps."""

    seconds: float
    sentence: str


def expected(step_seconds: Sequence[float], info: RunInfo) -> Expected | None:
    """What a run that has just begun will take, from the seconds of its steps so far; None while those are too few.

    The first steps compile and warm up, and are not counted. An evaluation is taken for a third of the same tokens'
    training, since forward is about a third of forward and backward; samples and checkpoints are not in it.
    """
    counted = list(step_seconds)[SKIPPED:]
    if len(counted) < FEWEST:
        return None
    step = statistics.median(counted)
    left = max(0, info.steps - info.start_step - len(step_seconds))
    settings = info.config.get("eval", {})  # a run that is read back may have been written by anybody
    every, asked = settings.get("every", 0), settings.get("tokens")
    every = 0 if isinstance(every, str) else every  # epochs
    per_evaluation = min(info.val_tokens, asked or info.val_tokens) * step / max(info.batch_tokens, 1) / 3
    evaluations = left // every + (1 if left % every else 0) if every else min(left, 1)
    total = left * step + evaluations * per_evaluation
    tokens = info.steps * info.batch_tokens
    return Expected(
        total,
        f"about {human_seconds(total)} to go: {left:,} steps of {_seconds(step)}, measured over {len(counted)}, "
        f"and {many(evaluations, 'evaluation')}; {human_count(tokens)} tokens in all, "
        f"{tokens / max(info.parameters, 1):.1f} per parameter",
    )
