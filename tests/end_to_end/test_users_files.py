"""Random commands in a folder full of a user's own files, with names like ours: not one of them is ever changed."""

from pathlib import Path

import pytest

from tests.called import Outcome, look
from tests.users_files import PREPARED, Room, copy_of, furnish, judge, run_commands


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return furnish(tmp_path_factory.mktemp("furnished") / "home")


def check(room: Room, place: Path, seed: int, count: int) -> None:
    told = run_commands(room, place, seed, count)
    print(told.table())
    print(
        f"{len(told.prepared_then_refused)} prepared their data and were refused afterwards; "
        f"{told.set_aside} set a checkpoint aside with the user's notes in it"
    )
    assert not told.failures, f"{len(told.failures)} of {count} commands:\n" + "\n".join(told.failures)


def test_what_a_command_must_not_do_is_noticed(room: Room, tmp_path: Path) -> None:
    here = copy_of(room, tmp_path / "home")
    before = look(here.home)
    assert judge(here, before, before, Outcome(("train",), 0, "", "")) == []
    (here.project / "notes.txt").write_text("not my words", encoding="utf-8")
    (here.project / "notes.old-2024" / "diary.txt").unlink()
    (here.project / "read-only").chmod(0o755)
    (here.project / "link-out").unlink()
    (here.project / "link-out").mkdir()
    (here.home / "outside" / "letter.txt").write_bytes(b"")
    (here.project / "runs" / "first" / "best.json").unlink()  # ours
    wrong = judge(here, before, look(here.home), Outcome(("train",), 0, "", ""))
    assert len(wrong) == 5, wrong
    assert all("the user's" in line for line in wrong)


def test_a_refusal_that_leaves_something_is_noticed(room: Room, tmp_path: Path) -> None:
    here = copy_of(room, tmp_path / "home")
    before = look(here.home)
    refusal = Outcome(("train",), 2, "", "error: no\nhint: yes\n")
    assert judge(here, before, look(here.home), refusal) == []
    (here.project / "runs" / "third").mkdir()
    (here.project / "runs" / "first" / "best.json").unlink()
    assert len(judge(here, before, look(here.home), refusal)) == 2
    assert len(judge(here, before, before, Outcome(("train",), 2, "", "error: no\n"))) == 1
    assert len(judge(here, before, before, Outcome(("train",), None, "", "", "ValueError: x"))) == 1


def test_only_overwrite_may_change_a_dataset_and_be_refused(room: Room, tmp_path: Path) -> None:
    here = copy_of(room, tmp_path / "home")
    before = look(here.home)
    (here.project / "data" / "clean" / "manifest.json").write_text("{}", encoding="utf-8")
    (here.project / "data" / "clean" / "val-00000.bin").unlink()

    def judged(code: int, *words: str) -> list[str]:
        return judge(here, before, look(here.home), Outcome(words, code, "", "error: no\nhint: yes\n"))

    assert judged(3, "prepare", "--overwrite") == [PREPARED]
    assert len(judged(3, "prepare")) == len(judged(2, "prepare", "--overwrite")) == len(judged(3, "train")) == 2
    (here.project / "runs" / "first" / "best.json").unlink()
    assert len(judged(3, "prepare", "--overwrite")) == 3


def test_random_commands_leave_a_users_files_alone(room: Room, tmp_path: Path) -> None:
    check(room, tmp_path / "home", seed=1, count=24)


@pytest.mark.slow
def test_a_thousand_random_commands_leave_a_users_files_alone(room: Room, tmp_path: Path) -> None:
    check(room, tmp_path / "home", seed=2, count=1000)
