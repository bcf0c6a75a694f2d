"""What `flatout tune` tries, while it does, and the table it chose from."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.table import Table

from flatout.errors import many
from flatout.observe.human import human_seconds
from flatout.observe.terminal import Terminal, say
from flatout.records import TuneProgress, TuneResult, TuneRow

_STATUS = {"fits": "", "over": "no margin", "out_of_memory": "out of memory", "absent": "not here"}


class TuneReader:
    """A live line on stderr where somebody watches, a plain line per trial elsewhere; the table goes to stdout."""

    def __init__(self, stream: TextIO | None = None, progress_stream: TextIO | None = None) -> None:
        self.console = Terminal(progress_stream or sys.stderr, soft_wrap=True)
        self.output = Terminal(stream, width_of_files=160)

    def progress(self, progress: TuneProgress) -> None:
        used = f"{human_seconds(progress.seconds)} of at most {human_seconds(progress.budget)}"
        line = f"trial {progress.number}: {progress.text} ({used})"
        if self.console.is_terminal:
            self.console.redraw(line)
        else:
            say(self.console, line)

    def close(self) -> None:
        self.console.end_line()

    def table(self, rows: Sequence[TuneRow], result: TuneResult | None) -> None:
        """All rows, the fastest first, with the chosen one marked; then in a sentence what was chosen and why then.

        All figures are the search's, so that they compare; what was confirmed of the chosen row stands behind it.
        """
        if not rows:
            return
        chosen = None if result is None else result.chosen.number
        confirmed = result.chosen if result is not None and result.confirmed else None
        best = max((row.tokens_per_second or 0.0 for row in rows if row.status == "fits"), default=0.0)
        table = Table(box=None, header_style="bold", pad_edge=False)
        offloads = any(row.optimizer_offload for row in rows)
        compiles = len({(row.kernels, row.compile) for row in rows}) > 1
        names = ["", "micro-batch", "checkpointing", "loss", *(["kernels", "compile"] if compiles else [])]
        threads = len({row.threads for row in rows}) > 1
        names += [*(["threads"] if threads else []), *(["optimizer"] if offloads else [])]
        names += ["tokens/s", "of best", "ms", "peak GiB", "estimate", ""]
        right = {"micro-batch", "threads", "tokens/s", "of best", "ms", "peak GiB", "estimate"}
        for name in names:
            table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
        for row in sorted(rows, key=lambda row: (row.status != "fits", -(row.tokens_per_second or 0.0))):
            cells = ["*" if row.number == chosen else "", f"{row.micro_batch} x {row.accumulation}", row.checkpointing]
            cells += [row.loss if row.loss == "plain" else f"{row.loss} {row.loss_chunk}"]
            cells += [row.kernels, row.compile] if compiles else []
            cells += [str(row.threads)] if threads else []
            cells += ["host" if row.optimizer_offload else "device"] if offloads else []
            rate = row.tokens_per_second
            told = ["-"] * 3 if rate is None else [f"{rate:,.0f}", f"{rate / best:.1%}" if best else "-"]
            told += [] if rate is None else ["-" if row.milliseconds is None else f"{row.milliseconds:,.1f}"]
            cells += [*told, "-" if row.peak_bytes is None else _gib(row.peak_bytes), _gib(row.estimate_bytes)]
            how = "whole steps" if result is None or result.batch_samples is None else "measured again"
            notes = [
                f"{how}: {confirmed.tokens_per_second or 0.0:,.0f}" if confirmed and row.number == chosen else "",
                _STATUS[row.status],
                "graphs" if row.cuda_graphs else "",
                row.reason if row.status == "absent" else "",
            ]
            cells += [", ".join(note for note in notes if note)]
            table.add_row(*cells, style="bold" if row.number == chosen else "dim" if row.status != "fits" else "")
        self.output.print(table)
        if result is not None:
            # Whoever shows it may break the line: breaks of ours would stay in files, and leave spaces at their ends.
            say(self.output, _sentence(result))
            if result.note:
                say(self.output, f"note: {result.note}")


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f}"


def _sentence(result: TuneResult) -> str:
    row = result.chosen
    threads = "" if row.threads == "auto" else f", threads {row.threads}"
    memory = "" if result.capacity_bytes is None or row.peak_bytes is None else (
        f", {row.peak_bytes / 2**30:.2f} of {result.capacity_bytes / 2**30:.1f} GiB"
    )  # fmt: skip
    return (
        f"chose micro-batch {row.micro_batch} x {row.accumulation}, checkpointing {row.checkpointing}, "
        f"loss {row.loss}{threads}: {row.tokens_per_second or 0.0:,.0f} tokens/s ({_how(result)}){memory}, "
        f"on {result.device}; {many(result.tried, 'trial')} in {human_seconds(result.seconds)} on {result.data}; "
        f"{result.ended}"
    )


def _how(result: TuneResult) -> str:
    """Where the figure of the choice comes from."""
    samples = result.batch_samples is not None
    if not result.confirmed:
        return "of whole steps" if samples else "put together from shorter steps"
    return (
        "of whole steps, measured again"
        if samples
        else "of whole steps; the table's are put together from shorter ones"
    )
