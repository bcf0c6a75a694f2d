"""GGUF files written by hand, whole ones and hostile ones. Shares no code with the reader or the package `gguf`."""

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FORMS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "u64": 10, "i64": 11, "f64": 12}
LETTERS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?",
           "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip


class Raw(bytes):
    """A value with its type, as it shall stand in the file."""


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def number(form: str, value: float) -> Raw:
    return Raw(struct.pack("<I", FORMS[form]) + struct.pack(f"<{LETTERS[form]}", value))


def array(form: str, values: Any) -> Raw:
    """Of numbers, or of texts with the form `text`."""
    head = struct.pack("<IIQ", 9, 8 if form == "text" else FORMS[form], len(values))
    body = [text(one) if form == "text" else struct.pack(f"<{LETTERS[form]}", one) for one in values]
    return Raw(head + b"".join(body))


def value(given: Any) -> bytes:
    match given:
        case Raw():
            return given
        case bool():
            return number("bool", given)
        case int():
            return number("u32", given)
        case float():
            return number("f32", given)
        case str() | bytes():
            return struct.pack("<I", 8) + text(given)
        case list():
            form = "text" if isinstance(given[0], str) else "i32" if isinstance(given[0], int) else "f32"
            return array(form, given)
    raise TypeError(given)


def gguf_bytes(
    values: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    header: bytes | None = None,
    change: Callable[[str, dict[str, Any]], None] = lambda name, entry: None,
    align: int = 32,
) -> bytes:
    """A file of fp32 tensors. `change` edits the table's entry of a tensor: dims, kind, offset, name."""
    made = b"".join(text(key) + value(given) for key, given in values.items())
    table, data = b"", b""
    for name, x in tensors.items():
        entry: dict[str, Any] = {"name": name, "dims": list(x.shape[::-1]), "kind": 0, "offset": len(data)}
        change(name, entry)
        dims = struct.pack(f"<I{len(entry['dims'])}Q", len(entry["dims"]), *entry["dims"])
        table += text(entry["name"]) + dims + struct.pack("<IQ", entry["kind"], entry["offset"])
        data += x.astype("<f4").tobytes()
        data += bytes(-len(data) % align)
    start = header or b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head = start + made + table
    return head + bytes(-len(head) % align) + data


