"""Strict YAML: text in, values with line numbers out, and `ConfigError` for everything else.

PyYAML composes the tree of nodes and constructs no object. Depth, duplicate keys, tags and the types of keys are
checked while values are taken from the nodes.
Scalars follow the YAML 1.2 core rules, so `1e-4` is a number and `on`, `no`, `2024-01-01` and `12:30` are text.

The contract: whatever the bytes are, the result is a mapping of text keys to `Node`s or a `ConfigError` whose message
begins with `file:line:`. The trap: PyYAML also breaks lines at U+0085, U+2028 and U+2029, which would put its line
numbers out of step with an editor's; these characters are refused together with the control characters.
"""

import math
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flatout.errors import ConfigError

MAX_BYTES = 100_000  # the pure-Python parser answers within half a second up to here
MAX_DEPTH = 20
MAX_NODES = 10_000  # aliases make many values of few bytes
MAX_DIGITS = 100  # longer integers are read as floats: Python refuses those of more than 4300 digits

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
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
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
    root = _tree(text, name)
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


def parse_word(text: str, where: str, *, collections: bool = False) -> Any:
    """The value of one command-line argument, by the same scalar rules as in a file.

    Unquoted text is taken whole, so `ROMEO:` and `a #b` need no quotes here, although a file would need them. What
    YAML gives a meaning to at the start of a value (anchors, tags, and without `collections` lists and mappings) is
    refused rather than taken as text.
    """
    text = text.strip(" \t")
    control = re.search("[\n\r]", text) or _CONTROL_IN_TEXT.search(text)
    if control is not None:
        raise ConfigError(
            f"{where}: the value contains the control character {control.group()!a}",
            "remove it; a line break is written as \\n inside double quotes that the shell keeps",
        )
    if not text:
        raise ConfigError(f"{where}: no value after =", 'write null for no value, or "" for empty text')
    if text[0] in "\"'" or (collections and text[0] in "[{"):
        kind, closing = {"[": (list, "]"), "{": (dict, "}")}.get(text[0], (str, text[0]))
        root = _tree(text, where, one_line=True)
        if root is None or not isinstance(root.value, kind) or not text.endswith(closing):
            raise ConfigError(f"{where}: {shorten(text)} goes on after its end", f"end it with its own {closing}")
        return root.plain
    if text[0] in "[]{},&*!|>%@`#" or text.startswith(("- ", "? ", ": ", "---")):
        raise ConfigError(
            f"{where}: {shorten(text)} is not a single value",
            f"only quoted text can begin with {text[0]}; put quotes around it, inside the shell's own",
        )
    return resolve_scalar(text)


def resolve_scalar(text: str) -> Scalar:
    """An unquoted scalar as null, boolean, integer, float or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int(text)
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


def _tree(text: str, name: str, *, one_line: bool = False) -> Node | None:
    """The values of the only document; `one_line` leaves line numbers out of errors."""
    # The pure-Python loader, so that errors do not depend on the build. It gives every value the tag of text.
    loader = yaml.BaseLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if one_line or mark is None else mark.line + 1
        problem = printable(error.problem or error.context or "not understood")
        hint = "check indentation (spaces, not tabs), quotes, brackets and colons around there"
        _fail(name, line, f"not valid YAML: {problem}", hint)
    except RecursionError:
        _fail_deep(name, 0 if one_line else loader.line + 1)
    except (ValueError, OverflowError):
        # PyYAML hands escapes such as "\UFFFFFFFF" to chr and the version in %YAML to int, unchecked.
        line = 0 if one_line else loader.line + 1
        _fail(name, line, "not valid YAML: an escape or version number is out of range", "check \\U escapes and %YAML")
    return None if root is None else _Values(name, one_line).of(root)


class _Values:
    """Takes the values from PyYAML's nodes."""

    def __init__(self, name: str, one_line: bool) -> None:
        self._name = name
        self._one_line = one_line
        self._count = 0

    def of(self, node: yaml.Node, depth: int = 0) -> Node:
        line = 0 if self._one_line else node.start_mark.line + 1
        self._count += 1
        if self._count > MAX_NODES:
            _fail(self._name, line, f"holds more than {MAX_NODES} values", "a config file holds a few dozen values")
        if node.tag not in _TAGS:
            problem = f"the tag {shorten(node.tag)} is not used here"
            _fail(self._name, line, problem, "remove it; a value's form says its type")
        if isinstance(node, yaml.ScalarNode):
            return Node(resolve_scalar(node.value) if node.style is None else node.value, line)
        if depth >= MAX_DEPTH:
            _fail_deep(self._name, line)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.of(item, depth + 1) for item in node.value], line)
        items: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = self.of(key_node, depth + 1)
            if not isinstance(key.value, str):
                problem = f"the key {shorten(key.plain)} is {_kind(key.value)}, not text"
                _fail(self._name, key.line, problem, "keys are words")
            if key.value in items:
                first = f", first on line {items[key.value].line}" if key.line else ""
                problem = f"the key {shorten(key.value)} is written twice{first}"
                _fail(self._name, key.line, problem, "keep one of the two")
            items[key.value] = Node(self.of(value_node, depth + 1).value, key.line)
        return Node(items, line)


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), "null")


def _fail(name: str, line: int, problem: str, hint: str) -> NoReturn:
    raise ConfigError(f"{name}:{line}: {problem}" if line else f"{name}: {problem}", hint)


def _fail_deep(name: str, line: int) -> NoReturn:
    _fail(name, line, f"nested more than {MAX_DEPTH} deep", "sections are one level deep")
