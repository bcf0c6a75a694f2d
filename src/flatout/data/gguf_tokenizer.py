"""Tokenizers and chat templates as GGUF's metadata, and back to the files of a Hugging Face folder.

llama.cpp has two kinds that models here use. `gpt2` is byte-level BPE with ranked merges; `tokenizer.ggml.pre` names
the way it cuts text into words. `llama` joins neighbours by the score of their piece, without words; for a
tokenizer.json that lists every pair of every piece in the order of scores, as conversions from SentencePiece do, that
gives the same ids. Anything else is refused by name: a near one would train or answer on other tokens silently.

Trap: llama.cpp does not normalise text. Qwen's tokenizer does (NFC), so text that is not normalised gives other ids
there. It needs merges, which bytes have not: a pair that can never meet stands for them (`_NO_MERGES`).
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.data.chat_template import CONFIG, DEFAULT, ChatTemplate
from flatout.data.library_tokenizers import GPT2_REGEX, GPT4_REGEX, ModelTokenizer
from flatout.data.tokenizer import Tokenizer
from flatout.data.tokenizer_files import FLAGS, GENERATION, OWN, TOKENIZER, portable
from flatout.errors import DataError
from flatout.files import parse_json
from flatout.gguf_file import GgufFile, read_gguf

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTES, _GPT2_WORDS = ("ByteLevel", False), ("ByteLevel", True)
# How text is cut into words, by llama.cpp's names; see `_words`.
_PRE: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (("Digits",), _GPT2_WORDS),
    "llama-bpe": (("Split", GPT4_REGEX % r"\p{N}{1,3}"), _BYTES),
    "qwen2": (("Split", GPT4_REGEX % r"\p{N}"), _BYTES),
}
_NFC = ("qwen2",)  # whose tokenizer.json normalises text
_IGNORE_MERGES = ("llama-bpe",)  # that take a word of the vocabulary whole
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
_SPACE = "▁"
_OTHER = "use a model with a tokenizer like GPT-2's, Llama's or Qwen's; a Hugging Face folder takes any tokenizer"


# --- writing ----------------------------------------------------------------------------------------------------------


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
    content = found.content
    model, added = content["model"], {entry["id"]: entry for entry in content.get("added_tokens") or []}
    if model.get("type", "BPE") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise DataError(f"GGUF has no form for its tokenizer ({model.get('type')})", _OTHER)
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", ())]
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: entry["content"] for number, entry in added.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
    if len(set(tokens)) != len(tokens):
        raise DataError("its tokenizer has two tokens with one text, which GGUF cannot hold", _OTHER)
    types = [_UNUSED if number not in texts else _NORMAL for number in range(vocab)]
    for number, entry in added.items():
        types[number] = _CONTROL if entry.get("special") else _USER
    if model.get("byte_fallback"):
        values = {**_pieces(content, merges), "model": "llama", "scores": _scores(tokens, types, merges)}
        unknown = model["vocab"].get(model.get("unk_token"))
        for number, text in enumerate(tokens):
            types[number] = _UNKNOWN if number == unknown else _BYTE if _is_byte(text) else types[number]
    else:
        pairs = [" ".join(pair) for pair in merges]
        values = {"model": "gpt2", "pre": _pre(content, merges), "merges": pairs or _no_merges(tokenizer, tokens)}
    ids = {text: number for number, text in enumerate(tokens)}
    special = {"bos_token": found.special.get("bos_token", found.begin), **found.special}
    for name, key in _NAMES.items():
        if (text := special.get(f"{name}_token")) in ids:
            values[f"{key}_token_id"] = ids[text]
    more = [stop for stop in stops if stop != tokenizer.end_of_text]
    values |= {f"{name}_token_id": stop for name, stop in zip(("eot", "eom"), more, strict=False)}
    values |= {"tokens": tokens, "token_type": types, "add_bos_token": found.begin is not None}
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if template is not None:
        values["tokenizer.chat_template"] = template.text
        others = {form: text for form, text in template.texts.items() if text != template.text and form != DEFAULT}
        values |= {f"tokenizer.chat_template.{form}": text for form, text in others.items()}
    if not isinstance(tokenizer, ModelTokenizer):
        described = {name: value for name, value in tokenizer.to_json().items() if name != "content"}
        values[OWN] = json.dumps(described)
    return values


def _no_merges(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """A pair whose second half nothing makes."""
    assert tokenizer.end_of_text is not None, "checked by the caller"
    end = tokens[tokenizer.end_of_text]
    return [f"{end[0]} {end[1:]}"]


def _pre(content: Mapping[str, Any], merges: Sequence[Any]) -> str:
    words = _words(content.get("pre_tokenizer"))
    words = (_GPT2_WORDS,) if words == (("Split", GPT2_REGEX), _BYTES) or (words == (_BYTES,) and not merges) else words
    name = next((name for name, known in _PRE.items() if words == known), None)
    rules = content.get("normalizer"), bool(content["model"].get("ignore_merges"))
    if name is None or rules != ({"type": "NFC"} if name in _NFC else None, name in _IGNORE_MERGES):
        raise DataError("llama.cpp has no pre-tokenizer that cuts text as its tokenizer.json does", _OTHER)
    return name


def _words(part: Any, inside: str = "pretokenizers") -> tuple[Any, ...]:
    """The steps of a pre-tokenizer, as far as ids depend on them."""
    if not isinstance(part, dict):
        return ()
    kind = part.get("type")
    if kind == "Sequence":
        return tuple(step for one in part.get(inside, ()) for step in _words(one, inside))
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return (("ByteLevel", part.get("use_regex", True)),)
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return (("Split", part.get("pattern", {}).get("Regex")),)
    if kind == "Digits" and part.get("individual_digits"):
        return (("Digits",),)
    return ((kind, json.dumps(part, sort_keys=True)),)


_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_SPACES: Mapping[bool, dict[str, Any]] = {
    True: {"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]},
    False: _REPLACE,
}


def _pieces(content: Mapping[str, Any], merges: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Whether a text gets a space in front; refuses what llama.cpp would join in another order."""
    normalizer, words = content.get("normalizer"), content.get("pre_tokenizer")
    prefix = next((prefix for prefix, known in _SPACES.items() if normalizer == known and words is None), None)
    if normalizer is None and isinstance(words, dict) and words.get("type") == "Metaspace" and not words.get("split"):
        prefix = {"always": True, "never": False}.get(words.get("prepend_scheme", ""))
    vocab, pairs = content["model"]["vocab"], set(merges)
    made = [key for key, _ in itertools.groupby("".join(pair) for pair in merges)]
    plain = vocab.keys() - {entry["content"] for entry in content.get("added_tokens") or []}
    whole = all(pair in pairs for text in plain for pair in _halves(text, vocab))
    if prefix is None or not whole or len(set(made)) != len(made):
        raise DataError("llama.cpp has no form for the spaces or the merges of its tokenizer.json", _OTHER)
    return {"add_space_prefix": prefix}


