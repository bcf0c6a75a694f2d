"""Tokenizers as files: read from the folder of a Hugging Face model, written for other programs, learned from a corpus.

Reading: `tokenizer.json` is the tokenizer; `tokenizer_config.json` names the special tokens; `special_tokens_map.json`
names them in older models. They are read as `transformers` reads them, as far as ids can depend on it. What is missing
or contradicts itself is a `DataError` that names the file, and nothing is executed. A token that the config names as
special need not be an added token in `tokenizer.json`; unless it is made one, its text falls apart into ordinary
pieces.

Writing: each kind of tokenizer is an instance of what the `tokenizers` library has. Bytes are a byte-level encoding
without merges; characters one without merges over characters; GPT-2's merges follow from the ranks of its tokens. The
files give the ids that our tokenizer gives, for every text that does not spell a special token. What they cannot
express is listed in `notices`: in `char`, ours refuses a character it has never seen, and the file leaves it out.

Learning: byte-pair encoding begins with the 256 bytes. The corpus goes by once as a stream of words that are counted;
only the different words have to fit into memory. The same texts in the same order give the same bytes, whatever the
number of threads. The last id is `<|endoftext|>`. A corpus that is too small for the size asked for gives fewer ids.
"""

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.corpus.document import gpt2_tokens, shown
from flatout.data.chat_template import (
    CONFIG,
    DEFAULT,
    OLD_TEMPLATE,
    TEMPLATE,
    TEMPLATES,
    ChatTemplate,
    file_bytes,
    is_there,
    json_object,
    object_if_there,
)
from flatout.data.library_tokenizers import HuggingFaceTokenizer, ModelTokenizer, names_code, try_out
from flatout.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    tokenizer_from_json,
    word_segments,
)
from flatout.errors import DataError
from flatout.files import parse_json

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def read_model_tokenizer(folder: str | Path) -> ModelTokenizer:
    """The tokenizer of the model in `folder`, with special tokens as its files name them.

    One that names code of its own (`auto_map`) is refused.
    """
    folder = Path(folder)
    path = folder / TOKENIZER
    if not is_there(path):
        others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).is_file()]
        found = f"; it has {others[0]}, which is of another kind" if others else ""
        raise DataError(
            f"there is no {TOKENIZER} in {shown(folder)}{found}",
            "give the folder of a Hugging Face model with its fast tokenizer, or save one there",
        )
    content = json_object(path)
    config, older = object_if_there(folder / CONFIG), object_if_there(folder / SPECIAL_TOKENS)
    if config.get("auto_map"):
        raise names_code(folder / CONFIG)
    try:
        _check_entries(content)
        special = _special_tokens(config, older)
        content = _with_added_tokens(content, config, special)
        put_first = try_out(content)
        known = _known(content)
        # A model can do without these, and files name some that it never had.
        for name in ("pad_token", "mask_token", "sep_token", "cls_token", "unk_token"):
            if special.get(name) not in known:
                special.pop(name, None)
        return ModelTokenizer(content, special, _first_token(put_first, config, special))
    except ValueError as error:
        raise DataError(
            f"the tokenizer in {shown(folder)} is not usable: {error}",
            f"check {TOKENIZER} and {CONFIG}, or fetch them again",
        ) from error


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in _NAMES:
        value = config.get(name, older.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or not text:
            raise ValueError(f"its {name} is {text!r}, which is no text")
        special[name] = text
    return special


def _check_entries(content: dict[str, Any]) -> None:
    """Refuses a file whose added tokens do not have the expected types."""
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError("added_tokens is no list of objects")
    for entry in added:
        if not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
            raise ValueError(f"{entry!r:.100} is no added token: it needs an id and a content")


def _known(content: dict[str, Any]) -> dict[str, int]:
    """The ids of all tokens that the file knows by their text."""
    model = content.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, list):  # unigram: pairs of a text and its score
        known = {str(entry[0]): number for number, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    else:
        known = dict(vocab) if isinstance(vocab, dict) else {}
    return known | {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}


def _with_added_tokens(content: dict[str, Any], config: dict[str, Any], special: dict[str, str]) -> dict[str, Any]:
    """The file with added tokens that only the other files know of."""
    known = _known(content)
    added = list(content.get("added_tokens") or [])
    present = {entry["content"] for entry in added}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ValueError("added_tokens_decoder is no object")
    for number, entry in sorted(decoder.items(), key=lambda pair: int(pair[0]) if str(pair[0]).isdigit() else -1):
        if not str(number).isdigit() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ValueError(f"added_tokens_decoder has {number!r}, which is no id with a token")
        text = entry["content"]
        if known.get(text, int(number)) != int(number):
            raise ValueError(f"{text!r} has id {known[text]} in {TOKENIZER} and {number} in {CONFIG}")
        if text not in present:
            flags = {name: bool(entry.get(name, usual)) for name, usual in FLAGS.items()}
            added.append({"id": int(number), "content": text, **flags})
            known[text] = int(number)
            present.add(text)
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    more = list(more.values()) if isinstance(more, dict) else more
    more = more if isinstance(more, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in more]
    for text in (*special.values(), *texts):
        if isinstance(text, str) and text in known and text not in present:
            added.append({"id": known[text], "content": text, **FLAGS})
            present.add(text)
    return {**content, "added_tokens": sorted(added, key=lambda entry: entry["id"])}


def _first_token(put_first: str | None, config: dict[str, Any], special: dict[str, str]) -> str | None:
    """The token that the model expects before a text: by the config, or else what the post-processor puts there."""
    asked = config.get("add_bos_token")
    if asked is False or (asked is True and "bos_token" in special):
        return special["bos_token"] if asked else None
    return put_first if special.get("bos_token", put_first) == put_first else None


GENERATION = "generation_config.json"
OWN = "flatout_tokenizer"  # in tokenizer_config.json: which of ours it is
_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Portable:
    """A tokenizer for other programs: the content of tokenizer.json, and its special tokens by name."""

    content: dict[str, Any]
    special: dict[str, str]
    begin: str | None
    notices: tuple[str, ...] = ()


def portable(tokenizer: Tokenizer) -> Portable:
    """The tokenizer for other programs; a `DataError` where they cannot express it."""
    if isinstance(tokenizer, ModelTokenizer):
        return Portable(tokenizer.to_json()["content"], tokenizer.special, tokenizer.begin)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        end = tokenizer.end_of_text_name
        notices = (
            () if end is not None else ("its tokenizer names no end of text, so readers do not know where to stop",)
        )
        content = tokenizer.to_json()["content"]
        return Portable(content, {} if end is None else {"eos_token": end}, None, notices)
    if isinstance(tokenizer, ByteTokenizer):
        vocab = {letter: number for number, letter in enumerate(byte_letters())}
        return Portable(_byte_level(vocab, [], split=False), {"eos_token": END_OF_TEXT}, None)
    if isinstance(tokenizer, Gpt2Tokenizer):
        return Portable(_gpt2_content(), {"eos_token": END_OF_TEXT}, None)
    assert isinstance(tokenizer, CharTokenizer)
    return _characters(tokenizer)


def as_model_tokenizer(tokenizer: Tokenizer) -> ModelTokenizer:
    """The same ids by a tokenizer for chat templates, in which the text of a special token is that token."""
    if isinstance(tokenizer, ModelTokenizer):
        return tokenizer
    found = portable(tokenizer)
    if "eos_token" not in found.special:
        raise DataError(
            f"its tokenizer ({tokenizer.kind}) has no end-of-text token, so that a model could never learn to stop",
            "train the base anew on data that this version prepares, or with a tokenizer.json that has <|endoftext|>",
        )
    return ModelTokenizer(found.content, found.special, found.begin)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be seen, else one above."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], *, split: bool) -> dict[str, Any]:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    library: Any = tokenizers.Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    library.decoder = decoders.ByteLevel()
    return _with_end(library)


def _with_end(library: Any) -> dict[str, Any]:
    """What tokenizer.json holds, with the end of a text as the last id."""
    import tokenizers

    library.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return json.loads(library.to_str())


@functools.cache
def _gpt2_content() -> dict[str, Any]:
    """GPT-2's merges from its ranks: a token is the merge of the two that are left when all earlier merges are done."""
    letters = byte_letters()
    tokens = gpt2_tokens()
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    for rank, token in enumerate(tokens):
        if len(token) == 1:
            continue
        parts = [token[place : place + 1] for place in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            place = min(range(len(joined)), key=joined.__getitem__)
            if joined[place] >= rank:
                raise DataError(f"GPT-2's token {rank} is no merge of earlier ones", "install flatout again")
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        merges.append((spelled(parts[0]), spelled(parts[1])))
    return _byte_level({spelled(token): rank for rank, token in enumerate(tokens)}, merges, split=True)


def _characters(tokenizer: CharTokenizer) -> Portable:
    import tokenizers
    from tokenizers import decoders, models

    described = tokenizer.to_json()
    characters: str = described["characters"]
    if any("\ud800" <= character <= "\udfff" for character in characters):
        raise DataError(
            "the tokenizer has halves of surrogate pairs as characters, and no file of text can hold them",
            "train on text that is well-formed, or with data.tokenizer=bytes",
        )
    vocab = {character: number for number, character in enumerate(characters)}
    unknown = None
    if tokenizer.unknown == "replace":
        unknown = _UNKNOWN if _UNKNOWN not in vocab else "<unk>"
        vocab[unknown] = len(characters)
    library: Any = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=unknown))
    library.decoder = decoders.Fuse()
    special = {} if unknown is None else {"unk_token": unknown}
    notices: list[str] = []
    if tokenizer.end_of_text is None:
        notices.append("its tokenizer (char) has no end of text, so readers do not know where to stop")
    else:
        special["eos_token"] = END_OF_TEXT
    if tokenizer.unknown == "error":
        notices.append("in tokenizer.json characters that it has never seen are left out, where ours refuses them")
    content = json.loads(library.to_str()) if tokenizer.end_of_text is None else _with_end(library)
    return Portable(content, special, None, tuple(notices))


