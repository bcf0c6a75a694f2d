"""A save on a full disk waits for space, and not forever."""

import errno

import pytest

from flatout.engine import recovery
from flatout.engine.recovery import when_there_is_room
from flatout.errors import FullDiskError
from flatout.files import disk_errors
from flatout.records import NoticeRecord


def drained(save, wait: float) -> tuple[list[str], object]:
    """What is told, and what comes back."""
    told, saving = [], when_there_is_room(save, 7, wait)
    try:
        while True:
            record = next(saving)
            assert isinstance(record, NoticeRecord)
            told.append(record.message)
    except StopIteration as end:
        return told, end.value


def failing(times: int, number: int = errno.ENOSPC):
    left = iter(range(times))

    def save() -> str:
        with disk_errors("checkpoint x"):
            if next(left, None) is not None:
                raise OSError(number, "No space left on device")
        return "saved"

    return save


def test_a_save_waits_for_space(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "PAUSE", 0.01)
    told, result = drained(failing(3), 5.0)
    assert result == "saved"
    assert len(told) == 2
    assert told[0].startswith("could not write checkpoint x: No space left on device: training pauses")
    assert told[1].startswith("the disk has room again")


def test_not_forever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "PAUSE", 0.01)
    with pytest.raises(FullDiskError):
        drained(failing(10**6), 0.05)


def test_other_errors_of_the_disk_are_told_at_once():
    with pytest.raises(Exception, match="could not write"):
        drained(failing(1, errno.EIO), 60.0)
    assert drained(failing(0), 60.0) == ([], "saved")
