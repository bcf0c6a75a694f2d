"""Tokenizers: known ids, round trips, special text, descriptions that rebuild the same tokenizer, clear refusals."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from flatout.corpus import document as shipped
from flatout.data import library_tokenizers
from flatout.data import tokenizer as module
from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    load_tokenizer,
    token_dtype,
    tokenizer_from_json,
)
from flatout.errors import DataError
from tests.chat_models import _tokenizer

ODD_TEXTS = [
    "",
    "Hello world",
    "naïve café ☕️ 👩‍👩‍👧‍👦 🇩🇪",
    "漢字かな交じり文、句読点。한국어",
    "  two\t\ttabs\r\n\r\nand \x0b\x0c odd\u00a0\u2003spaces\u2028\u2029\u0085  ",
    "<|endoftext|>",
    "a<|endoftext|><|endoftext|>b </s> <eos> <|end_of_text|>",
    "it's we'll I'D you've\u0000\ufffd\U0010ffff",
    "\n" * 50 + "x" + " " * 50,
    "\x1c\x1d \x1e\x1f\n",
    " \x02\x03  \x02\n\n\x03  x\x02",
]
# Characters at which splits differ: white space and what looks like it, contractions, letters, digits, marks.
TRICKY = " \n\t\u00a0\u3000\x1c\x02\x03ab'sll1٣é漢か。，.-_\u0301👍"


@pytest.fixture(scope="module")
def shakespeare() -> str:
    return resources.files("flatout.data").joinpath("bundled", "tiny_shakespeare.txt").read_bytes().decode("utf-8")


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer()


def library_file(folder: Path, special: tuple[str, ...] = ("<|endoftext|>", "<pad>"), **changes: object) -> Path:
    """A byte-level BPE of 300 tokens, as Hugging Face writes it."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(["the cat sat on the mat, the hat on the cat <| <| <|"] * 4, trainer)
    content = json.loads(library.to_str()) | changes
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def every_kind(folder: Path) -> list[Tokenizer]:
    characters = CharTokenizer.from_text(ODD_TEXTS)
    return [characters, ByteTokenizer(), Gpt2Tokenizer(), load_tokenizer(str(library_file(folder)))]


def test_every_tokenizer_returns_text_unchanged_and_survives_its_own_description(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path):
        rebuilt = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert type(rebuilt) is type(tokenizer)
        assert (rebuilt.fingerprint, rebuilt.vocab, rebuilt.end_of_text) == (
            tokenizer.fingerprint,
            tokenizer.vocab,
            tokenizer.end_of_text,
        )
        for text in ODD_TEXTS:
            ids = tokenizer.encode(text)
            assert ids.ndim == 1
            assert ids.dtype == token_dtype(tokenizer.vocab)
            assert tokenizer.decode(ids) == text, (tokenizer.kind, text)
            assert rebuilt.encode(text).tolist() == ids.tolist()


def test_text_that_spells_a_special_token_is_ordinary_text(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path):
        ids = tokenizer.encode("a<|endoftext|>b<pad>").tolist()
        assert tokenizer.end_of_text not in ids
        assert len(ids) > 3
        if tokenizer.kind == "huggingface":
            # Not even a trace of it: the text is merged as if the special token did not exist.
            assert "<|" in [tokenizer.decode([number]) for number in ids]


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    tokenizers = [*every_kind(tmp_path), CharTokenizer("ab"), CharTokenizer("abc")]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == len(tokenizers)
    # Pinned: datasets and checkpoints store it, so it must not change between versions.
    old = tokenizer_from_json({"kind": "char", "characters": "ab"})  # from before characters had an end of text
    assert old.fingerprint == "d7c902bb1925eb660821e868465c60d50d753b749e136911ea074cabc8325000"
    assert (old.vocab, old.end_of_text) == (2, None)
    assert old.decode(old.encode("abba")) == "abba"
    assert CharTokenizer("ab").fingerprint == "e1a18d13405d86e02c28241716488f255c7425be492421c43189a8d92ddf5f6d"


