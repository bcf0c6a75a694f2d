"""A tokenizer and chat template as GGUF's metadata, and as Ollama's Modelfile.

`gguf_files.py` is the way back. What llama.cpp would cut into other ids is refused by name. llama.cpp's tokenizer
`llama` gives the ids of a tokenizer.json that lists every pair of every piece in the order of scores, as conversions
from SentencePiece do.

Ollama does not run Jinja. Most templates write each message between two texts that depend on its role alone; these
texts are found by rendering, and the result is compared with the template on a longer conversation.

Traps:
- llama.cpp does not normalise text. Qwen's tokenizer does (NFC), so text that is not normalised gives other ids there.
- It does not load byte-level BPE without merges, as our tokenizer `bytes` is. A pair that never meets stands for them.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data import gguf_files as tables
from flatout.data.chat_template import DEFAULT, ChatTemplate, TemplateRefusal
from flatout.data.library_tokenizers import GPT2_REGEX, ModelTokenizer
from flatout.data.tokenizer import Tokenizer
from flatout.data.tokenizer_files import portable
from flatout.errors import DataError

_BYTE = 6  # of the types of tokens: one of SentencePiece's, such as <0x0A>
_OTHER = "use a model with a tokenizer like GPT-2's, Llama's or Qwen's; a Hugging Face folder takes any tokenizer"


def tokenizer_values(
    tokenizer: Tokenizer, vocab: int, stops: Sequence[int], template: ChatTemplate | None
) -> dict[str, Any]:
    """The metadata of a tokenizer for a model of `vocab` ids. `stops` end an answer."""
    if tokenizer.kind in ("char", "ids"):
        raise DataError(
            f"GGUF has no form for its tokenizer ({tokenizer.kind})",
            "train with data.tokenizer=bpe-1024, gpt2 or bytes, as the preset shakespeare does",
        )
    if tokenizer.end_of_text is None:
        raise DataError(
            f"its tokenizer ({tokenizer.kind}) names no end of text, and llama.cpp would end answers at another token",
            "name its eos_token in tokenizer_config.json",
        )
    found = portable(tokenizer)
    content, model = found.content, found.content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise DataError(f"GGUF has no form for its tokenizer ({model.get('type')})", _OTHER)
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", ())]
    added = {entry["id"]: entry for entry in content.get("added_tokens") or []}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: entry["content"] for number, entry in added.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
    ids = {text: number for number, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise DataError("its tokenizer has two tokens with one text, which GGUF cannot hold", _OTHER)
    types = [tables.NORMAL if number in texts else tables.UNUSED for number in range(vocab)]
    for number, entry in added.items():
        types[number] = tables.CONTROL if entry.get("special") else tables.USER
    if model.get("byte_fallback"):
        values = {"model": "llama", "add_space_prefix": _puts_space(content, merges), "scores": _scores(tokens, merges)}
        for number, text in enumerate(tokens):
            is_byte = len(text) == 6 and text.startswith("<0x")
            types[number] = tables.UNKNOWN if text == model.get("unk_token") else _BYTE if is_byte else types[number]
    else:
        end = tokens[tokenizer.end_of_text]
        pairs = [" ".join(pair) for pair in merges] or [f"{end[0]} {end[1:]}"]
        values = {"model": "gpt2", "pre": _pre(content, merges), "merges": pairs}
    special = {"bos_token": found.begin, **found.special}
    for name, key in tables.SPECIAL.items():
        if (text := special.get(f"{name}_token")) in ids:
            values[f"{key}_token_id"] = ids[text]
    ends = [tokenizer.end_of_text, *(stop for stop in stops if stop != tokenizer.end_of_text)]
    values |= {f"{name}_token_id": stop for name, stop in zip(tables.STOPS, ends, strict=False)}
    values |= {"tokens": tokens, "token_type": types, "add_bos_token": found.begin is not None}
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if template is not None:
        values[tables.TEMPLATE] = template.text
        others = {form: text for form, text in template.texts.items() if text != template.text and form != DEFAULT}
        values |= {f"{tables.TEMPLATE}.{form}": text for form, text in others.items()}
    if not isinstance(tokenizer, ModelTokenizer):
        described = {name: value for name, value in tokenizer.to_json().items() if name != "content"}
        values[tables.OWN] = json.dumps(described)
    return values


def _pre(content: Mapping[str, Any], merges: Sequence[Any]) -> str:
    """llama.cpp's name for the way a tokenizer.json cuts text."""
    steps = _steps(content.get("pre_tokenizer"))
    if steps == [tables.split(GPT2_REGEX), tables.byte_level(False)] or (
        steps == [tables.byte_level(False)] and not merges
    ):
        steps = tables.PRE["gpt-2"]
    rules = content.get("normalizer"), bool(content["model"].get("ignore_merges"))
    for name, known in tables.PRE.items():
        if steps == known and rules == (tables.NORMALIZERS.get(name), name in tables.IGNORE_MERGES):
            return name
    raise DataError("llama.cpp has no pre-tokenizer that cuts text as its tokenizer.json does", _OTHER)


def _steps(part: Any) -> list[Any]:
    """The steps of a pre-tokenizer, as far as ids depend on them."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [step for one in part.get("pretokenizers", ()) for step in _steps(one)]
    if part.get("type") == "ByteLevel":
        return [{"use_regex": True, **part, "trim_offsets": True}]
    return [part]


def _puts_space(content: Mapping[str, Any], merges: Sequence[tuple[str, ...]]) -> bool:
    """Whether a text gets a space in front; refuses what llama.cpp would join in another order."""
    normalizer, words = content.get("normalizer"), content.get("pre_tokenizer")
    found = next((prefix for prefix, known in tables.SPACES.items() if normalizer == known and words is None), None)
    if normalizer is None and isinstance(words, dict) and words.get("type") == "Metaspace" and not words.get("split"):
        found = {"always": True, "never": False}.get(words.get("prepend_scheme", ""))
    vocab, pairs = content["model"]["vocab"], set(merges)
    made = [key for key, _ in itertools.groupby("".join(pair) for pair in merges)]
    plain = vocab.keys() - {entry["content"] for entry in content.get("added_tokens") or []}
    whole = all(pair in pairs for text in plain for pair in tables.halves(text, vocab))
    if found is None or not whole or len(set(made)) != len(made):
        raise DataError("llama.cpp has no form for the spaces or the merges of its tokenizer.json", _OTHER)
    return found


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """The sooner a piece is made, the higher; pieces that nothing makes come after all others."""
    ranks = {text: float(-rank) for rank, text in enumerate(dict.fromkeys("".join(pair) for pair in merges))}
    return [ranks.get(text, float(-len(ranks))) for text in tokens]


# --- for Ollama -------------------------------------------------------------------------------------------------------


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
