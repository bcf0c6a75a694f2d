"""Text to token ids and back, by one of six tokenizers with the same methods.

A tokenizer is a value: `to_json` describes it completely, `fingerprint` is the hash of that description, and two
tokenizers with one fingerprint give the same ids for every text. Shards and checkpoints carry the description. Those
that the `tokenizers` library runs are in `library_tokenizers`.

Contract: `encode` gives a 1-D array of unsigned ids below `vocab`, and never the end-of-text id, which is added between
documents by the caller. Text that spells `<|endoftext|>` is ordinary text, except for the kind `model`, which reads
text that a chat template wrote. `decode(encode(text)) == text` for every well-formed text, except where a Hugging Face
file normalises text, or a `char` tokenizer drops or replaces characters it has never seen. `encode_batch` gives the ids
that `encode` gives for each text, in a fraction of the time where texts are short.

Memory does not grow with a text beside its ids: a long one is encoded in segments, cut where a token begins anyway.
Where a quarter of a million characters hold no such place, such as a line of nothing but letters, the cut falls
anywhere. Without such a stretch GPT-2's ids are those of the whole text.
"""

import abc
import difflib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from flatout.config.sizes import learned_vocab
from flatout.corpus.document import GPT2_END_OF_TEXT, GPT2_RANKS_SHA256, gpt2_tokens
from flatout.errors import DataError
from flatout.files import parse_json, read_bounded

