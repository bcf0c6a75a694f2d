"""Tokenizers that the `tokenizers` library reads from a `tokenizer.json`: those of Hugging Face, and of models.

The library does what a file says. A few replacements in a row make a gigabyte of one letter, which aborts the process;
a regular expression can take for ever; and both may wait for a letter that no trial text has. So a file is run in this
process only if every part of it is on the lists below, which cover GPT-2, Llama, Mistral, Qwen and our own. For these
the time is linear in the text, and text grows at most `_MOST_GROWTH` times. All others run in a child process with
limits (`tokenizer_child`), which is slower.

Trap: a `tokenizer.json` may ask for truncation, padding and BPE dropout. The first loses text, the second invents it
and the third makes ids random, so all three are switched off on loading, and the description says so. A file that puts
a space before every text does so before every segment of a million characters.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.confined import Child, ChildLimits, Exceeded
from flatout.corpus.document import shown
from flatout.data.tokenizer import (
    END_OF_TEXT,
    Ids,
    Tokenizer,
    checked_ids,
    groups,
    token_dtype,
    well_formed,
    word_segments,
)
from flatout.data.tokenizer_child import UNKNOWN
from flatout.errors import CheckpointError, DataError
from flatout.files import MOST_JSON, canonical_json, parse_json, read_bounded

# How GPT-2, GPT-4 and Qwen cut text.
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = frozenset({GPT2_REGEX, GPT4_REGEX % r"\p{N}{1,3}", GPT4_REGEX % r"\p{N}"})
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


# Names under which published tokenizer files keep their end-of-text token, the most particular first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
_LARGEST_VOCAB = 2**24  # as model.vocab
# A confined tokenizer has this much processor time for a request, and 1 s more for every 50,000 characters.
_SECONDS, _CHARACTERS_A_SECOND = 10.0, 50_000
_ANOTHER_TEXT = "remove such text, or use another tokenizer"
# The `tokenizers` library takes 130 bytes for each byte of text.
_HUGGINGFACE_SEGMENT = 2**20


class _LibraryTokenizer(Tokenizer):
    """A `tokenizer.json` run by the `tokenizers` library, made deterministic.

    If its cost on a text is not known (`is_plain`), it encodes and decodes in a child process, and here the library
    opens its vocabulary alone. The post-processor is always left out: it only adds special tokens.
    """

    def _open(self, content: dict[str, Any], *, special: bool) -> dict[str, int]:
        """Opens what `tokenizer.json` holds and returns its vocabulary; an unusable one is a `ValueError`.

        `special`: text that spells a special token stays ordinary text.
        """
        import tokenizers

        self._content = _deterministic(content)
        used = {**self._content, "post_processor": None}
        self._confined = None if is_plain(used) else _Confined(used, special=special)
        if self._confined is not None:
            used |= {"normalizer": None, "pre_tokenizer": None, "decoder": None}
        try:
            with _panics():
                self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(used))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(str(error)) from error
        self._tokenizer.encode_special_tokens = special
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError("it has no tokens")
        # Ids may have gaps, so the largest one decides and not their number.
        self.vocab = max(ids.values()) + 1
        if self.vocab > _LARGEST_VOCAB:
            raise ValueError(f"its largest id is {self.vocab - 1:,}, and Flatout takes ids below {_LARGEST_VOCAB:,}")
        return ids

    def _library_ids(self, texts: Sequence[str]) -> list[Ids]:
        dtype = token_dtype(self.vocab)
        if self._confined is not None:
            return [ids.astype(dtype) for ids, _ in self._confined.encode(texts, offsets=False)]
        with _in_words(f"cannot encode one of {len(texts):,} texts"):
            # This call differs from plain `encode` in not working out which characters each token came from.
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=dtype) for each in encoded]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        numbers = checked_ids(ids, self.vocab).tolist()
        if self._confined is not None:
            return self._confined.decode(numbers)
        with _in_words("cannot decode its ids"):
            return self._tokenizer.decode(numbers, skip_special_tokens=False)


@final
class HuggingFaceTokenizer(_LibraryTokenizer):
    """Any tokenizer that the `tokenizers` library can read from a `tokenizer.json`."""

    kind = "huggingface"

    def __init__(self, content: dict[str, Any]) -> None:
        ids = self._open(content, special=True)
        self.end_of_text_name = next((name for name in END_OF_TEXT_NAMES if name in ids), None)
        self.end_of_text = None if self.end_of_text_name is None else ids[self.end_of_text_name]
        self._special = self._special_tokens(ids)
        self._is_special = np.zeros(self.vocab, dtype=bool)
        self._is_special[list(self._special.values())] = True

    def _special_tokens(self, ids: dict[str, int]) -> dict[str, int]:
        """The tokens that no text may become. The unknown token is not one of them, since unknown text becomes it."""
        model = self._content.get("model", {})
        unknown = [ids.get(str(model.get("unk_token")), -1), model.get("unk_id", -1)]  # no set: it may be any value
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}
        if self.end_of_text is not None:
            special |= {name: ids[name] for name in END_OF_TEXT_NAMES if ids.get(name) == self.end_of_text}
        return {content: number for content, number in special.items() if number not in unknown}

    def encode(self, text: str) -> Ids:
        # One at a time: the library keeps much about every token until all texts of a call are done.
        encoded = [self._encode_parts([part])[0] for part in word_segments(text, _HUGGINGFACE_SEGMENT)]
        return encoded[0] if len(encoded) == 1 else np.concatenate([np.empty(0, token_dtype(self.vocab)), *encoded])

    def _encode_group(self, texts: list[str]) -> list[Ids]:
        if len(texts) == 1:
            return super()._encode_group(texts)
        return self._encode_parts([well_formed(text) for text in texts])

    def _encode_parts(self, texts: list[str]) -> list[Ids]:
        encoded = self._library_ids(texts)
        for number, ids in enumerate(encoded):
            if self._is_special[ids].any():
                encoded[number] = self._without_special(texts[number])
        return encoded

    def _without_special(self, text: str) -> Ids:
        # A model whose own vocabulary holds the special token's text can still produce it from that text. Encoding the
        # first character of each such place on its own makes that impossible.
        names = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
        cuts = [0, *(match.start() + 1 for match in re.finditer(f"(?={names})", text)), len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]
        ids = np.concatenate(self._library_ids(parts))
        if self._is_special[ids].any():
            name = next(name for name, number in self._special.items() if number in ids)
            raise DataError(
                f"the tokenizer turns ordinary text into its special token {name!r}",
                "remove such text from the source, or use another tokenizer",
            )
        return ids

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "content": self._content}


@final
class ModelTokenizer(_LibraryTokenizer):
    """The tokenizer of a Hugging Face model, for text that its chat template wrote.

    Special tokens are parsed where the text spells them, and none is added: the post-processor would put a second BOS
    in front. It would also move offsets away from white space, and masks go by offsets.
    `special` holds the special tokens that the model's files name, such as `bos_token`; templates see them under these
    names. `begin` is the token that the model expects before a text that no template wrote, which is BOS, or None.
    """

    kind = "model"

    def __init__(self, content: dict[str, Any], special: dict[str, str], begin: str | None) -> None:
        ids = self._open(content, special=False)
        named = {**special, "first token": begin} if begin is not None else special
        missing = [f"{name} {token!r}" for name, token in named.items() if token not in ids]
        if missing:
            raise ValueError(f"the vocabulary lacks its {missing[0]}")
        self.special = dict(special)
        self.begin = begin
        self.begin_of_text = ids[begin] if begin is not None else None
        self.end_of_text = ids[special["eos_token"]] if "eos_token" in special else None
        added = self._tokenizer.get_added_tokens_decoder().values()
        # The longest first, so that one whose text begins another's is not found in its place.
        texts = {token.content for token in added if token.special} | set(special.values())
        self.special_texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return self._library_ids([well_formed(text) for text in texts])

    def encode_prompt(self, text: str) -> Ids:
        """The ids of a text that no template wrote, after BOS where the model expects it and the text has none."""
        ids = self.encode(text)
        return np.concatenate([np.array([self.begin_of_text], ids.dtype), ids]) if self.needs_begin(ids) else ids

    def needs_begin(self, ids: Ids) -> bool:
        """Whether BOS is still to be put before the ids of a text that no template wrote."""
        return self.begin_of_text is not None and not (len(ids) and int(ids[0]) == self.begin_of_text)

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The library's encoding of each text: `ids`, and by `token_to_chars` the characters each token came from.

        Texts are well-formed already: characters are counted in them. The library works on many at once.
        """
        if self._confined is not None:
            return [_Encoding(*found) for found in self._confined.encode(texts, offsets=True)]
        with _in_words(f"cannot encode one of {len(texts):,} texts"):
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text."""
        return self._tokenizer.token_to_id(text)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "content": self._content, "special": self.special, "begin": self.begin}


@final
class _Confined:
    """The library's work on a tokenizer.json in the child process, with limits in proportion to the text."""

    def __init__(self, content: dict[str, Any], *, special: bool) -> None:
        self._content, self._special = json.dumps(content), special
        self._key = hashlib.sha256(f"{special} {self._content}".encode("ascii")).hexdigest()

    def encode(self, texts: Sequence[str], *, offsets: bool) -> list[tuple[Ids, Ids]]:
        """The ids of each text, and if asked for where the characters of each token begin and end."""
        found: list[tuple[Ids, Ids]] = []
        for group in groups(texts):
            for answer in self._ask({"texts": group, "offsets": offsets}, sum(map(len, group))):
                ids, *places = [np.frombuffer(base64.b64decode(part), np.uint32) for part in answer]
                found.append((ids, places[0].reshape(-1, 2) if places else ids[:0]))
        return found

    def decode(self, ids: list[int]) -> str:
        return self._ask({"ids": ids}, len(ids))

    def _ask(self, request: dict[str, Any], size: int) -> Any:
        seconds = _SECONDS + size / _CHARACTERS_A_SECOND
        try:
            answer = child().ask({"key": self._key, **request}, seconds=seconds)
            if answer[0] == UNKNOWN:
                opened = {"key": self._key, "open": self._content, "special": self._special}
                answer = child().ask(opened)
                if answer[0] == "done":
                    answer = child().ask({"key": self._key, **request}, seconds=seconds)
        except Exceeded as error:
            # Not a DataError, which would drop this text and go on: the next one would take as long.
            raise CheckpointError(
                f"the tokenizer {error}, for {size:,} characters or tokens", "use another tokenizer, or another model"
            ) from error
        if answer[0] != "done":
            raise DataError(f"the tokenizer refuses a text: {answer[1]:.300}", _ANOTHER_TEXT)
        return answer[1]


