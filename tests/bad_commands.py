"""Command lines that must all be refused: typos, wrong values, bad files, noise."""

import random
import string
from collections.abc import Iterator
from pathlib import Path

from tests.bad_configs import bad_config_files, bad_overrides

VERBS = ["train", "prepare", "eval", "generate", "export", "config"]
NUMBERS = {
    "--tokens": ["-1", "0", "many", "1.5", "1e99", ""],
    "--temperature": ["-1", "hot", "nan", "1e9"],
    "--top-k": ["0", "-5", "x"],
    "--top-p": ["-0.1", "1.01", "all"],
    "--seed": ["-1", "one", "9" * 40],
}


def bad_commands(seed: int, count: int, folder: Path) -> Iterator[list[str]]:
    """`count` command lines, a third of them with a bad config file, a third with bad overrides."""
    choose = random.Random(seed)
    files, overrides = bad_config_files(seed, count), bad_overrides(seed, count)
    for index in range(count):
        kind = index % 3
        if kind == 0:
            path = folder / f"bad-{index % 50}.yaml"
            path.write_bytes(next(files))
            yield [*_config_verb(choose), str(path)]
        elif kind == 1:
            yield [*_config_verb(choose), *next(overrides)]
        else:
            yield _bad_words(choose)


def _config_verb(choose: random.Random) -> list[str]:
    return choose.choice([["train"], ["prepare"], ["config", "show"], ["config", "explain"], ["train", "--json"]])


def _bad_words(choose: random.Random) -> list[str]:
    kind = choose.randrange(8)
    if kind == 0:
        return [_typo(choose, choose.choice(VERBS))]
    if kind == 1:
        return [choose.choice(["train", "prepare", "eval", "generate"]), "--" + _noise(choose)]
    if kind == 2:
        option = choose.choice(list(NUMBERS))
        return ["generate", option, choose.choice(NUMBERS[option])]
    if kind == 3:
        return ["train", "--resume", f"nowhere/{_noise(choose)}"]
    if kind == 4:
        return [choose.choice(["eval", "generate"]), f"nowhere/{_noise(choose)}"]
    if kind == 5:
        return ["config", choose.choice([_typo(choose, "explain"), _noise(choose), "copy"])]
    if kind == 6:
        return ["train", f"{_noise(choose)}.yaml", *([f"--{_noise(choose)}"] if choose.random() < 0.5 else [])]
    return ["train", "shakespeare-char", _noise(choose), _noise(choose)]


def _typo(choose: random.Random, word: str) -> str:
    place = choose.randrange(len(word))
    return word[:place] + choose.choice(string.ascii_lowercase + "-_") + word[place:]


def _noise(choose: random.Random) -> str:
    letters = string.ascii_letters + string.digits + "äß☃ \t\n\x1b\x00'\"\\;$-".replace("\x00", "")
    return "z" + "".join(choose.choice(letters) for _ in range(choose.randrange(1, 30)))
