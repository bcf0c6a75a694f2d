"""Rows of instruction files to conversations, whatever their format calls things.

Idea: five formats cover what people have. `messages` (role and content, with system, tools and tool calls), `sharegpt`
(conversations of from and value), `alpaca` (instruction, input, output), `prompt-completion` (two texts, or two lists
of messages) and `text`. Each row becomes one `Conversation`, or one `Problem` that says where it is and what is wrong
with it. `fields` maps our name of a column to the one that a file has.

Contract: nothing is guessed within a row: a role that is not known, a wrong type or an empty answer is a problem.
Messages are plain JSON values in the form that chat templates expect: roles as OpenAI names them, content a text, tool
calls with arguments as an object. Keys that hold null are left out, since tables cannot leave them out themselves.
`train` of a message is what the row says about learning it: `train` or `weight` of the message, or nothing.

Trap: the format is the first one that has the given fields and fits one of the first rows, in the order above; rows of
another format further down are problems. The report names the format and why it was taken.
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from flatout.corpus.document import Problem, ProblemKind, Row, shown
from flatout.corpus.rows import names_shown
from flatout.errors import ConfigError, DataError

Format = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)
LOOK_AT = 64

# Our names of the columns of each format. Those of a single message are names inside a list.
FIELDS: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages", "tools", "documents", "system", "role", "content"),
    "sharegpt": ("conversations", "tools", "system", "from", "value"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt-completion": ("prompt", "completion", "system", "tools"),
    "text": ("text",),
}
_INSIDE = ("role", "content", "from", "value")
# What files call a prompt and its completion, the most particular first.
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "answer"),
)
# The columns without which a row is not of a format, by our names.
_NEEDED: Mapping[Format, tuple[Mapping[str, str], ...]] = {
    "messages": ({"messages": "messages"},),
    "sharegpt": ({"conversations": "conversations"}, {"conversations": "conversation"}),
    "alpaca": ({"instruction": "instruction", "output": "output"},),
    "prompt-completion": tuple({"prompt": prompt, "completion": completion} for prompt, completion in _PAIRS),
    "text": ({"text": "text"},),
}
# Lists of messages under the other format's name, and what a message names its speaker by.
_ALSO: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "messages": ({"messages": "conversations"}, {"messages": "conversation"}),
    "sharegpt": ({"conversations": "messages"},),
}
_SPEAKERS = {"messages": "role", "sharegpt": "from"}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_SHAREGPT_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
_FLAGS = ("train", "weight")


@dataclass(frozen=True)
class Conversation:
    """One row. `messages` for the template, with a flag each; or `prompt` and `completion` as bare texts as well.

    A raw text has no messages, and is the completion of an empty prompt.
    """

    file: str
    place: str
    messages: tuple[dict[str, Any], ...]
    train: tuple[bool | None, ...]
    tools: tuple[Any, ...] | None = None
    documents: tuple[Any, ...] | None = None
    prompt: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class RowReading:
    """How rows are read: the format, our name of each column with the file's, and why."""

    format: Format
    fields: Mapping[str, str]
    why: str


class RowError(Exception):
    """What is wrong with a row, which is listed and left out."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind
        self.message = message


def check_fields(fields: Mapping[str, str]) -> None:
    """Refuse names that no format has."""
    names = tuple(dict.fromkeys(name for all in FIELDS.values() for name in all))
    for name, column in fields.items():
        if name not in names:
            raise ConfigError(
                f"no format has a field {shown(name)!r}",
                f"{_close_to(name, names)}the names in chat.fields are {', '.join(names)}",
            )
        if not isinstance(column, str) or not column:
            raise ConfigError(f"the field {name!r} is mapped to {column!r}", "give the name of a column")


def _close_to(name: str, names: Sequence[str]) -> str:
    """The question whether one of `names` was meant; nothing where none is close."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {shown(close[0])!r}? " if close else ""


