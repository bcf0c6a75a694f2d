"""Command lines that must be refused (typos, wrong values, bad files, noise), and mutated ones that may be valid."""

import random
import string
from collections.abc import Iterator
from pathlib import Path

from flatout.config.facts import field_facts
from flatout.front.commands import VERBS
from tests.bad_configs import as_yaml, bad_config_files, bad_overrides, good_sections

CONFIG_VERBS = [
    ["train"], ["prepare"], ["config", "show"], ["config", "explain"], ["train", "--json"], ["finetune"], ["estimate"],
    ["estimate", "--gpus", "8"], ["tune"], ["tune", "lr"], ["bench"], ["ablate"], ["profile"],
]  # fmt: skip
MODEL_VERBS = ["eval", "generate", "chat", "serve", "export", "plot", "report", "watch"]
NUMBERS = {
    ("generate",): ["--tokens", "--temperature", "--top-k", "--top-p", "--seed"],
    ("chat",): ["--tokens", "--temperature", "--top-p", "--seed"],
    ("eval",): ["--tokens"],
    ("prepare",): ["--workers", "--context"],
    ("prepare", "inspect", "."): ["--context"],
    ("estimate",): ["--price", "--seconds"],
    ("estimate", "--gpus", "8"): [
        "--per-host",
        "--intra",
        "--inter",
        "--rate",
        "--mfu",
        "--disk",
    ],
    ("tune",): ["--memory", "--seconds"],
    ("tune", "lr"): ["--from", "--to", "--steps"],
    ("tune", "search", "space.yaml"): ["--trials"],
    ("bench",): ["--steps", "--parity-steps", "--batch-tokens", "--seconds"],
    ("ablate",): ["--seeds", "--minutes"],
    ("profile",): ["--steps"],
    ("watch",): ["--port"],
    ("report", "--serve"): ["--port"],
}
NO_NUMBERS = ["-1", "many", "nan", "-inf", "1e99", "9" * 40, "", " ", "--", "0x10", "1,5", "٣x", "\x1b[2J", "1" * 5000]
CONTRADICTIONS = [
    ["train", "--view", "--json"], ["train", "--resume", ""], ["watch", "--port", "5"],
    ["bench", "--rungs", ","], ["bench", "--rungs", "bf16", "--only", "extra"],
    ["bench", "--rungs", "nope"], ["bench", "--out", ""], ["profile", "--out", " "], ["tune", "--out", "found.txt"],
    ["ablate", "--fields", ","], ["ablate", "--fields", "model.nope"], ["ablate", "--fields", "model.width"],
    ["ablate", "--fields", "train.seed=2"], ["ablate", "--out", ""],
    ["tune", "--out", "nowhere/found.yaml"], ["tune", "lr", "--from", "1", "--to", "2"], ["tune", "search"],
    ["tune", "search", "nowhere.yaml"], ["tune", "search", "nowhere.yaml", "--study", "nowhere/x.jsonl"],
    ["prepare", "inspect"], ["prepare", "verify", "."],
    ["prepare", "look"], ["tokenizer", "train", "--vocab", "300"],
    ["config", "copy"], ["config", "copy", "nope"], ["config", "copy", "../lora"], ["config", "copy", "lora", ""],
    ["config", "copy", "lora", "nowhere/a.yaml"], ["export", "."], ["export", ".", ""], ["merge", ".", "out"],
    ["export", ".", "out"], ["plot"], ["plot", "."], ["report", "."], ["eval", "."],
    ["eval", "--split", "test"], ["chat", "."], ["finetune"], ["finetune", "shakespeare-char"], ["train", "a", "b"],
    ["generate", "--device", "tpu"], ["generate", "--device", "cuda:9999"], ["train", "--hardware", "7gb"],
    ["estimate", "--gpus", "8..2"], ["estimate", "--gpus", "8", "--size", "9t"], ["estimate", "--rate", "9"],
    ["estimate", "--gpus", "8", "--gpu", "abacus"], ["estimate", "--gpus", "8", "--rate", "9", "--mfu", "0.5"],
    ["plan"], ["bundle", "."], ["data", "look"], ["report", "--zip", "--serve"], ["report", "--port", "5"],
    ["prepare", "--engine", "ray"], ["prepare", "lora"], ["export", ".", "out", "--dtype", "int4"], ["-x"], [""],
]  # fmt: skip


def bad_commands(seed: int, count: int, folder: Path) -> Iterator[list[str]]:
    """`count` command lines, a third of them with a bad config file, a third with bad overrides; none can be obeyed."""
    choose = random.Random(seed)
    files, overrides = bad_config_files(seed, count), bad_overrides(seed, count)
    for index in range(count):
        kind = index % 3
        if kind == 0:
            path = folder / f"bad-{index % 50}.yaml"
            path.write_bytes(next(files))
            yield [*choose.choice(CONFIG_VERBS), str(path)]
        elif kind == 1:
            verb, words = choose.choice(CONFIG_VERBS), next(overrides)
            # Of one setting alone `config explain` tells, and refuses a second word.
            alone = verb == ["config", "explain"] and words in (["steps"], ["train.steps"])
            yield [*verb, *words, *(words if alone else [])]
        else:
            yield _bad_words(choose)


