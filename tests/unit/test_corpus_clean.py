"""Cleaning rules: each with a text just inside and just outside, in their order; languages."""

import itertools
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.former import as_now
from flatout.config.load import load_config
from flatout.config.schema import CleanConfig
from flatout.corpus import clean
from flatout.corpus.clean import RULES, CleanRules, language_of, load_rules, rejection
from flatout.corpus.document import shakespeare
from flatout.errors import ConfigError, DataError

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "data.md"
LICENSE = DOCS.parents[2] / "LICENSE"

QUALITY = CleanRules(quality=True)
REPETITION = CleanRules(repetition=True)

PARAGRAPHS = {
    "en": (
        "The harbour was quiet that morning, and only the gulls were awake. An old man sat on the wall and mended his "
        "net with slow, careful hands, while his dog slept in the sun beside him. Nobody had told them that the ship "
        "would not come back, and so they waited as they had waited every day for a year."
    ),
    "de": (
        "Der Hafen war an diesem Morgen still, und nur die Möwen waren wach. Ein alter Mann saß auf der Mauer und "
        "flickte mit langsamen, sorgfältigen Händen sein Netz, während sein Hund neben ihm in der Sonne schlief. "
        "Niemand hatte ihnen gesagt, dass das Schiff nicht zurückkommen würde, und so warteten sie wie jeden Tag."
    ),
    "fr": (
        "Le port était calme ce matin-là, et seules les mouettes étaient éveillées. Un vieil homme était assis sur le "
        "mur et réparait son filet d'une main lente et soigneuse, tandis que son chien dormait au soleil à côté de "
        "lui. Personne ne leur avait dit que le bateau ne reviendrait pas, et ils attendaient comme tous les jours."
    ),
    "es": (
        "El puerto estaba tranquilo aquella mañana, y solo las gaviotas estaban despiertas. Un viejo se sentaba en el "
        "muro y remendaba su red con manos lentas y cuidadosas, mientras su perro dormía al sol junto a él. Nadie les "
        "había dicho que el barco no volvería, y por eso esperaban como habían esperado todos los días."
    ),
    "ru": (
        "В то утро в гавани было тихо, и не спали только чайки. Старик сидел на стене и медленно, бережно чинил свою "
        "сеть, а рядом с ним на солнце спала его собака. Никто не сказал им, что корабль не вернётся, и поэтому они "
        "ждали, как ждали каждый день вот уже целый год."
    ),
    "zh": (
        "那天早晨港口很安静，只有海鸥醒着。一位老人坐在墙上，用缓慢而细心的双手修补他的渔网，他的狗在他身边的阳光下睡觉。"
        "没有人告诉他们那艘船不会回来了，所以他们像一年来的每一天那样等待着。孩子们从学校回家的时候，都会停下来看他工作，"
        "听他讲海上的故事。"
    ),
    "ja": (
        "その朝、港は静かで、起きているのはカモメだけだった。老人は壁の上に座り、ゆっくりと丁寧な手つきで網を直していた。"
        "犬は彼のそばの日なたで眠っていた。船が戻らないことを誰も彼らに伝えていなかったので、"
        "彼らは一年のあいだ毎日そうしてきたように待っていた。"
    ),
}


def fresh(count: int, size: int = 5, salt: str = "") -> list[str]:
    """That many different words of `size` letters; another salt gives others."""
    letters = itertools.product("abcdefghijklmnop", repeat=size - len(salt))
    return [salt + "".join(word) for word in itertools.islice(letters, count)]


def lines_of(words: list[str], count: int, end: str = ".") -> list[str]:
    """The words in `count` lines of equal length, each ending like a sentence."""
    size = len(words) // count
    return [" ".join(words[i * size : (i + 1) * size]) + end for i in range(count)]


def prose(count: int = 100, *, start: tuple[str, ...] = ("the", "and")) -> list[str]:
    """Words that no rule minds, two of them stop words."""
    return [*start, *fresh(count - len(start))]


def marked(words: list[str], mark: str, count: int) -> str:
    """The words as ten lines, a mark at the front of `count` of them."""
    return "\n".join(lines_of([*words[:2], *(mark + word for word in words[2 : 2 + count]), *words[2 + count :]], 10))


def changed(text: str, changes: dict[int, str]) -> str:
    """The text with some of its lines replaced; `{}` stands for the line as it was."""
    return "\n".join(changes.get(i, "{}").format(line) for i, line in enumerate(text.split("\n")))


def short_words(size_of_one: int) -> str:
    """Fifty words of three characters, one of them of another size."""
    words = ["the", "and", *fresh(48, 3, salt="q")]
    words[7] = words[7][:size_of_one].ljust(size_of_one, "q")
    words[-1] = words[-1][:2] + "."
    return " ".join(words)


