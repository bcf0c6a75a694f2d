"""Rules that drop documents, and the search for near duplicates.

`rejection` asks rule after rule, the cheap ones first, and returns the name of the first that fails, so that a report
can count each of them. Every rule, its threshold and its origin are in docs/guides/data.md.

`quality` holds the rules of Gopher (Rae et al. 2021, "Scaling Language Models", section A1.1, "Quality Filtering") and
the three that FineWeb added (Penedo et al. 2024, "The FineWeb Datasets", section 3.6). `repetition` is Gopher's
"Repetition Removal" with the thresholds of its table A1. Where the papers leave a choice, it is this:
- a word is what stands between white space, and its characters are all that count in shares of words and n-grams; only
for the share of words with letters, marks that stand by themselves are no words;
- lines are stripped, and empty ones left out; paragraphs are separated by empty lines;
- a duplicate is an occurrence after the first, of lines, paragraphs and n-grams alike;
- characters covered by overlapping n-grams count once.

Near duplicates: two texts are alike when they share most of their word 5-grams, by the Jaccard index. The share of
equal slots in two MinHash signatures (Broder 1997) estimates that index. Signatures are cut into bands (Indyk and
Motwani 1998); only texts that agree in a whole band are compared. `near_duplicates` goes through the documents in order
and drops one when an earlier kept one has an estimate at or above the threshold. So if b is like a, and c is like b but
not like a, then b goes and c stays. Words are runs of Unicode letters, marks, digits and underscores, lower-cased; in
scripts without spaces each letter is one. Fewer than 5 words are compared as single words.

Contract: both answers depend on the rules and the texts only: no Python `hash`, process, machine or number of workers.
`to_json` names all that decides the result, with the versions of the libraries.

rensa 0.5 (Rust) makes the signatures: on one core it takes 80 million n-grams a second, datasketch 2.0 takes 2.7
million. The search is ours, in numpy: rensa's index takes no signatures from a file, datasketch's takes 8,000 documents
a second and 5,500 bytes for each, ours 80,000 and 195 bytes (440 when three in ten are near duplicates) beside 512
bytes of signature, which may stay on disk.

Traps: a text is judged by its first 16 Mi characters, a document in pieces by its first piece. Words and lines are
those of languages with spaces: `quality` drops all Chinese, Japanese or Thai text. Language detection is often wrong
below two or three hundred characters. The estimate of similarity has a standard error of up to sqrt(J (1 - J) / 128),
0.035 at J = 0.8, and banding misses one pair in twenty just at the threshold (`bands_for`).
"""

import itertools
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import needed
from flatout.errors import ConfigError

if TYPE_CHECKING:  # workers import this module and have no need of pydantic, which takes 0.1 s
    from flatout.config.schema import CleanConfig


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
    """The kind of every code point, 0 where it has not been looked up yet."""
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


