"""Model folders with small tokenizers and chat templates that behave like those of well-known families.

The templates are our own; what they write is what those families write. Tokenizers know a few words as whole tokens and
fall back to bytes or characters for the rest, so that expectations can be written by hand.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Whole tokens. A word's beginnings are tokens, too, and a word must not get in the way of an earlier one.
WORDS = ("assistant", "system", "user", "Hello", "Hi", " there", " two", " is", " it", " one", "one", "What", "ĊĊ")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nHelpful one<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- else %}
    {%- set system = 'Helpful two' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}' }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user, assistant, user, ...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
# Leaves the reasoning of all but the last answer out, as reasoning models do.
THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reads its first message before anything else, and writes empty thoughts into what follows the last user's message.
QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of models: template, tokenizer, special tokens, and what of a turn is learned."""

    name: str
    template: str
    tokenizer: str
    special: tuple[str, ...]
    config: dict[str, Any]
    before: str
    after: str
    trims: bool = False
    systems: bool = True

    def learned(self, content: str) -> str:
        return self.before + (content.strip() if self.trims else content) + self.after


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
FAMILIES = {
    family.name: family
    for family in (
        Family("smollm2", SMOLLM2, "bytes", _CHATML, {**_CHATML_CONFIG, "bos_token": "<|im_start|>"}, "", "<|im_end|>"),
        Family("qwen", QWEN, "bytes", _CHATML, {**_CHATML_CONFIG, "add_bos_token": False}, "", "<|im_end|>"),
        Family(
            "llama3",
            LLAMA3,
            "bytes-bos",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            "",
            "<|eot_id|>",
            trims=True,
        ),
        Family(
            "mistral",
            MISTRAL,
            "pieces",
            ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
            " ",
            "</s>",
            systems=False,
        ),
        Family(
            "zephyr",
            ZEPHYR,
            "pieces",
            ("<unk>", "<s>", "</s>"),
            {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"},
            "",
            "</s>",
        ),
        Family("marked", MARKED, "bytes", _CHATML, _CHATML_CONFIG, "", "<|im_end|>"),
    )
}


@functools.cache
def _tokenizer(kind: str, special: tuple[str, ...]) -> str:
    pieces = kind == "pieces"
    space = "▁" if pieces else "Ġ"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [f"<0x{number:02X}>" for number in range(256)] + [space, *_LETTERS] if pieces else alphabet
    vocab = {text: number for number, text in enumerate([*special, *letters])}
    merges: list[tuple[str, str]] = []
    for word in WORDS[:-1] if pieces else WORDS:
        word = word.replace(" ", space)
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>" if pieces else None, byte_fallback=pieces))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if pieces:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    if kind == "bytes":
        # As GPT-2's file has it: it moves offsets away from white space.
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        name = "<s>" if pieces else special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name}:0 $A:0", pair=f"{name}:0 $A:0 $B:1", special_tokens=[(name, vocab[name])]
        )
    return tokenizer.to_str()


def write_model(folder: Path, family: Family, template: Any = ...) -> Path:
    """A model's folder without weights. `template` replaces that of the family; None leaves it out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer(family.tokenizer, family.special), encoding="utf-8")
    text = family.template if template is ... else template
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **family.config}
    if text is not None:
        config["chat_template"] = text
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def as_a_stranger(folder: Path) -> Path:
    """The folder without the hashes that only we write: what others' folders are, and what a test may change."""
    (folder / "flatout.json").unlink()
    return folder


def write_chat_model(folder: Path, family: str = "smollm2", *, seed: int = 1, **shape: int) -> Path:
    """A whole model's folder: a small Llama with drawn weights, tokenizer and template. `shape` makes it larger."""
    folder.mkdir(parents=True, exist_ok=True)
    made = _chat_model.__wrapped__ if shape else _chat_model  # a large one is not kept in memory
    for name, content in made(family, seed, tuple(shape.items())).items():
        (folder / name).write_bytes(content)
    return folder


@functools.lru_cache(maxsize=8)
def _chat_model(family: str, seed: int, shape: tuple[tuple[str, int], ...]) -> dict[str, bytes]:
    """The files of such a folder: most tests have the same ones."""
    from flatout.config.schema import ModelConfig
    from flatout.data.tokenizer_files import read_model_tokenizer
    from flatout.model.gpt import build_model
    from flatout.model.hub_folder import export_huggingface

    with tempfile.TemporaryDirectory() as place:
        language = write_model(Path(place) / "language", FAMILIES[family])
        sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 256, **dict(shape)}
        config = ModelConfig(**sizes, qk_norm=False, tied=False)  # pyright: ignore[reportArgumentType]
        folder = Path(place) / "model"
        export_huggingface(build_model(config, read_model_tokenizer(language).vocab, seed=seed), folder)
        as_a_stranger(folder)
        return {path.name: path.read_bytes() for path in (*folder.iterdir(), *language.iterdir())}
