"""A profile as one page to read: the answer first, then the figures that it came from, largest first.

Contract: the page is made of `profile.json` alone, as plain values, so it needs neither torch nor the run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flatout.records import exposed_share, slowest_rank
from flatout.rows import (
    OWN,
    Block,
    Bullets,
    Heading,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_bytes,
    human_count,
    or_dash,
)

TOP = 10  # kernels on the page; kernels.csv has all
MOST_RANKS = 16  # on the page
_BAR = 20  # characters for the whole step
_SHOWN = ("precision", "kernels", "compile", "cuda_graphs", "attention", "loss", "checkpointing", "loader", "workers")
_WHAT_IS_IN = {
    "trace.json.gz": "the steps event by event: open it at ui.perfetto.dev or in chrome://tracing",
    "kernels.csv": "all kernels with kind, time, calls and share",
    "profile.json": "every figure of this page, for programs",
    "reading.md": "this page",
}


def sheet_of(report: Mapping[str, Any], folder: str | None = None) -> Sheet:
    """The page of a profile's report, which is `profile.json` as Python values."""
    parts = (_answer, _step, _ranks, _rates, _memory, _kernels)
    blocks = [block for part in parts for block in part(report)] + list(_end(report, folder))
    return Sheet(blocks=blocks, width=100_000, indent=2)  # a file has no right margin


def _answer(report: Mapping[str, Any]) -> Iterator[Block]:
    verdict, used = report["verdict"], report["used"]
    size = f"{human_count(report['parameters'])} parameters"
    shape = f"{report['micro_batch']} x {report['context']:,} tokens x {report['accumulation']}"
    where = f" in each of {len(report['ranks']['step_seconds'])} ranks" if report.get("ranks") else ""
    yield Heading(f"{report['config']}: {verdict['bottleneck']}", 1)
    yield Sentence(verdict["sentence"], OWN)
    yield Bullets(tuple(("", line) for line in verdict["evidence"]))
    yield Heading("Try next")
    yield Bullets(tuple((advice["words"], advice["why"]) for advice in verdict["advice"]))
    yield Heading("What was profiled")
    switches = ", ".join(f"{name} {used[name]}" for name in _SHOWN if name in used)
    lines = [
        f"{size}, {shape} a step{where}, on {report['device']} (torch {report['torch']}, flatout {report['flatout']})",
        f"speed: {switches}",
        *([f"data: {report['data']}"] if report["data"] else []),
        *report["notices"],
    ]
    yield Bullets(tuple(("", line) for line in lines))


def _step(report: Mapping[str, Any]) -> Iterator[Block]:
    cuda, step = report["device_kind"] == "cuda", report["step_seconds"]
    busy = "device busy" if cuda else "in operators"
    gap = "idle: waiting for the host" if cuda else "outside of operators: Python"
    kinds = sorted(report["seconds_by_kind"].items(), key=lambda item: -item[1])
    lines = [
        ("the whole step", step),
        (busy, report["busy_seconds"]),
        *((f"  {kind}", seconds) for kind, seconds in kinds if seconds >= 0.0005 * step),
        ("idle: waiting for data" if cuda else "waiting for data", report["idle_for_data_seconds"]),
        (gap, report["idle_for_host_seconds"]),
    ]
    yield Heading("Where the step's time goes")
    bars = {name: "█" * round(_BAR * min(1.0, max(0.0, seconds / step))) for name, seconds in lines}
    rows = [
        ResultRow(
            name=name,
            cells={"ms": _ms(seconds, report), "share": f"{seconds / step:.1%}", " ": bars[name]},
            tone=OWN if name == "the whole step" else "",
        )
        for name, seconds in lines
    ]
    yield Table(rows=rows, left=(" ",))
    how = (
        ": it slows the host down, not the kernels. So the whole step and the waiting are timed without it "
        f"({report['timed_steps']} steps), the kernels with it ({report['profiled_steps']})."
        if cuda
        else f". The shares of operators are measured under it ({report['profiled_steps']} steps) "
        f"and scaled to the step without it ({report['timed_steps']} steps)."
    )
    yield Sentence(f"Under the profiler a step takes {_ms(report['profiled_step_seconds'], report)} ms{how}")
    clock = "ms on the host, profiled" if cuda else "ms"
    yield Heading("By part of the step")
    rows = []
    for part in report["ranges"]:
        cells = {"ms on the device": _ms(part["device_seconds"], report)} if cuda else {}
        cells |= {clock: _ms(part["host_seconds"], report), "times a step": f"{part['calls']:g}"}
        rows.append(ResultRow(name="  " * part["depth"] + part["name"], cells=cells))
    yield Table(rows=rows, names="part")