Positions = npt.NDArray[np.int64]
SHORTEST = 200  # characters
SIMILAR = 0.8  # near duplicates: the least Jaccard similarity of word 5-grams
# Gopher
_FEWEST_WORDS, _MOST_WORDS = 50, 100_000
_SHORTEST_MEAN_WORD, _LONGEST_MEAN_WORD = 3, 10
_MOST_SYMBOLS_PER_WORD = 0.1
_MOST_BULLET_LINES = 0.9
_MOST_ELLIPSIS_LINES = 0.3
_FEWEST_WORDS_WITH_LETTERS = 0.8
_FEWEST_STOP_WORDS = 2
_STOP_WORDS = tuple(
    (word, word.capitalize(), word.upper()) for word in ("the", "be", "to", "of", "and", "that", "have", "with")
)
# FineWeb: a document goes when it is at the threshold, where Gopher's goes beyond it
_PUNCTUATED_LINES = 0.12
_DUPLICATE_LINE_CHARACTERS = 0.1
_SHORT_LINES = 0.67
_SHORT_LINE = 30
# Gopher, table A1
_MOST_DUPLICATES = 0.30
_MOST_DUPLICATE_CHARACTERS = 0.20
_TOP_GRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
_DUPLICATE_GRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_STRICTEST = min(_DUPLICATE_GRAMS.values())
_JUDGED_CHARACTERS = 2**24
_LANGUAGE_CHARACTERS = 2**16
_VERSION = 1  # of the rules; to be raised when any of them changes its answer
_BULLETS = frozenset("•‣▪●◦·*-–")
_ELLIPSES = ("...", "…")
_ENDS = frozenset(".!?\"'…”’»。！？」』।؟۔")
_PARAGRAPH_GAP = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class CleanRules:
    """The `clean` section of a config as plain values, with its languages checked."""

    min_characters: int = 0
    exact_duplicates: bool = False
    near_duplicates: float | None = None
    languages: tuple[str, ...] | None = None
    repetition: bool = False
    quality: bool = False
    # Versions of the libraries whose answers count; None where they are not used.
    language_method: str | None = None
    near_method: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All that decides which documents are dropped, as plain JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "version": _VERSION,
            **values,
            "languages": None if self.languages is None else list(self.languages),
        }


def load_rules(config: "CleanConfig") -> CleanRules:
    """The rules that a config asks for. What it names must exist: languages, packages."""
    return CleanRules(
        min_characters=SHORTEST if "short" in config.drop else 0,
        exact_duplicates="exact_duplicates" in config.drop,
        near_duplicates=SIMILAR if "near_duplicates" in config.drop else None,
        repetition="repetition" in config.drop,
        quality="quality" in config.drop,
        languages=None if config.languages is None else _known_languages(config.languages),
        language_method=None if config.languages is None else f"resiliparse {version('resiliparse')}",
        near_method=method() if "near_duplicates" in config.drop else None,
    )


def rejection(rules: CleanRules, text: str) -> str | None:
    """The name of the first rule, in the order of `RULES`, that drops the document; None keeps it."""
    if len(text) < rules.min_characters:
        return "too_short"
    language = None
    if rules.languages is not None:
        language = language_of(text)
        if language not in rules.languages:
            return "language"
    if not (rules.quality or rules.repetition):
        return None
    text = text[:_JUDGED_CHARACTERS]
    # One word more than allowed is enough to know, and spares a huge text the list of its words.
    words = text.split(None, _MOST_WORDS if rules.quality else -1)
    if rules.quality and not _FEWEST_WORDS <= len(words) <= _MOST_WORDS:
        return "quality_few_words" if len(words) < _FEWEST_WORDS else "quality_many_words"
    if not words:
        return None
    looked_at = _look_at(text, words)
    reason = _quality(looked_at, language in (None, "en")) if rules.quality else None
    return reason or (_repetition(looked_at) if rules.repetition else None)


def language_of(text: str) -> str | None:
    """The code of the language that the beginning of a text is most like; None where it is like none."""
    text = text[:_LANGUAGE_CHARACTERS]
    if not any(map(str.isalpha, text)):
        return None  # the detector answers English where there are no letters
    # Above its cutoff, 1200, the distance to the nearest language means little, and the answer is "unknown".
    code, _ = _detector().detect_fast(unicodedata.normalize("NFC", text))
    return None if code == "unknown" else code


def _known_languages(codes: list[str]) -> tuple[str, ...]:
    known = sorted(_detector().supported_langs())
    for code in codes:
        if code not in known:
            close = get_close_matches(code, known, n=4, cutoff=0.4) or known
            raise ConfigError(
                f"clean.languages names {code}, a language that cannot be detected",
                f"codes are those of ISO 639-1, such as {', '.join(close)}",
            )
    return tuple(sorted(set(codes)))


def _detector() -> Any:
    return needed("resiliparse.parse.lang", "clean.languages needs")