TokenizerKind = Literal["char", "bytes", "gpt2", "huggingface", "model", "ids"]
UnknownPolicy = Literal["error", "drop", "replace"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts text before merging: contractions, then words, numbers and the rest, each with the space before it, and
# white space, here without GPT-2's look-ahead. A regular expression with one runs at half the speed, and exhausts its
# stack on a million spaces; what it would see is found by `_inner_cuts` before.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# Unicode White_Space, which is what \s means above. Python's own \s also takes in \x1c-\x1f and would cut wrongly.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Marks between texts and inside them: characters that are most unlikely in a text; if one is there, it costs time only.
_CUT_MARK, _END_MARK = "\x02", "\x03"
_INTACT = "give a tokenizer.json that is intact"
_SEGMENT = 2**18
# How far beyond a segment to look for a good place to cut. A single word of both takes tiktoken 0.3 s and 80 MB.
_STRETCH = 2**18
# Where GPT-2's split cuts whatever stands around: before the last white space of a run, after a letter or digit before
# an ASCII character of another class, and between Chinese, Japanese or Korean letters and their punctuation.
_GPT2_CUT = re.compile(
    rf"[{_SPACE}](?=[^{_SPACE}])|(?<=[A-Za-z])(?=[!-@\[-`{{-~])|(?<=[0-9])(?=[!-/:-~])"
    r"|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])(?=[\u3001\u3002\uff01\uff0c\uff1f])"
)
# Where nearly every tokenizer cuts: before a single space, or before a single line end after a letter or digit.
_WORD_CUT = re.compile(rf"(?<=[^{_SPACE}]) (?=[^{_SPACE}])|(?<=[^\W_])\n(?=[^{_SPACE}])")


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The little-endian type that ids below `vocab` are kept in: two bytes if they fit, else four."""
    if not 1 <= vocab <= 2**32:
        raise ValueError(f"a vocabulary has 1 to 2**32 ids, not {vocab}")
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


class Tokenizer(abc.ABC):
    """What every tokenizer offers. Subclasses are final; they set the attributes once and never change them."""

    kind: TokenizerKind
    vocab: int
    end_of_text: int | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    @abc.abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of `text`, without an end-of-text id."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, as `encode` gives them; arrays may be parts of one larger array."""
        return [ids for group in groups(texts) for ids in self._encode_group(group)]

    def _encode_group(self, texts: list[str]) -> list[Ids]:
        """The same of a few neighbours; a long text comes alone."""
        return [self.encode(text) for text in texts]

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, an id outside the vocabulary is a `DataError`."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A description of plain JSON values from which `tokenizer_from_json` makes the same tokenizer."""


@final
class CharTokenizer(Tokenizer):
    """One id per character, in the order of their code points. Knows only the characters it was made from.

    What becomes of others is `unknown`: an error, nothing, or one more id after theirs, which decodes to U+FFFD. The
    last id is the end of a text. Tokenizers from before they had one stay without (`ends` false).
    """

    kind = "char"

    def __init__(self, characters: str, unknown: UnknownPolicy = "error", *, ends: bool = True) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError("the characters of a char tokenizer are sorted, without repetition, and at least one")
        if unknown not in ("error", "drop", "replace"):
            raise ValueError(f"unknown characters are an error, or drop or replace them, not {unknown!r}")
        self.unknown = unknown
        self._texts = len(characters) + (unknown == "replace")  # ids that stand for text
        self.vocab = self._texts + ends
        self.end_of_text = self._texts if ends else None
        self._characters = characters
        self._code_of_id = _code_points(characters + "\ufffd")
        # A table over code points makes encoding one numpy gather: 1 MB takes a few milliseconds, not a Python loop.
        # Unknown ones get the id after the last, and so does the table's last entry, which stands for all beyond it.
        self._id_of_code = np.full(
            int(self._code_of_id[-2]) + 2, len(characters), dtype=token_dtype(len(characters) + 1)
        )
        self._id_of_code[self._code_of_id[:-1]] = np.arange(len(characters))

    @classmethod
    def from_text(cls, chunks: Iterable[str]) -> "CharTokenizer":
        """A tokenizer for exactly the characters that occur in `chunks`."""
        characters: set[str] = set()
        for chunk in chunks:
            characters.update(chunk)
        if not characters:
            raise DataError("there is no text to take characters from", "give a source that is not empty")
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def _encode_group(self, texts: list[str]) -> list[Ids]:
        ids = self._id_of_code.take(_code_points("".join(texts)), mode="clip")
        bounds = np.cumsum([0, *map(len, texts)])
        if self.unknown != "replace" and not (known := ids < self._texts).all():
            if self.unknown == "error":
                raise self._unknown_error(texts)
            ids, bounds = ids[known], np.concatenate([[0], np.cumsum(known)])[bounds]
        ids = ids.astype(token_dtype(self.vocab), copy=False)
        return [ids[start:end] for start, end in itertools.pairwise(bounds.tolist())]

    def _unknown_error(self, texts: Sequence[str]) -> DataError:
        known = set(self._characters)
        text = next(text for text in texts if not known.issuperset(text))
        position, character = next(pair for pair in enumerate(text) if pair[1] not in known)
        return DataError(
            f"character {character!r} (U+{ord(character):04X}) at position {position} is not among the "
            f"{len(self._characters)} characters of this tokenizer",
            "leave it out, prepare the data again from text that contains it or with data.unknown_characters=replace, "
            "or use the tokenizer `bytes`, which knows every text",
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        values = checked_ids(ids, self.vocab)
        parts = (
            np.split(values, np.flatnonzero(values == self.end_of_text)) if self.end_of_text is not None else [values]
        )
        texts = [self._code_of_id[part[part < self._texts]].tobytes() for part in parts]
        return END_OF_TEXT.join(text.decode("utf-32-le", "surrogatepass") for text in texts)

    def to_json(self) -> dict[str, Any]:
        # Datasets from before there was a choice say nothing about it and mean "error", and no end of text.
        policy = {} if self.unknown == "error" else {"unknown": self.unknown}
        ending = {} if self.end_of_text is None else {"end_of_text": END_OF_TEXT}
        return {"kind": self.kind, "characters": self._characters, **policy, **ending}


@final
class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and id 256 for the end of a text. Knows every text."""

    kind = "bytes"
    vocab = 257
    end_of_text = 256

    def encode(self, text: str) -> Ids:
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raw = well_formed(text).encode("utf-8")
        return np.frombuffer(raw, dtype=np.uint8).astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        values = checked_ids(ids, self.vocab)
        parts = np.split(values, np.flatnonzero(values == self.end_of_text))
        texts = [part[part < 256].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts]
        return END_OF_TEXT.join(texts)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@final
class IdTokenizer(Tokenizer):
    """Ids of a vocabulary whose texts are not known, written as numbers with spaces between them."""

    kind = "ids"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> Ids:
        words = text.split()
        if not all(word.isdecimal() and len(word) < 11 for word in words):
            raise DataError("this model knows no text, only token ids", 'write ids with spaces between them: "12 7 3"')
        return checked_ids([int(word) for word in words], self.vocab).astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return " ".join(str(id) for id in checked_ids(ids, self.vocab).tolist())

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab": self.vocab}


@final
class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, from the rank file that ships with Flatout.

    tiktoken splits and merges, on text in which marks stand wherever the split needs to look ahead. To tiktoken a mark
    is a special token, which ends a piece of text; its id is above the vocabulary and is taken out afterwards.
    """

    kind = "gpt2"
    vocab = GPT2_END_OF_TEXT + 1
    end_of_text = GPT2_END_OF_TEXT

    def __init__(self) -> None:
        import tiktoken

        self._cut_id, self._end_id = self.vocab, self.vocab + 1
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(gpt2_tokens())},
            special_tokens={END_OF_TEXT: GPT2_END_OF_TEXT, _CUT_MARK: self._cut_id, _END_MARK: self._end_id},
        )
        self._spaces = _space_table()
        # A text that ends in white space ends there, so to look-ahead the mark after it is no word that follows.
        self._spaces_and_end = self._spaces.copy()
        self._spaces_and_end[ord(_END_MARK)] = True

    def encode(self, text: str) -> Ids:
        parts = [self._encode_segment(part) for part in _segments(text, _SEGMENT, _GPT2_CUT)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, token_dtype(self.vocab)), *parts])

    def _encode_group(self, texts: list[str]) -> list[Ids]:
        joined = _END_MARK.join(texts)
        if len(texts) == 1 or _CUT_MARK in joined or joined.count(_END_MARK) != len(texts) - 1:
            return super()._encode_group(texts)
        marked = _CUT_MARK.join(_inner_cuts(joined, self._spaces_and_end))
        ids = self._ids(marked, {_CUT_MARK, _END_MARK})
        ends = np.flatnonzero(ids == self._end_id).tolist()
        return [ids[start + 1 : end] for start, end in itertools.pairwise([-1, *ends, len(ids)])]

    def _encode_segment(self, text: str) -> Ids:
        parts = _inner_cuts(text, self._spaces)
        if _CUT_MARK in text:
            return np.concatenate([self._ids(part, set()) for part in parts])
        return self._ids(_CUT_MARK.join(parts), {_CUT_MARK})

    def _ids(self, text: str, marks: set[str]) -> Ids:
        # With the marks allowed and nothing forbidden, tiktoken takes all else as ordinary text.
        try:
            ids = self._encoding.encode_to_numpy(text, allowed_special=marks, disallowed_special=())
        except UnicodeEncodeError:
            ids = self._encoding.encode_to_numpy(well_formed(text), allowed_special=marks, disallowed_special=())
        return ids[ids != self._cut_id].astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self._encoding.decode(checked_ids(ids, self.vocab).tolist(), errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks_sha256": GPT2_RANKS_SHA256}


def load_tokenizer(spec: str, corpus: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """The tokenizer that a config names: `char`, `bytes`, `gpt2`, or the path of a JSON file.

    `char` needs `corpus`, which gives the texts to take characters from; `bpe-512` and its like are learned while data
    is prepared and only found in its folder. A file may be a Hugging Face `tokenizer.json` or one that Flatout wrote
    beside its shards, so that new text can be prepared for an old model.
    """
    if spec == "char" or learned_vocab(spec) is not None:
        if corpus is None or spec != "char":
            raise DataError(
                f"the tokenizer `{spec}` is made from a text, and none was given",
                "give the tokenizer.json of a prepared dataset instead",
            )
        return CharTokenizer.from_text(corpus())
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        return Gpt2Tokenizer()
    path = Path(spec)
    if not os.path.isfile(path):  # which takes a name that is too long for one of no file
        raise DataError(f"there is no tokenizer {spec!r}", _tokenizer_hint(spec, path))
    try:
        content = parse_json(read_bounded(path))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the tokenizer {spec!r}: {error}", _INTACT) from error
    if isinstance(content, dict) and "kind" in content and "model" not in content:
        return tokenizer_from_json(content)
    if isinstance(content, dict):
        from flatout.data import library_tokenizers  # which needs this module

        library_tokenizers.check_no_code(path)
        try:
            library_tokenizers.try_out(content)
        except ValueError as error:
            raise DataError(f"the tokenizer {spec!r} is not usable: {error}", _INTACT) from error
    return tokenizer_from_json({"kind": "huggingface", "content": content})


def tokenizer_from_json(description: Any) -> Tokenizer:
    """The tokenizer that `to_json` described; whatever else is given is a `DataError`."""
    if not isinstance(description, dict):
        raise DataError("the description of a tokenizer is no JSON object", _INTACT)
    kind = description.get("kind")
    try:
        return _described(kind, description)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the description of a {kind} tokenizer is not usable: {error}", _INTACT) from error


def _described(kind: object, description: dict[str, Any]) -> Tokenizer:
    from flatout.data import library_tokenizers  # which needs this module

    def field(name: str, of: type, *usual: Any) -> Any:
        value = description.get(name, *usual)
        if type(value) is not of and value not in usual:
            raise ValueError(f"its field {name!r} is missing or of another type")
        return value

    match kind:
        case "char":
            if (ending := description.get("end_of_text")) not in (None, END_OF_TEXT):
                raise ValueError(f"its end of text is {ending!r:.100}, and this version has {END_OF_TEXT!r}")
            return CharTokenizer(field("characters", str), field("unknown", str, "error"), ends=ending is not None)
        case "bytes":
            return ByteTokenizer()
        case "gpt2":
            if (ranks := field("ranks_sha256", str)) != GPT2_RANKS_SHA256:
                raise ValueError(f"it was made with GPT-2 ranks {ranks}, and this version has {GPT2_RANKS_SHA256}")
            return Gpt2Tokenizer()
        case "huggingface":
            return library_tokenizers.HuggingFaceTokenizer(field("content", dict))
        case "model":
            special = field("special", dict)
            if not all(isinstance(token, str) for token in special.values()):
                raise ValueError("its special tokens are no names with texts")
            return library_tokenizers.ModelTokenizer(field("content", dict), special, field("begin", str, None))
        case "ids":
            if not 1 <= (vocab := field("vocab", int)) <= 2**32:
                raise ValueError(f"its vocabulary is {vocab}")
            return IdTokenizer(vocab)
    raise DataError(
        f"a tokenizer of kind {kind!r:.100} is unknown",
        "the kinds are char, bytes, gpt2, huggingface, model and ids; is flatout up to date?",
    )


def word_segments(text: str, size: int) -> Iterator[str]:
    """`text`, well-formed, in parts of about `size` characters, cut between words where there are any."""
    return _segments(well_formed(text), size, _WORD_CUT)


def _tokenizer_hint(spec: str, path: Path) -> str:
    if os.path.isdir(path):
        return f"that is a folder: give the tokenizer.json inside it, {str(path / 'tokenizer.json')!r}"
    if path.suffix == ".json" or len(path.parts) > 1:
        return "check the path; it must be a tokenizer.json file"
    close = difflib.get_close_matches(spec.lower(), ["char", "bytes", "gpt2"], n=1, cutoff=0.5)
    choices = "use char, bytes, gpt2, bpe-512 or another number, or the path of a tokenizer.json"
    return f"did you mean {close[0]!r}? {choices}" if close else choices


def _segments(text: str, size: int, cut: re.Pattern[str]) -> Iterator[str]:
    """`text` in parts that end at the first place for a `cut` after `size` characters, or _STRETCH later anywhere."""
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > size:
            match = cut.search(text, start + size, start + size + _STRETCH)
            end = match.start() if match else min(start + size + _STRETCH, end)
        yield text[start:end]
        start = end


def groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Neighbouring texts whose characters together are at most a segment; a longer text is alone."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _SEGMENT:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _inner_cuts(text: str, spaces: npt.NDArray[np.bool_]) -> list[str]:
    """`text`, cut before the last character of every run of two or more white-space characters that a word follows.

    GPT-2's split does so by looking ahead: the last one is the space before the word, or else a piece of its own.
    """
    is_space = spaces.take(_code_points(text), mode="clip")
    cuts = np.flatnonzero(is_space[:-2] & is_space[1:-1] & ~is_space[2:]) + 1
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts.tolist(), len(text)])]


def _space_table() -> npt.NDArray[np.bool_]:
    """Whether each code point is white space; the last entry stands for all that follow."""
    is_space = re.compile(f"[{_SPACE}]").match
    return np.array([is_space(chr(code)) is not None for code in range(0x3002)])


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, since UTF-8 has no form for them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def checked_ids(ids: Sequence[int] | npt.NDArray[Any], vocab: int) -> npt.NDArray[np.int64]:
    values = np.asarray(ids, dtype=np.int64).reshape(-1)
    if values.size and int(values.view(np.uint64).max()) >= vocab:  # a negative id is a large one, too
        wrong = next(int(value) for value in values if not 0 <= value < vocab)
        raise DataError(
            f"token id {wrong} is outside the tokenizer's vocabulary of {vocab}",
            "use the tokenizer the ids were made with",
        )
    return values
