"""Numbers and text for people, and the terminal that they are printed to.

Numbers as people write them, and text that cannot move the cursor or rename the window.

The terminal, or the pipe in its place, that everything here prints to.

Several ranks of a run: which is the slowest, and how long the others wait for it and for gradients.
"""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flatout.records import exposed_share as exposed_share
from flatout.records import slowest_rank as slowest_rank
from flatout.rows import human_bytes as human_bytes
from flatout.rows import human_count as human_count
from flatout.rows import human_seconds as human_seconds
from flatout.shown import printable as printable


def one_line(text: str) -> str:
    """The text as one printable line."""
    return " ".join(printable(text).split())


def loss_text(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3g}"


def human_parameters(parameters: float, trained: float | None, tables: float | None = None) -> str:
    """The size of a model; `trained` is that of the adapters beside it, where it is frozen.

    `tables` of the parameters lie in value and bigram tables, of which a token reads a row each.
    """
    frozen = "" if trained is None else f" frozen and {human_count(trained)} trained"
    parts = f" ({human_count(parameters - tables)} dense, {human_count(tables)} in tables)" if tables else ""
    return f"{human_count(parameters)}{frozen} parameters{parts}"


class Terminal(Console):
    """A console that raises BrokenPipeError when the reader of a pipe leaves, where rich would end the process.

    A file or pipe has no edge at which to cut, so lines there may have `width_of_files` columns.
    """

    def __init__(self, stream: TextIO | None = None, *, width_of_files: int = 0, soft_wrap: bool = False) -> None:
        super().__init__(file=stream, highlight=False, soft_wrap=soft_wrap)
        self._line: Live | None = None
        if not self.is_terminal:
            self.width = max(self.width, width_of_files)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def redraw(self, line: str) -> None:
        """Shows a line in the place of the one before, for what changes while it runs."""
        if self._line is None:
            self._line = Live(console=self, refresh_per_second=8, transient=True)
            self._line.start()
        self._line.update(Text(line, style="cyan", no_wrap=True, overflow="ellipsis"))

    def end_line(self) -> None:
        """Takes the line of `redraw` away, if there is one."""
        if self._line is not None:
            self._line.stop()
            self._line = None


def say(console: Console, words: str, style: str = "") -> None:
    """Prints a line without markup and control characters; only the terminal breaks it."""
    console.print(Text(printable(words), style), soft_wrap=True)


def ranks_line(seconds: Sequence[float], reduction: float) -> str:
    """A line for the terminal, by the first rank's own waiting."""
    share = exposed_share(reduction, seconds[0])
    return f"slowest rank: {slowest_rank(seconds)}; rank 0 waits {share:.1%} of its time for gradients"
