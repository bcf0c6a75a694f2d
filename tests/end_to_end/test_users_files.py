"""Random commands in a folder full of a user's own files, with names like ours: not one of them is ever changed."""

from pathlib import Path

import pytest

from tests.called import call, look
from tests.users_files import Room, drawn, furnish, judge, replay, run_commands


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return furnish(tmp_path_factory.mktemp("furnished") / "home")


def check(room: Room, place: Path, seed: int, count: int) -> None:
    told = run_commands(room, place, seed, count)
    print(told.table())
    print(f"{len(told.prepared_then_refused)} prepared their data and were refused afterwards")
    assert not told.failures, f"{len(told.failures)} of {count} commands:\n" + "\n".join(told.failures)


def test_random_commands_leave_a_users_files_alone(room: Room, tmp_path: Path) -> None:
    check(room, tmp_path / "home", seed=1, count=40)


@pytest.mark.slow
def test_a_thousand_random_commands_leave_a_users_files_alone(room: Room, tmp_path: Path) -> None:
    check(room, tmp_path / "home", seed=2, count=1000)