_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SEEN]
LETTERS_OF_BYTES = [chr(byte) if byte in _SEEN else chr(256 + _HIDDEN.index(byte)) for byte in range(256)]


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def small_model(seed: int = 0, **more: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of a Llama of one block."""
    width, hidden, vocab, chance = 16, 24, 258, np.random.default_rng(seed)
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": width,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*LETTERS_OF_BYTES, "th", "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": TEMPLATE,
    }
    shapes = {
        "token_embd.weight": (vocab, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_k.weight": (width // 2, width),
        "blk.0.attn_v.weight": (width // 2, width),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (hidden, width),
        "blk.0.ffn_up.weight": (hidden, width),
        "blk.0.ffn_down.weight": (width, hidden),
    }
    tensors = {name: chance.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    return values | more, tensors


def hostile(seed: int) -> Iterator[tuple[str, bytes]]:
    """Endless files, each with what is wrong with it: first one of every kind, then random damage."""
    values, tensors = small_model()
    whole = gguf_bytes(values, tensors)
    count = (len(tensors), len(values))
    huge = (2**31, 2**32 + 1, 2**40, 2**62, 2**63, 2**64 - 1)

    def head(version: int = 3, tensors: int = count[0], pairs: int = count[1]) -> bytes:
        return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)

    yield "empty", b""
    yield "no magic", b"GGML" + whole[4:]
    for version in (0, 1, 4, 2**24 * 3):
        yield f"version {version}", gguf_bytes(values, tensors, header=head(version))
    for many in huge:
        yield f"{many} tensors", gguf_bytes(values, tensors, header=head(tensors=many))
        yield f"{many} pairs", gguf_bytes(values, tensors, header=head(pairs=many))
        yield f"text of {many}", gguf_bytes(values | {"x": Raw(struct.pack("<IQ", 8, many))}, tensors)
        yield f"key of {many}", gguf_bytes({}, {}, header=head(3, 0, 1) + struct.pack("<Q", many))
        for kind in (0, 8, 9, 12):
            raw = Raw(struct.pack("<IIQ", 9, kind, many))
            yield f"array of {many} {kind}", gguf_bytes({"x": raw, **values}, tensors)
        for place in ("dims", "offset"):
            wrong = [many, many] if place == "dims" else many - many % 32
            yield (
                f"{place} {many}",
                gguf_bytes(values, tensors, change=lambda name, entry, p=place, w=wrong: entry.update({p: w})),
            )
        for key in ("block_count", "embedding_length", "context_length", "attention.head_count", "feed_forward_length"):
            yield f"{key} {many}", gguf_bytes(values | {f"llama.{key}": number("u64", many)}, tensors)
    for key in [key for key in values if key != "general.architecture"]:
        for odd in (0, -1.5, float("nan"), float("inf"), "x", "", ["a", "b"], [1, 2], [0.5], True, number("i64", -1)):
            yield f"{key} {odd!r:.30}", gguf_bytes(values | {key: odd}, tensors)
        yield f"no {key}", gguf_bytes({name: given for name, given in values.items() if name != key}, tensors)
    for key, odd in _METADATA.items():
        for one in odd:
            yield f"{key} {one!r:.40}", gguf_bytes(values | {key: one}, tensors)
    for changes in _ENTRIES:
        yield f"tensors {changes}", gguf_bytes(values, tensors, change=lambda name, entry, c=changes: entry.update(c))
    for name in tensors:
        yield f"no {name}", gguf_bytes(values, {other: x for other, x in tensors.items() if other != name})
        yield f"{name} nan", gguf_bytes(values, tensors | {name: tensors[name] * np.nan})
        yield f"{name} cut", gguf_bytes(values, tensors | {name: tensors[name][:1]})
    yield "twice", gguf_bytes(values, tensors, header=head(pairs=count[1] + 1) + text("llama.block_count") + value(1))
    yield "more tensors", gguf_bytes(values, tensors | {"blk.9.x.weight": np.zeros((2, 2))})
    chance = random.Random(seed)
    while True:
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(6500)] = chance.randrange(256)
        end = chance.choice((len(damaged), len(damaged), chance.randrange(len(damaged))))
        yield f"random damage, {end} bytes", bytes(damaged[:end])


_METADATA: dict[str, list[Any]] = {
    "general.architecture": ["mamba", "", 7, ["llama"], b"\xff\xfe"],
    "general.alignment": [0, 3, 1, 2**31, "32", 4096],
    "llama.attention.key_length": [0, 7, 2**30],
    "llama.rope.dimension_count": [0, 4],
    "llama.rope.scaling.type": ["yarn", "linear", 3],
    "llama.rope.scaling.factor": [0.0, float("nan"), 4.0],
    "llama.expert_count": [8],
    "tokenizer.ggml.model": ["bert", "t5", "llama", "none"],
    "tokenizer.ggml.pre": ["default", "nonsense"],
    "tokenizer.ggml.tokens": [["a"] * 258, ["a" * 10_000] * 2, [chr(300 + i) * 40_000 for i in range(258)]],
    "tokenizer.ggml.token_type": [[9] * 258, [5] * 258, [3] * 258],
    "tokenizer.ggml.merges": [[" "], ["a b c"], ["th th"] * 1000, ["", "t  h"]],
    "tokenizer.ggml.scores": [["x"], [0.0]],
    "tokenizer.ggml.eos_token_id": [2**32 - 1, 258],
    "tokenizer.chat_template": [
        "{% for",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**9 }}",
    ],
    "tokenizer.chat_template.../x": ["{{ messages }}"],
    "flatout_tokenizer": ["{", "[" * 100_000, '{"kind": "char", "characters": 3}', '{"kind": "huggingface"}', "7"],
}
_ENTRIES: list[dict[str, Any]] = [
    {"offset": 0},  # all of them share their bytes
    {"offset": 32},
    {"offset": 7},
    {"name": "token_embd.weight"},
    {"name": b"\xc3\x28"},
    {"name": "x" * 100_000},
    {"kind": 12},
    {"kind": 99},
    {"kind": 2**32 - 1},
    {"kind": 2},
    {"kind": 8},
    {"dims": []},
    {"dims": [0]},
    {"dims": [1] * 5},
    {"dims": [16, 2**60]},
]