# --- files beside the weights -----------------------------------------------------------------------------------------


def tokenizer_files(tokenizer: Tokenizer, context: int) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """tokenizer.json and tokenizer_config.json by name, and notices about them."""
    found = portable(tokenizer)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **found.special,
    }
    if "bos_token" in found.special:
        config["add_bos_token"] = found.begin is not None
    if not isinstance(tokenizer, ModelTokenizer):
        config[OWN] = {name: value for name, value in tokenizer.to_json().items() if name != "content"}
    return {TOKENIZER: _json(found.content), CONFIG: _json(config)}, found.notices


def own_tokenizer(folder: Path) -> Tokenizer | None:
    """Our tokenizer that a folder's files were written from, so that its ids are those of our shards; or None."""
    try:
        config = parse_json(file_bytes(folder / CONFIG))
        if config.get("auto_map"):  # we write none: `read_model_tokenizer` refuses it
            return None
        described = config.get(OWN)
        if isinstance(described, dict) and described.get("kind") == "huggingface":
            described["content"] = parse_json(file_bytes(folder / TOKENIZER))
    except (OSError, KeyError, ValueError, AttributeError):
        return None
    return tokenizer_from_json(described) if isinstance(described, dict) else None


def with_template(files: Mapping[str, bytes], template: ChatTemplate | None) -> dict[str, bytes]:
    """The files with this chat template and no other; with None, without any."""
    kept = {
        name: content
        for name, content in files.items()
        if name not in (TEMPLATE, OLD_TEMPLATE) and not name.startswith((f"{TEMPLATES}/", "chat_template"))
    }
    config = json.loads(kept.get(CONFIG, b"{}"))
    config.pop("chat_template", None)
    if template is not None:
        # Old programs look into the config, new ones for the file.
        config["chat_template"] = template.text
        kept[TEMPLATE] = template.text.encode("utf-8")
        others = {form: text for form, text in template.texts.items() if text != template.text and form != DEFAULT}
        kept |= {f"{TEMPLATES}/{form}.jinja": text.encode("utf-8") for form, text in others.items()}
    if config:
        kept[CONFIG] = _json(config)
    return kept