def test_known_facts_about_each_kind(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    assert (gpt2.vocab, gpt2.end_of_text) == (50257, 50256)
    assert (ByteTokenizer().vocab, ByteTokenizer().end_of_text) == (257, 256)
    assert (CharTokenizer("ab").vocab, CharTokenizer("ab").end_of_text) == (3, 2)
    assert (CharTokenizer("ab", "replace").vocab, CharTokenizer("ab", "replace").end_of_text) == (4, 3)
    assert load_tokenizer(str(library_file(tmp_path))).end_of_text == 0
    assert load_tokenizer(str(library_file(tmp_path, ("<x>", "</s>")))).end_of_text == 1
    assert load_tokenizer(str(library_file(tmp_path, ("<x>",)))).end_of_text is None


# gpt2


def test_gpt2_gives_the_known_ids(gpt2: Gpt2Tokenizer, shakespeare: str) -> None:
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("\n\n  I'll say 2,024 naïve 漢 👍").tolist() == [
        628, 220, 314, 1183, 910, 362, 11, 40839, 41492, 10545, 120, 95, 50169, 235,
    ]  # fmt: skip
    assert gpt2.decode([15496, 50256]) == "Hello<|endoftext|>"
    ids = gpt2.encode(shakespeare)
    assert len(ids) == 338_025
    assert gpt2.decode(ids) == shakespeare


@pytest.fixture(scope="module")
def published() -> tiktoken.Encoding:
    """GPT-2's split as OpenAI wrote it down, with the shipped ranks."""
    split = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding(
        "published",
        pat_str=split,
        mergeable_ranks={token: rank for rank, token in enumerate(shipped.gpt2_tokens())},
        special_tokens={},
    )


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.text(alphabet=TRICKY, max_size=60) | st.text(max_size=20), max_size=5),
    segment=st.integers(1, 8) | st.just(2**18),
)
def test_gpt2_ids_are_those_of_the_published_split(
    gpt2: Gpt2Tokenizer, published: tiktoken.Encoding, texts: list[str], segment: int
) -> None:
    wanted = [published.encode_ordinary(text) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SEGMENT", segment)
        assert [gpt2.encode(text).tolist() for text in texts] == wanted
        assert [ids.tolist() for ids in gpt2.encode_batch(texts)] == wanted


@pytest.mark.parametrize("text", ["\n" * 1_200_000 + "x", " " * 1_200_000, "a" * 700_000, "x \n" * 200_000])
def test_gpt2_takes_long_runs_that_would_exhaust_the_regex_engine(gpt2: Gpt2Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_text_without_a_place_to_cut_is_cut_all_the_same() -> None:
    most = module._SEGMENT + module._STRETCH
    for text in ("a" * (3 * most), " " * (2 * most) + "x"):
        parts = list(module._segments(text, module._SEGMENT, module._GPT2_CUT))
        assert "".join(parts) == text
        assert max(map(len, parts)) == most


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.text(alphabet=TRICKY, max_size=12) | st.text(max_size=8), max_size=8), segment=st.integers(1, 40)
)
def test_a_batch_gives_what_its_texts_give_alone(every: list[Tokenizer], texts: list[str], segment: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SEGMENT", segment)
        for tokenizer in every:
            together = tokenizer.encode_batch(texts)
            assert [ids.tolist() for ids in together] == [tokenizer.encode(text).tolist() for text in texts]
            assert {ids.dtype for ids in together} <= {token_dtype(tokenizer.vocab)}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    policies = [CharTokenizer("\n as", "drop"), CharTokenizer("\n as", "replace")]
    return [*every_kind(tmp_path_factory.mktemp("every"))[1:], *policies]


def test_surrogates_do_not_crash(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path)[1:]:
        assert tokenizer.decode(tokenizer.encode("a\ud83d\ude00b")) == "a😀b"
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
        assert tokenizer.encode_batch(["a\ud800", "\ude00b"])[1].tolist() == tokenizer.encode("\ufffdb").tolist()
    characters = CharTokenizer.from_text(["a\ud800b"])
    assert characters.decode(characters.encode("b\ud800")) == "b\ud800"
    assert tokenizer_from_json(json.loads(json.dumps(characters.to_json()))).fingerprint == characters.fingerprint


def test_a_damaged_rank_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "GPT2_RANKS_SHA256", "0" * 64)
    shipped.gpt2_tokens.cache_clear()
    with pytest.raises(DataError, match=r"gpt2\.tiktoken is damaged"):
        Gpt2Tokenizer()


# char and bytes


def test_char_vocabulary_is_the_sorted_characters_of_the_corpus(shakespeare: str) -> None:
    tokenizer = load_tokenizer("char", lambda: [shakespeare[:5000], shakespeare[5000:]])
    assert (tokenizer.vocab, tokenizer.end_of_text) == (66, 65)
    assert tokenizer.encode("\n !").tolist() == [0, 1, 2]
    assert tokenizer.encode("z").tolist() == [64]
    assert tokenizer.decode(tokenizer.encode(shakespeare)) == shakespeare