def _halves(text: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes this one."""
    cuts = ((text[:place], text[place:]) for place in range(1, len(text)))
    return [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]


def _scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """The sooner a piece is made, the higher; pieces that nothing makes come after all others."""
    made = dict.fromkeys("".join(pair) for pair in merges)
    ranks = {text: float(-rank) for rank, text in enumerate(made)}
    return [ranks.get(text, float(-len(ranks))) for text in tokens]


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


# --- reading ----------------------------------------------------------------------------------------------------------


def gguf_files(path: Path) -> dict[str, bytes]:
    """The files that a Hugging Face folder of this model would have beside its weights."""
    return _files(read_gguf(path))


@functools.lru_cache(maxsize=1)
def _files(gguf: GgufFile) -> dict[str, bytes]:
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in gguf.values.items()}
    tokens, types = gguf.texts("tokenizer.ggml.tokens"), values.get("token_type")
    kinds = [_NORMAL] * len(tokens) if types is None else getattr(types, "tolist", list)()
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise gguf.refuse("its tokens have other numbers of texts and types, or two of them have one text")
    while kinds and kinds[-1] == _UNUSED:
        kinds.pop()
    tokens = tokens[: len(kinds)]
    kind = gguf.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise gguf.refuse(f"its tokenizer is of kind {kind!r:.40}, which is not supported", _OTHER)
    content = _pieces_content(gguf, tokens, kinds) if kind == "llama" else _bytes_content(gguf, tokens, kinds)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _NAMES.items():
        number = values.get(f"{key}_token_id")
        if isinstance(number, int) and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    begins = values.get("add_bos_token", kind == "llama" or values.get("pre") in _IGNORE_MERGES)
    config["add_bos_token"] = bool(begins) and "bos_token" in config
    if templates := _templates(gguf):
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    if isinstance(own := gguf.values.get(OWN), str):
        with contextlib.suppress(ValueError):  # then it is the tokenizer of others
            config[OWN] = parse_json(own)
    stops = [values.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    generation = {"eos_token_id": list(dict.fromkeys(stop for stop in stops if isinstance(stop, int)))}
    files = {TOKENIZER: content, CONFIG: config, GENERATION: generation}
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}


def _templates(gguf: GgufFile) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {name.removeprefix(key).removeprefix(".") or DEFAULT: text for name, text in gguf.values.items()
             if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)}  # fmt: skip
    return found


def _bytes_content(gguf: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    pre = gguf.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise gguf.refuse(f"its pre-tokenizer {pre!r:.40} is not supported", _OTHER)
    steps = [_step(*step) for step in _PRE[pre]]
    words = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    known = set(tokens)
    merges = [_cut(merge) for merge in gguf.texts("tokenizer.ggml.merges")]
    merges = [pair for pair in merges if known.issuperset((*pair, "".join(pair)))]
    return _content(
        tokens,
        kinds,
        merges,
        normalizer={"type": "NFC"} if pre in _NFC else None,
        words=words,
        decoder=_step("ByteLevel", True, add_prefix_space=True),
        ignore_merges=pre in _IGNORE_MERGES,
    )


def _cut(merge: str) -> tuple[str, str]:
    place = merge.find(" ", 1)
    return (merge[:place], merge[place + 1 :]) if place > 0 else (merge, "")


def _step(kind: str, value: Any = None, *, add_prefix_space: bool = False) -> dict[str, Any]:
    if kind == "Split":
        return {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False}
    if kind == "Digits":
        return {"type": "Digits", "individual_digits": True}
    return {"type": kind, "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": value}


def _pieces_content(gguf: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = gguf.values.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(tokens):
        raise gguf.refuse("its tokenizer has no score for every token")
    if max(map(len, tokens), default=0) > 1000:  # all halves of every piece are tried
        raise gguf.refuse("its tokenizer has a piece of more than 1,000 characters")
    vocab = {text: number for number, text in enumerate(tokens)}
    order = sorted((number for number, kind in enumerate(kinds) if kind == _NORMAL), key=lambda n: (-scores[n], n))
    made = (sorted(_halves(tokens[n], vocab), key=lambda pair: (vocab[pair[0]], vocab[pair[1]])) for n in order)
    prefix = bool(gguf.values.get("tokenizer.ggml.add_space_prefix", True))
    unknown = next((text for text, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    decoders = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}] + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _content(
        tokens,
        kinds,
        list(itertools.chain.from_iterable(made)),
        normalizer=_SPACES[prefix],
        words=None,
        decoder={"type": "Sequence", "decoders": decoders},
        **more,
    )


def _content(
    tokens: list[str], kinds: list[int], merges: Sequence[Sequence[str]], *, normalizer: Any, words: Any, decoder: Any,
    **model: Any,
) -> dict[str, Any]:  # fmt: skip
    """tokenizer.json. Special tokens behind the others are no words of the vocabulary, as in most files."""
    last = max((number for number, kind in enumerate(kinds) if kind not in (_CONTROL, _USER)), default=-1)
    added = [
        {"id": number, "content": tokens[number], **FLAGS, "special": kind != _USER}
        for number, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER, _UNKNOWN)
    ]
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    vocab = {text: number for number, text in enumerate(tokens[: last + 1])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", **usual, **model, "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }
