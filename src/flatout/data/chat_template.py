"""Conversations to text, by the chat template that a model was taught with.

Idea: a template is a program in Jinja's language that comes with a model, and what it writes is what the model has seen
in its training. So it runs in the surroundings that the `transformers` library gives it (block trimming, `tojson`,
`raise_exception`, `strftime_now`, loop controls, the `generation` tag, special tokens by name), and its text is taken
as it is. For models without one there are two of our own, `chatml` and `plain`.

Contract: a template is a stranger's program. It is compiled and rendered in a child process with limits on time, memory
and output (`confined`), there in Jinja's immutable sandbox, sees nothing but plain values made of JSON, and reaches
neither attributes of Python objects nor files. What it refuses is a `TemplateRefusal` with its own words; what breaks
it is one too; an attempt to leave the sandbox, or to take more than a rendering may, is a `DataError`. Our own two
templates are rendered here. Rendering is a pure function: `strftime_now` formats the time at which the template
was loaded, so that two renderings can be compared.

Trap: `generation` blocks mark what an assistant writes. They are found by rendering a second time with two marks in the
text, and only believed where that gives the same text; a template may look at its own output.
"""

import difflib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast, final

from flatout.confined import Child, Exceeded
from flatout.corpus.document import shown
from flatout.data.gguf_files import gguf_files
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.errors import DataError
from flatout.files import leads_outside, parse_json, read_bounded
from flatout.gguf_file import is_gguf

Messages = Sequence[Mapping[str, Any]]
Objects = Sequence[Any] | None
MODEL = "model"
NONE = "none"
_TOOLS = "tool_use"
_ANSWER = "Flatout"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_INSTEAD = "do not use this template; set chat.template to chatml, plain or a file of your own"
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
# Answers that begin differently: what two renderings have in common is what the template writes before any answer.
DIFFERENT = ("x", "y")
# Each with the tokens that it needs: by their text, or by the name of a special token.
BUILT_IN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "plain": (_PLAIN, ("eos_token",)),
}


class TemplateRefusal(Exception):  # not a UserError: the row is listed and left out
    """A template does not take a conversation, in its own words."""


