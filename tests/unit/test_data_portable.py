"""Our tokenizers as files: other libraries read them and give the same ids."""

import json
from pathlib import Path

import pytest

from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.tokenizer import ByteTokenizer, CharTokenizer, Gpt2Tokenizer, Tokenizer
from flatout.data.tokenizer_files import (
    as_model_tokenizer,
    own_tokenizer,
    portable,
    tokenizer_files,
    train_bpe,
    with_stops,
)
from flatout.errors import DataError

TEXTS = [
    "Hello there,  world!\n\n  It's 1234 na\u00efve \u2013 \u65e5\u672c\u8a9e \U0001f389\t\tend ",
    "",
    " ",
    "a\r\n b",
    "don't  stop\u3000now   ",
    "\x00\x7f\xa0\xad\u0378",
]
ALPHABET = "".join(sorted(set("".join(TEXTS))))


def made() -> dict[str, Tokenizer]:
    corpus = [" ".join(TEXTS) * 3]
    return {
        "bytes": ByteTokenizer(),
        "gpt2": Gpt2Tokenizer(),
        "char": CharTokenizer(ALPHABET),
        "char-replace": CharTokenizer(ALPHABET, "replace"),
        "char-with-mark": CharTokenizer("".join(sorted(ALPHABET + "\ufffd")), "replace"),
        "char-drop": CharTokenizer(ALPHABET, "drop"),
        "char-without-end": CharTokenizer(ALPHABET, "drop", ends=False),  # as they were made once
        "bpe": HuggingFaceTokenizer(train_bpe(corpus, 270)),
    }


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return made()


CHARACTERS = ["char", "char-replace", "char-with-mark", "char-drop"]
NAMES = ["bytes", "gpt2", *CHARACTERS, "char-without-end", "bpe"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_gives_our_ids(tokenizers, name, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    ours = tokenizers[name]
    files, notices = tokenizer_files(ours, 128)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs(text, add_special_tokens=False).input_ids == ids, text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.end_of_text
    assert any("no end of text" in notice for notice in notices) == (ours.end_of_text is None)
    if isinstance(ours, CharTokenizer) and ours.unknown != "error":
        unknown = [ours.vocab - 2] if ours.unknown == "replace" else []
        assert theirs("\u4242").input_ids == ours.encode("\u4242").tolist() == unknown
    assert any("left out" in notice for notice in notices) == (name == "char")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_back_is_the_same_to_our_shards(tokenizers, name, tmp_path: Path):
    for file, content in tokenizer_files(tokenizers[name], 128)[0].items():
        (tmp_path / file).write_bytes(content)
    again = own_tokenizer(tmp_path)
    assert again is not None
    assert again.fingerprint == tokenizers[name].fingerprint


@pytest.mark.parametrize("name", ["bytes", "gpt2", *CHARACTERS, "bpe"])
def test_for_chat_templates_the_end_of_text_is_a_token(tokenizers, name):
    ours = tokenizers[name]
    chat = as_model_tokenizer(ours)
    assert chat.vocab == ours.vocab
    assert chat.end_of_text == ours.end_of_text
    for text in TEXTS:
        assert chat.encode(text).tolist() == ours.encode(text).tolist()
    assert chat.encode("a<|endoftext|>").tolist() == [*ours.encode("a").tolist(), ours.end_of_text]


def test_characters_of_old_have_no_end(tokenizers):
    with pytest.raises(DataError, match="no end-of-text token"):
        as_model_tokenizer(tokenizers["char-without-end"])


def test_half_characters_cannot_be_written():
    with pytest.raises(DataError, match="surrogate"):
        portable(CharTokenizer("ab\ud800"))


def test_stops_are_one_id_or_a_list_beside_what_was_there():
    files = {"generation_config.json": b'{"temperature": 0.5, "eos_token_id": 1}'}
    assert json.loads(with_stops(files, (7,))["generation_config.json"]) == {"temperature": 0.5, "eos_token_id": 7}
    assert json.loads(with_stops({}, (7, 3))["generation_config.json"]) == {"eos_token_id": [3, 7]}
    assert with_stops({}, ()) == {}


def test_a_folder_of_others_is_none_of_ours(tmp_path: Path):
    assert own_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert own_tokenizer(tmp_path) is None
