"""The tokenizer and chat template in a GGUF file, as the files of a Hugging Face folder.

Two of llama.cpp's tokenizers are read. `gpt2` is byte-level BPE with ranked merges; `tokenizer.ggml.pre` names the way
it cuts text into words (`PRE`). `llama` joins neighbours by the score of their piece, without words: its merges are all
pairs of every piece, in the order of scores. Others are refused by name, because a similar tokenizer would give other
ids.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.data.library_tokenizers import GPT4_REGEX
from flatout.files import parse_json
from flatout.gguf_file import GgufFile, read_gguf

NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5
# Keys of special tokens behind `tokenizer.ggml.`, by their names in tokenizer_config.json.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
STOPS = ("eos", "eot", "eom")
OWN = "flatout_tokenizer"  # which of ours it is: the same key as in tokenizer_config.json
SPACE = "▁"
TEMPLATE = "tokenizer.chat_template"
_OTHER = "use the model's Hugging Face folder, or a file of a model with a tokenizer like GPT-2's, Llama's or Qwen's"
_LONGEST_PIECE = 1000  # characters: all halves of every piece are tried


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# The steps of tokenizer.json's pre-tokenizer, by llama.cpp's names.
PRE: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "llama-bpe": [split(GPT4_REGEX % r"\p{N}{1,3}"), byte_level(False)],
    "qwen2": [split(GPT4_REGEX % r"\p{N}"), byte_level(False)],
}
NORMALIZERS = {"qwen2": {"type": "NFC"}}
IGNORE_MERGES = ("llama-bpe",)  # take a word of the vocabulary whole
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
# Normalizers of `llama`, by whether a text gets a space in front.
SPACES: Mapping[bool, dict[str, Any]] = {
    True: {"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]},
    False: _REPLACE,
}


def gguf_files(path: Path) -> dict[str, bytes]:
    """The files that a Hugging Face folder of this model would have beside its weights."""
    return _files(read_gguf(path))


@functools.lru_cache(maxsize=1)
def _files(gguf: GgufFile) -> dict[str, bytes]:
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in gguf.single.items()}
    tokens, types = gguf.texts("tokenizer.ggml.tokens"), gguf.values.get("tokenizer.ggml.token_type")
    kinds = [NORMAL] * len(tokens) if types is None else getattr(types, "tolist", list)()
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise gguf.refuse("its tokens have other numbers of texts and types, or two of them have one text")
    while kinds and kinds[-1] == UNUSED:
        kinds.pop()
    tokens = tokens[: len(kinds)]
    kind = gguf.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise gguf.refuse(f"its tokenizer is of kind {kind!r:.40}, which is not supported", _OTHER)
    parts = _of_pieces(gguf, tokens, kinds) if kind == "llama" else _of_bytes(gguf, tokens)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in SPECIAL.items():
        number = values.get(f"{key}_token_id")
        if isinstance(number, int) and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    begins = values.get("add_bos_token", kind == "llama" or values.get("pre") in IGNORE_MERGES)
    config["add_bos_token"] = bool(begins) and "bos_token" in config
    templates = {key.removeprefix(TEMPLATE): text for key, text in gguf.single.items() if key.startswith(TEMPLATE)}
    config["chat_template"] = [
        {"name": name.removeprefix(".") or "default", "template": text}
        for name, text in templates.items()
        if isinstance(text, str)
    ]
    if isinstance(own := gguf.single.get(OWN), str):
        with contextlib.suppress(ValueError):  # then it is the tokenizer of others
            config[OWN] = parse_json(own)
    stops = [values.get(f"{name}_token_id") for name in STOPS]
    generation = {"eos_token_id": list(dict.fromkeys(stop for stop in stops if isinstance(stop, int)))}
    files = {
        "tokenizer.json": _content(tokens, kinds, **parts),
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}


def _of_bytes(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    pre = gguf.text("tokenizer.ggml.pre", "default")
    if pre not in PRE:
        raise gguf.refuse(f"its pre-tokenizer {pre!r:.40} is not supported", _OTHER)
    steps, known = PRE[pre], set(tokens)
    cuts = ((merge, merge.find(" ", 1)) for merge in gguf.texts("tokenizer.ggml.merges"))
    merges = [(merge[:place], merge[place + 1 :]) for merge, place in cuts if place > 0]
    return {
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level(True), "add_prefix_space": True},
        "ignore_merges": pre in IGNORE_MERGES,
        # the library refuses a pair of no token; such a pair never meets
        "merges": [pair for pair in merges if known.issuperset((*pair, "".join(pair)))],
    }


def _of_pieces(gguf: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores: Any = gguf.values.get("tokenizer.ggml.scores")
    kind = getattr(getattr(scores, "dtype", None), "kind", None)
    if kind not in ("f", "i") or len(scores) < len(tokens) or max(map(len, tokens), default=0) > _LONGEST_PIECE:
        raise gguf.refuse(f"its pieces have no scores, or one is longer than {_LONGEST_PIECE:,} characters")
    vocab = {text: number for number, text in enumerate(tokens)}
    order = sorted((n for n, kind in enumerate(kinds) if kind == NORMAL), key=lambda n: (-scores[n], n))
    made = (sorted(halves(tokens[n], vocab), key=lambda pair: (vocab[pair[0]], vocab[pair[1]])) for n in order)
    prefix = bool(gguf.single.get("tokenizer.ggml.add_space_prefix", True))
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}] + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": SPACES[prefix],
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "unk_token": next((text for text, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None),
        "fuse_unk": True,
        "byte_fallback": True,
        "merges": list(itertools.chain.from_iterable(made)),
    }


def halves(text: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes this one."""
    cuts = ((text[:place], text[place:]) for place in range(1, len(text)))
    return [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]


def _content(
    tokens: Sequence[str], kinds: Sequence[int], *, normalizer: Any, pre_tokenizer: Any, decoder: Any, **model: Any
) -> dict[str, Any]:
    """tokenizer.json. Special tokens behind the others are no words of the vocabulary, as in most files."""
    last = max((number for number, kind in enumerate(kinds) if kind not in (CONTROL, USER)), default=-1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": tokens[number], **flags, "special": kind != USER}
        for number, kind in enumerate(kinds)
        if kind in (CONTROL, USER, UNKNOWN)
    ]
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    vocab = {text: number for number, text in enumerate(tokens[: last + 1])}
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    parts |= dict.fromkeys(("truncation", "padding", "post_processor"))
    return {
        "version": "1.0",
        "added_tokens": added,
        **parts,
        "model": {"type": "BPE", **usual, "vocab": vocab, **model},
    }