@final
class ChatTemplate:
    """A chat template, ready to render. `texts` are its forms by name: `default`, and perhaps `tool_use`."""

    def __init__(self, name: str, texts: Mapping[str, str], variables: Mapping[str, str]) -> None:
        if not texts:
            raise ValueError("a chat template has a text")
        for form in texts:  # which becomes the name of a file where the template is written for others
            if not re.fullmatch(r"\w[\w.-]{0,99}", form):
                raise DataError(f"the chat template {shown(name)} has a form named {shown(form)!r:.100}", _INSTEAD)
        self.name = name
        self.texts = dict(texts)
        self.variables = dict(variables)
        self._now = datetime.now().isoformat()
        self._marked = {form for form, text in texts.items() if re.search(r"\{%[-+]?\s*generation\b", text)}
        self._ours = all(_is_ours(text, variables) for text in texts.values())
        for form in texts:
            self._ask(form, (), {})
        self._always = functools.cache(self._tries_prompt)
        self._header = functools.cache(self._tries_header)
        described = json.dumps([self.texts, self.variables], sort_keys=True)
        self.fingerprint = hashlib.sha256(described.encode("ascii")).hexdigest()

    @property
    def text(self) -> str:
        """The form that is used without tools, as it would lie in chat_template.jinja."""
        return self.texts[self._form(None)]

    def to_json(self) -> dict[str, Any]:
        """A description of plain JSON values from which `template_from_json` makes the same template."""
        return {"name": self.name, "texts": self.texts, "variables": self.variables}

    def has_marks(self, tools: Objects = None) -> bool:
        """Whether the template marks what the assistant writes."""
        return self._form(tools) in self._marked

    def prompts_always(self, tools: Objects = None) -> bool:
        """Whether it writes the prompt for an answer even where it is not asked for, as old templates do."""
        return self._always(self._form(tools))

    def _tries_prompt(self, form: str) -> bool:
        turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
        asks = [(1, True), (1, False), (2, False), (3, False)]
        try:
            asked, one, two, three = map(_written, self._ask(form, asks, self._values(turns, None, None)))
        except TemplateRefusal:
            return False
        # Both end in the same header, which is not there any more when the conversation goes on.
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[::-1], two[::-1], strict=False))
        header = one[len(one) - len(list(alike)) :].strip()
        return asked == one and two.startswith(one) and not three.startswith(two) and len(header) > 3

    def header(self, tools: Objects = None) -> str:
        """What it writes between a user's message and any answer, as in its prompt; empty if there is no such text."""
        return self._header(self._form(tools))

    def _tries_header(self, form: str) -> str:
        user = {"role": "user", "content": "u"}
        texts: list[str] = []
        try:
            for turns in ([user, answer_of(said)] for said in DIFFERENT):
                asks = [(1, False), (1, True), (2, False)]
                texts += map(_written, self._ask(form, asks, self._values(turns, None, None)))
        except TemplateRefusal:
            return ""
        before, prompt, one, *_, other = texts
        alike = common_beginning([prompt, one, other])
        return alike[len(before) :] if alike.startswith(before) else ""

    def render(self, messages: Messages, *, tools: Objects = None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the assistant would begin to write."""
        return _written(self.beginnings(messages, [(len(messages), add_generation_prompt)], tools)[0])

    def beginnings(
        self, messages: Messages, asks: Sequence[tuple[int, bool]], tools: Objects = None, documents: Objects = None
    ) -> "list[str | TemplateRefusal]":
        """Several renderings of one conversation: of how many messages each, and whether with the prompt for an answer.

        To ask for them at once is much faster: the conversation goes to the child process and back a single time.
        """
        return self._ask(self._form(tools), asks, self._values(messages, tools, documents))

    def marked_spans(
        self, messages: Messages, text: str, tools: Objects = None, documents: Objects = None
    ) -> list[tuple[int, int]] | None:
        """Where in `text`, the rendering of `messages`, the template's own marks lie; None where it has none."""
        from flatout.data.template_child import BEGIN, END  # here, as it imports Jinja

        form = self._form(tools)
        if form not in self._marked or BEGIN in text or END in text:
            return None
        values = self._values(messages, tools, documents)
        marked = _written(self._ask(form, [(len(messages), False)], values, marks=True)[0])
        spans: list[tuple[int, int]] = []
        begins: list[int] = []
        length = 0
        for part in re.split(f"([{BEGIN}{END}])", marked):
            if part == BEGIN:
                begins.append(length)
            elif part == END and begins:
                spans.append((begins.pop(), length))
            elif part == END:
                return None
            elif text.startswith(part, length):
                length += len(part)
            else:
                return None
        return sorted(spans) if length == len(text) and not begins else None

    def release(self) -> None:
        """Ends the process that renders templates of others; the next rendering starts it again."""
        if not self._ours:
            child().close()

    def _form(self, tools: Objects) -> str:
        if tools and _TOOLS in self.texts:
            return _TOOLS
        return DEFAULT if DEFAULT in self.texts else next(iter(self.texts))

    def _values(self, messages: Messages, tools: Objects, documents: Objects) -> dict[str, Any]:
        """What a template sees."""
        given = {"tools": list(tools) if tools else None, "documents": list(documents) if documents else None}
        return {**self.variables, "messages": [_with_reasoning(message) for message in messages], **given}

    def _ask(
        self, form: str, asks: Sequence[tuple[int, bool]], values: dict[str, Any], *, marks: bool = False
    ) -> "list[str | TemplateRefusal]":
        """The renderings; without any, a look at whether the template can be compiled."""
        request = {"text": self.texts[form], "now": self._now, "marks": marks, "values": values, "asks": asks}
        try:
            if self._ours:
                from flatout.data.template_child import answer

                answers = answer(request)
            else:
                answers = child().ask(request, max(1, len(asks)))
        except Exceeded as error:
            raise DataError(f"the chat template {shown(self.name)} {error}", _INSTEAD) from error
        except (RecursionError, TypeError, ValueError) as error:  # of JSON: the child gets nothing else
            raise TemplateRefusal(f"it holds values that are not plain JSON: {error}") from error
        return [self._taken(status, text) for status, text in answers][1:]

    def _taken(self, status: str, text: str) -> "str | TemplateRefusal":
        if status == "done":
            return text
        if status == "refused":
            return TemplateRefusal(text)
        if status == "unsafe":
            raise DataError(f"the chat template {shown(self.name)} tries to leave its sandbox: {text}", _INSTEAD)
        what = "is no Jinja template" if status == "syntax" else "cannot be compiled"
        raise DataError(
            f"the chat template {shown(self.name)} {what}: {text}",
            "mend it, or set chat.template to chatml, plain or a file of your own",
        )


def _written(rendered: str | TemplateRefusal) -> str:
    if isinstance(rendered, TemplateRefusal):
        raise rendered
    return rendered


@functools.cache
def child() -> Child:
    """The process that renders templates of others: one for all of them."""
    return Child("flatout.data.template_child", ("jinja2", "markupsafe"))


def _is_ours(text: str, variables: Mapping[str, str]) -> bool:
    """Whether a text is one of our own templates, with or without a first token; a name alone says nothing."""
    beginnings = ["", *(_writing(token) for token in variables.values())]
    return any(text == beginning + ours for beginning in beginnings for ours, _ in BUILT_IN.values())


def _writing(token: str) -> str:
    return "{{ " + json.dumps(token, ensure_ascii=False) + " }}"


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
    if not os.path.isfile(path):  # which takes a name that is too long for one of no file
        close = difflib.get_close_matches(spec, (MODEL, *BUILT_IN, NONE), n=1)
        mean = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"there is no chat template {shown(spec)!r}",
            f"{mean}set chat.template to model, chatml, plain, none, or the path of a .jinja file",
        )
    try:
        text = read_bounded(path).decode("utf-8")
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
        text = _writing(tokenizer.begin) + text
    return ChatTemplate(name, {DEFAULT: text}, tokenizer.special)