def choose_reading(fields: Mapping[str, str], first: Sequence[Row], source: str) -> RowReading:
    """How to read rows like the `first` ones; an error where no format that has these fields fits any of them."""
    check_fields(fields)
    rows = [row.value for row in first if isinstance(row.value, dict)]
    for row in rows:
        for known in FORMATS:
            if set(fields) <= set(FIELDS[known]) and (found := _detected(known, row, fields)):
                mapped = {name: fields.get(name, found.get(name, name)) for name in FIELDS[known]}
                return RowReading(known, mapped, f"the first rows have {_columns(found)}")
    for name, column in fields.items() if rows else ():
        if column not in (columns := _columns_of(rows, inside=name in _INSIDE)):
            raise DataError(
                f"the rows of {shown(source)} fit no format: there is no column {shown(column)!r}, which chat.fields "
                f"names as {name}",
                f"{_close_to(column, columns)}the columns are {names_shown(columns)}",
            )
    kind = names_shown(list(rows[0])) if rows else f"{_kind(first[0].value)} instead of an object with fields"
    if rows and (wrong := _why_not(rows[0], fields)):
        raise DataError(
            f"the rows of {shown(source)} fit no format; the first has {kind}, but {wrong}",
            "mend the rows, or name other columns, such as chat.fields='[prompt=question, completion=answer]'",
        )
    raise DataError(
        f"the rows of {shown(source)} fit no format; the first has {kind}",
        "name the columns, such as chat.fields='[prompt=question, completion=answer]'; formats are "
        "messages, conversations with from and value, instruction with output, prompt with completion, text",
    )


def _columns_of(rows: Sequence[dict[str, Any]], *, inside: bool) -> list[str]:
    """The names of columns that any of the rows has, or that the messages in them have."""
    lists = [found for row in rows for value in row.values() if isinstance(found := _parsed(value), list)]
    objects = [item for items in lists for item in items if isinstance(item, dict)] if inside else rows
    return list(dict.fromkeys(str(name) for row in objects for name in row))


def _why_not(row: dict[str, Any], fields: Mapping[str, str]) -> str:
    """What is wrong with a row that has the columns of a format by their names; nothing where it has those of none."""
    for known, choices in _NEEDED.items():
        for columns in choices if set(fields) <= set(FIELDS[known]) else ():
            named = {name: fields.get(name, column) for name, column in columns.items()}
            if all(column in row for column in named.values()):
                mapped = {name: fields.get(name, named.get(name, name)) for name in FIELDS[known]}
                found = conversation_of(Row(row, ""), RowReading(known, mapped, ""), "")
                return found.message if isinstance(found, Problem) else ""
    return ""


def conversation_of(row: Row, reading: RowReading, file: str) -> Conversation | Problem:
    """The conversation of a row, or what is wrong with it."""
    try:
        if not isinstance(row.value, dict):
            raise RowError("field", f"the row is {_kind(row.value)}, not an object with fields")
        return replace(_READERS[reading.format](row.value, reading.fields), file=file, place=row.place)
    except RowError as error:
        return Problem(file, row.place, error.kind, error.message, records=1)


# What a row of each format looks like: the columns that it would be read from, by our names.


def _is_list_of(value: object, name: str) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and name in item for item in value)


def _detected(known: Format, row: dict[str, Any], fields: Mapping[str, str]) -> dict[str, str] | None:
    inside, kinds = _SPEAKERS.get(known), (str, list) if known == "prompt-completion" else str
    for columns in (*_NEEDED[known], *_ALSO.get(known, ())):
        named = {name: fields.get(name, column) for name, column in columns.items()}
        values = [row.get(column) for column in named.values()]
        if inside is None and all(isinstance(value, kinds) for value in values):
            return named
        if inside is not None and _is_list_of(_parsed(values[0]), fields.get(inside, inside)):
            return named
    return None


def _columns(found: Mapping[str, str]) -> str:
    return " and ".join(f"{column!r}" + (f" for {name}" if name != column else "") for name, column in found.items())


# Rows of each format.


def _read_messages(row: dict[str, Any], fields: Mapping[str, str]) -> Conversation:
    values = _list_at(row, fields["messages"])
    read = [_message(value, number, fields["role"], fields["content"]) for number, value in enumerate(values, 1)]
    read = _with_system(read, _optional_text(row, fields["system"]))
    documents = _objects(row, fields["documents"], "documents")
    return _conversation(read, tools=_tools(row, fields["tools"]), documents=documents)


