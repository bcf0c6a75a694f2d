"""Learned tokenizers: exact size, any text there and back, the same bytes every time, whole files; and fertility."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data import tokenizer as tokenizer_module
from flatout.data import tokenizer_files as module
from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.tokenizer import END_OF_TEXT, ByteTokenizer, CharTokenizer, load_tokenizer
from flatout.data.tokenizer_files import Split, fertility, train_bpe, write_tokenizer
from flatout.errors import DataError, ResourceError, UsageError

SPLITS: tuple[Split, ...] = ("gpt2", "gpt4")
TEXTS = [
    f"The {noun} {verb} over 12345 {place}s.\n\n    It's naïve, <|endoftext|>{END_OF_TEXT} 漢字 {verb}ing!\r\n"
    for noun in ("fox", "cow", "reader")
    for verb in ("jump", "climb", "look")
    for place in ("hill", "fence", "river")
]


@pytest.fixture(scope="module")
def learned() -> dict[Split, HuggingFaceTokenizer]:
    return {split: HuggingFaceTokenizer(train_bpe(TEXTS, 320, split=split)) for split in SPLITS}


def test_the_vocabulary_is_exactly_as_large_as_asked_and_ends_with_end_of_text(
    learned: dict[Split, HuggingFaceTokenizer],
) -> None:
    for tokenizer in learned.values():
        assert (tokenizer.vocab, tokenizer.end_of_text) == (320, 319)
        content = tokenizer.to_json()["content"]
        assert len(content["model"]["merges"]) == 320 - 257
        assert sorted(content["model"]["vocab"].values()) == list(range(319))
        # The words of the corpus were learned, and the text that spells the special token is still text.
        assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
        assert 319 not in tokenizer.encode(TEXTS[0]).tolist()
        assert tokenizer.decode([319]) == END_OF_TEXT


@settings(max_examples=150, deadline=None)
@given(text=st.text() | st.text(alphabet="The cow jumps\n\r\t 12345'S\u3000漢\x00<|endoftext|>"))
def test_every_text_comes_back(learned: dict[Split, HuggingFaceTokenizer], text: str) -> None:
    for tokenizer in learned.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert 319 not in ids.tolist()


def test_splits_cut_numbers_in_their_own_ways(learned: dict[Split, HuggingFaceTokenizer]) -> None:
    def tokens(split: Split) -> list[str]:
        return [learned[split].decode([number]) for number in learned[split].encode(" 12345").tolist()]

    assert tokens("gpt2") == [" 12345"]
    assert tokens("gpt4") == [" ", "123", "45"]


def test_other_libraries_read_the_file(tmp_path: Path, learned: dict[Split, HuggingFaceTokenizer]) -> None:
    from transformers import PreTrainedTokenizerFast

    for split, tokenizer in learned.items():
        path = tmp_path / f"{split}.json"
        write_tokenizer(tokenizer.to_json()["content"], path)
        ours, theirs = load_tokenizer(str(path)), PreTrainedTokenizerFast(tokenizer_file=str(path))
        assert ours.fingerprint == tokenizer.fingerprint
        text = "The cow's 12345 rivers\n\n  naïve 漢字 👍\x00"
        assert theirs.encode(text) == ours.encode(text).tolist()
        assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
        assert theirs.encode(END_OF_TEXT) == [ours.end_of_text]


def test_the_same_corpus_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    script = (
        "import json, sys; from flatout.data.tokenizer_files import train_bpe, write_tokenizer\n"
        "write_tokenizer(train_bpe(iter(json.load(sys.stdin)), 320), sys.argv[1])"
    )
    files = []
    for threads in ("1", "4"):
        path = tmp_path / f"{threads}.json"
        environment = {**os.environ, "PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", script, str(path)]
        subprocess.run(command, input=json.dumps(TEXTS), text=True, check=True, env=environment)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_a_corpus_that_is_too_small_is_told_how_many_ids_it_gives() -> None:
    with pytest.raises(DataError) as caught:
        train_bpe(["ab ab"], 300)
    assert "300" in caught.value.message
    assert "only 258 ids" in caught.value.message
    assert "258" in caught.value.hint
    assert HuggingFaceTokenizer(train_bpe(["ab ab"], 258)).vocab == 258
    assert HuggingFaceTokenizer(train_bpe(["ab"], 258, min_frequency=1)).vocab == 258


def test_bytes_alone_are_the_smallest_vocabulary() -> None:
    tokenizer = HuggingFaceTokenizer(train_bpe(["ab ab"], 257))
    assert tokenizer.vocab == 257
    assert tokenizer.decode(tokenizer.encode("é\x00ab")) == "é\x00ab"
    with pytest.raises(UsageError, match="256 ids is too small"):
        train_bpe(["ab ab"], 256)


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_learn_from_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text"):
        train_bpe(texts, 300)


@pytest.mark.parametrize("wrong", [{"split": "gpt5"}, {"min_frequency": 0}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        train_bpe(TEXTS, 300, **wrong)


def test_an_error_of_the_source_comes_through() -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise DataError("line 3 is broken", "mend it")

    with pytest.raises(DataError, match="line 3 is broken"):
        train_bpe(texts(), 300)


def test_long_texts_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train_bpe(["a cat sat " * 500], 262)
    monkeypatch.setattr(module, "_SEGMENT", 100)
    assert train_bpe(["a cat sat " * 500], 262) == wanted
    assert train_bpe(["a cat sat \ud800"] * 600, 262)


# files


def test_texts_without_words_are_learned_from_in_time() -> None:
    bases = "".join(random.Random(1).choices("ACGT", k=2**16))
    parts = list(module._cut_long_words(f"words and {bases} words"))
    assert "".join(parts) == f"words and {bases} words"
    assert max(map(len, parts)) <= 512 + len("words and ")
    assert list(module._cut_long_words("words\n" * 1000)) == ["words\n" * 1000]
    learned = HuggingFaceTokenizer(train_bpe([bases], 300))  # half a minute with one word of that length
    assert len(learned.encode(bases)) < 2**15


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokenizer.json"
    write_tokenizer({"a": "é"}, path)
    with pytest.raises(UsageError, match="already a file"):
        write_tokenizer({"b": 1}, path)
    assert json.loads(path.read_text("utf-8")) == {"a": "é"}
    write_tokenizer({"b": 1}, path, overwrite=True)
    assert json.loads(path.read_text("utf-8")) == {"b": 1}
    assert os.listdir(path.parent) == ["tokenizer.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer({"a": 1}, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(ResourceError, match="No space left"):
        write_tokenizer({"b": 1}, path, overwrite=True)
    assert json.loads(path.read_text("utf-8")) == {"a": 1}
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"tokenizer\.json"):
        write_tokenizer({}, tmp_path / "file" / "tokenizer.json")


# fertility


def test_fertility_counts_what_it_says() -> None:
    result = fertility(ByteTokenizer(), ["two words\n", "", "é  漢"])
    assert (result.texts, result.bytes, result.characters, result.words, result.tokens) == (3, 17, 14, 4, 17)
    assert (result.bytes_per_token, result.tokens_per_word) == (1.0, 17 / 4)
    assert result.unused == 256 - len(set("two words\né  漢".encode()))
    assert result.round_trip_failures == 0


def test_fertility_counts_texts_that_do_not_come_back() -> None:
    result = fertility(CharTokenizer("abc", unknown="drop"), ["abc", "abd", "d"])
    assert (result.tokens, result.round_trip_failures, result.unused) == (5, 2, 0)


def test_fertility_of_nothing_is_zero() -> None:
    result = fertility(ByteTokenizer(), [])
    assert (result.texts, result.tokens, result.bytes_per_token, result.tokens_per_word) == (0, 0, 0.0, 0.0)
    assert result.unused == 256


def test_fertility_does_not_depend_on_how_texts_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fertility(load_tokenizer("gpt2"), TEXTS)
    monkeypatch.setattr(tokenizer_module, "_SEGMENT", 64)
    assert fertility(load_tokenizer("gpt2"), iter(TEXTS)) == wanted


@pytest.mark.parametrize("name", ["x" * 300, "file.txt/tokenizer.json", "folder"])
def test_a_place_that_cannot_be_written_is_an_error_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises((UsageError, ResourceError)):
        write_tokenizer({"a": 1}, tmp_path / name, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "mine.json")
    with pytest.raises(UsageError):
        write_tokenizer({"a": 1}, tmp_path / "tokenizer.json")
    write_tokenizer({"a": 1}, tmp_path / "tokenizer.json", overwrite=True)
    assert (tmp_path / "mine.json").read_text() == "mine"
    assert not (tmp_path / "tokenizer.json").is_symlink()