def with_stops(files: Mapping[str, bytes], stops: Collection[int]) -> dict[str, bytes]:
    """The files with a generation_config.json that names every token at which an answer ends."""
    config = json.loads(files.get(GENERATION, b"{}"))
    if stops:
        config["eos_token_id"] = sorted(stops) if len(stops) > 1 else next(iter(stops))
    return {**files, GENERATION: _json(config)} if config else dict(files)


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


# The library takes 256 texts at a time out of a stream, so what is one text to it must be small.
_SEGMENT = 2**16
# Its time grows with the square of a word's length: a sequence of DNA, or one base64 line, would take minutes.
_LONGEST_WORD = 512
_LONG_WORD = re.compile(rf"\w{{{_LONGEST_WORD}}}|[^\w\s]{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}")


def train_bpe(texts: Iterable[str], vocab: int) -> dict[str, Any]:
    """Learn a byte-level BPE of `vocab` ids, or fewer from a small text: the content of a `tokenizer.json`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library: Any = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def parts() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            for segment in word_segments(text, _SEGMENT):
                yield from _cut_long_words(segment)
            characters += len(text)

    library.train_from_iterator(parts(), trainer)
    if not characters:
        raise DataError("there is no text to learn a tokenizer from", "give a source that is not empty")
    library.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return json.loads(library.to_str())


def _cut_long_words(text: str) -> Iterator[str]:
    """The text in parts without a word above `_LONGEST_WORD`; almost always in one."""
    start = 0
    for match in _LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]
