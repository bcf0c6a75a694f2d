"""Folders that appear whole, and deletions that touch nothing but our own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout import folders
from flatout.errors import DataError
from flatout.files import write_new, write_whole
from flatout.folders import MARK, _create, make_folders, process_lives, remove_empty, retire, sweep, whole_folder


def fill(target: Path, text: str = "new", **options) -> None:
    with whole_folder(target, **options) as work:
        (work / "a.txt").write_text(text)


def leave_behind(target: Path) -> Path:
    """What a kill in the middle of writing `target` leaves."""
    work = _create(target)
    (work / "half.bin").write_bytes(b"0" * 10)
    return work


def test_a_folder_appears_whole_and_without_its_mark(tmp_path):
    fill(tmp_path / "deep" / "target")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]
    assert [path.name for path in (tmp_path / "deep" / "target").iterdir()] == ["a.txt"]


def test_a_failure_leaves_the_disk_as_it_was(tmp_path):
    def fails() -> None:
        with whole_folder(tmp_path / "x" / "y" / "target") as work:
            (work / "a.txt").write_text("half")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ours_is_replaced_and_another_is_not(tmp_path):
    target = tmp_path / "target"
    fill(target, "old")
    fill(target, "new", replaces={"a.txt"})
    assert (target / "a.txt").read_text() == "new"
    (target / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"mine\.txt"):
        fill(target, "newer", replaces={"a.txt"}, occupied=lambda place, name: DataError(f"{name} is there", "move it"))
    assert (target / "a.txt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


@pytest.mark.parametrize("what", ["file", "link", "dangling"])
def test_files_and_links_are_never_replaced(tmp_path, what):
    target, other = tmp_path / "target", tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("mine")
    if what == "file":
        target.write_text("mine")
    else:
        target.symlink_to(other if what == "link" else tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        fill(target, replaces={"a.txt"})
    assert (other / "a.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "target"]


def test_sweeping_takes_what_is_marked_and_nothing_else(tmp_path):
    left = leave_behind(tmp_path / "step-1")
    elsewhere = leave_behind(tmp_path / "step-2")
    copied = tmp_path / "step-1.tmp-00000000"
    copied.mkdir()
    (copied / MARK).write_bytes((left / MARK).read_bytes())  # a mark that names another folder
    (tmp_path / "step-1.old-20240101").mkdir()
    (tmp_path / "step-1.old-20240101" / "notes.txt").write_text("mine")
    linked = tmp_path / "step-1.tmp-12345678"
    linked.symlink_to(elsewhere)
    sweep(tmp_path, "step-1", locked=True)
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [elsewhere.name, copied.name, "step-1.old-20240101", linked.name]
    )
    assert (elsewhere / "half.bin").exists()
    through = tmp_path / "link"
    through.symlink_to(tmp_path)
    sweep(through, "step-2", locked=True)
    assert elsewhere.exists()


def test_without_a_lock_a_living_writer_keeps_its_folder(tmp_path):
    left = leave_behind(tmp_path / "target")
    mark = json.loads((left / MARK).read_bytes())
    (left / MARK).write_text(json.dumps({**mark, "pid": os.getppid()}))
    sweep(tmp_path, "target", locked=False)
    assert left.exists()
    (left / MARK).write_text(json.dumps({**mark, "host": "another", "pid": 2**22 + 1}))
    sweep(tmp_path, "target", locked=False)
    assert left.exists()
    (left / MARK).write_text(json.dumps({**mark, "pid": 2**22 + 1}))
    sweep(tmp_path, "target", locked=False)
    assert not left.exists()


@pytest.mark.parametrize("at", ["before the mark", "inside the mark", "after the mark was removed"])
def test_a_kill_around_the_mark_leaves_nothing_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    class Killed(BaseException):
        pass

    def killed(*arguments, **options) -> None:
        raise Killed

    target = tmp_path / "target"
    with monkeypatch.context() as patches:
        patches.setattr(Path, "rmdir", killed)  # nothing is cleaned up by a process that is gone
        if at == "before the mark":
            patches.setattr(folders, "write_new", killed)
        elif at == "inside the mark":
            patches.setattr(folders, "write_new", lambda path, *_, **__: (path.touch(), killed()))
            patches.setattr(Path, "unlink", killed)
        with pytest.raises(Killed), whole_folder(target):
            raise Killed
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("target.tmp-")
    sweep(tmp_path, "target", locked=False)
    assert left.exists(), "its writer may be about to write the mark"
    os.utime(left, (1e9, 1e9))
    mine = {tmp_path / name for name in ("target.tmp-12345678", "target.tmp-0123456789abcdef", "target.tmp-mine")}
    for path in mine:
        path.mkdir()
        os.utime(path, (1e9, 1e9))
    sweep(tmp_path, "target", locked=False)
    assert set(tmp_path.iterdir()) == mine
    left.symlink_to(tmp_path / "target.tmp-mine")
    sweep(tmp_path, "target", locked=True)
    assert set(tmp_path.iterdir()) == {*mine, left}
    left.unlink()
    left.mkdir()
    sweep(tmp_path, "target", locked=True)
    assert set(tmp_path.iterdir()) == mine


def test_a_file_that_was_to_replace_another_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine = tmp_path / "best.json.tmp-0123456789abcdef"
    mine.write_text("mine")
    with monkeypatch.context() as patches:
        patches.setattr(os, "replace", lambda *_: None)
        write_whole(tmp_path / "best.json", b"new")  # which is not there yet when the process is killed
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path, r"best\.json", locked=False)
    assert len(list(tmp_path.iterdir())) == 2, "its writer may live"
    sweep(tmp_path, r"best\.json", locked=True)
    assert list(tmp_path.iterdir()) == [mine]


def test_links_inside_what_is_removed_are_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    left = leave_behind(tmp_path / "target")
    (left / "link").symlink_to(kept)
    (left / "deep").mkdir()
    (left / "deep" / "link").symlink_to(kept)
    sweep(tmp_path, "target", locked=True)
    assert not left.exists()
    assert (kept / "mine.txt").read_text() == "mine"


def test_retiring_takes_only_a_folder_with_nothing_else_in_it(tmp_path):
    target = tmp_path / "target"
    fill(target)
    (target / "mine").mkdir()
    assert not retire(target, {"a.txt"})
    assert sorted(path.name for path in target.iterdir()) == ["a.txt", "mine"]
    (target / "mine").rmdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    assert not retire(link, {"a.txt"})
    assert retire(target, {"a.txt"})
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_only_folders_that_were_made_are_taken_back(tmp_path):
    (tmp_path / "was").mkdir()
    made = make_folders(tmp_path / "was" / "a" / "b")
    assert [path.name for path in made] == ["a", "b"]
    remove_empty(made)
    assert (tmp_path / "was").is_dir()
    assert not (tmp_path / "was" / "a").exists()


def test_writing_a_file_follows_no_link(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_new(link, b"new")
    write_whole(link, b"new", durable=True)
    assert mine.read_text() == "mine"
    assert link.read_text() == "new"
    assert not link.is_symlink()


def test_a_full_disk_leaves_no_folder_without_a_mark(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_new", full)
    with pytest.raises(OSError, match="No space"):
        fill(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs a way to wait for a process and leave it as it is")
def test_a_process_that_has_ended_does_not_live_though_nobody_asked_for_its_code():
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert process_lives(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_lives(child.pid) or sys.platform != "linux"
    child.wait()
    assert not process_lives(child.pid)
