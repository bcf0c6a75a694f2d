"""A folder full of a user's own files, and random commands in it, for tests/end_to_end/test_users_files.py.

The names look like ours: locks, temporary folders, partial datasets, run folders, outputs. Some are links, in and out.
In between lie things that Flatout made, and the user has put files of their own into those too. What is ours is what
`furnish` listed right after making it; everything else is the user's, and no command may change it.
"""

import collections
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.called import Disk, Outcome, call, complaint, differences, look
from tests.chat_models import write_chat_model
from tests.conftest import TINY

PROJECT = "project"
EXPORTED = ["model.norm=rmsnorm", "model.mlp=swiglu"]
TUNING = [
    "model.init_from=base", "chat.source=rows.json", "model.context=64", "lora.rank=2", "train.epochs=null",
    "eval.sample_tokens=4", "speed.device=cpu",
]  # fmt: skip
RUNS = ["runs/first", "runs/second", "tuned"]
CHECKPOINTS = ["runs/first/checkpoints/step-00000001", "runs/second/checkpoints/step-00000001"]
MODELS = [*RUNS, *CHECKPOINTS, "base", "exported", "adapters"]
DATASETS = ["data/texts-char", "data/clean"]
NEW = ["new", "new-2", "new/deep/er", "runs/third", "data/new", "new.png", "new.yaml", "new.html", "new.jsonl"]
ODD = [
    "x" * 300,
    "deep/" * 60 + "x",
    "new\nline",
    "red\x1b[31m",
    "",
    ".",
    "..",
    "texts/",
    "./base/../texts",
    "caf\udce9",
]
RESET_AFTER = 40


# --- the folder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The folder as it was made. `ours` are the paths of what Flatout made; `names` what commands are drawn from."""

    home: Path
    start: Disk
    ours: frozenset[str]
    names: tuple[str, ...]

    @property
    def project(self) -> Path:
        return self.home / PROJECT

    def users(self, disk: Disk) -> Disk:
        return {path: facts for path, facts in disk.items() if path not in self.ours and path in self.start}


def furnish(home: Path) -> Room:
    """Makes the folder: first what Flatout makes, which is listed, then the user's own things around and inside it."""
    project = home / PROJECT
    project.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        _write_texts()
        before = look(home)
        _make_ours()
        ours = frozenset(look(home).keys() - before.keys())
        _make_the_users()
    start = look(home)
    names = sorted(os.path.relpath(home / path, project) for path in start)
    return Room(home, start, ours, tuple(names))


def copy_of(room: Room, home: Path) -> Room:
    shutil.copytree(room.home, home, symlinks=True)
    return Room(home, room.start, room.ours, room.names)


def _write_texts() -> None:
    Path("texts").mkdir()
    for name in ("a", "b"):
        lines = [f"the {name} {fox} over the {moon}.\n" for fox in ("fox", "cow") for moon in ("moon", "dog")]
        Path(f"texts/{name}.txt").write_text("".join(lines * 40), encoding="utf-8")
    rows = [{"instruction": f"What is {number} and one?", "output": f"It is {number + 1}."} for number in range(20)]
    Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    write_chat_model(Path("base"))


def _make_ours() -> None:
    train = ["train", *TINY, "data.source=texts", "train.steps=2", "checkpoint.every=1"]
    for words in [
        [*train, "output.folder=runs/first"],
        [*train, *EXPORTED, "data.folder=data/clean", "output.folder=runs/second"],
        ["finetune", *TUNING, "train.steps=1", "output.folder=tuned"],
        ["export", "runs/second", "exported"],
        ["export", "tuned", "adapters", "--adapter"],
        ["report", "runs/first"],
    ]:
        outcome = call(words)
        assert outcome.code == 0, outcome