def long_words(size_of_one: int) -> str:
    """Fifty words of ten characters on average, one of them of another size."""
    words = ["the", "and", *fresh(48, 10, salt="qqqq")]
    words[5] = words[5] + "q" * 14
    words[7] = words[7][:5].ljust(size_of_one, "q")
    words[-1] = words[-1][:9] + "."
    return " ".join(words)


TEN = "\n".join(lines_of(prose(), 10))
HUNDRED = "\n".join(lines_of(prose(1000), 100))
EQUAL = lines_of(fresh(999, salt="x"), 111)  # lines of one length

INSIDE_AND_OUTSIDE = {
    "quality_few_words": (" ".join(prose(50)) + ".", " ".join(prose(49)) + "."),
    "quality_many_words": ("\n".join(lines_of(prose(100_000), 100)), "\n".join([*lines_of(prose(100_000), 100), "x"])),
    "quality_word_length": (short_words(3), short_words(2)),
    "quality_hashes": (marked(prose(), "#", 10), marked(prose(), "#", 11)),
    "quality_ellipses": (marked(prose(), "...", 10), marked(prose(), "…", 11)),
    "quality_bullet_lines": (
        changed(TEN, dict.fromkeys(range(9), "- {}")),
        changed(HUNDRED, dict.fromkeys(range(91), "• {}")),
    ),
    "quality_ellipsis_lines": (
        changed(TEN, dict.fromkeys(range(3), "{}..")),
        changed(TEN, dict.fromkeys(range(4), "{} …")),
    ),
    "quality_unpunctuated_lines": (
        changed(HUNDRED, dict.fromkeys(range(87), "{},")),
        changed(HUNDRED, dict.fromkeys(range(88), "{},")),
    ),
    "quality_short_lines": (
        "\n".join(f"{word} and the longer sayings." for word in [*fresh(66, 5), *fresh(34, 6)]),
        "\n".join(f"{word} and the longer sayings." for word in [*fresh(67, 5), *fresh(33, 6)]),
    ),
    "quality_duplicate_lines": (
        "\n".join([*EQUAL[:91], *EQUAL[:9], "the and"]),
        "\n".join(EQUAL[:90] + EQUAL[:10]),
    ),
    "quality_letters": (
        " ".join(["the", "and", *fresh(78), *map(str, range(100, 120)), "| - –"]) + ".",
        " ".join(["the", "and", *fresh(77), *map(str, range(100, 121)), "| - –"]) + ".",
    ),
    "quality_stop_words": (" ".join(prose(start=("The", "WITH"))) + ".", " ".join(prose(start=("the", "the"))) + "."),
}


@pytest.mark.parametrize("rule", INSIDE_AND_OUTSIDE)
def test_a_quality_rule_keeps_what_is_at_its_threshold_and_drops_what_is_beyond(rule: str) -> None:
    inside, outside = INSIDE_AND_OUTSIDE[rule]
    assert rejection(QUALITY, inside) is None
    assert rejection(QUALITY, outside) == rule


def test_every_quality_rule_is_tried() -> None:
    assert list(INSIDE_AND_OUTSIDE) == [rule for rule in RULES if rule.startswith("quality_")]


def test_words_may_be_too_long_as_well_as_too_short() -> None:
    assert rejection(QUALITY, long_words(10)) is None
    assert rejection(QUALITY, long_words(11)) == "quality_word_length"


def test_at_its_threshold_a_rule_of_fineweb_drops_and_one_of_gopher_keeps() -> None:
    twelve = changed(HUNDRED, dict.fromkeys(range(88), "{},"))
    assert sum(line.endswith(".") for line in twelve.split("\n")) == 12
    assert rejection(QUALITY, twelve) == "quality_unpunctuated_lines"
    assert rejection(QUALITY, changed(TEN, dict.fromkeys(range(3), "{}.."))) is None


def test_empty_lines_and_spaces_around_lines_do_not_count() -> None:
    inside, outside = INSIDE_AND_OUTSIDE["quality_unpunctuated_lines"]
    assert rejection(QUALITY, inside.replace("\n", " \t\n\n\n  ")) is None
    assert rejection(QUALITY, outside.replace("\n", " \t\n\n\n  ")) == "quality_unpunctuated_lines"


def indented(depth: int, rest: int) -> str:
    """A paragraph that comes twice, with a space that counts in it but not in its lines, and others of `rest`."""
    paragraph = "yy\n" + " " * depth + "zz"
    last = "\n".join(fresh(4))
    return "\n\n".join([paragraph, "ww", paragraph, last + "\n" + "x" * (rest - len(last) - 1)])


