"""Near duplicates: a fixed-size signature for each text (MinHash), and the pairs that are alike (LSH).

Idea: two texts are alike when they share most of their word 5-grams, measured by the Jaccard index: n-grams in both
over n-grams in either. The share of equal slots in two MinHash signatures (Broder 1997) estimates that index without
the texts. Signatures are cut into bands (Indyk and Motwani 1998); only texts that agree in a whole band are compared.

Contract: `signature` depends on the text only: no Python `hash`, no process, machine or order. `near_duplicates` sees
the signatures in the order of the documents and goes through them one by one: a document is dropped when an *earlier,
kept* one has an estimate at or above the threshold. So if b is like a, and c is like b but not like a, then b goes and
c stays. The answer is the same for any number of workers.

Words are runs of Unicode letters, marks, digits and underscores, lower-cased; in scripts that put no spaces between
words, each letter is one. Fewer than 5 words are compared as single words. A text without a word is like no other.

Library: rensa 0.5 (Rust) makes the signatures, not datasketch 2.0. Both are maintained (0.5.0 is of September 2026,
2.0.0 of July 2026) and free of Python's `hash`; rensa's scalar, AVX2 and default code gave the same bytes here. But on
one core, at 500 n-grams a text, rensa takes 80 million n-grams a second and datasketch 2.7 million, no more than 15 MB
of text, and it brings scipy along. The search is ours, in numpy: rensa's index takes no signatures that come from a
file, and datasketch's takes 8,000 documents a second and 5,500 bytes for each, against 80,000 and the bytes below.

Cost, measured at threshold 0.8 (16 bands): 512 bytes of signature a document, which may stay on disk (pass a
`numpy.memmap`), and while searching 195 bytes of memory a document, 440 when three in ten were made from another.

Trap: the estimate has a standard error of up to sqrt(J (1 - J) / 128), 0.035 at J = 0.8, so a threshold is a soft one,
and banding misses one pair in twenty that is just at it, see `bands_for`. A document that comes in pieces is
represented by its first. What is a letter is for Python to say: one with newer Unicode tables knows newer letters.
"""

import math
import unicodedata
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import needed

Numbers = npt.NDArray[np.uint64]
Signatures = npt.NDArray[np.uint32]

SLOTS = 128
SIGNATURE_BYTES = 4 * SLOTS
WORDS_PER_GRAM = 5

_SLOT = np.dtype("<u4")
_SEED = 1
_NO_WORDS = b"\xff" * SIGNATURE_BYTES
_CHUNK = 2**18
_ROWS = 2**14
# A bucket of pages from one template, all a little below the threshold, would be compared each with each.
_MOST_IN_BUCKET = 1024
_OTHER, _LETTER, _ALONE = 1, 2, 3
# Thai to Burmese, Khmer, kana, ideographs: written without spaces.
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers have inverses modulo 2**64
_GRAM_KEYS = (0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xB564EF22EC7AECE5, 0xF7C2EBC08F67F2B5, 0xD605BBB58C8ABBFD)
# Arrays without dimensions: numpy makes one of a number at every use, and each step of a run mixes a few values.
_MIXING = tuple(np.array(n, dtype=np.uint64) for n in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31))


def method() -> str:
    """What decides a signature beside the text, in words: a change makes older signatures incomparable."""
    return f"rensa R-MinHash {_rensa().RMinHash.ALGORITHM_VERSION}, {SLOTS} slots, word {WORDS_PER_GRAM}-grams"


def signature(text: str) -> bytes:
    """The MinHash signature of a text: 128 numbers of 32 bits, little-endian."""
    grams = _grams(_word_hashes(text))
    if not len(grams):
        return _NO_WORDS
    ends = np.array([0, len(grams)], dtype=np.uint64)
    matrix = _rensa().RMinHash.digest_matrix_from_flat_token_hashes(grams, ends, SLOTS, _SEED)
    return np.array(matrix.to_rows()[0], dtype=_SLOT).tobytes()


