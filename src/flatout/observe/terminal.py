"""The terminal, or the pipe in its place, that everything here prints to."""

from rich.console import Console


class Terminal(Console):
    """rich ends the process by itself when the reader of a pipe leaves; ours is told, and exits with the usual code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
