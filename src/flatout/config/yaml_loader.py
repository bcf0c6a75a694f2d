"""Strict YAML: text in, values with line numbers out, and `ConfigError` for everything else.

The idea: PyYAML is used for its event parser only, which never recurses and never constructs an object. The tree is
composed here, so that depth, duplicates, tags, anchors and key types are checked as they appear.
Scalars follow the YAML 1.2 core rules, so `1e-4` is a number and `on`, `no`, `2024-01-01` and `12:30` are text.

The contract: whatever the bytes are, the result is a mapping of text keys to `Node`s or a `ConfigError` whose message
begins with `file:line:`. The trap: PyYAML also breaks lines at U+0085, U+2028 and U+2029, which would put its line
numbers out of step with an editor's; these characters are refused together with the control characters.
"""

import itertools
import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import yaml

from flatout.errors import ConfigError

MAX_BYTES = 100_000  # the pure-Python parser answers within half a second up to here
MAX_DEPTH = 20
MAX_NODES = 10_000  # a hundred times what the schema has room for; bounds the time a hostile file can take
MAX_DIGITS = 100  # Python itself refuses to read or print integers of more than 4300 digits

Scalar = None | bool | int | float | str


@dataclass(frozen=True)
class Node:
    """A value and the line it stands on; for a value in a mapping that is the line of its key."""

    value: "Scalar | list[Node] | dict[str, Node]"
    line: int

    @property
    def plain(self) -> Any:
        """The value without line numbers. The limit on depth bounds the recursion."""
        if isinstance(self.value, list):
            return [item.plain for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain for key, item in self.value.items()}
        return self.value


_CONTROL_IN_VALUE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_CONTROL_IN_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def read_yaml(path: Path) -> dict[str, Node]:
    """The top-level mapping of a config file; an empty file has no values."""
    name = printable(str(path))
    try:
        if path.is_dir():
            raise ConfigError(
                f"{name}: is a folder, not a config file",
                "give the path of a .yaml file; a model is named as model.init_from=FOLDER, a run by --resume FOLDER",
            )
        with path.open("rb") as file:
            # One byte more than allowed is enough to know; a device or pipe may have no end.
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: no such file", "check the path; `flatout config presets` lists what needs no file"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{name}: cannot be read: {printable(reason)}", "check the path and its permissions"
        ) from None
    return parse_yaml(data, name)


