"""The terminal, or the pipe in its place, that everything here prints to."""

from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flatout.observe.human import printable


class Terminal(Console):
    """rich ends the process by itself when the reader of a pipe leaves; ours is told, and exits with the usual code.

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
        """Shows a line in the place of the one before, for what changes while somebody watches."""
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
    """Prints a line: no markup, no control characters, and broken by nobody but the terminal."""
    console.print(Text(printable(words), style), soft_wrap=True)