def template_from_json(description: Mapping[str, Any]) -> ChatTemplate:
    """The template that `to_json` described."""
    name, texts, variables = (description.get(name) for name in ("name", "texts", "variables"))
    plain = all(
        isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
        for value in (texts, variables)
    )
    if not plain or not isinstance(name, str) or not texts:
        raise DataError("the description of a chat template is damaged", "restore the file that holds it")
    template = ChatTemplate(name, cast(dict[str, str], texts), cast(dict[str, str], variables))
    template.release()  # most models are loaded for something else than chat
    return template


def common_beginning(texts: Sequence[str]) -> str:
    """As much as all of the texts begin with."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return texts[0][: len(list(alike))]


def answer_of(said: str) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": said}


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """What a message holds of reasoning, under any of its names; None if nothing."""
    return next((message[name] for name in _REASONING if message.get(name) is not None), None)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with what it holds of reasoning under all the names that templates know it by."""
    result = dict(message)
    reasoning = reasoning_of(message)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
OLD_TEMPLATE = "chat_template.json"
DEFAULT = "default"


def read_templates(folder: str | Path) -> dict[str, str]:
    """The chat templates of the model in `folder` by name; most have one, `default`, and some have none."""
    folder = Path(folder)
    found: dict[str, str] = {}
    for path in (folder / CONFIG, folder / OLD_TEMPLATE):
        found |= _named(object_if_there(path).get("chat_template"), path)
    files = {path.stem: _file_text(path, folder) for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if is_there(folder / TEMPLATE):
        files[DEFAULT] = _file_text(folder / TEMPLATE, folder)
    return files or found  # files of their own stand for all of what JSON says


def _named(value: object, path: Path) -> dict[str, str]:
    """What stands under `chat_template`: nothing, a text, or a list of names with texts."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    if not isinstance(value, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in value
    ):
        raise DataError(
            f"the chat_template in {shown(path)} is neither a text nor a list of names with templates",
            "mend the file, or set chat.template to a file of its own",
        )
    return {entry["name"]: entry["template"] for entry in value}


def is_there(path: Path) -> bool:
    """Whether a model's folder has a file. A GGUF file in a folder's place has those that its metadata makes."""
    return path.name in gguf_files(path.parent) if is_gguf(path.parent) else os.path.isfile(path)


def file_bytes(path: Path) -> bytes:
    """The content of a file that is there."""
    return gguf_files(path.parent)[path.name] if is_gguf(path.parent) else read_bounded(path)


def object_if_there(path: Path) -> dict[str, Any]:
    return json_object(path) if is_there(path) else {}


def json_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(_file_text(path, path.parent))
    except ValueError as error:
        raise DataError(f"{shown(path)} is not JSON: {error}", "fetch the file again") from error
    if not isinstance(content, dict):
        raise DataError(f"{shown(path)} holds no JSON object", "fetch the file again")
    return content


def _file_text(path: Path, folder: Path) -> str:
    if leads_outside(path, folder):
        raise DataError(
            f"{shown(path)} is a link that leads out of its folder",
            "put the file itself there, or name the folder it lies in",
        )
    try:
        return file_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(path)} is not UTF-8 at byte {error.start}", "fetch the file again") from error
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {error.strerror}", "check that you may read it") from error


def stops_of(tokenizer: ModelTokenizer, template: ChatTemplate | None, named: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end of text, those that are `named` by the model's files, and the
    one that the template writes after what an assistant said."""
    stops = [token for token in named if token < tokenizer.vocab]
    if tokenizer.end_of_text is not None:
        stops.insert(0, tokenizer.end_of_text)
    if template is not None:
        try:
            text = template.render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}])
        except TemplateRefusal:
            text = ""
        finally:
            template.release()
        after = text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else ""
        special = {tokenizer.token_id(token) for token in tokenizer.special_texts}
        stops += [int(token) for token in tokenizer.encode(after) if int(token) in special][:1]
    return tuple(dict.fromkeys(stops))