def blocks(count: int, size: int, total: int) -> str:
    """`count` sequences of `size` words, each of them twice, in `total` words of the same length on one line."""
    repeated = fresh(count * size, salt="x")
    filler = iter(fresh(total))
    words = []
    for _ in range(2):
        for block in range(count):
            words += [*repeated[block * size : (block + 1) * size], next(filler)]
    return " ".join([*words, *itertools.islice(filler, total - len(words))])


def often(gram: list[str], times: int, total: int) -> str:
    """A sequence of words that comes several times among others, in `total` words of the same length on one line."""
    filler = iter(fresh(total))
    words = [word for _ in range(times) for word in (*gram, next(filler))]
    return " ".join([*words, *itertools.islice(filler, total - len(words))])


REPEATING = {
    # Three and four of ten lines, too short to weigh.
    "repetition_lines": (
        "\n".join(["a"] * 4 + fresh(6)),
        "\n".join(["a"] * 5 + fresh(5)),
    ),
    # A single word, so that it is no repeated n-gram; 20 of 100 characters, and of 99.
    "repetition_line_characters": (
        "\n".join(["y" * 20, "z" * 30, "y" * 20, "x" * 30]),
        "\n".join(["y" * 20, "z" * 30, "y" * 20, "x" * 29]),
    ),
    "repetition_paragraphs": (
        "\n\n".join(["a"] * 4 + ["\n".join(fresh(4, salt=salt)) for salt in "uvwxyz"]),
        "\n\n".join(["a"] * 5 + ["\n".join(fresh(4, salt=salt)) for salt in "vwxyz"]),
    ),
    # 20 of 100 characters, and of 99; in lines, the space is left out.
    "repetition_paragraph_characters": (
        indented(15, rest=58),
        indented(15, rest=57),
    ),
    "repetition_top_2_gram": (often(["xxxxy", "xxxxz"], 10, 100), often(["xxxxy", "xxxxz"], 10, 99)),
    "repetition_top_3_gram": (often(fresh(3, salt="x"), 6, 100), often(fresh(3, salt="x"), 6, 99)),
    "repetition_top_4_gram": (often(fresh(4, salt="x"), 4, 100), often(fresh(4, salt="x"), 4, 99)),
    **{
        f"repetition_{size}_grams": (blocks(20 - size, size, 100 * size), blocks(20 - size, size, 100 * size - 1))
        for size in range(5, 11)
    },
}


@pytest.mark.parametrize("rule", REPEATING)
def test_a_repetition_rule_keeps_what_is_at_its_threshold_and_drops_what_is_beyond(rule: str) -> None:
    inside, outside = REPEATING[rule]
    assert rejection(REPETITION, inside) is None
    assert rejection(REPETITION, outside) == rule


def test_every_repetition_rule_is_tried() -> None:
    assert list(REPEATING) == [rule for rule in RULES if rule.startswith("repetition_")]


@pytest.mark.parametrize("turn", [1, -1])
def test_of_n_grams_that_come_equally_often_the_longest_is_asked(turn: int) -> None:
    pairs = [("y" * 20, "z" * 20), ("a", "b")][::turn]
    words = [word for pair, salt in zip(pairs, "uv", strict=True) for word in (*pair, *fresh(20, salt=salt), *pair)]
    assert rejection(REPETITION, " ".join(words)) == "repetition_top_2_gram"


def plain_repeated_grams(words: list[str]) -> str | None:
    """The rules on n-grams, word for word as docs/guides/data.md has them."""
    sizes = [len(word) for word in words]
    for size, most in {2: 0.20, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}.items():
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        times = Counter(grams)
        if size <= 4:
            repeated = [gram for gram in grams if times[gram] > 1]
            if not repeated:
                continue
            top = max(repeated, key=lambda gram: (times[gram], len("".join(gram))))
            places = [i for i, gram in enumerate(grams) if gram == top]
        else:
            places = [i for i, gram in enumerate(grams) if gram in grams[:i]]
        covered = {i + offset for i in places for offset in range(size)}
        if sum(sizes[i] for i in covered) / sum(sizes) > most:
            return f"repetition_top_{size}_gram" if size <= 4 else f"repetition_{size}_grams"
    return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_repeated_n_grams_are_those_of_the_plain_definition(data: st.DataObject) -> None:
    distinct = data.draw(st.sampled_from([2, 5, 30, 100]))
    numbers = data.draw(st.lists(st.integers(0, distinct), min_size=1, max_size=120))
    copied = data.draw(st.integers(0, 30))
    words = ["w" * (1 + number % 4) + str(number) for number in [*numbers, *numbers[:copied]]]
    assert rejection(REPETITION, " ".join(words)) == plain_repeated_grams(words)


def test_length_bounds_count_characters() -> None:
    assert [rejection(CleanRules(min_characters=3), "é" * size) for size in (2, 3)] == ["too_short", None]


def test_nothing_is_dropped_by_default() -> None:
    rules = load_rules(CleanConfig())
    for text in ("", "x", "buy " * 1000, "#" * 1000, PARAGRAPHS["zh"]):
        assert rejection(rules, text) is None