def parse_yaml(data: bytes, name: str) -> dict[str, Node]:
    """The top-level mapping of one YAML document; `name` is what errors call it."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name}: is larger than {MAX_BYTES} bytes",
            "a config file has a few dozen lines; is it the right file?",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _fail(name, line, f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8 text")
    control = _CONTROL_IN_TEXT.search(text)
    if control is not None:
        # Before this character only \n and \r can have ended lines: the others are in the set that was searched for.
        line = len(re.findall(r"\r\n|\n|\r", text[: control.start()])) + 1
        _fail(
            name,
            line,
            f"contains the control character {control.group()!a}",
            'remove it; in double quotes it can be written as an escape such as "\\n"',
        )
    root = _Composer(text, name).root()
    if root is None or root.value is None:
        return {}
    if not isinstance(root.value, dict):
        _fail(
            name,
            root.line,
            f"holds {_kind(root.value)}, not a mapping of keys to values",
            "write sections such as `train:` with indented lines such as `steps: 100` below",
        )
    return root.value


def parse_scalar(text: str, where: str) -> Scalar:
    """The value of one command-line argument, by the same scalar rules as in a file.

    Unquoted text is taken whole, so `ROMEO:` and `a #b` need no quotes here, although a file would need them. What
    YAML gives a meaning to at the start of a value (lists, anchors, tags) is refused rather than taken as text.
    """
    text = _one_line(text, where)
    if not text:
        raise ConfigError(f"{where}: no value after =", 'write null for no value, or "" for empty text')
    if text[0] in "\"'":
        root = _Composer(text, where, one_line=True).root()
        if root is None or not isinstance(root.value, str):
            raise ConfigError(f"{where}: {shorten(text)} is not one quoted text", "close the quote at the very end")
        return root.value
    if text[0] in "[]{},&*!|>%@`#" or text.startswith(("- ", "? ", ": ", "---")):
        raise ConfigError(
            f"{where}: {shorten(text)} is not a single value",
            f"only quoted text can begin with {text[0]}; put quotes around it, inside the shell's own",
        )
    return resolve_scalar(text, where)


def is_collection(text: str) -> bool:
    """Whether a command-line argument begins as a list or mapping does."""
    return text.strip(" \t").startswith(("[", "{"))


def parse_collection(text: str, where: str) -> Node:
    """The list or mapping that one command-line argument holds, by the rules of a file."""
    text = _one_line(text, where)
    root = _Composer(text, where, one_line=True).root()
    if root is None or not isinstance(root.value, list | dict) or text[-1] not in "]}":
        closing = "]" if text.startswith("[") else "}"
        raise ConfigError(f"{where}: {shorten(text)} goes on after its end", f"end it with its own {closing}")
    return root


def resolve_scalar(text: str, where: str) -> Scalar:
    """An unquoted scalar as null, boolean, integer, float or text; `where` names the place in errors."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > MAX_DIGITS:
            raise ConfigError(
                f"{where}: the number {shorten(text)} has more than {MAX_DIGITS} digits",
                "write a smaller number, or put quotes around it if it is text",
            )
        return int(digits)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def looks_like_value(text: str) -> bool:
    """Whether text would be something other than text without its quotes."""
    return text in _WORDS or any(form.fullmatch(text) for form in (_INTEGER, _FLOAT, _NOT_FINITE))


def format_sections(config: object) -> str:
    """A config file of these sections; a stored config may hold anything."""
    lines: list[str] = []
    for section, values in config.items() if isinstance(config, dict) else ():
        if isinstance(values, dict) and values:
            lines += [f"{section}:", *(f"  {name}: {format_value(value)}" for name, value in values.items())]
        else:
            lines.append(f"{section}: {format_value(values)}")
    return "".join(f"{line}\n" for line in lines)


def format_value(value: object) -> str:
    """One line of YAML that reads back as `value`: null, booleans, numbers, text, and lists and mappings of them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(key)}: {format_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text not in _WORDS:
        return text
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """`text` with everything a terminal could act on written as an escape, so that a message stays one line."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def shorten(value: object, limit: int = 80) -> str:
    """A value as it is shown in a message: escaped, on one line, about `limit` characters, safe at any depth."""
    if value is None or isinstance(value, bool):
        return format_value(value)
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        return f"a number of more than {MAX_DIGITS} digits"
    form = reprlib.Repr()
    form.maxlevel, form.maxstring, form.maxlong, form.maxother = 2, limit, limit, limit
    shown = printable(form.repr(value))
    return shown if len(shown) <= limit else shown[: limit - 4] + "..." + shown[-1]


def has_control_character(text: str) -> bool:
    """Whether text holds characters that no value may hold: controls other than tab and line breaks, or surrogates."""
    return _CONTROL_IN_VALUE.search(text) is not None


def _one_line(text: str, where: str) -> str:
    """A command-line argument without the space around it, refused if it holds control characters."""
    text = text.strip(" \t")
    control = re.search("[\n\r]", text) or _CONTROL_IN_TEXT.search(text)
    if control is not None:
        raise ConfigError(
            f"{where}: the value contains the control character {control.group()!a}",
            "remove it; a line break is written as \\n inside double quotes that the shell keeps",
        )
    return text