def _ranks(report: Mapping[str, Any]) -> Iterator[Block]:
    """How several ranks share the work; nothing for one."""
    ranks = report.get("ranks")
    if not ranks:
        return
    work, waits = ranks["busy_seconds"], ranks["reduction_seconds"]
    count = len(work)
    shown = sorted(sorted(range(count), key=lambda rank: -work[rank])[:MOST_RANKS])
    rows = [
        ResultRow(
            name=f"{rank}",
            cells={
                "ms a step": _ms(ranks["step_seconds"][rank], report),
                "at work": _ms(work[rank], report),
                "waiting for gradients": _ms(waits[rank], report),
                "share waiting": f"{exposed_share(waits[rank], work[rank]):.1%}",
            },
        )
        for rank in shown
    ]
    yield Heading("Ranks")
    lines = [f"slowest rank: {slowest_rank(work)}"]
    if ranks["sent_bytes"] is not None:
        sent, reduced = human_bytes(ranks["sent_bytes"]), human_bytes(ranks["reduced_bytes"])
        lines.append(f"gradients of {reduced} a step; each rank sends {sent} of them in a ring")
    if ranks["exposed_seconds"] is not None:
        communication = report["seconds_by_kind"].get("communication", 0.0)
        alone = f"{_ms(ranks['exposed_seconds'], report)} of {_ms(communication, report)} ms"
        lines.append(f"communication with nothing else on rank 0's device: {alone} (under the profiler)")
    if count > MOST_RANKS:
        lines.append(f"the {MOST_RANKS} slowest of {count} ranks; profile.json has all")
    yield Bullets(tuple(("", line) for line in lines))
    yield Table(rows=rows, names="rank")
    yield Sentence(
        "Means over the steps without the profiler, the whole step as a median. A rank waits for the last "
        "gradients of others after its own backward pass; what was sent before that is hidden."
    )


def _rates(report: Mapping[str, Any]) -> Iterator[Block]:
    peak, mfu, products = report["peak_flops_per_second"], report["mfu"], report["product_flops_per_second"]
    lines = [
        ("tokens per second", f"{report['tokens_per_second']:,.0f}", ""),
        (
            "FLOP/s of the whole step" + (", of one rank" if report.get("ranks") else ""),
            _flops(report["flops_per_second"]),
            "peak not known" if mfu is None else f"MFU {mfu:.1%} of {_flops(peak)}",
        ),
    ]
    if products is not None:
        share = "" if not peak else f"{products / peak:.1%} of the peak"
        lines.append(("FLOP/s in products and attention", _flops(products), share))
    what = "kernels" if report["device_kind"] == "cuda" else "operators"
    mean = f"{1e6 * report['mean_kernel_seconds']:.1f} µs each on average"
    lines.append((f"{what} per second", f"{report['kernels_per_second']:,.0f}", mean))
    lines.append((f"{what} per step", f"{report['kernels_per_step']:,.0f}", ""))
    yield Heading("Rates")
    yield Table(rows=[ResultRow(name=name, cells={"rate": rate, " ": note}) for name, rate, note in lines], left=(" ",))


def _memory(report: Mapping[str, Any]) -> Iterator[Block]:
    rows = [
        ResultRow(
            name=part["name"],
            cells={
                "measured": or_dash(part["measured"], human_bytes),
                "estimated before": or_dash(part["estimated"], human_bytes),
            },
        )
        for part in report["memory"]
    ]
    yield Heading("Memory")
    yield Table(rows=rows)


def _kernels(report: Mapping[str, Any]) -> Iterator[Block]:
    total = sum(report["seconds_by_kind"].values()) or 1.0
    rows = [
        ResultRow(
            name=kernel["name"],
            cells={
                "kind": kernel["kind"],
                "ms a step": _ms(kernel["seconds"], report),
                "calls": f"{kernel['calls']:,.0f}",
                "share": f"{kernel['seconds'] / total:.1%}",
            },
        )
        for kernel in report["top"][:TOP]
    ]
    what = "kernel" if report["device_kind"] == "cuda" else "operator"
    yield Heading(f"Longest {what}s")
    yield Table(rows=rows, names=what, left=("kind",), code=True)


def _end(report: Mapping[str, Any], folder: str | None) -> Iterator[Block]:
    yield Heading("Files" if folder is None else f"Files in {folder}")
    names = [*report["files"], *([] if folder is None else ["reading.md"])]
    yield Bullets(tuple((name, _WHAT_IS_IN.get(name, "")) for name in names))


# --- words ------------------------------------------------------------------------------------------------------------


def _ms(seconds: float | None, report: Mapping[str, Any]) -> str:
    """Milliseconds, with as many decimals as the whole step deserves: a column of them is easier to compare."""
    decimals = 1 if report["step_seconds"] >= 0.1 else 2 if report["step_seconds"] >= 0.005 else 3
    return "-" if seconds is None else f"{1000 * seconds:,.{decimals}f}"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