def _make_the_users() -> None:
    """Files of a user, whose content names its path, so that none can take another's place."""

    def put(*paths: str, mode: int = 0o644) -> None:
        for path in paths:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(f"{path}: my own words\n" * 3, encoding="utf-8")
            Path(path).chmod(mode)

    def write(path: str, content: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")

    def link(path: str, target: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, path)

    # Names like those of our temporary folders, locks and marks.
    put("notes.txt", "notes.old-2024/diary.txt", "notes.tmp-1/draft.txt", "step-00000003.old-0badcafe/weights.bin")
    put("new.tmp-0123abcd/mine.txt", "runs.old-00000001/mine.txt", "runs/third.tmp-12345678/mine.txt")
    for path in ("step-00000002.tmp-12345678", "empty", "runs/first.old-12345678", "data/clean.old-0badcafe"):
        Path(path).mkdir(parents=True)
    put(".shakespeare-char.partial/thoughts.txt", ".x.lock", ".x.old/a.txt", ".x.partial", ".new.old/mine.txt")
    put(".new.partial/mine.txt", ".new.lock", "data/.texts-char.lock", "data/.clean.partial/journal.json")
    put("data/.new.old/train-00000.bin", "data/.new.partial/parts/00000.bin", "data/.new.lock", ".unfinished-new.png")
    put("runs/first/config.yaml.tmp-12345678", "new.yaml.tmp-12345678", ".flatout-tune-mine", ".flatout-profile-mine/a")
    mark = {"flatout": "unfinished", "folder": "another.tmp-0123abcd", "host": "elsewhere", "pid": 1}
    for place in ("lab/checkpoints/step-00000002.tmp-0123abcd", "lab/adapter.old-0badcafe", "new-2.tmp-0123abcd"):
        put(f"{place}/mine.txt")
        write(f"{place}/.flatout-unfinished", json.dumps(mark))
    put("lab/checkpoints/step-00000001.old-0badcafe/.flatout-unfinished", "desk/.flatout-unfinished")

    # Folders that look like runs, datasets, models and outputs.
    write("run.lock", "")
    put("config.yaml", "metrics.jsonl", "best.json", "manifest.json", "tokenizer.json", "results.png", "report.html")
    put("bench.jsonl", "bench.png", "comparison.png", "steps.csv", "plots/results.png", "plots/mine.svg")
    put("checkpoints/step-00000001/weights.bin", "checkpoints/notes.txt", "adapter/mine.txt")
    write("lab/run.lock", "")
    put("lab/checkpoints/step-00000001.aside/x", "lab/checkpoints/step-1", "lab/adapter/mine.txt", "lab/plots/mine.png")
    put("desk/run.lock", "desk/plots/results.png", "desk/report.html", "desk/checkpoints/mine.txt")
    put("study/checkpoints/step-00000007/chapter.txt", "tuned/checkpoints/step-00000009/chapter.txt")
    put("thesis/checkpoints/step-00000007/chapter.txt", "thesis/metrics.jsonl", "thesis/best.json")
    put("bed/manifest.json", "bed/train-00000.bin", "bed/tokenizer.json", "pile/train-00000.bin", "pile/mine.txt")
    put(
        "profile/shakespeare-char/trace.json.gz",
        "bench/shakespeare-char/bench.png",
        "tuned.yaml",
        "shakespeare-char.yaml",
    )
    put("data/texts-char.png", "data/clean.png", "data/.unfinished-texts-char.png", "new.html.d/x")

    # The user's own files inside of what we made.
    put("runs/first/notes.txt", "runs/first/checkpoints/notes.txt", "runs/first/checkpoints/step-00000001/notes.txt")
    put("runs/first/checkpoints/step-00000002.tmp-12345678/mine.txt", "runs/first/adapter/mine.txt")
    put(
        "runs/first/plots/results.png",
        "runs/first/plots/mine.png",
        "runs/second/report.html",
        "runs/second/plots/mine.csv",
    )
    put("runs/second/checkpoints/step-00000002/notes.txt", "tuned/adapter/mine.txt", "tuned/checkpoints/mine/a.txt")
    put("data/texts-char/mine.txt", "data/rows-samples/mine.txt", "exported/README.md", "adapters/mine.txt")

    # Links in, out, in circles and to nowhere, some under names that we use for ourselves.
    put("../outside/archive/one.txt", "../outside/archive/step-00000001.tmp-12345678/two.txt", "../outside/letter.txt")
    put("../outside/picture.png", "../outside/page.html", "../outside/found.yaml", "../outside/tokenizer.json")
    put("../outside/checkpoints/step-00000004.old-0badcafe/three.txt")
    link("../outside/link-in", f"../{PROJECT}/texts")
    link("../outside/run-in", f"../{PROJECT}/runs/first")
    for path, target in {
        "link-out": "../outside/archive", "dangling": "nowhere", "loop-a": "loop-b", "loop-b": "loop-a", "self": ".",
        "link-to-run": "runs/second", "link-to-data": "data/clean", "link.png": "../outside/picture.png",
        "link.html": "../outside/page.html", "link.yaml": "../outside/found.yaml",
        "link.json": "../outside/tokenizer.json", ".link-out.partial": "../outside/archive",
        ".link-out.lock": "../outside/letter.txt", "data/.linked.partial": "../../outside/archive",
        "data/.linked.lock": "../../outside/letter.txt", "data/.linked.old": "../../outside/archive",
        "data/linked": "clean", "hall/run.lock": "../../outside/letter.txt",
        "attic/checkpoints": "../../outside/checkpoints", "cellar/adapter": "../../outside/archive",
        "porch/metrics.jsonl": "../../outside/letter.txt", "shed/plots": "../../outside/archive",
        "shed/report.html": "../../outside/page.html", "barn/bench.jsonl": "../../outside/letter.txt",
        "runs/second/plots/results.png": "../../../../outside/picture.png", "tuned/plots": "../../outside/archive",
        "runs/second/checkpoints/step-00000003.tmp-12345678": "../../../../outside/archive",
        "runs/second/checkpoints/step-00000001/link": "../../../../../outside/letter.txt",
        "runs/first/checkpoints/step-00000002.superseded": "nowhere", "runs/first/plots/metrics.png": "nowhere",
        "new.yaml.tmp-0badcafe": "../outside/letter.txt", "step-00000009.old-0badcafe": "../outside/archive",
    }.items():  # fmt: skip
        link(path, target)

    # Corners that may not be written to. For root these are only modes, which must stay as they are.
    put("read-only/a.txt", "read-only/run.lock", "read-only/deep/b.txt", mode=0o444)
    Path("read-only/deep").chmod(0o555)
    Path("read-only").chmod(0o555)


# --- random commands --------------------------------------------------------------------------------------------------


@dataclass
class Drawer:
    """Draws command lines; the same seed and number give the same words."""

    names: tuple[str, ...]
    chance: random.Random

    def one(self, *likely: str) -> str:
        """Mostly one of the likely names where there are any; else any name: the user's, ours, new ones, odd ones."""
        if likely and self.chance.random() < 0.75:
            return self.chance.choice(likely)
        kinds = [self.names] * 6 + [NEW] * 3 + [ODD]
        return self.chance.choice(self.chance.choice(kinds))

    def maybe(self, *words: str, share: float = 0.3) -> list[str]:
        return list(words) if self.chance.random() < share else []

    def words(self) -> list[str]:
        return self.chance.choices(list(_VERBS), list(_VERBS.values()))[0](self)


def drawn(room: Room, seed: int, index: int) -> list[str]:
    return Drawer(room.names, random.Random(f"{seed} {index}")).words()


def _source(draw: Drawer) -> str:
    return f"data.source={draw.one('texts', 'texts', 'texts/a.txt')}"


def _train(draw: Drawer) -> list[str]:
    words = ["train", *TINY, f"train.steps={draw.chance.randint(1, 3)}", _source(draw), *draw.maybe(*EXPORTED)]
    words += [f"checkpoint.every={draw.chance.choice([0, 1, 1])}", f"checkpoint.keep={draw.chance.choice([1, 1, 2])}"]
    words += draw.maybe(
        f"output.folder={draw.one('new', 'lab', 'desk', 'hall', 'attic', 'cellar', 'study', '.')}", share=0.8
    )
    words += draw.maybe(f"data.folder={draw.one(*DATASETS, *NEW)}", share=0.5)
    words += draw.maybe("--resume", draw.one("auto", "auto", *RUNS, *CHECKPOINTS), share=0.4)
    return words + draw.maybe("--json")


def _finetune(draw: Drawer) -> list[str]:
    words = ["finetune", *TUNING, f"train.steps={draw.chance.randint(1, 2)}", "checkpoint.keep=1"]
    words += draw.maybe(f"chat.source={draw.one('rows.json')}", share=0.3)
    words += draw.maybe(f"model.init_from={draw.one(*MODELS)}", share=0.3)
    words += draw.maybe(f"lora.init_from={draw.one('adapters', 'tuned/adapter')}", share=0.2)
    words += draw.maybe(f"output.folder={draw.one('new', 'lab', 'desk', 'cellar', 'tuned')}", share=0.8)
    words += draw.maybe(f"data.folder={draw.one('data/rows-samples', *NEW)}", share=0.7)
    return words + draw.maybe("--resume", draw.one("auto", "tuned"), share=0.3)


def _prepare(draw: Drawer) -> list[str]:
    words = ["prepare", _source(draw), f"data.tokenizer={draw.chance.choice(['char', 'bytes', 'gpt2'])}"]
    words += draw.maybe(f"data.folder={draw.one(*DATASETS, 'data/linked', 'link-out', 'bed', *NEW)}", share=0.9)
    return [*words, "--workers", "0", *draw.maybe("--overwrite", share=0.6), *draw.maybe("--json")]


def _data(draw: Drawer) -> list[str]:
    if draw.chance.random() < 0.4:
        return ["prepare", "verify", draw.one(*DATASETS)]
    return ["prepare", "inspect", draw.one(*DATASETS)]


def _use(draw: Drawer) -> list[str]:
    verb = draw.chance.choice(["eval", "generate", "chat"])
    words = [verb, draw.one(*MODELS), "--device", "cpu", "--tokens", "3", *draw.maybe("--last")]
    words += draw.maybe("--base", draw.one("base"), share=0.2)
    if verb == "eval":
        return words + draw.maybe("--data", draw.one(*DATASETS))
    return [*words, "--message" if verb == "chat" else "--prompt", "the fox"]


def _export(draw: Drawer) -> list[str]:
    words = [
        "export",
        draw.one("tuned", "adapters", "runs/second", *MODELS),
        draw.one("exported", "empty", "link-out", *NEW),
        *draw.maybe("--last"),
    ]
    return words + draw.maybe("--adapter")


def _plot(draw: Drawer) -> list[str]:
    runs = [draw.one(*RUNS, "shed") for _ in range(draw.chance.choice([1, 1, 1, 2]))]
    out = draw.one("plots", "shed", "comparison.png", "link.png", "results.png", *NEW)
    return ["plot", *runs, *draw.maybe("--out", out, share=0.6), *draw.maybe("--no-csv"), *draw.maybe("--svg")]


def _report(draw: Drawer) -> list[str]:
    runs = [draw.one(*RUNS, "shed", "desk") for _ in range(draw.chance.choice([0, 1, 1, 1, 2]))]
    return ["report", *runs, *draw.maybe("--out", draw.one("report.html", "link.html", "new.html"), share=0.7)]


def _watch(draw: Drawer) -> list[str]:
    return ["watch", *draw.maybe(draw.one(*RUNS, "desk", "lab"), share=0.9), *draw.maybe("--json")]


def _config(draw: Drawer) -> list[str]:
    if draw.chance.random() < 0.6:
        files = draw.one("shakespeare-char.yaml", "config.yaml", "link.yaml", "dangling", *NEW)
        return ["config", "copy", draw.chance.choice(["shakespeare-char", "lora"]), *draw.maybe(files, share=0.9)]
    return ["config", draw.chance.choice(["show", "explain"]), draw.one("runs/first/config.yaml", "config.yaml")]


def _look_ahead(draw: Drawer) -> list[str]:
    settings = [
        *TINY,
        "train.steps=2",
        _source(draw),
        f"output.folder={draw.one()}",
        f"data.folder={draw.one(*DATASETS)}",
    ]
    return draw.chance.choice([["estimate", "--no-probe"], ["doctor", "--quick"]]) + settings


def _measure(draw: Drawer) -> list[str]:
    """What measures: mostly refused before it begins, since a real measurement takes seconds."""
    settings = [*TINY, "train.steps=2", _source(draw), *draw.maybe(f"data.folder={draw.one(*DATASETS)}")]
    out = draw.one("barn", "bench", "profile", "empty", "tuned.yaml", "link.yaml", *NEW)
    wrong = draw.maybe("train.steps=none", share=0.5)
    return draw.chance.choice(
        [
            ["tune", *settings, "--seconds", "1", "--out", out, *wrong],
            ["tune", "lr", *settings, "--steps", "20", "--out", out, *draw.maybe("--plot", draw.one("link.png"))],
            ["tune", "search", draw.one("config.yaml"), *settings, "--trials", "1", "--study", draw.one("new.jsonl")],
            [
                "bench",
                *settings,
                "--rungs",
                draw.chance.choice(["nope", "fp8", "fp8"]),
                "--out",
                out,
            ],
            ["ablate", *settings, "--fields", draw.chance.choice(["nope", "model.width"]), "--out", out],
            ["profile", *settings, "--steps", "1", *draw.maybe("--out", out, share=0.8), *wrong],
        ]
    )


_VERBS: dict[Callable[[Drawer], list[str]], float] = {
    _train: 24, _finetune: 8, _prepare: 18, _data: 6, _use: 6, _export: 9, _plot: 4, _report: 6,
    _watch: 2, _config: 6, _look_ahead: 3, _measure: 3,
}  # fmt: skip


# --- the campaign -----------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What a campaign saw: how often each verb ended with each code, and everything that was wrong."""

    codes: collections.Counter[tuple[str, int | None]] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    prepared_then_refused: list[str] = field(default_factory=list)
    set_aside: int = 0

    def table(self) -> str:
        codes = sorted({code for _, code in self.codes}, key=str)
        verbs = sorted({verb for verb, _ in self.codes})
        head = f"{'verb':<16}" + "".join(f"{code!s:>6}" for code in codes)
        rows = [f"{verb:<16}" + "".join(f"{self.codes[verb, code]:>6}" for code in codes) for verb in verbs]
        total = f"{'all':<16}" + "".join(f"{sum(self.codes[verb, code] for verb in verbs):>6}" for code in codes)
        return "\n".join([head, *rows, total])


def run_commands(room: Room, place: Path, seed: int, count: int) -> Told:
    """Draws and runs `count` commands. After each one, everything of the user's must be as it was in the beginning."""
    told = Told()
    for index, here, before, outcome in _outcomes(room, place, seed, range(count)):
        told.codes[outcome.words[0], outcome.code] += 1
        after = look(here.home)
        wrong = judge(here, before, after, outcome)
        told.set_aside += bool(set_aside(here, after) - set_aside(here, before))
        if wrong == [PREPARED]:
            told.prepared_then_refused.append(f"{index}: {_shown(outcome)}")
        elif wrong:
            told.failures.append(f"seed {seed}, command {index}: {_shown(outcome)}\n  " + "\n  ".join(wrong[:12]))
            shutil.rmtree(here.home)
    return told


def replay(room: Room, place: Path, seed: int, index: int) -> tuple[Outcome, list[str]]:
    """Runs one command of a campaign again, after those that came before it since the folder was made anew."""
    *_, last = _outcomes(room, place, seed, range(index - index % RESET_AFTER, index + 1))
    _, here, before, outcome = last
    return outcome, judge(here, before, look(here.home), outcome)


PREPARED = "the data was prepared, and the command was refused afterwards"


def judge(room: Room, before: Disk, after: Disk, outcome: Outcome) -> list[str]:
    """Everything that is wrong after a command: a user's file that is not as it was, a refusal that left something."""
    moved = set_aside(room, after)
    kept = {path: facts for path, facts in room.users(room.start).items() if path not in moved}
    wrong = [f"the user's {line}" for line in differences(kept, room.users(after))]
    said = complaint(outcome)
    if said and not (outcome.words[0] == "doctor" and not outcome.trouble):  # whose problems are findings, not errors
        wrong.append(said)
    if outcome.refused and not wrong:
        left = differences(before, after)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        # What `--overwrite` names may be prepared anew and have problems; any other dataset has to be new.
        anew = outcome.words[0] == "prepare" and "--overwrite" in outcome.words and outcome.code == 3
        manifests = [path for path in changed if path.endswith("/manifest.json") and path in after]
        datasets = [path.removesuffix("/manifest.json") for path in manifests]
        datasets = [path for path in datasets if anew or path not in before]
        if left and all(_in_one_of(path, datasets, new=path not in before) for path in changed):
            return [PREPARED]
        wrong += [f"refused with {outcome.code}, but {line}" for line in left]
    return wrong


def set_aside(room: Room, after: Disk) -> set[str]:
    """The user's files in checkpoints of ours that a run renamed, as it does when it goes back to an earlier one.

    They count as kept where they lie in the renamed folder, unchanged.
    """
    found: set[str] = set()
    for path in room.users(room.start).keys() - after.keys():
        folder = next((str(parent) for parent in Path(path).parents if parent.name.startswith("step-")), None)
        if folder in room.ours and folder is not None:
            names = re.compile(re.escape(folder) + r"\.[a-z]+(-\d+)?" + re.escape(path.removeprefix(folder)))
            found |= {path for name in after if names.fullmatch(name) and after[name] == room.start[path]}
    return found


def _in_one_of(path: str, folders: list[str], *, new: bool) -> bool:
    """Whether a path is of a dataset, or of a folder that was made to hold it."""
    return any(f"{path}/".startswith(f"{one}/") or (new and one.startswith(f"{path}/")) for one in folders)


def _outcomes(room: Room, place: Path, seed: int, numbers: range) -> Iterator[tuple[int, Room, Disk, Outcome]]:
    """Runs commands one after the other. The folder is made anew now and then, and whenever a test has removed it."""
    here: Room | None = None
    before: Disk = {}
    for index in numbers:
        if here is None or index % RESET_AFTER == 0 or not here.home.exists():
            shutil.rmtree(place, ignore_errors=True)
            here = copy_of(room, place)
        before = look(here.home)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here.project)
            outcome = call(drawn(room, seed, index))
        yield index, here, before, outcome


def _shown(outcome: Outcome) -> str:
    words = [word for word in outcome.words if word not in TINY and word not in TUNING]
    said = outcome.errors.strip().splitlines()
    return f"code {outcome.code}: {words!r} {said[-2:-1]}"
