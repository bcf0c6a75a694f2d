"""Text to token ids and back, by one of six tokenizers that all answer to the same few names.

Idea: a tokenizer is a value. `to_json` describes it completely, `fingerprint` is the hash of that description, and two
tokenizers with one fingerprint give the same ids for every text. Shards and checkpoints carry the description, so a
model can always be asked in the language it was taught.

Contract: `encode` gives a 1-D array of unsigned ids below `vocab`, and never the end-of-text id: that one is added
between documents by whoever knows where documents end. Text that merely spells `<|endoftext|>` is ordinary text. The
one exception is `model`, which reads what a chat template wrote: there the text of a special token is that token.
`decode(encode(text)) == text` for every well-formed text, except where a Hugging Face file normalises text or lacks it,
or a `char` tokenizer was told to drop or replace what it has never seen. `encode_batch` gives the ids that `encode`
gives for each text; many short texts cost a fraction of the time that way.

Beside the ids, memory does not grow with a text: a long one is encoded a segment at a time, cut where a token begins
anyway. Where a quarter of a million characters in a row hold no place that is sure to be one, such as a line of nothing
but letters, the cut falls anywhere. Without such a stretch GPT-2's ids are those of the whole text.

Trap: a `tokenizer.json` may ask for truncation, padding and BPE dropout. The first loses text, the second invents it
and the third makes ids random, so all three are switched off on loading, and the description says so. One that puts a
space before every text does so before every segment, too; segments of a Hugging Face tokenizer have a million
characters.
"""

import abc
import base64
import contextlib
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
from flatout.confined import Child, ChildLimits, Exceeded
from flatout.corpus.document import GPT2_END_OF_TEXT, GPT2_RANKS_SHA256, gpt2_tokens, shown
from flatout.data.tokenizer_child import UNKNOWN
from flatout.data.tokenizer_parts import is_plain
from flatout.errors import CheckpointError, DataError
from flatout.files import MOST_JSON, canonical_json, parse_json, read_bounded

TokenizerKind = Literal["char", "bytes", "gpt2", "huggingface", "model", "ids"]
UnknownPolicy = Literal["error", "drop", "replace"]
Ids = npt.NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = "<|endoftext|>"
# Names under which published tokenizer files keep their end-of-text token, the most particular first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")

# How GPT-2 cuts text before merging: contractions, then words, numbers and the rest, each with the space before it, and
# white space, here without GPT-2's look-ahead. A regular expression with one runs at half the speed, and exhausts its
# stack on a million spaces; what it would see is found by `_inner_cuts` before.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# Unicode White_Space, which is what \s means above. Python's own \s also takes in \x1c-\x1f and would cut wrongly.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Marks between texts and inside them: characters that are most unlikely in a text; if one is there, it costs time only.
_CUT_MARK, _END_MARK = "\x02", "\x03"

_INTACT = "give a tokenizer.json that is intact"
_LARGEST_VOCAB = 2**24  # as model.vocab
# A confined tokenizer has this much processor time for a request, and 1 s more for every 50,000 characters.
_SECONDS, _CHARACTERS_A_SECOND = 10.0, 50_000
_ANOTHER_TEXT = "remove such text, or use another tokenizer"
_SEGMENT = 2**18
# How far beyond a segment to look for a good place to cut. A single word of both takes tiktoken 0.3 s and 80 MB.
_STRETCH = 2**18
# The `tokenizers` library takes 130 bytes for each byte of text.
_HUGGINGFACE_SEGMENT = 2**20
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
        values = _checked_ids(ids, self.vocab)
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
            raw = _well_formed(text).encode("utf-8")
        return np.frombuffer(raw, dtype=np.uint8).astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        values = _checked_ids(ids, self.vocab)
        parts = np.split(values, np.flatnonzero(values == self.end_of_text))
        texts = [part[part < 256].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts]
        return END_OF_TEXT.join(texts)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@final