def near_duplicates(rows: Signatures, threshold: float) -> npt.NDArray[np.int64]:
    """For each document the number of the first earlier kept document that is as like as `threshold`; -1 keeps it.

    `rows` are the signatures in the order of the documents. They may be a map of a file.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"a threshold is above 0 and at most 1, not {threshold}")
    if rows.ndim != 2 or rows.shape[1] != SLOTS:
        raise ValueError(f"signatures are rows of {SLOTS} numbers, not an array of shape {rows.shape}")
    result = np.full(len(rows), -1, dtype=np.int64)
    if len(rows) < 2:
        return result
    buckets = _shared_buckets(rows, *bands_for(threshold))
    active = np.flatnonzero((buckets >= 0).any(axis=0))
    needed = math.ceil(threshold * SLOTS)
    kept: dict[int, list[int]] = {}
    for number, own in zip(active.tolist(), buckets[:, active].T, strict=True):
        mine = own[own >= 0].tolist()
        earlier = sorted(set().union(*(kept.get(bucket, ()) for bucket in mine)))
        if earlier:
            same = np.count_nonzero(rows[earlier] == rows[number], axis=1)
            alike = np.flatnonzero(same >= needed)
            if len(alike):
                result[number] = earlier[int(alike[0])]
                continue
        for bucket in mine:
            members = kept.setdefault(bucket, [])
            if len(members) < _MOST_IN_BUCKET:
                members.append(number)
    return result


@cache
def bands_for(threshold: float) -> tuple[int, int]:
    """(bands, slots in each) for a threshold.

    A pair of index J agrees in at least one of b bands of r slots with probability 1 - (1 - J**r)**b. The pair (b, r)
    is the one with the least weighted area of mistakes: pairs missed above the threshold, useless comparisons below it.
    Since every candidate is verified, a useless comparison costs only time, and weighs a twentieth of a missed pair.
    """
    index = np.linspace(0.0, 1.0, 1001)
    above = index >= threshold
    best, chosen = math.inf, (SLOTS, 1)
    for size in range(1, SLOTS + 1):
        for bands in range(1, SLOTS // size + 1):
            found = 1.0 - (1.0 - index**size) ** bands
            mistakes = 0.95 * float(np.sum(1.0 - found[above])) + 0.05 * float(np.sum(found[~above]))
            if mistakes < best - 1e-9:
                best, chosen = mistakes, (bands, size)
    return chosen


def _shared_buckets(rows: Signatures, bands: int, size: int) -> npt.NDArray[np.int64]:
    """(bands, documents): the number of the bucket, different in every band, or -1 where a document is alone in it."""
    keys = np.empty((bands, len(rows)), dtype=np.uint64)
    weights = np.multiply.accumulate(np.full(size, _BASE, dtype=np.uint64))
    wordless = np.empty(len(rows), dtype=bool)
    for start in range(0, len(rows), _ROWS):
        block = rows[start : start + _ROWS]
        wordless[start : start + _ROWS] = (block == np.uint32(2**32 - 1)).all(axis=1)
        for band in range(bands):
            # A collision of this hash costs a comparison, no more.
            keys[band, start : start + _ROWS] = mixed(
                block[:, band * size : (band + 1) * size].astype(np.uint64) @ weights
            )
    buckets = keys.view(np.int64)  # written over the keys, band by band, since both at once would take twice the memory
    total = 0
    for band in range(bands):
        order = np.argsort(keys[band], kind="stable")
        ordered = keys[band][order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(starts, append=len(ordered))
        numbers = np.where(counts > 1, np.arange(total, total + len(counts)), -1)
        buckets[band][order] = np.repeat(numbers, counts)
        total += len(counts)
    buckets[:, wordless] = -1
    return buckets


def _grams(words: Numbers) -> Numbers:
    count = len(words) - WORDS_PER_GRAM + 1
    if count < 1:
        return words
    total = words[:count] * np.uint64(_GRAM_KEYS[0])
    for position in range(1, WORDS_PER_GRAM):
        total += words[position : position + count] * np.uint64(_GRAM_KEYS[position])
    return total


def _word_hashes(text: str) -> Numbers:
    """A 64-bit hash of each word, in order.

    A word's hash is a polynomial of its code points, taken from running sums, so that numpy does the text at once; in
    chunks, since the sums take 8 bytes a character.
    """
    text = text.lower()
    codes: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]
    if text.isascii():
        codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    found: list[Numbers] = []
    start = 0
    while start < len(codes):
        chunk = codes[start : start + _CHUNK]
        starts, ends = _words_in(chunk)
        start += len(chunk)
        if start < len(codes) and len(starts) and starts[-1] > 0:
            # The last word may go on in the next chunk, which begins with it. One that fills a chunk is cut.
            start -= len(chunk) - int(starts[-1])
            starts, ends = starts[:-1], ends[:-1]
        powers, inverses = _powers()
        sums = np.zeros(len(chunk) + 1, dtype=np.uint64)
        np.cumsum(chunk * powers[: len(chunk)], out=sums[1:])
        found.append(mixed((sums[ends] - sums[starts]) * inverses[starts]))
    return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint64), *found])


def _words_in(codes: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.intp], ...]:
    """Where words begin, and where they end."""
    kinds = np.full(len(codes) + 2, _OTHER, dtype=np.uint8)
    table = _kinds()
    kinds[1:-1] = table[codes]
    if not kinds.all():
        for code in np.unique(codes[kinds[1:-1] == 0]).tolist():
            table[code] = _kind(code)
        kinds[1:-1] = table[codes]
    before, after = kinds[:-1], kinds[1:]
    edge = before != after
    if codes.dtype != np.uint8:
        edge |= after == _ALONE
    return np.flatnonzero(edge & (after >= _LETTER)), np.flatnonzero(edge & (before >= _LETTER))


def _kind(code: int) -> int:
    letter = chr(code)
    # Marks belong to the letter before them: without them the words of India's scripts would fall apart.
    if unicodedata.category(letter)[0] not in "LNM" and letter != "_":
        return _OTHER
    unspaced = code >= 0x20000 or any(first <= code <= last for first, last in _UNSPACED)
    return _ALONE if unspaced else _LETTER


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """The kind of every code point, 0 where nobody has asked yet."""
    table = np.zeros(0x110000, dtype=np.uint8)
    table[:128] = [_kind(code) for code in range(128)]
    return table


@cache
def _powers() -> tuple[Numbers, Numbers]:
    """The powers of the base and of its inverse, modulo 2**64."""
    both = []
    for base in (_BASE, pow(_BASE, -1, 2**64)):
        powers = np.full(_CHUNK, base, dtype=np.uint64)
        powers[0] = 1
        both.append(np.multiply.accumulate(powers))
    return both[0], both[1]


def mixed(values: Numbers) -> Numbers:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a flipped input bit flips half of the output bits."""
    first, times, second, times_again, last = _MIXING
    mixing = values ^ (values >> first)
    mixing *= times
    mixing ^= mixing >> second
    mixing *= times_again
    mixing ^= mixing >> last
    return mixing


def _rensa() -> Any:
    return needed("rensa", "near duplicates need")
