"""Text to token ids and back, by one of four tokenizers that all answer to the same few names.

Idea: a tokenizer is a value. `to_json` describes it completely, `fingerprint` is the hash of that description, and two
tokenizers with one fingerprint give the same ids for every text. Shards and checkpoints carry the description, so a
model can always be asked in the language it was taught.

Contract: `encode` gives a 1-D array of unsigned ids below `vocab`, and never the end-of-text id: that one is added
between documents by whoever knows where documents end. Text that merely spells `<|endoftext|>` is ordinary text.
`decode(encode(text)) == text` for every well-formed text, except where a Hugging Face file normalises text or lacks it.

Trap: a `tokenizer.json` may ask for truncation, padding and BPE dropout. The first loses text, the second invents it
and the third makes ids random, so all three are switched off on loading, and the description says so.
"""

import abc
import binascii
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError

TokenizerKind = Literal["char", "bytes", "gpt2", "huggingface"]
Ids = npt.NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = "<|endoftext|>"
# Names under which published tokenizer files keep their end-of-text token, the most particular first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# How GPT-2 cuts text before merging: contractions, then words, numbers and the rest, each with the space before it.
# Possessive quantifiers match the same pieces as GPT-2's greedy ones, without a backtracking entry per character.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Unicode White_Space, which is what \s means above. Python's own \s also takes in \x1c-\x1f and would cut wrongly.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LAST_SPACE_OF_RUN = re.compile(rf"[{_SPACE}](?=[^{_SPACE}])")
_SEGMENT = 2**18


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The little-endian type that ids below `vocab` are kept in: two bytes if they fit, else four."""
    if not 1 <= vocab <= 2**32:
        raise ValueError(f"a vocabulary has 1 to 2**32 ids, not {vocab}")
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


class Tokenizer(abc.ABC):
    """What every tokenizer offers. Subclasses are final; they set the attributes once and never change them."""

    kind: TokenizerKind
    vocab: int
    end_of_text: int | None
    fingerprint: str

    @abc.abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of `text`, without an end-of-text id."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, an id outside the vocabulary is a `DataError`."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A description of plain JSON values from which `tokenizer_from_json` makes the same tokenizer."""


@final
class CharTokenizer(Tokenizer):
    """One id per character, in the order of their code points. Knows only the characters it was made from."""

    def __init__(self, characters: str) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError("the characters of a char tokenizer are sorted, without repetition, and at least one")
        self.kind = "char"
        self.vocab = len(characters)
        self.end_of_text = None
        self._characters = characters
        self._code_of_id = _code_points(characters)
        # A table over code points makes encoding one numpy gather: 1 MB takes a few milliseconds, not a Python loop.
        self._id_of_code = np.full(int(self._code_of_id[-1]) + 2, self.vocab, dtype=np.uint32)
        self._id_of_code[self._code_of_id] = np.arange(self.vocab, dtype=np.uint32)
        self.fingerprint = _fingerprint(self.to_json())

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
        codes = _code_points(text)
        # The table's last entry stands for every code point beyond it, and means "unknown".
        ids = self._id_of_code[np.minimum(codes, len(self._id_of_code) - 1)]
        unknown = ids == self.vocab
        if unknown.any():
            position = int(np.argmax(unknown))
            raise DataError(
                f"character {text[position]!r} (U+{ord(text[position]):04X}) at position {position} is not among the "
                f"{self.vocab} characters of this tokenizer",
                "leave it out, prepare the data again from text that contains it, or use the tokenizer `bytes`, "
                "which knows every text",
            )
        return ids.astype(token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        codes = self._code_of_id[_checked_ids(ids, self.vocab)]
        return codes.tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self._characters}


