"""Conversations to text, by the chat template that a model was taught with.

Idea: a template is a program in Jinja's language that comes with a model, and what it writes is what the model has seen
in its training. So it runs in the surroundings that the `transformers` library gives it (block trimming, `tojson`,
`raise_exception`, `strftime_now`, loop controls, the `generation` tag, special tokens by name), and its text is taken
as it is. For models without one there are two of our own, `chatml` and `plain`.

Contract: a template is a stranger's program. It runs in Jinja's immutable sandbox, sees nothing but plain values made
of JSON, and reaches neither attributes of Python objects nor files. What it refuses is a `TemplateRefusal` with its own
words; what breaks it is one too; an attempt to leave the sandbox is a `DataError`. Rendering is a pure function: the
time that `strftime_now` tells is that at which the template was loaded, so that two renderings can be compared.

Trap: `generation` blocks mark what an assistant writes. They are found by rendering a second time with two marks in the
text, and only believed where that gives the same text; a template may look at its own output.
"""

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast, final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from flatout.corpus.document import shown
from flatout.data.model_folder import DEFAULT, read_templates
from flatout.data.tokenizer import ModelTokenizer
from flatout.errors import DataError

Message = Mapping[str, Any]

MODEL = "model"
NONE = "none"
_TOOLS = "tool_use"
# Code points that Unicode promises never to give a meaning.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_REASONING = ("reasoning_content", "thinking", "reasoning")

_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('this template has no form for tools') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] or message.tool_calls %}"
    "{{ raise_exception('this template has no form for tools, or for the role ' + message.role) }}{% endif %}"
)
_CHATML = (
    _NO_TOOLS + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    _NO_TOOLS + "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
    "{% elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
# Each with the tokens that it needs: by their text, or by the name of a special token.
BUILT_IN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "plain": (_PLAIN, ("eos_token",)),
}


class TemplateRefusal(Exception):  # it is no error of the program: a row is told of and left out
    """A template does not take a conversation, in its own words."""