@pytest.mark.parametrize(("text", "shown", "position"), [("ab\u00e9", "'é' (U+00E9)", 2), ("\U0001f600", "U+1F600", 0)])
def test_an_unknown_character_is_named_with_its_position(text: str, shown: str, position: int) -> None:
    with pytest.raises(DataError) as caught:
        CharTokenizer("abz").encode(text)
    assert shown in caught.value.message
    assert f"position {position}" in caught.value.message
    assert "bytes" in caught.value.hint


def test_an_unknown_character_in_a_batch_is_named_as_in_its_text() -> None:
    with pytest.raises(DataError, match=r"'c' \(U\+0063\) at position 1 is not among the 2 characters"):
        CharTokenizer("ab").encode_batch(["aba", "bc", "d"])


def test_unknown_characters_can_be_dropped_or_replaced() -> None:
    drop, replace = CharTokenizer("abz", unknown="drop"), CharTokenizer("abz", unknown="replace")
    assert (drop.vocab, replace.vocab) == (4, 5)
    assert drop.encode("éa\x00zz\U0001f600").tolist() == [0, 2, 2]
    assert drop.encode("é").tolist() == []
    assert replace.encode("éaz\U0001f600").tolist() == [3, 0, 2, 3]
    assert replace.decode([3, 0]) == "\ufffda"
    for tokenizer in (drop, replace):
        assert tokenizer.to_json()["unknown"] == tokenizer.unknown
        rebuilt = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert rebuilt.fingerprint == tokenizer.fingerprint
        assert rebuilt.encode("azé").tolist() == tokenizer.encode("azé").tolist()
    assert len({drop.fingerprint, replace.fingerprint, CharTokenizer("abz").fingerprint}) == 3
    with pytest.raises(DataError, match="token id 4 "):
        drop.decode([4])


def test_a_replacement_id_counts_when_choosing_the_width() -> None:
    characters = "".join(chr(code) for code in range(0x10000, 0x1FFFF))
    assert CharTokenizer(characters, "drop").encode("a" + characters[-1]).dtype == np.dtype("<u2")
    assert CharTokenizer(characters, "drop").encode("a" + characters[-1]).tolist() == [65534]
    assert CharTokenizer(characters, "replace").encode("a").tolist() == [65535]
    assert CharTokenizer(characters, "replace").encode("a").dtype == np.dtype("<u4")


def test_characters_collected_elsewhere_make_the_same_tokenizer() -> None:
    wanted = CharTokenizer.from_text(["hello", " world"])
    assert CharTokenizer.from_text("dehlorw lo").fingerprint == wanted.fingerprint
    assert CharTokenizer("ab", "drop").encode("xax").tolist() == [0]
    with pytest.raises(DataError, match="no text"):
        CharTokenizer.from_text([])


def test_another_end_of_text_is_refused() -> None:
    with pytest.raises(DataError, match="its end of text is '</s>'"):
        tokenizer_from_json({"kind": "char", "characters": "ab", "end_of_text": "</s>"})


def test_a_large_char_vocabulary_needs_four_bytes() -> None:
    characters = "".join(chr(code) for code in range(0x10000, 0x10000 + 65537))
    assert CharTokenizer(characters[:-1]).encode(characters[65535]).tolist() == [65535]
    big = CharTokenizer(characters)
    assert big.encode(characters[-1]).dtype == np.dtype("<u4")
    assert big.decode(big.encode(characters)) == characters


def test_decoding_shows_broken_text_and_ends_of_text() -> None:
    assert (
        CharTokenizer("ab", "replace").decode([3, 0, 2, 3, 3, 1]) == "<|endoftext|>a\ufffd<|endoftext|><|endoftext|>b"
    )
    assert CharTokenizer("ab").decode([2]) == "<|endoftext|>"
    assert ByteTokenizer().decode([0xC3, 256, 0xA9, 65]) == "\ufffd<|endoftext|>\ufffdA"


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path):
        assert isinstance(tokenizer.decode([tokenizer.vocab - 1]), str)
        for wrong in (tokenizer.vocab, 70000, -1):
            with pytest.raises(DataError, match=f"token id {wrong} "):
                tokenizer.decode([0, wrong])


# huggingface


def test_truncation_padding_and_dropout_in_the_file_are_switched_off(tmp_path: Path) -> None:
    plain = load_tokenizer(str(library_file(tmp_path)))
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    fill = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    content |= {"truncation": cut, "padding": fill}
    content["model"]["dropout"] = 0.5
    tricky = HuggingFaceTokenizer(content)
    text = "the cat sat on the mat"
    assert tricky.encode(text).tolist() == plain.encode(text).tolist()
    assert tricky.fingerprint == plain.fingerprint