@final
class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and id 256 for the end of a text. Knows every text."""

    def __init__(self) -> None:
        self.kind = "bytes"
        self.vocab = 257
        self.end_of_text = 256
        self.fingerprint = _fingerprint(self.to_json())

    def encode(self, text: str) -> Ids:
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
class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, from the rank file that ships with Flatout."""

    def __init__(self) -> None:
        import tiktoken

        self.kind = "gpt2"
        self.vocab = 50257
        self.end_of_text = 50256
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_SPLIT,
            mergeable_ranks=_gpt2_ranks(),
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocab,
        )
        self.fingerprint = _fingerprint(self.to_json())

    def encode(self, text: str) -> Ids:
        # With no special token allowed and none forbidden, tiktoken takes all text as ordinary.
        parts = [
            self._encoding.encode_to_numpy(part, allowed_special=set(), disallowed_special=())
            for part in _gpt2_segments(_well_formed(text))
        ]
        return np.concatenate(parts).astype(token_dtype(self.vocab)) if parts else np.empty(0, token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self._encoding.decode(_checked_ids(ids, self.vocab).tolist(), errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks_sha256": GPT2_RANKS_SHA256}


@final
class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer that the `tokenizers` library can read from a `tokenizer.json`."""

    def __init__(self, content: dict[str, Any]) -> None:
        """`content` is what `tokenizer.json` holds; an unusable one is a `ValueError`."""
        import tokenizers

        content = {**content, "truncation": None, "padding": None}
        model = content.get("model")
        if isinstance(model, dict) and model.get("dropout") is not None:
            content["model"] = {**model, "dropout": None}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(str(error)) from error
        # False would turn text that spells a special token into that token.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError("it has no tokens")
        self.kind = "huggingface"
        # Ids may have gaps, so the largest one decides and not their number.
        self.vocab = max(ids.values()) + 1
        self.end_of_text = next((ids[name] for name in END_OF_TEXT_NAMES if name in ids), None)
        self._content = content
        self._special = self._special_tokens(ids)
        self._is_special = np.zeros(self.vocab, dtype=bool)
        self._is_special[list(self._special.values())] = True
        self.fingerprint = _fingerprint(self.to_json())

    def _special_tokens(self, ids: dict[str, int]) -> dict[str, int]:
        """The tokens that no text may become. The unknown token is not one of them: unknown text does become it."""
        model = self._content.get("model", {})
        unknown = {ids.get(str(model.get("unk_token")), -1), model.get("unk_id", -1)}
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}
        if self.end_of_text is not None:
            special |= {name: ids[name] for name in END_OF_TEXT_NAMES if ids.get(name) == self.end_of_text}
        return {content: number for content, number in special.items() if number not in unknown}

    def encode(self, text: str) -> Ids:
        text = _well_formed(text)
        ids = self._encode_part(text)
        if self._is_special[ids].any():
            # A model whose own vocabulary holds the special token's text can still produce it from that text. Encoding
            # the first character of each such place on its own makes that impossible.
            names = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
            cuts = [0, *(match.start() + 1 for match in re.finditer(f"(?={names})", text)), len(text)]
            parts = [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]
            ids = np.concatenate([self._encode_part(part) for part in parts])
            if self._is_special[ids].any():
                name = next(name for name, number in self._special.items() if number in ids)
                raise DataError(
                    f"the tokenizer turns ordinary text into its special token {name!r}",
                    "remove such text from the source, or use another tokenizer",
                )
        return ids

    def _encode_part(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=token_dtype(self.vocab))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self._tokenizer.decode(_checked_ids(ids, self.vocab).tolist(), skip_special_tokens=False)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "content": self._content}


def load_tokenizer(spec: str, corpus: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """The tokenizer that a config names: `char`, `bytes`, `gpt2`, or the path of a JSON file.

    `char` needs `corpus`, which gives the texts to take characters from. A file may be a Hugging Face `tokenizer.json`
    or one that Flatout wrote beside its shards, so that new text can be prepared for an old model.
    """
    if spec == "char":
        if corpus is None:
            raise DataError(
                "the tokenizer `char` is made from a text, and none was given",
                "give the tokenizer.json of a prepared dataset instead",
            )
        return CharTokenizer.from_text(corpus())
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        return Gpt2Tokenizer()
    path = Path(spec)
    if not path.is_file():
        raise DataError(f"there is no tokenizer {spec!r}", _tokenizer_hint(spec, path))
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read the tokenizer {spec!r}: {error}", "give a tokenizer.json that is intact"
        ) from error
    if isinstance(content, dict) and "kind" in content and "model" not in content:
        return tokenizer_from_json(content)
    return tokenizer_from_json({"kind": "huggingface", "content": content})


def tokenizer_from_json(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described."""
    kind = description.get("kind")
    try:
        if kind == "char":
            return CharTokenizer(_text_field(description, "characters"))
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "gpt2":
            if (ranks := _text_field(description, "ranks_sha256")) != GPT2_RANKS_SHA256:
                raise ValueError(f"it was made with GPT-2 ranks {ranks}, and this version has {GPT2_RANKS_SHA256}")
            return Gpt2Tokenizer()
        if kind == "huggingface":
            if not isinstance(content := description.get("content"), dict):
                raise ValueError("its content is not a JSON object")
            return HuggingFaceTokenizer(content)
    except ValueError as error:
        raise DataError(
            f"the description of a {kind} tokenizer is not usable: {error}", "give a tokenizer.json that is intact"
        ) from error
    raise DataError(
        f"a tokenizer of kind {kind!r} is unknown",
        "the kinds are char, bytes, gpt2 and huggingface; is flatout up to date?",
    )


def _tokenizer_hint(spec: str, path: Path) -> str:
    if path.is_dir():
        return f"that is a folder: give the tokenizer.json inside it, {str(path / 'tokenizer.json')!r}"
    if path.suffix == ".json" or len(path.parts) > 1:
        return "check the path; it must be a tokenizer.json file"
    close = difflib.get_close_matches(spec.lower(), ["char", "bytes", "gpt2"], n=1, cutoff=0.5)
    choices = "use char, bytes, gpt2, or the path of a tokenizer.json"
    return f"did you mean {close[0]!r}? {choices}" if close else choices


def _gpt2_ranks() -> dict[bytes, int]:
    raw = resources.files("flatout.data").joinpath("bundled", "gpt2.tiktoken").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != GPT2_RANKS_SHA256:
        raise DataError(
            f"the shipped file gpt2.tiktoken is damaged: its SHA-256 is {found} and should be {GPT2_RANKS_SHA256}",
            "install flatout again",
        )
    pairs = (line.split() for line in raw.splitlines())
    return {binascii.a2b_base64(token): int(rank) for token, rank in pairs}


def _gpt2_segments(text: str) -> Iterable[str]:
    """Cut a long text where GPT-2's split cuts it anyway, so that its ids do not change.

    The last white-space character of a run begins a piece whenever something follows the run: either it is the space
    that belongs to the next word, or a piece of its own. Cutting right before it bounds memory, and it also bounds the
    runs in the middle of a segment, on which the look-ahead of the split would exhaust the regex engine's stack at
    about a million characters.
    """
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > _SEGMENT:
            match = _LAST_SPACE_OF_RUN.search(text, start + _SEGMENT)
            end = match.start() if match else end
        yield text[start:end]
        start = end


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


def _fingerprint(description: dict[str, Any]) -> str:
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _text_field(description: dict[str, Any], name: str) -> str:
    value = description.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its field {name!r} is missing or not text")
    return value
