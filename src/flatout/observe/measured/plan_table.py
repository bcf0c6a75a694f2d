"""A plan for many GPUs, for people: a row for each form and number of GPUs, then saving and interruptions.

Contract: it reads the JSON form of a plan (`PlanResult.to_json`), so a stored line is shown like a fresh one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from flatout.observe.human import human_bytes, human_count, human_seconds
from flatout.observe.terminal import Terminal, say

# What goes first where the terminal is too narrow for everything.
_STEP_EXTRAS = ("between hosts", "hidden", "compute", "sent", "tokens/s/GPU", "micro-batch")
_SAVE_EXTRAS = ("at 2h00m", "at 60s", "at 30m00s", "at 5m00s", "written in", "pause", "form")


def print_plan(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Everything, to stdout unless told otherwise."""
    console = Terminal(stream, width_of_files=180)
    for line in headline(body):
        say(console, line)
    console.print()
    console.print(_table(_steps(body), _STEP_EXTRAS, console.width))
    say(console, "* parallel.form=auto; micro-batch: sequences x micro-batches of a rank; sent: by a rank in a step")
    usable = f"of each card {human_bytes(body['usable_bytes'])} are usable"
    say(console, f"exposed: communication that compute does not hide; {usable}")
    console.print()
    console.print(Text("checkpoints and interruptions"), style="bold")
    console.print(_table(_saves(body), _SAVE_EXTRAS, console.width))
    say(console, f"one interruption in {body['failure_hours']:,.0f} GPU-hours: {body['failure_source']}")
    say(
        console,
        f"goodput: time in steps that are kept; pause: training stands still for a save, of which "
        f"each host writes {body['disk'] / 1e9:g} GB/s",
    )
    console.print()
    for note in body["notes"]:
        say(console, note)
    console.print()
    say(console, body["recommendation"], "bold")


def headline(body: Mapping[str, Any]) -> list[str]:
    """What is planned, and what is assumed of it."""
    name = body["config"] if body["size"] is None else body["size"]
    share = "" if body["mfu"] is None else f", {100 * body['mfu']:.0f}% of the peak rate"
    return [
        f"{name}: {human_count(body['parameters'])} parameters, {body['batch_tokens']:,} tokens a step of context "
        f"{body['context']:,}, on hosts of {body['per_host']} {body['card']}",
        f"one GPU: {body['one_gpu_tokens_per_second']:,.0f} tokens/s{share}; {body['rate_source']}",
        f"inside a host {body['inside'] / 1e9:g} GB/s for each GPU: {body['inside_source']}",
        f"between hosts {body['across'] / 1e9:g} GB/s for each GPU: {body['across_source']}",
    ]


def short_seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{0 if value >= 0.1 else 1}f} ms"
    return f"{value:.2f} s" if value < 90 else human_seconds(value)


Row = tuple[dict[str, str], str]  # cells by the name of their column, and a style


def _table(rows: Sequence[Row], extras: Sequence[str], width: int) -> Table:
    """The rows with as many columns as there is room for."""
    names = list(dict.fromkeys(name for cells, _ in rows for name in cells))
    needed = {name: max(len(name), *(len(cells.get(name, "")) for cells, _ in rows)) + 2 for name in names}
    for extra in extras:
        if sum(needed[name] for name in names) - 2 > width and extra in names:
            names.remove(extra)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == "form" else "right", no_wrap=True)
    for cells, style in rows:
        table.add_row(*(cells.get(name, "") for name in names), style=style)
    return table


def _steps(body: Mapping[str, Any]) -> list[Row]:
    rows, before = [], None
    for row in body["rows"]:
        first, before = row["gpus"] != before, row["gpus"]
        again = "" if row["checkpointing"] == "none" else f" {row['checkpointing']}"
        unfit = "refused" if row["refused"] else "does not fit"
        cells = {
            "GPUs": f"{row['gpus']:,}" if first else "",
            "form": f"{body['forms'][row['form']]}{' *' if row['auto'] else ''}",
            "micro-batch": f"{row['micro_batch']} x {row['accumulation']}{again}" if row["fits"] else unfit,
            "memory": human_bytes(row["memory_bytes"]),
        }
        if row["fits"]:
            cells |= {
                "sent": human_bytes(row["sent_bytes"]),
                "between hosts": human_bytes(row["crossed_bytes"]),
                "step": short_seconds(row["step_seconds"]),
                "compute": short_seconds(row["compute_seconds"]),
                "exposed": short_seconds(row["exposed_seconds"]),
                "hidden": short_seconds(max(row["communication_seconds"] - row["exposed_seconds"], 0.0)),
                "tokens/s/GPU": f"{row['tokens_per_second']:,.0f}",
                "efficiency": f"{100 * row['efficiency']:.1f}%",
            }
        rows.append((cells, "dim" if not row["fits"] else "bold" if row["auto"] else ""))
    return rows


def _saves(body: Mapping[str, Any]) -> list[Row]:
    rows = []
    for gpus, save in body["saves"].items():
        cells = {
            "GPUs": f"{int(gpus):,}",
            "form": body["forms"][save["form"]],
            "checkpoint": human_bytes(save["checkpoint_bytes"]),
            "pause": short_seconds(save["pause_seconds"]),
            "written in": short_seconds(save["write_seconds"]),
            "interruptions/day": f"{save['interruptions_per_day']:.3g}",
            "best interval": human_seconds(save["best_interval"]),
            "goodput": f"{100 * save['best']:.2f}%",
        }
        shares = sorted((int(interval), share) for interval, share in save["by_interval"].items())
        cells |= {f"at {human_seconds(interval)}": f"{100 * share:.2f}%" for interval, share in shares}
        rows.append((cells, ""))
    return rows
