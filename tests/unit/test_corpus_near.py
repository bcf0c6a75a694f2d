"""Near duplicates: estimates of a known similarity, signatures that never change, and who is dropped for whom."""

import hashlib
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.corpus import clean as near
from flatout.corpus.clean import SIGNATURE_BYTES, SLOTS, bands_for, near_duplicates, signature
from flatout.errors import DataError

SOURCE = Path(__file__).parents[2] / "src"
TEXTS = [
    "one",
    "a b c d e f",
    "Über den Wolken, sagt man, ist die Freiheit grenzenlos.",
    "那天早晨港口很安静",
    "w " * 9,
]


def estimate(first: bytes, second: bytes) -> float:
    """The Jaccard index that two signatures suggest: the share of slots in which they agree."""
    rows = as_rows([first, second])
    return float(np.mean(rows[0] == rows[1]))


def as_rows(signatures: list[bytes]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(b"".join(signatures), dtype="<u4").reshape(-1, SLOTS)


def words(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"w{generator.randrange(10**9)}" for _ in range(count)]


def jaccard(first: list[str], second: list[str]) -> float:
    sets = [{tuple(each[i : i + 5]) for i in range(len(each) - 4)} for each in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_the_estimate_is_near_the_known_similarity(share: float) -> None:
    errors, expected = [], []
    for seed in range(40):
        count = (40, 250, 1500)[seed % 3]
        first = words(count, seed)
        second = [*first[: round(share * count)], *words(count - round(share * count), seed + 1000)]
        known = jaccard(first, second)
        errors.append(estimate(signature(" ".join(first)), signature(" ".join(second))) - known)
        expected.append(math.sqrt(known * (1 - known) / SLOTS))
    # Five standard errors for one pair and for the mean: no pair is far off, and together they are not to one side.
    assert all(abs(error) <= 5 * limit + 1e-9 for error, limit in zip(errors, expected, strict=True))
    assert abs(np.mean(errors)) <= 5 * np.mean(expected) / math.sqrt(len(errors)) + 1e-9


def test_a_text_is_like_itself_whatever_the_case_and_the_marks() -> None:
    first = signature("The harbour was quiet that morning, and only the gulls were awake.")
    second = signature("  the Harbour -- WAS quiet; that\nmorning and only the gulls were... awake")
    assert first == second
    assert estimate(first, second) == 1.0
    assert len(first) == SIGNATURE_BYTES


def test_the_order_of_words_counts_but_not_how_often_they_come() -> None:
    text = " ".join(words(200, 1))
    assert estimate(signature(text), signature(" ".join(sorted(text.split())))) < 0.1
    assert estimate(signature(text), signature(f"{text} {text} {text}")) > 0.9


def test_fewer_than_five_words_are_compared_as_words() -> None:
    assert signature("red green blue") == signature("blue red, green")
    assert 0.2 < estimate(signature("red green blue"), signature("red green black")) < 0.8
    assert estimate(signature("red"), signature("green")) == 0.0


def test_words_are_those_of_unicode() -> None:
    assert signature("naïve ÉTÉ x_1 Ωμέγα") == signature("NAÏVE été; X_1! ωμέγα")
    assert signature("naïve") != signature("na ve")
    assert signature("हिन्दी") != signature("ह न द")  # marks are part of a word
    assert signature("港口很安") == signature("港 口 很 安")  # no spaces to go by
    assert signature("ab港cd") == signature("ab 港 cd")


def test_a_text_without_words_is_like_no_other() -> None:
    empty = signature("")
    assert empty == signature(" ... !")
    assert len(empty) == SIGNATURE_BYTES
    assert near_duplicates(as_rows([empty, empty, signature("!?"), signature("a word")]), 0.5).tolist() == [-1] * 4


@pytest.mark.parametrize("chunk", [16, 17, 50])
def test_a_long_text_is_read_in_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    texts = [" ".join(words(30, 1)), "Über den Wolken 港口很安静 " * 5, "." * 60 + "word" + "." * 40, " a" * 40]
    whole = [signature(text) for text in texts]
    monkeypatch.setattr(near, "_CHUNK", chunk)
    assert [signature(text) for text in texts] == whole


def test_a_word_longer_than_a_chunk_is_still_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_CHUNK", 16)
    assert signature("x" * 100 + " a b c d") != signature("x" * 100 + "y" + " a b c d")


def test_signatures_never_change_between_versions() -> None:
    digest = hashlib.sha256(b"".join(map(signature, TEXTS))).hexdigest()
    assert digest == "81e68a3976a23e4d821cedb9f94ec25ed0d06f16938d370baca9f578aa82639e"
    assert near.method() == "rensa R-MinHash 2, 128 slots, word 5-grams"


@pytest.mark.parametrize("kernel", ["scalar", "avx2", ""])
def test_another_process_and_another_processor_give_the_same(kernel: str) -> None:
    code = "import sys; from flatout.corpus.clean import signature; print([signature(t).hex() for t in sys.argv[1:]])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(SOURCE), "RENSA_FORCE_KERNEL": kernel}
    texts = [*TEXTS, " ".join(words(2000, 3))]
    done = subprocess.run([sys.executable, "-c", code, *texts], env=environment, capture_output=True, check=True)
    assert done.stdout.decode().strip() == str([signature(text).hex() for text in texts])


def rows_like(counts: list[int]) -> npt.NDArray[np.uint32]:
    """Signatures, the first of any numbers, each of the others equal to it in that many slots and in no more."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2**31, size=(len(counts) + 1, SLOTS), dtype=np.uint32)
    for row, count in zip(rows[1:], counts, strict=True):
        row[:count] = rows[0, :count]
    return rows


def test_the_threshold_itself_drops() -> None:
    assert near_duplicates(rows_like([96, 95]), 0.75).tolist() == [-1, 0, -1]
    assert near_duplicates(rows_like([103, 102]), 0.8).tolist() == [-1, 0, -1]


def test_in_a_chain_only_kept_documents_count() -> None:
    first = words(300, 1)
    second = [*first[30:], *words(30, 2)]
    third = [*second[30:], *words(30, 3)]
    a, b, c = (signature(" ".join(each)) for each in (first, second, third))
    assert estimate(a, b) >= 0.75 <= estimate(b, c)
    assert estimate(a, c) < 0.75
    assert near_duplicates(as_rows([a, b, c]), 0.75).tolist() == [-1, 0, -1]  # c is like b, but b is gone
    assert near_duplicates(as_rows([b, a, c]), 0.75).tolist() == [-1, 0, 0]
    assert near_duplicates(as_rows([a, c, b]), 0.75).tolist() == [-1, -1, 0]  # the first of two that it is like
    assert near_duplicates(as_rows([a, b, c, c]), 0.75).tolist() == [-1, 0, -1, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, SLOTS)), max_size=40), st.sampled_from([0.5, 0.8, 0.95]))
def test_the_answer_is_that_of_comparing_each_with_each(recipe: list[tuple[int, int]], threshold: float) -> None:
    """Each row is the beginning of one of four, so that what is alike agrees in whole bands."""
    generator = np.random.default_rng(len(recipe))
    originals = generator.integers(0, 2**31, size=(4, SLOTS), dtype=np.uint32)
    rows = generator.integers(0, 2**31, size=(len(recipe), SLOTS), dtype=np.uint32)
    for row, (original, count) in zip(rows, recipe, strict=True):
        row[:count] = originals[original, :count]
    plain: list[int] = []
    for number, row in enumerate(rows):
        kept = (i for i in range(number) if plain[i] < 0)
        plain.append(next((i for i in kept if np.mean(rows[i] == row) >= threshold), -1))
    assert near_duplicates(rows, threshold).tolist() == plain


def test_pieces_of_a_corpus_are_found_in_any_form(tmp_path: Path) -> None:
    texts = [" ".join(words(120, seed % 25)) + f" and {seed}" for seed in range(60)]
    signatures = [signature(text) for text in texts]
    expected = [-1] * 25 + [number % 25 for number in range(25, 60)]
    assert near_duplicates(as_rows(signatures), 0.8).tolist() == expected
    (tmp_path / "signatures").write_bytes(b"".join(signatures))
    mapped = np.memmap(tmp_path / "signatures", dtype="<u4", mode="r").reshape(-1, SLOTS)
    assert near_duplicates(mapped, 0.8).tolist() == expected


def test_a_bucket_of_a_thousand_is_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_like([64] * 300)
    assert (near_duplicates(rows, 0.8) == -1).all()
    monkeypatch.setattr(near, "_MOST_IN_BUCKET", 10)
    again = np.concatenate([rows, rows])
    found = near_duplicates(again, 0.8)
    assert (found[:301] == -1).all()
    # What is the same is still found, since its other bands have buckets of their own.
    assert found[301:].tolist() == list(range(301))


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99])
def test_bands_find_nearly_all_above_the_threshold(threshold: float) -> None:
    bands, size = bands_for(threshold)
    assert bands * size <= SLOTS

    def found(index: float) -> float:
        return 1 - (1 - index**size) ** bands

    assert found(threshold) > 0.75
    assert found(min(1.0, threshold + 0.1)) > 0.99
    assert found(threshold / 3) < 0.5 or threshold < 0.3


def test_bands_for_the_preset() -> None:
    assert bands_for(0.8) == (16, 8)


@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one_have_no_duplicates(count: int) -> None:
    assert near_duplicates(as_rows([signature("a text")] * count), 0.8).tolist() == [-1] * count


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, float("nan")])
def test_a_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        near_duplicates(as_rows([]), threshold)


def test_what_is_no_signature_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 128"):
        near_duplicates(np.zeros((3, 5), dtype=np.uint32), 0.8)


def test_without_its_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match=r"rensa.*flatout\[data\]"):
        signature("a text")


def test_all_pairs_of_a_small_corpus_are_told_apart() -> None:
    signatures = [signature(" ".join(words(80, seed))) for seed in range(30)]
    assert max(estimate(a, b) for a, b in itertools.combinations(signatures, 2)) < 0.1