@dataclass(frozen=True)
class _Text:
    """A text with at least one word, taken apart.

    `numbers` numbers its distinct words, `ids` are the words in order, by number; `times` is how often each occurs.
    The characters of word p are `edges[p]` to `edges[p + 1] - 1`, white space left out.
    """

    text: str
    lines: list[str]
    numbers: dict[str, int]
    ids: Positions
    times: Positions
    edges: Positions

    def per_word(self, count: int) -> float:
        return count / len(self.ids)

    def of_lines(self, holds: Callable[[str], bool]) -> float:
        """The share of lines for which something holds."""
        return sum(map(holds, self.lines)) / len(self.lines)


def _look_at(text: str, words: list[str]) -> _Text:
    numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    ids = np.fromiter(map(numbers.__getitem__, words), dtype=np.int64, count=len(words))
    sizes = np.fromiter(map(len, numbers), dtype=np.int64, count=len(numbers))
    edges = np.zeros(len(words) + 1, dtype=np.int64)
    np.cumsum(sizes[ids], out=edges[1:])
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return _Text(text, lines, numbers, ids, np.bincount(ids), edges)


# Gopher's and FineWeb's rules, in the order they are asked, for a text whose number of words is in order.
_QUALITY: dict[str, Callable[[_Text], bool]] = {
    "quality_word_length": lambda text: not _SHORTEST_MEAN_WORD <= text.per_word(text.edges[-1]) <= _LONGEST_MEAN_WORD,
    "quality_hashes": lambda text: text.per_word(text.text.count("#")) > _MOST_SYMBOLS_PER_WORD,
    "quality_ellipses": lambda text: text.per_word(sum(map(text.text.count, _ELLIPSES))) > _MOST_SYMBOLS_PER_WORD,
    "quality_bullet_lines": lambda text: text.of_lines(lambda line: line[0] in _BULLETS) > _MOST_BULLET_LINES,
    "quality_ellipsis_lines": lambda text: text.of_lines(lambda line: line.endswith(_ELLIPSES)) > _MOST_ELLIPSIS_LINES,
    "quality_unpunctuated_lines": lambda text: text.of_lines(lambda line: line[-1] in _ENDS) <= _PUNCTUATED_LINES,
    "quality_short_lines": lambda text: text.of_lines(lambda line: len(line) < _SHORT_LINE) >= _SHORT_LINES,
    "quality_duplicate_lines": lambda text: _duplicate_characters(text.lines) >= _DUPLICATE_LINE_CHARACTERS,
    "quality_letters": lambda text: _with_letters(text) < _FEWEST_WORDS_WITH_LETTERS,
    "quality_stop_words": lambda text: _stop_words(text) < _FEWEST_STOP_WORDS,
}
# Every name that `rejection` answers with, in order.
RULES = (
    *("too_short", "language", "quality_few_words", "quality_many_words"),
    *_QUALITY,
    *(f"repetition_{part}{what}" for part in ("line", "paragraph") for what in ("s", "_characters")),
    *(f"repetition_top_{size}_gram" for size in _TOP_GRAMS),
    *(f"repetition_{size}_grams" for size in _DUPLICATE_GRAMS),
)


def _quality(looked_at: _Text, english: bool) -> str | None:
    """The first rule that is broken."""
    asked = (name for name in _QUALITY if english or name != "quality_stop_words")
    return next((name for name in asked if _QUALITY[name](looked_at)), None)


def _stop_words(looked_at: _Text) -> int:
    """How many of the English stop words occur."""
    return sum(not looked_at.numbers.keys().isdisjoint(forms) for forms in _STOP_WORDS)


def _with_letters(looked_at: _Text) -> float:
    """The share of words with a letter in them, among those with a letter or a digit."""
    times = looked_at.times.tolist()
    digits = marks = 0
    for word, number in looked_at.numbers.items():
        # Nearly all words are letters only, which is quickly seen.
        if not word.isalpha() and not any(map(str.isalpha, word)):
            if any(map(str.isalnum, word)):
                digits += times[number]
            else:
                marks += times[number]
    words = len(looked_at.ids) - marks
    return (words - digits) / words if words else 0.0


