"""Which documents are dropped, and by which rule.

Idea: `rejection` asks rule after rule, the cheap ones first, and answers with the name of the first that fails, so that
a report can count what each of them cost. Every rule, its threshold and its origin are in docs/cleaning.md.

`quality` holds the rules of Gopher (Rae et al. 2021, "Scaling Language Models", section A1.1, "Quality Filtering") and
the three that FineWeb added (Penedo et al. 2024, "The FineWeb Datasets", section 3.6). `repetition` is Gopher's
"Repetition Removal" with the thresholds of its table A1. The code is ours; where the papers leave a choice, it is this:
- a word is what stands between white space, and its characters are all that count in shares of words and n-grams; only
  for the share of words with letters, marks that stand by themselves are no words;
- lines are stripped, and empty ones left out; paragraphs are parted by empty lines;
- a duplicate is an occurrence after the first, of lines, paragraphs and n-grams alike;
- characters covered by overlapping n-grams count once.

Contract: the answer depends on the rules and the text only. Rules travel between processes as they are; `to_json`
names all that decides the result, the version of the language detector included.

Trap: a text is judged by its first 16 Mi characters, a document in pieces by its first piece. Words and
lines are those of languages with spaces: of Chinese, Japanese or Thai, `quality` drops everything. Language detection
needs some text: below two or three hundred characters it is often wrong.
"""

import itertools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import needed
from flatout.corpus.near import method
from flatout.errors import ConfigError

if TYPE_CHECKING:  # workers import this module and have no need of pydantic, which takes 0.1 s
    from flatout.config.schema import CleanConfig

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
    # Versions of the libraries whose answers count; None where nobody asks them.
    language_method: str | None = None
    near_method: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All that decides what is dropped, in one spelling."""
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
        return None  # the detector takes nothing at all for English
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