@final
class _Encoding:
    """The two members of the library's class of this name that are used."""

    def __init__(self, ids: Ids, places: Ids) -> None:
        self.ids, self._places = ids, places

    def token_to_chars(self, token: int) -> tuple[int, int]:
        begin, end = self._places[token].tolist()
        return begin, end


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Turns panics of the library, which are no `Exception` in Python, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        with _panics():
            yield
    except Exception as error:  # the library raises nothing more particular
        raise DataError(f"the tokenizer {what}: {error!s:.300}", _ANOTHER_TEXT) from error


def _deterministic(content: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` that neither cuts, nor pads, nor drops merges at random."""
    content = {**content, "truncation": None, "padding": None}
    model = content.get("model")
    if isinstance(model, dict) and model.get("dropout") is not None:
        content["model"] = {**model, "dropout": None}
    return content


def check_no_code(path: Path) -> None:
    """Refuses a tokenizer.json beside a tokenizer_config.json that names code: without that code it may be another."""
    config = path.with_name("tokenizer_config.json")
    if path.name != "tokenizer.json" or not config.is_file():
        return
    try:
        values = parse_json(read_bounded(config))
    except (OSError, ValueError):
        return  # nothing else of it is read
    if isinstance(values, dict) and values.get("auto_map"):
        raise names_code(config, f", or copy {path.name} to a folder of its own")


def names_code(config: Path, otherwise: str = "") -> DataError:
    """The error for a tokenizer_config.json that names code."""
    return DataError(
        f"{shown(config)} names code of the tokenizer's own (auto_map), which Flatout never runs",
        f"if tokenizer.json gives the same tokens, take auto_map out of the file{otherwise}",
    )


def try_out(content: dict[str, Any]) -> str | None:
    """Refuses an unusable `tokenizer.json` from others with a `ValueError`; the library aborts the process on some.

    Returns the token that its post-processor puts before a text, if there is one.
    """
    try:
        plain = {**content, "truncation": None, "padding": None}
        size = len(canonical_json({"kind": "model", "content": plain}))
        if size > MOST_JSON:  # a dataset or a checkpoint with it could not be opened again
            raise ValueError(f"it has {size:,} bytes as a checkpoint stores it, and the limit is {MOST_JSON:,}")
        status, value = child().ask({"try": json.dumps(plain)})
    except Exceeded as error:
        raise ValueError(f"it {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        child().close()
    if status == "wrong":
        raise ValueError(value)
    return value


@functools.cache
def child() -> Child:
    """The process that runs tokenizers of others. A large one takes 1 s and half a gigabyte.

    Output is in proportion to the text: a token takes 16 bytes with its place, and a part that makes twelve tokens of a
    byte is a bomb.
    """
    limits = ChildLimits(seconds=_SECONDS, patience=300.0, memory=3 * 2**29, output=2**20, output_times=256)
    return Child("flatout.data.tokenizer_child", ("tokenizers",), limits)
