"""Learned tokenizers: their size, any text there and back, the same bytes every time."""

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

from flatout.data import tokenizer_files as module
from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.tokenizer import END_OF_TEXT, load_tokenizer
from flatout.data.tokenizer_files import train_bpe
from flatout.errors import DataError

TEXTS = [
    f"The {noun} {verb} over 12345 {place}s.\n\n    It's naïve, <|endoftext|>{END_OF_TEXT} 漢字 {verb}ing!\r\n"
    for noun in ("fox", "cow", "reader")
    for verb in ("jump", "climb", "look")
    for place in ("hill", "fence", "river")
]


@pytest.fixture(scope="module")
def learned() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(train_bpe(TEXTS, 320))


def test_the_vocabulary_has_the_size_asked_for_and_ends_with_end_of_text(learned: HuggingFaceTokenizer) -> None:
    assert (learned.vocab, learned.end_of_text) == (320, 319)
    content = learned.to_json()["content"]
    assert len(content["model"]["merges"]) == 320 - 257
    assert sorted(content["model"]["vocab"].values()) == list(range(319))
    # The words of the corpus were learned, and the text that spells the special token is still text.
    assert len(learned.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    assert 319 not in learned.encode(TEXTS[0]).tolist()
    assert learned.decode([319]) == END_OF_TEXT


@settings(max_examples=150, deadline=None)
@given(text=st.text() | st.text(alphabet="The cow jumps\n\r\t 12345'S\u3000漢\x00<|endoftext|>"))
def test_every_text_comes_back(learned: HuggingFaceTokenizer, text: str) -> None:
    ids = learned.encode(text)
    assert learned.decode(ids) == text
    assert 319 not in ids.tolist()


def test_other_libraries_read_the_file(tmp_path: Path, learned: HuggingFaceTokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(learned.to_json()["content"]))
    ours, theirs = load_tokenizer(str(path)), PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert ours.fingerprint == learned.fingerprint
    text = "The cow's 12345 rivers\n\n  naïve 漢字 👍\x00"
    assert theirs.encode(text) == ours.encode(text).tolist()
    assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.encode(END_OF_TEXT) == [ours.end_of_text]


def test_the_same_corpus_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    script = (
        "import json, sys; from flatout.data.tokenizer_files import train_bpe\n"
        "json.dump(train_bpe(iter(json.load(sys.stdin)), 320), open(sys.argv[1], 'w'))"
    )
    files = []
    for threads in ("1", "4"):
        path = tmp_path / f"{threads}.json"
        environment = {**os.environ, "PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", script, str(path)]
        subprocess.run(command, input=json.dumps(TEXTS), text=True, check=True, env=environment)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_bytes_alone_are_the_smallest_vocabulary() -> None:
    tokenizer = HuggingFaceTokenizer(train_bpe(["ab ab"], 257))
    assert tokenizer.vocab == 257
    assert tokenizer.decode(tokenizer.encode("é\x00ab")) == "é\x00ab"
    assert HuggingFaceTokenizer(train_bpe(["ab ab"], 1000)).vocab < 270, "a small text gives fewer ids"


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_learn_from_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text"):
        train_bpe(texts, 300)


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


def test_texts_without_words_are_learned_from_in_time() -> None:
    bases = "".join(random.Random(1).choices("ACGT", k=2**16))
    parts = list(module._cut_long_words(f"words and {bases} words"))
    assert "".join(parts) == f"words and {bases} words"
    assert max(map(len, parts)) <= 512 + len("words and ")
    assert list(module._cut_long_words("words\n" * 1000)) == ["words\n" * 1000]
    learned = HuggingFaceTokenizer(train_bpe([bases], 300))  # half a minute with one word of that length
    assert len(learned.encode(bases)) < 2**15


# fertility
