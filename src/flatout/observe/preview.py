"""What a run shows at its beginning: one sample as it is learned, and how long the run will take.

Text from data cannot act on the terminal: control characters are shown as signs or escapes. What is trained on has a
colour; where there is no colour, it has brackets, so that a log shows the same.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console as RichConsole
from rich.text import Text

from flatout.errors import many
from flatout.observe.human import Terminal, human_count, human_seconds
from flatout.records import RunInfo

SKIPPED = 4  # first steps of a run, which compile and warm up
FEWEST = 3  # steps after those that a sentence needs

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


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.1f}s" if value < 90 else human_seconds(value)
