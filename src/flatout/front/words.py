"""Words of a command line to values, and the words in which mistakes are answered.

Contract: a `Command` is a row of the table in `flatout.front.commands`. Its parser, its help, completion and the
reference are made from that row.
"""

import argparse
import dataclasses
import difflib
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from flatout.errors import UsageError, UserError, quoted


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command, or a word that it takes in a place; `more` are argparse's keywords."""

    names: tuple[str, ...]
    more: Mapping[str, Any]
    limits: str = ""  # of a number

    @property
    def by_place(self) -> bool:
        return not self.names[0].startswith("-")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what help says of it, the words it takes, the function that runs it and its twin in Python."""

    name: str  # a verb, or a verb and its action
    run: Callable[[argparse.Namespace], int] | None  # None: only its actions run
    summary: str  # in the list of all verbs, or of the verb's actions
    options: tuple[Option, ...] = ()
    about: str = ""  # at the head of its own help; default: the summary
    python: str = ""  # its twin, where that has another name
    preset: str | None = None  # what a command that takes a config starts from without one
    text: str = ""  # the option for text that people write without one
    processes: Literal["any", "one", "ranks"] = "any"  # which processes of a launcher may run it
    more_help: str = ""  # below the options

    @property
    def twin(self) -> str:
        """The name of `flatout` that does the same; none for an action that has no name of its own."""
        return self.python or ("" if " " in self.name else self.name)

    @property
    def takes_config(self) -> bool:
        return any(option.names == ("config",) for option in self.options)

    @property
    def heading(self) -> str:
        """What its own help begins with."""
        return self.about or f"{self.summary[0].upper()}{self.summary[1:]}."

    @property
    def usage(self) -> str | None:
        """The first line of help, where argparse's own would list each option."""
        if not self.takes_config:
            return None
        first = [option.more["metavar"] for option in self.options if option.by_place and option.names != ("config",)]
        return " ".join(["flatout", self.name, *first, "[CONFIG] [SECTION.FIELD=VALUE ...] [options]"])


def word(name: str, help: str, **more: Any) -> Option:
    return Option((name,), {"help": help, **more})


def option(name: str, metavar: str, help: str, **more: Any) -> Option:
    return Option((name,), {"metavar": metavar, "help": help, **more})


def choice(name: str, choices: Sequence[str], help: str, **more: Any) -> Option:
    return Option((name,), {"choices": choices, "help": help, **more})


def flag(name: str, help: str) -> Option:
    return Option((name,), {"action": "store_true", "help": help})


def number(name: str, low: float, high: float, help: str, **more: Any) -> Option:
    """An option with a number from `low` to `high`, which is a whole one if `high` is."""
    limits = f"{_limit(low)} to {_limit(high)}"
    return Option((name,), {"type": number_between(type(high), low, high), "help": help, **more}, limits)


SETTINGS = "Settings are written as SECTION.FIELD=VALUE, for example train.steps=500 optim.learning_rate=1e-3."


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose complaints are `UsageError`s with a suggestion."""

    def __init__(self, command: Command, actions: Sequence[Command] = ()) -> None:
        epilog = f"{SETTINGS if command.takes_config else ''} {command.more_help}".strip()
        epilog = "\n\n".join([epilog, *(f"flatout {action.name}: {action.summary}" for action in actions)])
        super().__init__(
            prog=f"flatout {command.name}",
            usage=command.usage,
            description=command.heading,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Help,
        )
        self.command = command
        for one in command.options:
            self.add_argument(*one.names, **one.more)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Options and other words, in any order. Of a command that takes a config, `a.b=c` words are `overrides`."""
        lists = any(one.by_place and one.more.get("nargs") in ("+", "*") for one in self.command.options)
        known, rest = (self.parse_known_intermixed_args if lists else self.parse_known_args)(list(words))
        overrides: list[str] = []
        optional = [one.names[0] for one in self.command.options if one.by_place and one.more.get("nargs") == "?"]
        if self.command.takes_config:
            for name in optional:
                if getattr(known, name) is not None and is_override(getattr(known, name)):
                    overrides.append(getattr(known, name))
                    setattr(known, name, None)
        for left in rest:
            free = next((name for name in optional if getattr(known, name) is None), None)
            if self.command.takes_config and is_override(left):
                overrides.append(left)
            elif free is not None and not left.startswith("-"):
                setattr(known, free, left)
            else:
                self._refuse(left)
        known.verb, known.typed = self.command.name, list(words)
        if self.command.takes_config:
            if known.config is not None and known.config_option is not None:
                raise UsageError(
                    f"two configs are named, {quoted(known.config)} and --config {quoted(known.config_option)}",
                    "leave one of them out",
                )
            known.config = known.config_option if known.config is None else known.config
            known.config_given = known.config is not None
            known.config = known.config if known.config_given else self.command.preset
            known.overrides = overrides
        return known

    def _refuse(self, word: str) -> NoReturn:
        if word.startswith("-"):
            raise UsageError(f"unknown option {quoted(word)}", self._nearest(word.partition("=")[0]))
        hint = "write settings as SECTION.FIELD=VALUE" if self.command.takes_config else f"see `{self.prog} --help`"
        if self.command.text:
            hint = f"write text as `{self.prog} RUN {self.command.text} {shlex.quote(word)}`"
        raise UsageError(f"unexpected word {quoted(word)}", hint)

    def _nearest(self, option: str) -> str:
        """What an unknown option may have meant: one of ours, or a setting, which other trainers write as an option."""
        near = difflib.get_close_matches(option, list(self._option_string_actions), n=1, cutoff=0.75)
        if near:
            return f"did you mean {near[0]}?"
        if self.command.takes_config:
            from flatout.config.suggest import field_hint

            if (hint := field_hint(option.strip("-"))) is not None:
                return hint
        return f"see `{self.prog} --help` for its options"


class _Help(argparse.HelpFormatter):
    """Fills each paragraph to the terminal's width and breaks no name at its hyphens."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = [
            textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            for paragraph in text.split("\n\n")
        ]
        return "\n\n".join(filled)


def tell(error: UserError) -> None:
    print(f"error: {one_line(error.message)}\nhint: {one_line(error.hint)}", file=sys.stderr)


def is_override(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and not word.startswith("-") and os.sep not in name


def one_line(text: str) -> str:
    visible = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))
    return visible.encode("utf-8", "backslashreplace").decode("utf-8")


def number_between(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """An argparse type for a number in a range; argparse prints its message after the option's name."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {name} from {_limit(low)} to {_limit(high)}")
        return value

    return parse


def _limit(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else str(value)
