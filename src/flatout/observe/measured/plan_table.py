"""A plan for many GPUs, for people: a row for each form and number of GPUs, then saving and interruptions.

Contract: it reads the JSON form of a plan (`PlanResult.to_json`), so a stored line is shown like a fresh one.
"""

from collections.abc import Mapping
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from flatout.observe.human import human_bytes, human_count, human_seconds
from flatout.observe.terminal import Terminal, say

_COLUMNS = (
    "GPUs", "form", "micro-batch", "memory", "sent", "between hosts", "step", "compute", "exposed", "hidden",
    "tokens/s/GPU", "efficiency",
)  # fmt: skip


def print_plan(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Everything, to stdout unless told otherwise."""
    console = Terminal(stream, width_of_files=180)
    for line in headline(body):
        say(console, line)
    console.print()
    console.print(_steps(body))
    say(console, "* `parallel: auto`; micro-batch: sequences x micro-batches of a rank; sent: by a rank in a step")
    usable = f"of each card {human_bytes(body['usable_bytes'])} are usable"
    say(console, f"exposed: communication that compute does not hide; {usable}")
    console.print()
    console.print(Text("checkpoints and interruptions"), style="bold")
    console.print(_saves(body))
    say(console, f"one interruption in {body['failure_hours']:,.0f} GPU-hours: {body['failure_source']}")
    say(console, f"goodput: time in steps that are kept; each host writes {body['disk'] / 1e9:g} GB/s")
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


def _steps(body: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "form" else "right", no_wrap=True)
    before = None
    for row in body["rows"]:
        first, before = row["gpus"] != before, row["gpus"]
        form = f"{body['forms'][row['form']]}{' *' if row['auto'] else ''}"
        cells = [f"{row['gpus']:,}" if first else "", form]
        if not row["fits"]:
            small = row["memory_bytes"] > body["usable_bytes"]
            table.add_row(*cells, "does not fit" if small else "too few", human_bytes(row["memory_bytes"]), style="dim")
            continue
        hidden = row["communication_seconds"] - row["exposed_seconds"]
        again = "" if row["checkpointing"] == "none" else f" {row['checkpointing']}"
        cells += [
            f"{row['micro_batch']} x {row['accumulation']}{again}",
            human_bytes(row["memory_bytes"]),
            human_bytes(row["sent_bytes"]),
            human_bytes(row["crossed_bytes"]),
            *(short_seconds(row[f"{part}_seconds"]) for part in ("step", "compute", "exposed")),
            short_seconds(max(hidden, 0.0)),
            f"{row['tokens_per_second']:,.0f}",
            f"{100 * row['efficiency']:.1f}%",
        ]
        table.add_row(*cells, style="bold" if row["auto"] else "")
    return table


def _saves(body: Mapping[str, Any]) -> Table:
    saves = body["saves"]
    intervals = sorted({int(interval) for save in saves.values() for interval in save["by_interval"]})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    names = ["GPUs", "checkpoint", "of a rank", "copied in", "written in", "interruptions a day", "best: save every"]
    for name in [*names, "goodput", *(f"every {human_seconds(interval)}" for interval in intervals)]:
        table.add_column(name, justify="right", no_wrap=True)
    for gpus, save in saves.items():
        shares = {int(interval): share for interval, share in save["by_interval"].items()}
        table.add_row(
            f"{int(gpus):,}",
            human_bytes(save["checkpoint_bytes"]),
            human_bytes(save["rank_bytes"]),
            short_seconds(save["copy_seconds"]),
            short_seconds(save["write_seconds"]),
            f"{save['interruptions_per_day']:.3g}",
            human_seconds(save["best_interval"]),
            f"{100 * save['best']:.2f}%",
            *(f"{100 * shares[interval]:.2f}%" if interval in shares else "-" for interval in intervals),
        )
    return table