def _read_sharegpt(row: dict[str, Any], fields: Mapping[str, str]) -> Conversation:
    read: list[tuple[dict[str, Any], bool | None]] = []
    for number, value in enumerate(_list_at(row, fields["conversations"]), 1):
        if not isinstance(value, dict):
            raise RowError("field", f"message {number} is {_kind(value)}, not an object")
        speaker = value.get(fields["from"])
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise RowError("role", f"message {number} is from {_shown_value(speaker)}; known are {known}")
        role = _SHAREGPT_ROLES[speaker]
        content = value.get(fields["value"])
        if role == "function_call":
            message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": _called(content, number)}
        else:
            message = {"role": role, "content": _content(content, number, fields["value"])}
        read.append((message, _flag(value, role, number)))
    read = _with_system(read, _optional_text(row, fields["system"]))
    return _conversation(read, tools=_tools(row, fields["tools"]))


def _read_alpaca(row: dict[str, Any], fields: Mapping[str, str]) -> Conversation:
    instruction, output = _text_at(row, fields["instruction"]), _text_at(row, fields["output"])
    extra = _optional_text(row, fields["input"])
    prompt = f"{instruction}\n\n{extra}" if extra and instruction else instruction or extra
    _not_blank(prompt, fields["instruction"])
    _not_blank(output, fields["output"])
    turns: list[dict[str, Any]] = []
    for number, pair in enumerate(_parsed(row.get(fields["history"])) or [], 1):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError("field", f"entry {number} of {fields['history']!r} is no pair of two texts")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    read = _with_system([(turn, None) for turn in turns], _optional_text(row, fields["system"]))
    return _conversation(read)


def _read_pair(row: dict[str, Any], fields: Mapping[str, str]) -> Conversation:
    prompt, completion = (_present(row, fields[name]) for name in ("prompt", "completion"))
    tools = _tools(row, fields["tools"])
    if isinstance(prompt, list) and isinstance(completion, list):
        both = [*prompt, *completion]
        read = [_message(value, number, "role", "content") for number, value in enumerate(both, 1)]
        # What is learned is the completion, whoever else has spoken in the prompt.
        read = [(message, flag if number >= len(prompt) else False) for number, (message, flag) in enumerate(read)]
        return _conversation(_with_system(read, _optional_text(row, fields["system"])), tools=tools)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        kinds = f"{_kind(prompt)} and {_kind(completion)}"
        raise RowError(
            "field", f"{fields['prompt']!r} and {fields['completion']!r} are {kinds}, not two texts or lists"
        )
    _not_blank(prompt, fields["prompt"])
    _not_blank(completion, fields["completion"])
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    system = _optional_text(row, fields["system"])
    read = _with_system([(turn, None) for turn in turns], system)
    bare = prompt if not system else None  # without a template there is no place for a system text
    return _conversation(read, tools=tools, prompt=bare, completion=completion)


def _read_text(row: dict[str, Any], fields: Mapping[str, str]) -> Conversation:
    text = _text_at(row, fields["text"])
    _not_blank(text, fields["text"])
    return _conversation([], prompt="", completion=text)


_READERS: Mapping[Format, Callable[[dict[str, Any], Mapping[str, str]], Conversation]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt-completion": _read_pair,
    "text": _read_text,
}


# Parts of a row.


def _conversation(read: Sequence[tuple[dict[str, Any], bool | None]], **more: Any) -> Conversation:
    return Conversation("", "", tuple(message for message, _ in read), tuple(flag for _, flag in read), **more)


def _message(value: object, number: int, role_name: str, content_name: str) -> tuple[dict[str, Any], bool | None]:
    if not isinstance(value, dict):
        raise RowError("field", f"message {number} is {_kind(value)}, not an object")
    role = value.get(role_name)
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise RowError("role", f"message {number} has the role {_shown_value(role)}; known are {known}")
    ours = (role_name, content_name, *_FLAGS, "tool_calls")
    message = {name: item for name, item in value.items() if item is not None and name not in ours}
    calls = value.get("tool_calls")
    content = value.get(content_name)
    if calls:
        message["tool_calls"] = _tool_calls(calls, number)
        content = "" if content is None else content
    message |= {"role": role, "content": _content(content, number, content_name)}
    return message, _flag(value, role, number)


