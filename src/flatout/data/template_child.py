"""Chat templates as they are compiled and rendered: the surroundings of `transformers` in Jinja's sandbox.

This is what runs in the child process of `confined`, for templates that came with a model; `chat_template` speaks to
it. It imports nothing of ours and no other package than Jinja, so that the child starts quickly. Our own templates are
rendered by the same functions, in the process that asks.
"""

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

# Code points that Unicode promises never to give a meaning.
BEGIN, END = "\ufdd0", "\ufdd1"
_WORDS = 2000  # characters of a message that are kept


def answer(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(status, text) of compiling the template, and of each rendering in `asks`: of how many messages, and whether with
    the prompt that makes a model answer.

    The text is a rendering, or what is wrong: `syntax` and `broken` of the template, `unsafe` of what it tries,
    `refused` of what it was given.
    """
    try:
        template = _compiled(request["text"], request["now"], request["marks"])
    except jinja2.TemplateSyntaxError as error:
        return [("syntax", f"{error.message} at line {error.lineno}"[:_WORDS])]
    except (ValueError, RecursionError, SyntaxError, OverflowError) as error:
        return [("broken", str(error)[:_WORDS])]
    return [("done", ""), *(_rendered(template, request["values"], *ask) for ask in request["asks"])]


def _rendered(template: jinja2.Template, values: Mapping[str, Any], count: int, prompt: bool) -> tuple[str, str]:
    messages = values["messages"][:count]
    try:
        return "done", template.render({**values, "messages": messages, "add_generation_prompt": prompt})
    except jinja2.exceptions.SecurityError as error:
        return "unsafe", str(error)[:_WORDS]
    except jinja2.TemplateError as error:
        return "refused", (error.message or type(error).__name__)[:_WORDS]
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a program of somebody else may raise anything
        return "refused", f"{type(error).__name__}: {error}"[:_WORDS]


@functools.lru_cache(maxsize=16)
def _compiled(text: str, now: str, marks: bool) -> jinja2.Template:
    return _environment(now, marks).from_string(text)


@functools.lru_cache(maxsize=16)
def _environment(now: str, marks: bool) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if marks else _Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _Namespace
    # A plain Python function, of which templates have no need.
    environment.globals.pop("lipsum", None)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `generation`: what stands in it is written as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja wants it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _MarkedGeneration(_Generation):
    """The same with marks around it."""

    def _written(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise_exception(message: object) -> str:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would take as markup; models have seen JSON as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _PlainDict:
    """`dict` for templates, which leads to no class."""

    def __call__(self, *values: Any, **names: Any) -> dict[Any, Any]:
        return dict(*values, **names)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, behind which Python keeps its inner things."""

    def __init__(*values: Any, **names: Any) -> None:
        self, *rest = values
        attributes = dict(*rest, **names)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no name that begins with an underscore, like {name!r}"
        )