@final
class ChatTemplate:
    """A chat template, ready to render. `texts` are its forms by name: `default`, and perhaps `tool_use`."""

    def __init__(self, name: str, texts: Mapping[str, str], variables: Mapping[str, str]) -> None:
        if not texts:
            raise ValueError("a chat template has a text")
        self.name = name
        self.texts = dict(texts)
        self.variables = dict(variables)
        now = datetime.now()
        plain, marking = _environment(now, marks=False), _environment(now, marks=True)
        self._plain = {form: _compiled(plain, text, name) for form, text in texts.items()}
        self._marking = {
            form: marking.from_string(text)
            for form, text in texts.items()
            if re.search(r"\{%[-+]?\s*generation\b", text)
        }
        self._always: dict[str, bool] = {}
        described = json.dumps([self.texts, self.variables], sort_keys=True)
        self.fingerprint = hashlib.sha256(described.encode("ascii")).hexdigest()

    @property
    def text(self) -> str:
        """The form that is used without tools, as it would lie in chat_template.jinja."""
        return self.texts[self._form(None)]

    def to_json(self) -> dict[str, Any]:
        """A description of plain JSON values from which `template_from_json` makes the same template."""
        return {"name": self.name, "texts": self.texts, "variables": self.variables}

    def has_marks(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template says itself what the assistant writes."""
        return self._form(tools) in self._marking

    def prompts_always(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether it writes the prompt that makes a model answer although nobody asked for it, as old ones do."""
        form = self._form(tools)
        if form not in self._always:
            self._always[form] = self._tries_prompt(form)
        return self._always[form]

    def _tries_prompt(self, form: str) -> bool:
        turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]

        def text(count: int, prompt: bool) -> str:
            return self._rendered(self._plain[form], turns[:count], None, None, prompt)

        try:
            asked, one, two, three = text(1, True), text(1, False), text(2, False), text(3, False)
        except TemplateRefusal:
            return False
        # Both end in the same header, which is not there any more when the conversation goes on.
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[::-1], two[::-1], strict=False))
        header = one[len(one) - len(list(alike)) :].strip()
        return asked == one and two.startswith(one) and not three.startswith(two) and len(header) > 3

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the assistant would begin to write."""
        template = self._plain[self._form(tools)]
        return self._rendered(template, messages, tools, documents, add_generation_prompt)

    def marked_spans(
        self,
        messages: Sequence[Message],
        text: str,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> list[tuple[int, int]] | None:
        """Where in `text`, the rendering of `messages`, the template's own marks lie; None where it has none."""
        template = self._marking.get(self._form(tools))
        if template is None or _BEGIN in text or _END in text:
            return None
        marked = self._rendered(template, messages, tools, documents, False)
        spans: list[tuple[int, int]] = []
        begins: list[int] = []
        length = 0
        for part in re.split(f"([{_BEGIN}{_END}])", marked):
            if part == _BEGIN:
                begins.append(length)
            elif part == _END and begins:
                spans.append((begins.pop(), length))
            elif part == _END:
                return None
            elif text.startswith(part, length):
                length += len(part)
            else:
                return None
        return sorted(spans) if length == len(text) and not begins else None

    def _form(self, tools: Sequence[Any] | None) -> str:
        if tools and _TOOLS in self.texts:
            return _TOOLS
        return DEFAULT if DEFAULT in self.texts else next(iter(self.texts))

    def _rendered(
        self,
        template: jinja2.Template,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        prompt: bool,
    ) -> str:
        try:
            return template.render(
                **self.variables,
                messages=[_with_reasoning(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=list(documents) if documents else None,
                add_generation_prompt=prompt,
            )
        except jinja2.exceptions.SecurityError as error:
            raise DataError(
                f"the chat template {shown(self.name)} tries to leave its sandbox: {error}",
                "do not use this template; set chat.template to chatml, plain or a file of your own",
            ) from error
        except jinja2.TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        except MemoryError:
            raise
        except Exception as error:  # a program of somebody else may raise anything
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def load_template(spec: str, folder: str | Path | None, tokenizer: ModelTokenizer) -> ChatTemplate | None:
    """The template that `spec` names: `model` (that of the model in `folder`), `chatml`, `plain`, a file, or `none`."""
    if spec == NONE:
        return None
    if spec == MODEL:
        texts = {} if folder is None else read_templates(folder)
        if not texts:
            where = "this model" if folder is None else f"the model in {shown(folder)}"
            raise DataError(
                f"{where} has no chat template",
                "set chat.template: chatml, plain, the path of a .jinja file, or none for text without turns",
            )
        return ChatTemplate(MODEL, texts, tokenizer.special)
    if spec in BUILT_IN:
        return _built_in(spec, tokenizer)
    path = Path(spec)
    if not path.is_file():
        close = difflib.get_close_matches(spec, (MODEL, *BUILT_IN, NONE), n=1)
        mean = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"there is no chat template {shown(spec)!r}",
            f"{mean}set chat.template to model, chatml, plain, none, or the path of a .jinja file",
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template {shown(spec)}: {error}", "give a text in UTF-8") from error
    return ChatTemplate(str(path), {DEFAULT: text}, tokenizer.special)


def _built_in(name: str, tokenizer: ModelTokenizer) -> ChatTemplate:
    text, needed = BUILT_IN[name]
    missing = [token for token in needed if token not in tokenizer.special and tokenizer.token_id(token) is None]
    if missing:
        others = " or ".join(other for other in BUILT_IN if other != name)
        raise DataError(
            f"the template {name} needs {' and '.join(missing)}, and this tokenizer has no such token",
            f"set chat.template to {others}, or to the path of a .jinja file",
        )
    # Written into the text and not into what it is given, so that other programs render it in the same way.
    if tokenizer.begin is not None:
        text = "{{ " + json.dumps(tokenizer.begin, ensure_ascii=False) + " }}" + text
    return ChatTemplate(name, {DEFAULT: text}, tokenizer.special)


def template_from_json(description: Mapping[str, Any]) -> ChatTemplate:
    """The template that `to_json` described."""
    name, texts, variables = (description.get(name) for name in ("name", "texts", "variables"))
    for value in (texts, variables):
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise DataError("the description of a chat template is damaged", "restore the file that holds it")
    if not isinstance(name, str) or not texts:
        raise DataError("the description of a chat template is damaged", "restore the file that holds it")
    return ChatTemplate(name, cast(dict[str, str], texts), cast(dict[str, str], variables))


def _compiled(environment: jinja2.Environment, text: str, name: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template {shown(name)} is no Jinja template: {error.message} at line {error.lineno}",
            "mend it, or set chat.template to chatml, plain or a file of your own",
        ) from error
    except (ValueError, RecursionError, SyntaxError, OverflowError) as error:
        raise DataError(
            f"the chat template {shown(name)} cannot be compiled: {error}",
            "set chat.template to chatml, plain or a file of your own",
        ) from error


def _with_reasoning(message: Message) -> dict[str, Any]:
    """The message, with what it holds of reasoning under all the names that templates know it by."""
    result = dict(message)
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _environment(now: datetime, *, marks: bool) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if marks else _Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
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
        return f"{_BEGIN}{caller()}{_END}"


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