def test_rules_are_asked_in_their_order() -> None:
    rules = load_rules(CleanConfig(languages=["en"], drop=["short", "quality", "repetition"]))
    assert rejection(rules, "buy") == "too_short"
    assert rejection(rules, PARAGRAPHS["de"] * 5) == "language"
    assert rejection(rules, PARAGRAPHS["en"][:230]) == "quality_few_words"
    assert rejection(rules, PARAGRAPHS["en"] * 5) == "repetition_5_grams"
    assert rejection(rules, PARAGRAPHS["en"]) is None
    for rule, (_, outside) in (INSIDE_AND_OUTSIDE | REPEATING).items():
        found = rejection(CleanRules(quality=True, repetition=True), outside)
        assert found is not None
        assert RULES.index(found) <= RULES.index(rule)


def test_a_huge_text_is_judged_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "_JUDGED_CHARACTERS", len(TEN))
    assert rejection(QUALITY, TEN + "\n#" * 1000) is None


def test_real_text_survives() -> None:
    rules = load_rules(CleanConfig(languages=["en"], drop=["short", "quality", "repetition"]))
    speeches = shakespeare().read_text(encoding="utf-8").split("\n\n")
    scenes = ["\n\n".join(speeches[start : start + 60]) for start in range(0, len(speeches), 60)]
    reasons = Counter(rejection(rules, scene) for scene in scenes)
    # Names that stand on lines of their own are repeated lines, and a few scenes have too many.
    assert reasons == {None: 112, "quality_duplicate_lines": 8, "repetition_lines": 1}
    assert rejection(rules, LICENSE.read_text(encoding="utf-8")) is None


@pytest.mark.parametrize("code", PARAGRAPHS)
def test_languages_are_told_apart(code: str) -> None:
    assert language_of(PARAGRAPHS[code]) == code
    assert rejection(load_rules(CleanConfig(languages=[code])), PARAGRAPHS[code]) is None
    other = "en" if code != "en" else "de"
    assert rejection(load_rules(CleanConfig(languages=[other])), PARAGRAPHS[code]) == "language"


def test_several_languages_may_be_kept() -> None:
    rules = load_rules(CleanConfig(languages=["de", "en", "de"]))
    assert rules.languages == ("de", "en")
    kept = [code for code, text in PARAGRAPHS.items() if rejection(rules, text) is None]
    assert kept == ["en", "de"]


@pytest.mark.parametrize("text", ["", " \n", "12 34 !", "?", "\ud800" * 300])
def test_a_text_without_letters_is_in_no_language(text: str) -> None:
    assert language_of(text) is None


def test_stop_words_are_asked_of_english_only() -> None:
    text = PARAGRAPHS["de"]
    assert rejection(QUALITY, text) == "quality_stop_words"
    assert rejection(load_rules(CleanConfig(languages=["de", "en"], drop=["quality"])), text) is None


@pytest.mark.parametrize(("code", "close"), [("eng", "en"), ("deu", "de"), ("zz", "uz"), ("xx", "zh")])
def test_an_unknown_language_is_refused_with_the_closest(code: str, close: str) -> None:
    with pytest.raises(ConfigError, match=rf"names {code}, .*such as (.*, )?{close}\b"):
        load_rules(CleanConfig(languages=["en", code]))


def test_without_its_package_a_rule_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resiliparse.parse.lang", None)
    with pytest.raises(DataError, match=r"resiliparse.*flatout\[data\]"):
        load_rules(CleanConfig(languages=["en"]))


def test_rules_travel_and_describe_themselves() -> None:
    def rules_with(**settings: Any) -> CleanRules:
        return load_rules(CleanConfig(languages=["en", "de"], **settings))

    rules = rules_with(drop=["near_duplicates"])
    assert pickle.loads(pickle.dumps(rules)) == rules
    described = rules.to_json()
    assert described["language_method"].startswith("resiliparse ")
    assert described["near_method"].startswith("rensa ")
    for other in (rules_with(), rules_with(drop=["near_duplicates", "quality"])):
        assert other.to_json() != described
    assert as_now({"clean": described})["clean"].keys() >= set(CleanConfig.model_fields) - {"drop"}


def test_every_rule_is_in_the_documentation() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [rule for rule in RULES if f"`{rule}`" not in text] == []


def test_the_preset_for_crawls_asks_for_all_of_it() -> None:
    rules = load_rules(load_config("common-crawl").config.clean)
    assert rules.exact_duplicates
    assert rules.near_duplicates == 0.8
    assert rules.languages == ("en",)
    assert rejection(rules, PARAGRAPHS["en"]) is None
    assert rejection(rules, PARAGRAPHS["de"]) == "language"