def mutated_commands(seed: int, count: int, folder: Path) -> Iterator[list[str]]:
    """`count` command lines that were valid before letters, words or bytes of theirs were changed at random.

    Some are valid still, so all of them are of verbs that write nothing.
    """
    choose = random.Random(f"mutated {seed}")
    for index in range(count):
        verb = choose.choice([["config", "show"], ["config", "explain"], ["config", "explain", "--json"]])
        if index % 2:
            path = folder / f"mutated-{index % 50}.yaml"
            path.write_bytes(_mutated_bytes(choose, as_yaml(good_sections(choose)).encode()))
            yield [*verb, str(path)]
        else:
            fields = choose.sample(sorted(field_facts()), choose.randint(1, 4))
            words = [*verb, choose.choice(["gpt2-124m", "shakespeare-char", "lora"])]
            words += [f"{name}={choose.choice(_VALUES)}" for name in fields]
            yield _mutated_words(choose, words)


_VALUES = ["1", "0", "-1", "0.5", "1e-3", "true", "null", "auto", "none", "[]", "[a, b]", "{}", "text", "'5'", "~", ""]
_PIECES = [
    "\n",
    "\t",
    ":",
    "- ",
    "#",
    "'",
    '"',
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "!!int ",
    "<<: ",
    "---\n",
    "..",
    "=",
    "\\",
]
_STRANGE = ["\x00", "\x1b[31m", "\u2028", "\ufeff", "\ud800", "é", "☃", "9" * 30, "-", "--", " ", "%s", "{0}", "$HOME"]


def _mutated_bytes(choose: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(choose.randint(1, 6)):
        place, kind = choose.randrange(len(changed) + 1), choose.randrange(4)
        if kind == 0:
            changed[place:place] = choose.choice([*_PIECES, *_STRANGE]).encode("utf-8", "surrogatepass")
        elif kind == 1:
            del changed[place : place + choose.randint(1, 8)]
        elif kind == 2 and place < len(changed):
            changed[place] ^= 1 << choose.randrange(8)
        else:
            start = choose.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + choose.randint(1, 30)]
    return bytes(changed)


def _mutated_words(choose: random.Random, words: list[str]) -> list[str]:
    words = list(words)
    for _ in range(choose.randint(1, 3)):
        place = choose.randrange(2, len(words) + 1) if len(words) > 2 else len(words)
        kind = choose.randrange(4)
        if kind == 0 or place == len(words):
            words.insert(place, choose.choice([_noise(choose), "--hardware", "--json", "--", *_PIECES]))
        elif kind == 1:
            words[place] = words[place] + choose.choice([*_PIECES, *_STRANGE[1:]])
        elif kind == 2:
            words[place] = _typo(choose, words[place] or "x")
        else:
            del words[place]
    return words


def _bad_words(choose: random.Random) -> list[str]:
    kind = choose.randrange(9)
    if kind == 0:
        return [_typo(choose, choose.choice(list(VERBS)))]
    if kind == 1:
        return [choose.choice(["train", "prepare", *MODEL_VERBS]), "--" + _noise(choose)]
    if kind == 2:
        verb = choose.choice(list(NUMBERS))
        return [*verb, choose.choice(NUMBERS[verb]), choose.choice(NO_NUMBERS)]
    if kind == 3:
        return [choose.choice(["train", "finetune"]), "--resume", f"nowhere/{_noise(choose)}"]
    if kind == 4:
        return [choose.choice(MODEL_VERBS), f"nowhere/{_noise(choose)}", *choose.choice([[], ["out"]])]
    if kind == 5:
        return [choose.choice(["config", "data", "completion"]), _noise(choose)]
    if kind == 6:
        return ["train", f"{_noise(choose)}.yaml", *([f"--{_noise(choose)}"] if choose.random() < 0.5 else [])]
    if kind == 7:
        return choose.choice(CONTRADICTIONS)
    return ["train", "shakespeare-char", _noise(choose), _noise(choose)]


def _typo(choose: random.Random, word: str) -> str:
    place = choose.randrange(len(word))
    return word[:place] + choose.choice(string.ascii_lowercase + "-_") + word[place:]


def _noise(choose: random.Random) -> str:
    letters = string.ascii_letters + string.digits + "äß☃ \t\n\x1b'\"\\;$-"
    return "z" + "".join(choose.choice(letters) for _ in range(choose.randrange(1, 30)))