@final
class _Composer:
    """The tree of the only document, from PyYAML's events. `one_line` leaves line numbers out of errors."""

    def __init__(self, text: str, name: str, *, one_line: bool = False) -> None:
        self._name = name
        self._one_line = one_line
        self._events = _events(text, name, one_line)
        self._nodes = 0

    def root(self) -> Node | None:
        root = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                self._fail(self._line(event), "a second document begins here", "keep one document; remove this `---`")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, 0)
        return root

    def _node(self, event: yaml.Event, depth: int, *, is_key: bool = False) -> Node:
        assert isinstance(event, yaml.NodeEvent)
        line = self._line(event)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(line, f"holds more than {MAX_NODES} values", "a config file holds a few dozen values")
        if event.anchor is not None:
            mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
            self._fail(line, f"{shorten(mark + event.anchor)}: anchors and aliases are not used here", "write it out")
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag is not None:
            self._fail(
                line, f"the tag {shorten(event.tag)} is not used here", "remove it; a value's form says its type"
            )
        if isinstance(event, yaml.ScalarEvent):
            return Node(self._scalar(event, line), line)
        if depth >= MAX_DEPTH:
            self._fail(line, f"nested more than {MAX_DEPTH} deep", "sections are one level deep")
        if is_key:
            self._fail(line, "a list or mapping is used as a key", "a key is a word such as `train`")
        if isinstance(event, yaml.SequenceStartEvent):
            return Node([self._node(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)], line)
        items: dict[str, Node] = {}
        for event_of_key in self._until(yaml.MappingEndEvent):
            key = self._node(event_of_key, depth + 1, is_key=True)
            name = self._checked_key(key, items)
            items[name] = Node(self._node(next(self._events), depth + 1).value, key.line)
        return Node(items, line)

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        return itertools.takewhile(lambda event: not isinstance(event, end), self._events)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Scalar:
        if event.style is None:
            return resolve_scalar(event.value, _place(self._name, line))
        if has_control_character(event.value):
            self._fail(line, f"{shorten(event.value)} contains a control character", "remove it from the text")
        return event.value

    def _checked_key(self, key: Node, items: dict[str, Node]) -> str:
        if not isinstance(key.value, str):
            self._fail(key.line, f"the key {shorten(key.value)} is {_kind(key.value)}, not text", "keys are words")
        if key.value == "<<":
            self._fail(key.line, "merge keys (<<) are not used here", "write the values out, or name a `preset:`")
        if key.value in items:
            first = f", first on line {items[key.value].line}" if key.line else ""
            self._fail(key.line, f"the key {shorten(key.value)} is written twice{first}", "keep one of the two")
        return key.value

    def _line(self, event: yaml.Event) -> int:
        return 0 if self._one_line else event.start_mark.line + 1

    def _fail(self, line: int, problem: str, hint: str) -> NoReturn:
        _fail(self._name, line, problem, hint)


def _events(text: str, name: str, one_line: bool) -> Iterator[yaml.Event]:
    """PyYAML's events. The pure-Python loader is used everywhere, so that errors do not depend on the build."""
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if one_line or mark is None else mark.line + 1
        problem = printable(error.problem or error.context or "not understood")
        hint = "check indentation, quotes and colons around there"
        if "'\\t'" in problem:
            hint = "indent with spaces, not tabs"
        elif one_line:
            hint = "check brackets, quotes and commas, and put the whole in quotes that the shell takes away"
        _fail(name, line, f"not valid YAML: {problem}", hint)
    except (ValueError, OverflowError):
        # PyYAML hands escapes such as "\UFFFFFFFF" to chr and the version in %YAML to int, unchecked.
        line = 0 if one_line else loader.line + 1
        _fail(name, line, "not valid YAML: an escape or version number is out of range", "check \\U escapes and %YAML")


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), "null")


def _place(name: str, line: int) -> str:
    return f"{name}:{line}" if line else name


def _fail(name: str, line: int, problem: str, hint: str) -> NoReturn:
    raise ConfigError(f"{_place(name, line)}: {problem}", hint)
