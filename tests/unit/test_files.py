"""Files that are ours to replace, and those that are not; sizes in words."""

import os
from pathlib import Path

import pytest

from flatout.cli import dispatch
from flatout.errors import ResourceError, UsageError, UserError
from flatout.files import check_replaceable
from flatout.front import output
from flatout.observe.sinks import MetricsFile, read_metrics
from flatout.records import NoticeRecord


def tree(folder: Path) -> dict[str, object]:
    """Every path below a folder with what it is, so that nothing can come, go or change unseen."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str):
    path, other = tmp_path / "x.png", tmp_path / "other.png"
    if kind in ("link", "dangling"):
        path.symlink_to(other)
    if kind == "link":
        other.write_bytes(b"mine")
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(UsageError):
        check_replaceable(path, lambda _: True)
    if kind in ("folder", "pipe"):
        with pytest.raises(UsageError):
            check_replaceable(path, lambda _: True, overwrite=True)


def test_records_are_never_written_through_a_link(tmp_path: Path):
    mine, metrics = tmp_path / "mine.txt", tmp_path / "metrics.jsonl"
    mine.write_text("precious\n")
    metrics.symlink_to(mine)
    with pytest.raises(ResourceError, match="is a link"):
        MetricsFile(metrics, keep_to_step=0)
    metrics.unlink()
    metrics.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResourceError, match="is a link"):
        MetricsFile(metrics, keep_to_step=0)
    assert tree(tmp_path) == {str(metrics): str(tmp_path / "nowhere"), str(mine): b"precious\n"}


def test_a_file_of_the_name_that_cutting_back_once_used_is_left_alone(tmp_path: Path):
    metrics, mine = tmp_path / "metrics.jsonl", tmp_path / f"metrics.jsonl.tmp-{os.getpid()}"
    mine.write_text("precious\n")
    for keep, step in ((0, 1), (1, 2), (1, 3)):
        with MetricsFile(metrics, keep_to_step=keep) as file:
            file.write(NoticeRecord(step=step, message="x"))
    assert [row["step"] for row in read_metrics(metrics)] == [1, 3]
    assert mine.read_text() == "precious\n"


OUTS = ["x" * 300, "file/x", "link", "/dev/null/x", "."]


@pytest.mark.parametrize("word", OUTS)
@pytest.mark.parametrize("verb", ["bench", "profile"])
def test_folders_that_cannot_be_are_refused_and_nothing_changes(tmp_path: Path, monkeypatch, verb: str, word: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / ("elsewhere" if verb == "profile" else "nowhere"))
    (tmp_path / "bench.png").write_bytes(b"mine")
    before = tree(tmp_path)
    with pytest.raises(UserError):
        dispatch([*verb.split(), "--out", word])
    assert tree(tmp_path) == before


@pytest.mark.parametrize("word", ["x" * 300 + ".yaml", "file/x.yaml", "mine.yaml", "link.yaml", ".", "folder.yaml"])
@pytest.mark.parametrize("verb", ["tune", "tune lr"])
def test_configs_that_are_not_ours_are_refused_and_nothing_changes(tmp_path: Path, monkeypatch, verb: str, word: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine.yaml").write_text("preset: shakespeare-char\n")
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    (tmp_path / "folder.yaml").mkdir()
    before = tree(tmp_path)
    with pytest.raises(UserError):
        dispatch([*verb.split(), "--out", word])
    assert tree(tmp_path) == before


def test_a_picture_beside_a_config_is_looked_at_before_anything_is_trained(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"lr\.png is there"):
        dispatch(["tune", "lr", "--out", "lr.yaml"])
    output.picture_target(Path("lr.png"), "--plot", overwrite=True)
    assert tree(tmp_path) == {str(tmp_path / "lr.png"): b"mine"}


def test_overwriting_a_config_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path):
    mine, link = tmp_path / "mine.yaml", tmp_path / "link.yaml"
    mine.write_text("mine")
    link.symlink_to(mine)
    with pytest.raises(UsageError, match="is a link"):
        output.write_config(link, "found")
    output.write_config(link, "found", overwrite=True)
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "found", False)
