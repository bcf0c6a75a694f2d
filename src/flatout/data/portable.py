"""Our tokenizers as files that other programs read: tokenizer.json, tokenizer_config.json, and the chat template.

Idea: each kind of tokenizer is an instance of what the `tokenizers` library has. Bytes are a byte-level encoding
without merges; characters one without merges over characters; GPT-2's merges follow from the ranks of its tokens. What
was read from a file is written as it was read. The template that a model was taught with goes beside it, and where to
stop into generation_config.json.

Contract: the files give the ids that our tokenizer gives, for every text that does not spell a special token; tested
against `tokenizers` and `transformers`. What cannot be said in them is told in words, as `notices`.

Trap: in `char` a text may hold a character that the tokenizer has never seen. Ours refuses it; the file leaves it out.
"""

import functools
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.corpus.shipped import gpt2_tokens
from flatout.data.chat_template import ChatTemplate
from flatout.data.model_folder import CONFIG, DEFAULT, OLD_TEMPLATE, TEMPLATE, TEMPLATES, TOKENIZER
from flatout.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    HuggingFaceTokenizer,
    ModelTokenizer,
    Tokenizer,
    tokenizer_from_json,
)
from flatout.errors import DataError
from flatout.files import parse_json, read_bounded

GENERATION = "generation_config.json"
OWN = "flatout_tokenizer"  # in tokenizer_config.json: which of ours it is
_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Portable:
    """A tokenizer in the terms of other programs: what goes into tokenizer.json, and its special tokens by name."""

    content: dict[str, Any]
    special: dict[str, str]
    begin: str | None
    notices: tuple[str, ...] = ()


def portable(tokenizer: Tokenizer) -> Portable:
    """The tokenizer as other programs would have it; a `DataError` where they cannot."""
    if isinstance(tokenizer, ModelTokenizer):
        return Portable(tokenizer.to_json()["content"], tokenizer.special, tokenizer.begin)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        end = tokenizer.end_of_text_name
        notices = () if end is not None else ("its tokenizer names no end of text, so nothing tells a reader to stop",)
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
    """The same ids by the tokenizer that chat templates need, in which the text of a special token is that token."""
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
        notices.append("its tokenizer (char) has no end of text, so nothing tells a reader to stop")
    else:
        special["eos_token"] = END_OF_TEXT
    if tokenizer.unknown == "error":
        notices.append("in tokenizer.json characters that it has never seen are left out, where ours refuses them")
    content = json.loads(library.to_str()) if tokenizer.end_of_text is None else _with_end(library)
    return Portable(content, special, None, tuple(notices))


# --- files beside the weights -----------------------------------------------------------------------------------------


def tokenizer_files(tokenizer: Tokenizer, context: int) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """tokenizer.json and tokenizer_config.json by name, and what there is to say of them."""
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
    """The tokenizer of ours that a folder's files were written from, so that it is the same to our shards; or None."""
    try:
        config = parse_json(read_bounded(folder / CONFIG))
        if config.get("auto_map"):  # we write none: `read_model_tokenizer` refuses it
            return None
        described = config.get(OWN)
        if isinstance(described, dict) and described.get("kind") == "huggingface":
            described["content"] = parse_json(read_bounded(folder / TOKENIZER))
    except (OSError, ValueError, AttributeError):
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
