"""Ollama's Modelfile for a GGUF file: context, stop texts, and the chat template in Go's language.

Ollama does not run Jinja. Most templates write each message between two texts that depend on its role alone; these
texts are found by rendering, and the result is compared with the template on a longer conversation.
"""

import json
from collections.abc import Sequence

from flatout.data.chat_template import ChatTemplate, TemplateRefusal

_MARKS = {"system": "SYSTEM0", "user": "USER0", "assistant": "ASSISTANT0"}
_UNKNOWN = (
    "the Modelfile has no TEMPLATE, because the chat template is not of the kind that writes each message by its role "
    "alone; Ollama may recognise it in the GGUF file"
)


def modelfile(
    name: str, context: int, stops: Sequence[str], template: ChatTemplate | None, begin: str | None
) -> tuple[str, tuple[str, ...]]:
    """The file for the GGUF file `name`, and notices on it. `begin` is what Ollama itself puts before a text."""
    lines = [f"FROM ./{name}", f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in stops]
    go = "{{ .Prompt }}" if template is None else _in_go(template, begin or "")
    if go is not None and '"""' not in go:
        lines.append(f'TEMPLATE """{go}"""')
    return "\n".join(lines) + "\n", () if lines[-1].startswith("TEMPLATE") else (_UNKNOWN,)


def _in_go(template: ChatTemplate, begin: str) -> str | None:
    """The template in Go's language; None where it has no such form."""
    turns = {role: {"role": role, "content": mark} for role, mark in _MARKS.items()}
    system, user, assistant = turns.values()
    try:
        asked = template.render([user], add_generation_prompt=True).removeprefix(begin)
        told = template.render([system, user]).removeprefix(begin)
        whole = template.render([user, assistant, user]).removeprefix(begin)
        tail = _cut(template.render([user, assistant]), ("assistant",))[1]
        first, between, again, end = _cut(whole, ("user", "assistant", "user"))
        before, inner, after = _cut(told, ("system", "user"))
        head, answer = again.removeprefix(tail), between.removeprefix(end)
        plain, closed = first.removesuffix(head), inner.removesuffix(head)
        prompt = asked.removeprefix(f"{first}{_MARKS['user']}{end}")
        expected = template.render([system, user, assistant, user, assistant, user], add_generation_prompt=True)
    except (TemplateRefusal, ValueError):
        return None
    finally:
        template.release()
    body = f"{head}{_MARKS['user']}{end}", f"{answer}{_MARKS['assistant']}{tail}"
    made = f"{before}{_MARKS['system']}{closed}{''.join(body) * 2}{body[0]}{prompt}"
    parts = (before, closed, plain, head, end, answer, tail, prompt)
    split = (plain + head, closed + head, after) == (first, inner, end)
    if not split or expected.removeprefix(begin) != made or any("{{" in part for part in parts):
        return None
    return (
        f"{{{{ if .System }}}}{before}{{{{ .System }}}}{closed}{{{{ else }}}}{plain}{{{{ end }}}}"
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{head}{{{{ .Content }}}}{end}'
        f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ .Content }}}}{tail}{{{{ end }}}}{{{{ end }}}}{prompt}'
    )


def _cut(text: str, roles: Sequence[str]) -> list[str]:
    """The texts before, between and after the messages of these roles."""
    parts: list[str] = []
    for role in roles:
        part, mark, text = text.partition(_MARKS[role])
        if not mark:
            raise ValueError("the template leaves a message out")
        parts.append(part)
    return [*parts, text]