def _repetition(looked_at: _Text) -> str | None:
    """The first rule of Gopher's table A1 that is broken."""
    paragraphs = [paragraph for paragraph in map(str.strip, _PARAGRAPH_GAP.split(looked_at.text)) if paragraph]
    for name, parts in (("line", looked_at.lines), ("paragraph", paragraphs)):
        if (distinct := len(set(parts))) == len(parts):
            continue
        if (len(parts) - distinct) / len(parts) > _MOST_DUPLICATES:
            return f"repetition_{name}s"
        if _duplicate_characters(parts) > _MOST_DUPLICATE_CHARACTERS:
            return f"repetition_{name}_characters"
    return _repeated_grams(looked_at)


def _duplicate_characters(parts: list[str]) -> float:
    """The share of characters in parts that occurred before."""
    characters = sum(map(len, parts))
    return (characters - sum(map(len, set(parts)))) / characters


def _repeated_grams(looked_at: _Text) -> str | None:
    """The first rule on n-grams that is broken.

    A repeated n-gram is made of repeated n-grams one word shorter. So only the places of those are looked at, and once
    they cover less than the strictest rule allows, the answer is known: in prose, mostly at 3 words. An n-gram's number
    is made of the numbers of the two that it consists of, so no two share one.
    """
    edges = looked_at.edges
    characters = int(edges[-1])
    places = np.flatnonzero(looked_at.times[looked_at.ids] > 1)
    ids = looked_at.ids[places]
    for size in range(2, max(_DUPLICATE_GRAMS) + 1):
        joined = np.flatnonzero(places[1:] == places[:-1] + 1)
        if not len(joined):
            return None
        keys = ids[joined] * (int(ids.max()) + 1) + ids[joined + 1]
        ids, times = _numbered(keys)
        again = times[ids] > 1
        places, ids = places[joined[again]], ids[again]
        if _covered(places, edges, size) / characters <= _STRICTEST:
            return None
        if size in _TOP_GRAMS:
            top = _most_frequent(places, ids, times, edges, size)
            if _covered(top, edges, size) / characters > _TOP_GRAMS[size]:
                return f"repetition_top_{size}_gram"
        else:
            first = np.empty(len(times), dtype=np.int64)
            first[ids[::-1]] = places[::-1]  # the last value that is written stays
            if _covered(places[places != first[ids]], edges, size) / characters > _DUPLICATE_GRAMS[size]:
                return f"repetition_{size}_grams"
    return None


def _numbered(keys: Positions) -> tuple[Positions, Positions]:
    """(numbers that are equal where the keys are, how often each occurs). As `numpy.unique`, at half the time."""
    order = np.argsort(keys)
    ordered = keys[order]
    steps = np.zeros(len(keys), dtype=np.int64)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = np.cumsum(steps)
    numbers = np.empty_like(ranks)
    numbers[order] = ranks
    return numbers, np.bincount(ranks)


def _most_frequent(places: Positions, ids: Positions, times: Positions, edges: Positions, size: int) -> Positions:
    """The places of the n-gram that occurs most often; of several, of the longest, and of those, of the first."""
    often = times[ids] == times[ids].max()
    places, ids = places[often], ids[often]
    longest = np.argmax(edges[places + size] - edges[places])
    return places[ids == ids[longest]]


def _covered(places: Positions, edges: Positions, size: int) -> int:
    """How many characters the n-grams at these places hold, those in two of them counted once."""
    if not len(places):
        return 0
    starts, ends = edges[places], edges[places + size]
    return int(np.sum(ends) - np.sum(np.maximum(starts[1:], ends[:-1])) - starts[0])
