"""Thousands of wrong command lines, configs and files: two lines each, exit code 2 or 3, and nothing on the disk."""

import collections
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.bad_commands import bad_commands, mutated_commands
from tests.called import call, complaint, differences, look
from tests.hostile_folders import QUICK, hostile_folders
from tests.nasty_inputs import TRAIN, TUNE, Kit, make_kit, nasty_inputs

SECONDS, MEMORY = 30, 6 * 2**30


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run; configs lie in another one."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def run_fuzzed(place: Path, commands: Iterable[list[str]], codes: set[int]) -> collections.Counter[int | None]:
    """Runs command lines that may end with one of `codes` and must not write anything."""
    failures: list[str] = []
    counts: collections.Counter[int | None] = collections.Counter()
    for number, words in enumerate(commands):
        outcome = call(words, seconds=30)
        counts[outcome.code] += 1
        wrong = complaint(outcome)
        if not wrong and outcome.code not in codes:
            wrong = f"ended with {outcome.code}: {outcome.errors[-300:]!r}"
        if not wrong and outcome.refused and outcome.output:
            wrong = f"refused, but said {outcome.output[:200]!r}"
        left = differences({".": look(place / "here")["."]}, look(place / "here"))
        if wrong or left:
            failures.append(f"{number}: {words!r:.600}: {wrong} {left[:5]}")
            for path in sorted((place / "here").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    print(f"by exit code: {dict(counts)}")
    assert not failures, f"{len(failures)} of {sum(counts.values())}:\n" + "\n".join(failures[:40])
    return counts


def fuzz(place: Path, seed: int, count: int) -> None:
    """Half of the commands cannot be obeyed; those that were mutated at random may still be valid."""
    run_fuzzed(place, bad_commands(seed, count // 2, place / "configs"), {2, 3})
    mutated = run_fuzzed(place, mutated_commands(seed, count // 2, place / "configs"), {0, 2, 3})
    assert mutated[2] > mutated[0], "most mutations break something"


def test_fuzzed_configs_and_command_lines(place: Path) -> None:
    fuzz(place, seed=0, count=300)


@pytest.mark.slow
def test_ten_thousand_fuzzed_configs_and_command_lines(place: Path) -> None:
    fuzz(place, seed=1, count=10_000)


# --- nasty inputs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return make_kit(tmp_path_factory.mktemp("kit") / "kit")


def meet(kit: Kit, place: Path, inputs: Iterable[tuple[str, Callable[[], list[str]]]]) -> None:
    """Meets nasty inputs, each in a folder of its own. Valid ones are counted; refused ones leave nothing."""
    failures: list[str] = []
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    good = look(kit.base.parent)
    for number, (name, make) in enumerate(inputs):
        here = place / "nasty" / "here"
        here.mkdir(parents=True)
        os.chdir(here)
        words = make()
        before = look(here.parent)
        outcome = call(words, seconds=SECONDS, memory=MEMORY)
        left = differences(before, look(here.parent))
        prepared = bool(left) and outcome.refused and set(left) == _new_data(here)
        wrong = [complaint(outcome)] if complaint(outcome) else []
        wrong += (
            [f"ended with {outcome.code}: {outcome.errors[-300:]!r}"] if outcome.code not in (0, 2, 3, None) else []
        )
        wrong += left if outcome.code != 0 and not prepared else []
        wrong += [f"the kit: {line}" for line in differences(good, look(kit.base.parent))]
        counts[name, f"{outcome.code}, prepared" if prepared else str(outcome.code)] += 1
        if wrong:
            shown = [word for word in words if word not in TRAIN and word not in TUNE]
            failures.append(f"{number} {name}: {shown!r:.300}: {'; '.join(wrong)[:700]}")
        os.chdir(place)
        shutil.rmtree(place / "nasty")
    for (name, code), number in sorted(counts.items()):
        print(f"{name:<24} {code:<14} {number:>4}")
    assert not failures, f"{len(failures)} of {counts.total()}:\n" + "\n".join(failures)


def _new_data(here: Path) -> set[str]:
    """What is left where data could be prepared, and the command was refused for something else or for a part of it."""
    folders = [here / name for name in ("data", "samples") if (here / name / "manifest.json").exists()]
    paths = [path for folder in folders for path in (folder, *folder.iterdir())]
    return {f"new: {str(path.relative_to(here.parent))!r}" for path in paths}


def test_nasty_inputs(kit: Kit, place: Path) -> None:
    meet(kit, place, nasty_inputs(kit, seed=0, count=20))


def test_hostile_folders(kit: Kit, place: Path) -> None:
    """A few of those that test_hostile.py meets by hundreds, in processes of their own with limits."""
    meet(kit, place, hostile_folders(kit, seed=0, count=6, kinds=QUICK))


@pytest.mark.slow
def test_five_hundred_nasty_inputs(kit: Kit, place: Path) -> None:
    meet(kit, place, nasty_inputs(kit, seed=1, count=500))