class IdTokenizer(Tokenizer):
    """Numbers for a vocabulary whose text nobody has told: ids are written as such, with spaces between them."""

    kind = "ids"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> Ids:
        words = text.split()
        if not all(word.isdecimal() and len(word) < 11 for word in words):
            raise DataError("this model knows no text, only token ids", 'write ids with spaces between them: "12 7 3"')
        return _checked_ids([int(word) for word in words], self.vocab).astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return " ".join(str(id) for id in _checked_ids(ids, self.vocab).tolist())

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
            ids = self._encoding.encode_to_numpy(_well_formed(text), allowed_special=marks, disallowed_special=())
        return ids[ids != self._cut_id].astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self._encoding.decode(_checked_ids(ids, self.vocab).tolist(), errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks_sha256": GPT2_RANKS_SHA256}


class _LibraryTokenizer(Tokenizer):
    """What the `tokenizers` library reads from a `tokenizer.json`, made deterministic.

    One whose cost on a text is not known (`tokenizer_parts`) encodes and decodes in a child process. Here the library
    then opens its vocabulary alone. The post-processor is left out in any case: it only adds special tokens.
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
        numbers = _checked_ids(ids, self.vocab).tolist()
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
        """The tokens that no text may become. The unknown token is not one of them: unknown text does become it."""
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
        return self._encode_parts([_well_formed(text) for text in texts])

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
        return self._library_ids([_well_formed(text) for text in texts])

    def encode_prompt(self, text: str) -> Ids:
        """The ids of a text that no template wrote, after BOS where the model expects it and the text has none."""
        ids = self.encode(text)
        return np.concatenate([np.array([self.begin_of_text], ids.dtype), ids]) if self.needs_begin(ids) else ids

    def needs_begin(self, ids: Ids) -> bool:
        """Whether BOS is still to be put before the ids of a text that no template wrote."""
        return self.begin_of_text is not None and not (len(ids) and int(ids[0]) == self.begin_of_text)

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """What the library says of each text: `ids`, and by `token_to_chars` the characters each token came from.

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
    """What the library does with a tokenizer.json in the child process, with limits that go by the text."""

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
            # No DataError, which would drop this text and go on: the next one would take as long.
            raise CheckpointError(
                f"the tokenizer {error}, for {size:,} characters or tokens", "use another tokenizer, or another model"
            ) from error
        if answer[0] != "done":
            raise DataError(f"the tokenizer refuses a text: {answer[1]:.300}", _ANOTHER_TEXT)
        return answer[1]


@final
class _Encoding:
    """The two things that the library's own class of this name is asked for."""

    def __init__(self, ids: Ids, places: Ids) -> None:
        self.ids, self._places = ids, places

    def token_to_chars(self, token: int) -> tuple[int, int]:
        begin, end = self._places[token].tolist()
        return begin, end


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Panics of the library are no `Exception` in Python; here they become one."""
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


def load_tokenizer(spec: str, corpus: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """The tokenizer that a config names: `char`, `bytes`, `gpt2`, or the path of a JSON file.

    `char` needs `corpus`, which gives the texts to take characters from; `bpe-512` and its like are learned while data
    is prepared (data/pack.py) and only found in its folder. A file may be a Hugging Face `tokenizer.json`
    or one that Flatout wrote beside its shards, so that new text can be prepared for an old model.
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
        _check_no_code(path)
        try:
            try_out(content)
        except ValueError as error:
            raise DataError(f"the tokenizer {spec!r} is not usable: {error}", _INTACT) from error
    return tokenizer_from_json({"kind": "huggingface", "content": content})


def _check_no_code(path: Path) -> None:
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
    """What is said of a tokenizer_config.json that names code."""
    return DataError(
        f"{shown(config)} names code of the tokenizer's own (auto_map), which Flatout never runs",
        f"if tokenizer.json gives the same tokens, take auto_map out of the file{otherwise}",
    )


def try_out(content: dict[str, Any]) -> str | None:
    """Refuses a `tokenizer.json` of somebody else that is unusable, as a `ValueError`: the library ends the whole
    process on some. Returns the token that its post-processor puts before a text, if there is one."""
    try:
        plain = {**content, "truncation": None, "padding": None}
        size = len(canonical_json({"kind": "model", "content": plain}))
        if size > MOST_JSON:  # a dataset or a checkpoint with it could not be opened again
            raise ValueError(f"it has {size:,} bytes as a checkpoint stores it, and the limit is {MOST_JSON:,}")
        told, value = child().ask({"try": json.dumps(plain)})
    except Exceeded as error:
        raise ValueError(f"it {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        child().close()
    if told == "wrong":
        raise ValueError(value)
    return value


@functools.cache
def child() -> Child:
    """The process that runs tokenizers of others. A large one takes 1 s and half a gigabyte.

    Output is in proportion to the text: a token takes 16 bytes with its place, and no part makes twelve tokens of a
    byte without being a bomb.
    """
    limits = ChildLimits(seconds=_SECONDS, patience=300.0, memory=3 * 2**29, output=2**20, output_times=256)
    return Child("flatout.data.tokenizer_child", ("tokenizers",), limits)


def tokenizer_from_json(description: Any) -> Tokenizer:
    """The tokenizer that `to_json` described; whatever else is given is a `DataError`."""
    if not isinstance(description, dict):
        raise DataError("the description of a tokenizer is no JSON object", _INTACT)
    kind = description.get("kind")
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise DataError(
            f"a tokenizer of kind {kind!r:.100} is unknown",
            "the kinds are char, bytes, gpt2, huggingface, model and ids; is flatout up to date?",
        )
    try:
        return made(description)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the description of a {kind} tokenizer is not usable: {error}", _INTACT) from error


def _char_tokenizer(description: dict[str, Any]) -> CharTokenizer:
    if (ending := description.get("end_of_text")) not in (None, END_OF_TEXT):
        raise ValueError(f"its end of text is {ending!r:.100}, and this version has {END_OF_TEXT!r}")
    characters, unknown = _text_field(description, "characters"), description.get("unknown", "error")
    return CharTokenizer(characters, unknown, ends=ending is not None)


def _gpt2_tokenizer(description: dict[str, Any]) -> Gpt2Tokenizer:
    if (ranks := _text_field(description, "ranks_sha256")) != GPT2_RANKS_SHA256:
        raise ValueError(f"it was made with GPT-2 ranks {ranks}, and this version has {GPT2_RANKS_SHA256}")
    return Gpt2Tokenizer()


def _model_tokenizer(description: dict[str, Any]) -> ModelTokenizer:
    content, special, begin = _content_field(description), description.get("special"), description.get("begin")
    if not isinstance(special, dict) or not all(isinstance(token, str) for token in special.values()):
        raise ValueError("its special tokens are no names with texts")
    if begin is not None and not isinstance(begin, str):
        raise ValueError("the token that texts begin with is no text")
    return ModelTokenizer(content, special, begin)


def _id_tokenizer(description: dict[str, Any]) -> IdTokenizer:
    if type(vocab := description.get("vocab")) is not int or not 1 <= vocab <= 2**32:
        raise ValueError("its vocabulary is no number")
    return IdTokenizer(vocab)


def _text_field(description: dict[str, Any], name: str) -> str:
    if not isinstance(value := description.get(name), str):
        raise ValueError(f"its field {name!r} is missing or not text")
    return value


def _content_field(description: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(content := description.get("content"), dict):
        raise ValueError("its content is not a JSON object")
    return content


_KINDS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "char": _char_tokenizer,
    "bytes": lambda given: ByteTokenizer(),
    "gpt2": _gpt2_tokenizer,
    "huggingface": lambda given: HuggingFaceTokenizer(_content_field(given)),
    "model": _model_tokenizer,
    "ids": _id_tokenizer,
}


def word_segments(text: str, size: int) -> Iterator[str]:
    """`text`, well-formed, in parts of about `size` characters, cut between words where there are any."""
    return _segments(_well_formed(text), size, _WORD_CUT)


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


def _well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, since UTF-8 has no form for them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _checked_ids(ids: Sequence[int] | npt.NDArray[Any], vocab: int) -> npt.NDArray[np.int64]:
    values = np.asarray(ids, dtype=np.int64).reshape(-1)
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < vocab:
        wrong = next(int(value) for value in values if not 0 <= value < vocab)
        raise DataError(
            f"token id {wrong} is outside the tokenizer's vocabulary of {vocab}",
            "use the tokenizer the ids were made with",
        )
    return values
