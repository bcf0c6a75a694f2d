"""Which tokenizer.json may run in this process: one whose parts all have a known cost.

The library does what a file says. A few replacements in a row make a gigabyte of one letter, which aborts the process;
a regular expression can take for ever; and both may wait for a letter that no trial text has. So a file is run here
only if every part of it is on the lists below, which hold those of GPT-2, Llama, Mistral, Qwen and our own. For these
the time is linear in the text, and text grows at most `_MOST_GROWTH` times. All others run in a child process with
limits (`tokenizer_child`), which is slower.
"""

from typing import Any

# How GPT-2, GPT-4 and Qwen cut text. GPT-4's way: contractions in any case, words with the one character before them,
# digits in threes (Qwen: each alone), and line ends kept together, so that numbers and code fare better than with
# GPT-2's.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4_SPLIT, _QWEN_SPLIT = _GPT4 % r"\p{N}{1,3}", _GPT4 % r"\p{N}"
_SPLITS = frozenset({_GPT2_SPLIT, GPT4_SPLIT, _QWEN_SPLIT})

_MOST_GROWTH = 16
_MOST_PARTS = 32
_SHORT = 16  # characters of what is put before a text or a piece of it
_LONGEST_PIECE = 128  # characters of a unigram: all pieces that begin at a character are tried
# Parts without settings that matter, and how many times as many bytes of UTF-8 they make of a text at most.
_NORMALIZERS = {"NFC": 3, "NFD": 3, "Lowercase": 2, "StripAccents": 1, "Strip": 1, "Nmt": 1, "ByteLevel": 2}
_PRE_TOKENIZERS = {
    **dict.fromkeys(("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"), 1),
    **dict.fromkeys(("CharDelimiterSplit", "UnicodeScripts"), 1),
    "ByteLevel": 2,
    "Metaspace": 3,
}
_DECODERS: dict[str, int] = dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Metaspace"), 1)


def is_plain(content: dict[str, Any]) -> bool:
    """Whether the library may run a tokenizer.json in this process, on any text."""
    model = content.get("model")
    if not isinstance(model, dict) or not _is_plain_model(model):
        return False
    before = _growth(content.get("normalizer"), "normalizers", _NORMALIZERS)
    words = _growth(content.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
    after = _growth(content.get("decoder"), "decoders", _DECODERS)
    return max(before * words, after) <= _MOST_GROWTH


def _is_plain_model(model: dict[str, Any]) -> bool:
    kind = model.get("type")
    marks = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    if not all(mark is None or _is_short(mark) for mark in marks):
        return False
    if kind == "Unigram":
        vocab = model.get("vocab")
        return isinstance(vocab, list) and all(
            isinstance(entry, list) and entry and isinstance(entry[0], str) and len(entry[0]) <= _LONGEST_PIECE
            for entry in vocab
        )
    if kind == "WordPiece":
        most = model.get("max_input_chars_per_word")
        return isinstance(most, int) and most <= 1000
    return kind in ("BPE", "WordLevel")


def _growth(part: Any, inside: str, known: dict[str, int]) -> float:
    """How many times as long a part makes a text at most; infinite where that is not known."""
    parts, growth = _flat(part, inside), 1.0
    if len(parts) > _MOST_PARTS:
        return float("inf")
    for one in parts:
        growth *= _growth_of_one(one, known)
    return growth


def _flat(part: Any, inside: str) -> list[Any]:
    if part is None:
        return []
    if isinstance(part, dict) and part.get("type") == "Sequence" and isinstance(part.get(inside), list):
        return [each for one in part[inside] for each in _flat(one, inside)]
    return [part]


def _growth_of_one(part: Any, known: dict[str, int]) -> float:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return float("inf")
    if kind in known:
        return known[kind]
    if kind == "Prepend" and _is_short(part.get("prepend")):
        return 1
    pattern = part.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if kind == "Replace" and isinstance(literal, str) and literal and isinstance(part.get("content"), str):
        return max(1, len(part["content"].encode("utf-8", "replace")) / len(literal.encode("utf-8", "replace")))
    if kind == "Split" and isinstance(pattern, dict) and (literal or pattern.get("Regex") in _SPLITS):
        return 1
    if kind == "Strip" and _is_short(part.get("content")) and all(part.get(end) in (0, 1) for end in ("start", "stop")):
        return 1
    if kind == "WordPiece" and _is_short(part.get("prefix")) and part["prefix"]:
        return 1
    return float("inf")


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _SHORT