def test_a_model_that_knows_the_special_text_itself_cannot_produce_the_special_id() -> None:
    vocabulary = [["<unk>", 0.0], ["</s>", 0.0], *([letter, -5.0] for letter in "abs</>")]
    content = json.loads(Library(models.Unigram([tuple(entry) for entry in vocabulary], 0, False)).to_str())
    content["added_tokens"] = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for number, text in enumerate(["<unk>", "</s>"])
    ]  # fmt: skip
    tokenizer = HuggingFaceTokenizer(content)
    assert tokenizer.end_of_text == 1
    assert 1 not in tokenizer.encode("a</s></s>b").tolist()
    assert 0 in tokenizer.encode("aé").tolist(), "unknown text still becomes the unknown token"


def test_long_text_for_a_tokenizer_file_is_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(library_file(tmp_path)))
    text = "the cat  sat\non\n\nthe mat, " * 30 + "thecat" * 40
    whole = tokenizer.encode(text[:750]).tolist()
    monkeypatch.setattr(module, "_STRETCH", 50)
    for size in (7, 100):
        monkeypatch.setattr(library_tokenizers, "_HUGGINGFACE_SEGMENT", size)
        assert tokenizer.encode(text[:750]).tolist() == whole
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(map(len, module.word_segments(text, 100))) == 150


def test_gaps_in_the_ids_count_towards_the_vocabulary(tmp_path: Path) -> None:
    content = json.loads(library_file(tmp_path).read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary[next(iter(reversed(vocabulary)))] = 70_000
    content["model"]["merges"] = []
    tokenizer = HuggingFaceTokenizer(content)
    assert tokenizer.vocab == 70_001
    assert tokenizer.encode("a").dtype == np.dtype("<u4")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"model": 3}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(damage)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert "intact" in caught.value.hint


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = library_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError):
        load_tokenizer(str(path))


# load_tokenizer and descriptions


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("gpt-2", "did you mean 'gpt2'"),
        ("byte", "did you mean 'bytes'"),
        ("Char", "did you mean 'char'"),
        ("zzz", "use char, bytes, gpt2"),
        ("missing/tokenizer.json", "check the path"),
        (".", "give the tokenizer.json inside"),
    ],
)
def test_an_unknown_tokenizer_gets_a_useful_hint(spec: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(spec, None)
    assert hint in caught.value.hint


def test_char_without_a_corpus_and_an_empty_corpus_are_refused() -> None:
    with pytest.raises(DataError, match="made from a text"):
        load_tokenizer("char")
    with pytest.raises(DataError, match="no text"):
        load_tokenizer("char", lambda: ["", ""])


def test_a_description_file_of_a_dataset_is_a_tokenizer_too(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(CharTokenizer("abc").to_json()), encoding="utf-8")
    assert load_tokenizer(str(path)).fingerprint == CharTokenizer("abc").fingerprint


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"kind": "morse"},
        {"kind": "char"},
        {"kind": "char", "characters": "ba"},
        {"kind": "char", "characters": ""},
        {"kind": "char", "characters": "ab", "unknown": "guess"},
        {"kind": "char", "characters": "ab", "unknown": []},
        {"kind": "gpt2", "ranks_sha256": "other"},
        {"kind": "huggingface"},
        {"kind": "huggingface", "content": {"model": {}}},
    ],
)
def test_an_unusable_description_is_refused(description: dict[str, object]) -> None:
    with pytest.raises(DataError):
        tokenizer_from_json(description)


@pytest.mark.parametrize(
    "description",
    [
        None, [], "x", 3, {}, {"kind": None}, {"kind": []}, {"kind": "char"}, {"kind": "char", "characters": 3},
        {"kind": "char", "characters": "ab", "unknown": []}, {"kind": "gpt2"}, {"kind": "gpt2", "ranks_sha256": {}},
        {"kind": "huggingface"}, {"kind": "huggingface", "content": []}, {"kind": "huggingface", "content": {}},
        {"kind": "huggingface", "content": {"model": []}}, {"kind": "model", "content": {}, "special": {}},
        {"kind": "model", "content": {}, "special": [], "begin": None}, {"kind": "model", "special": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_descriptions_of_any_shape_are_data_errors(description):
    with pytest.raises(DataError) as caught:
        tokenizer_from_json(description)
    assert caught.value.hint


def test_a_file_that_ends_the_library_s_process_is_an_error(tmp_path):
    content = json.loads(_tokenizer("bytes", ("<|endoftext|>",)))
    content["model"]["continuing_subword_prefix"] = "x"  # longer than a part of a merge
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match="is not usable: it breaks the process that runs it"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
