"""Words of a command line to values, and the words in which mistakes are answered."""

import argparse
import contextvars
import dataclasses
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.errors import HardwareError, UsageError, UserError, quoted

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig


@dataclasses.dataclass(frozen=True)
class Described:
    """What a verb would understand: its parser, or the names of its actions, each of which has one; or both."""

    parser: "Parser | None"
    actions: tuple[str, ...] = ()


class _Describing(BaseException):
    """Leaves a verb before it does anything, with what it would understand."""

    def __init__(self, told: Described) -> None:
        super().__init__()
        self.told = told


_describing = contextvars.ContextVar("describing", default=False)


def described(verb: Callable[[list[str]], int], words: Sequence[str]) -> Described:
    """What a verb would understand after these words. Nothing is parsed and nothing done."""
    token = _describing.set(True)
    try:
        verb(list(words))
    except _Describing as left:
        return left.told
    finally:
        _describing.reset(token)
    return Described(None)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are `UsageError`s with a suggestion."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(prog=f"flatout {verb}", description=description, allow_abbrev=False)
        self.verb = verb
        self.default_config: str | None = None
        self.text_option: str | None = None  # where text belongs that people write without an option
        self.limits: dict[str, str] = {}  # of options with a number, by `dest`, as text
        self.actions: tuple[str, ...] = ()  # words in the place of the first one that choose another parser

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")

    def flag(self, option: str, help: str) -> None:
        self.add_argument(option, action="store_true", help=help)

    def number(self, option: str, low: float, high: float, *, help: str, **more: Any) -> None:
        """An option with a number from `low` to `high`, which is a whole one if `high` is."""
        action = self.add_argument(option, type=number_between(type(high), low, high), help=help, **more)
        self.limits[action.dest] = f"{_limit(low)} to {_limit(high)}"

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses options and positionals in any order; `a.b=c` words go to `overrides`."""
        self._describe()
        takes_overrides = "overrides" in self._defaults
        known, rest = self.parse_known_args(list(words))
        overrides: list[str] = []
        if takes_overrides and known.config is not None and _is_override(known.config):
            overrides.append(known.config)
            known.config = None
        for word in rest:
            if takes_overrides and _is_override(word):
                overrides.append(word)
            elif takes_overrides and not word.startswith("-") and known.config is None:
                known.config = word
            else:
                self._refuse(word, _value_after(word, words))
        if takes_overrides:
            if known.config is not None and known.config_option is not None:
                raise UsageError(
                    f"two configs are named, {quoted(known.config)} and --config {quoted(known.config_option)}",
                    "leave one of them out",
                )
            known.config = known.config_option if known.config is None else known.config
            known.overrides = overrides
            known.config_given = known.config is not None
            known.config = known.config if known.config_given else self.default_config
        return known

    def parse_mixed(self, words: Sequence[str]) -> argparse.Namespace:
        """As `parse_words`, for verbs with a list of positionals, which may stand before and after options."""
        self._describe()
        known, rest = self.parse_known_intermixed_args(list(words))
        for word in rest:
            self._refuse(word)
        return known

    def _describe(self) -> None:
        if _describing.get():
            raise _Describing(Described(self, self.actions))

    def _refuse(self, word: str, value: str | None = None) -> NoReturn:
        if word.startswith("-"):
            raise UsageError(f"unknown option {quoted(word)}", self._nearest(word.partition("=")[0], value))
        hint = "write settings as SECTION.FIELD=VALUE" if "overrides" in self._defaults else f"see `{self.prog} --help`"
        if self.text_option is not None:
            hint = f"write text as `{self.prog} RUN {self.text_option} {shlex.quote(word)}`"
        raise UsageError(f"unexpected word {quoted(word)}", hint)

    def _nearest(self, option: str, value: str | None) -> str:
        """What an unknown option may have meant: one of ours, the config itself, or a field of it."""
        takes_overrides, tunes = "overrides" in self._defaults, self.verb == "finetune"
        if takes_overrides and option in ("-c", "--preset", *(() if tunes else ("--model",))):
            return f"write it without the option: `{self.prog} {shlex.quote(value or 'NAME-OR-FILE')}`"
        options = [known for action in self._actions for known in action.option_strings]
        near = difflib.get_close_matches(option, options, n=1, cutoff=0.75)
        if near:
            return f"did you mean {near[0]}?"
        name = option.strip("-").replace("-", "_")
        if takes_overrides and (way := _way_elsewhere(name)) is not None:
            return way
        name = "base_model" if tunes and name == "model" else name
        hint = _setting_called(name, value, tunes=tunes) if takes_overrides else None
        return hint or f"see `{self.prog} --help` for its options"


def add_config(parser: Parser, default: str | None = None, *, size: str = "") -> None:
    """Makes a verb take a config, a hardware overlay, a size and settings; `size` is what else --size may be."""
    from flatout.config.catalogue import DEFAULT_PRESET
    from flatout.config.sizes import size_words

    name = default or DEFAULT_PRESET
    parser.add_argument("config", nargs="?", help=f"a preset's name or a YAML file; default: {name}")
    parser.add_argument("--config", dest="config_option", metavar="CONFIG", help="the same as CONFIG")
    parser.default_config = default
    parser.add_argument(
        "--hardware", metavar="NAME", help="memory overlay: 4gb to 80gb, or auto for this machine's GPU"
    )
    parser.add_argument("--size", metavar="NAME", help=f"size {size_words()}{size}")
    parser.set_defaults(overrides=[])
    parser.usage = f"{parser.prog} [CONFIG] [SECTION.FIELD=VALUE ...] [options]"
    parser.epilog = "Settings are written as SECTION.FIELD=VALUE, for example train.steps=500 optim.learning_rate=1e-3."


def load(words: argparse.Namespace, *, tell: bool = True) -> "LoadedConfig":
    """The config that parsed words ask for. What there is to say of it goes to stderr, where a run does not say it."""
    from flatout.config.load import load_config

    hardware = words.hardware
    if hardware == "auto":
        # A mistake in the config answers before torch is asked about the GPU.
        load_config(words.config, words.overrides, size=words.size)
        hardware = _hardware_here()
    loaded = load_config(words.config, words.overrides, hardware=hardware, size=words.size)
    loaded = on_hardware(loaded, loaded.hardware)
    for notice in loaded.notices if tell else ():
        print(f"note: {one_line(notice)}", file=sys.stderr)
    return loaded


def on_hardware(loaded: "LoadedConfig", name: str | None) -> "LoadedConfig":
    """A config with the overlay of that name, which may be auto; for that of a run that is resumed, too."""
    if name is None:
        return loaded
    from flatout.config.catalogue import check_shipped
    from flatout.resolve.sizing import fitted_to  # it needs torch: only where an overlay was asked for

    name = _hardware_here() if name == "auto" else name
    check_shipped("hardware", name, "command line")
    return fitted_to(loaded, name)


def load_any(words: argparse.Namespace, *, tell: bool = True) -> "LoadedConfig":
    """The config that parsed words ask for, of pretraining or fine-tuning; for rows alone, the preset `lora`."""
    if not words.config_given and any(word.startswith("chat.source=") for word in words.overrides):
        words.config = "lora"  # as `flatout finetune` does
    return load(words, tell=tell)


def load_pretraining(words: argparse.Namespace, verb: str, *, tell: bool = True) -> "LoadedConfig":
    """The config that parsed words ask for, in a verb that knows plain text alone."""
    loaded = load(words, tell=tell)
    if loaded.config.fine_tunes:
        raise UsageError(
            f"`flatout {verb}` is for pretraining, and this config has chat.source",
            "leave chat.source out, or fine-tune it with `flatout finetune`",
        )
    return loaded


def add_model(parser: Parser) -> None:
    """Makes a verb take a trained model."""
    parser.add_argument(
        "run", nargs="?", help="a run, checkpoint, Hugging Face or adapter folder; default: the newest run"
    )
    add_base(parser)
    parser.add_argument("--last", action="store_true", help="use the newest checkpoint instead of the best")
    parser.add_argument("--device", default="auto", help="auto, cpu, mps, cuda or cuda:N")


def add_base(parser: Parser) -> None:
    """Makes a verb take the model that adapters are for."""
    parser.add_argument("--base", metavar="MODEL", help="the model under adapters, where it is not where they say")


def check_model(parsed: argparse.Namespace, text_option: str | None) -> None:
    """Refuses a model or a device that cannot be one, before anything heavy is imported."""
    if parsed.run is not None and (not parsed.run or not Path(parsed.run).is_dir()):
        from flatout.config.suggest import run_hint

        hint = run_hint(parsed.run, "name a run folder, such as runs/NAME")
        hint += f"; text goes after {text_option}" if text_option is not None else ""
        raise UsageError(f"{quoted(parsed.run)} is not a folder", hint)
    if getattr(parsed, "folder", None) == "":
        raise UsageError("the name of the folder to write is empty", "name a new folder to write into")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", parsed.device):
        raise UsageError(f"--device {quoted(parsed.device)} is unknown", "use auto, cpu, mps, cuda or cuda:N")


def _hardware_here() -> str:
    from flatout.config.catalogue import hardware_for
    from flatout.device import detect_device

    device = detect_device()
    if device.kind == "cpu" or device.memory_bytes is None:
        raise HardwareError(
            f"--hardware auto looks for a GPU, and this is {device.name}",
            "leave it out, or name an overlay: `flatout config presets` lists them",
        )
    return hardware_for(device.memory_bytes)


def converse(invitation: str, answer: Callable[[str], None]) -> int:
    """Asks for lines and answers each, until end of input; a line that cannot be answered must not end it."""
    print(invitation, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        try:
            answer(line)
        except UserError as error:
            tell(error)


def tell(error: UserError) -> None:
    print(f"error: {one_line(error.message)}\nhint: {one_line(error.hint)}", file=sys.stderr)


def choose_action(verb: str, words: list[str], actions: dict[str, str]) -> tuple[str, Parser, list[str]]:
    """The action of a verb that has several, its parser, and the words after it; leaves where help was asked for."""
    if not words and _describing.get():
        raise _Describing(Described(None, tuple(actions)))
    if not words or words[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:<9}{text}" for name, text in actions.items())
        print(f"usage: flatout {verb} ACTION ...\n\nactions:\n{listing}\n\n`flatout {verb} ACTION --help` tells more.")
        raise SystemExit(0)
    action = words[0]
    if action not in actions:
        near = difflib.get_close_matches(action, actions, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(actions)}"
        raise UsageError(f"unknown action {quoted(action)}", hint)
    about = actions[action]
    return action, Parser(f"{verb} {action}", f"{about[0].upper()}{about[1:]}."), words[1:]


def _way_elsewhere(name: str) -> str | None:
    from flatout.config.suggest import way_elsewhere

    return way_elsewhere(name)


def _setting_called(name: str, value: str | None, *, tunes: bool) -> str | None:
    """A hint at the setting that people coming from other trainers write as an option: --steps 5, --batch-size 8."""
    from flatout.config.suggest import about, keeps_value, nearest_fields, not_read

    field = next(iter(nearest_fields(name, tunes=tunes)), None)
    if field is None:
        return None
    taken = shlex.quote(value) if value and keeps_value(name, field) and len(value) <= 80 else "..."
    more = about(name, field, tunes=tunes)
    meant = f"did you mean the setting {field}={taken}?{more}{';' if more else ''} settings are written without dashes"
    return not_read(field, tunes=tunes) or meant


def _value_after(word: str, words: Sequence[str]) -> str | None:
    """What was written as the value of an option that we do not have: after its `=`, or as the next word."""
    _, equals, value = word.partition("=")
    if equals:
        return value
    following = list(words)[list(words).index(word) + 1 :] if word in words else []
    return following[0] if following and not following[0].startswith("--") and not _is_override(following[0]) else None


def _is_override(word: str) -> bool:
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
