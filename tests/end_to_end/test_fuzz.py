"""Thousands of wrong command lines, configs and files: two lines each, exit code 2 or 3, and nothing on the disk."""

import collections
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.bad_commands import bad_commands, mutated_commands
from tests.called import call, complaint, differences, look


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
