"""One sample as it is learned: its text, with what is trained on in colour.

Contract: text from data cannot act on the terminal: control characters are shown as signs or escapes. Where there is no
colour, brackets stand around what is trained on, so that a log shows the same.
"""

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.text import Text

from flatout.observe.human import Terminal

_TRAINED, _OTHER, _SIGN = "bold green", "dim", "cyan"
_OPEN, _CLOSE = "\u27e6", "\u27e7"  # white square brackets, which hardly any text holds
_SIGNS = {"\n": "\u23ce\n", "\t": "\u21e5", "\r": "\u240d"}


def print_sample(pieces: Iterable[tuple[str, bool]], *, most: int = 4000, console: RichConsole | None = None) -> None:
    """Show a sample given as (text, is it trained on); of a long one the beginning and the end, `most` characters."""
    console = console or Terminal()
    console.print(drawn(pieces, most=most, colour=console.color_system is not None and not console.no_color))


def drawn(pieces: Iterable[tuple[str, bool]], *, most: int, colour: bool) -> Text:
    """The sample as one text with styles, or with brackets where there is no `colour`."""
    result = Text(no_wrap=False)
    for text, trained in _shortened(list(pieces), most):
        if trained is None:
            result.append(text, _SIGN)
            continue
        style = _TRAINED if trained else _OTHER
        if trained and not colour:
            result.append(_OPEN)
        for letter in text:
            if letter in _SIGNS:
                result.append(_SIGNS[letter], _SIGN)
            elif letter.isprintable():
                result.append(letter, style)
            else:
                result.append(ascii(letter)[1:-1], _SIGN)
        if trained and not colour:
            result.append(_CLOSE)
    return result


def _shortened(pieces: list[tuple[str, bool]], most: int) -> list[tuple[str, bool | None]]:
    total = sum(len(text) for text, _ in pieces)
    if total <= most:
        return list(pieces)
    head, tail = most // 2, total - most // 2
    result: list[tuple[str, bool | None]] = []
    place = 0
    left_out = False
    for text, trained in pieces:
        first, last = text[: max(head - place, 0)], text[max(tail - place, 0) :]
        result += [(first, trained)] if first else []
        if not left_out and place + len(text) > head:
            result.append((f" [{tail - head:,} characters left out] ", None))
            left_out = True
        result += [(last, trained)] if last and place + len(text) > tail else []
        place += len(text)
    return result