def _content(value: object, number: int, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        raise RowError("field", f"message {number} has parts that are no text; only text can be learned")
    raise RowError("field", f"message {number} has {_kind(value)} as {name!r}, not a text")


def _flag(value: Mapping[str, Any], role: str, number: int) -> bool | None:
    """What a message says about being learned."""
    train, weight = value.get("train"), value.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError("field", f"message {number} has {_shown_value(train)} as 'train', not true or false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowError("field", f"message {number} has {_shown_value(weight)} as 'weight', not 0 or 1")
    if train is not None and weight is not None and train != bool(weight):
        raise RowError("field", f"message {number} says two things about being learned: 'train' and 'weight'")
    flag = bool(weight) if weight is not None else train
    if flag and role not in ("assistant", "function_call"):
        raise RowError("role", f"message {number} of role {role} asks to be learned; only assistant turns can be")
    return flag


def _tool_calls(value: object, number: int) -> list[dict[str, Any]]:
    calls = _parsed(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError("field", f"message {number} has tool calls that are no list of objects")
    return [_tool_call(call, number) for call in calls]


def _tool_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """A call with its arguments as an object: files often hold them as a text of JSON, which templates would quote."""
    inner = call.get("function", call)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise RowError("field", f"message {number} has a tool call without the name of a function")
    arguments = _parsed(inner.get("arguments", inner.get("parameters", {})))
    if not isinstance(arguments, dict):
        raise RowError("field", f"message {number} has a tool call whose arguments are no JSON object")
    outer = {name: item for name, item in call.items() if item is not None} if "function" in call else {}
    return {**outer, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


def _called(value: object, number: int) -> list[dict[str, Any]]:
    calls = _parsed(value)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise RowError("field", f"message {number} is a function call and holds no JSON of one")
    return _tool_calls(calls, number)


def _objects(row: Mapping[str, Any], column: str, what: str) -> tuple[dict[str, Any], ...] | None:
    value = _parsed(row.get(column))
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError("field", f"{column!r} is no list of {what}")
    return tuple(value)


def _tools(row: Mapping[str, Any], column: str) -> tuple[dict[str, Any], ...] | None:
    tools = _objects(row, column, "tools")
    if tools is None:
        return None
    bare = [("name" in tool or "parameters" in tool) and "function" not in tool for tool in tools]
    return tuple(
        {"type": "function", "function": tool} if alone else tool for tool, alone in zip(tools, bare, strict=True)
    )


def _with_system(
    read: list[tuple[dict[str, Any], bool | None]], system: str
) -> list[tuple[dict[str, Any], bool | None]]:
    if not system:
        return read
    if read and read[0][0]["role"] in ("system", "developer"):
        raise RowError("turns", "the row has a system text of its own and a first message that is one")
    return [({"role": "system", "content": system}, None), *read]


def _present(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise RowError("field", f"the row lacks the field {column!r}; there are: {names_shown(list(row))}")
    return _parsed_list(row[column])


def _text_at(row: Mapping[str, Any], column: str) -> str:
    return _text(_present(row, column), column)


def _optional_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else _text(value, column)


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise RowError("field", f"the field {column!r} is {_kind(value)}, not a text")
    return value


def _list_at(row: Mapping[str, Any], column: str) -> list[Any]:
    value = _parsed(_present(row, column))
    if not isinstance(value, list):
        raise RowError("field", f"the field {column!r} is {_kind(value)}, not a list of messages")
    if not value:
        raise RowError("empty", f"the field {column!r} is an empty list")
    return value


def _not_blank(text: str, column: str) -> None:
    if not text or text.isspace():
        raise RowError("empty", f"the field {column!r} is empty")


def _parsed(value: object) -> Any:
    """Lists and objects that a table could only keep as a text of JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _parsed_list(value: object) -> Any:
    # Only a list of messages is taken for more than a text: prompts may well begin with a bracket.
    parsed = _parsed(value)
    return parsed if _is_list_of(parsed, "role") else value


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shown_value(value: object) -> str:
    return repr(shown(value)[:40]) if isinstance(value, str) else _kind(value)


_KINDS: Mapping[type, str] = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list",
    dict: "an object",
}  # fmt: skip
