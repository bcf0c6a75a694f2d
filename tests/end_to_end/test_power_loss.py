"""Power loss at any moment: what a run or a prepare told its caller before the cut is still true after it.

What is recorded and what the disk may do to it: `tests.power_loss`.
"""

import dataclasses
import json
import os
import random
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import (
    Verdict,
    list_checkpoints,
    mark_as_base,
    read_checkpoint,
    read_verdict,
    remove_checkpoint,
    sweep_leftovers,
    verify_checkpoint,
    write_checkpoint,
    write_verdict,
)
from flatout.checkpoints.checkpoint_files import check_own
from flatout.checkpoints.run_folder import checkpoint_to_load, find_resume_point, run_lock
from flatout.config.load import LoadedConfig
from flatout.config.schema import ModelConfig
from flatout.corpus import sources
from flatout.data import plan, shards
from flatout.data.shards import open_dataset
from flatout.engine import saver
from flatout.errors import DivergedError, UserError
from flatout.files import write_whole
from flatout.folders import MARK
from flatout.lock import LOCK_MARK
from flatout.model.adapter_files import save_adapter
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.gpt import build_model
from flatout.model.hub_folder import export_huggingface
from flatout.observe.sinks import read_metrics
from flatout.records import CheckpointRecord, NoticeRecord, Record
from tests.power_loss import (
    Promise,
    Recording,
    Sync,
    Tree,
    after_power_loss,
    everything,
    read_tree,
    recording,
    write_tree,
)
from tests.unit.test_checkpoint import make

SMALL = [
    "model.layers=1", "model.width=16", "train.steps=10", "eval.every=4", "eval.sample_tokens=0", "checkpoint.every=2",
    "checkpoint.keep=1",
]  # fmt: skip
DIVERGING = ["optim.learning_rate=100", "optim.weight_decay=10", "optim.clip=0", "optim.warmup=0"]
DIVERGING += ["train.steps=20", "eval.every=0"]
RUN = Path("runs/run")  # both folders are new
Check = Callable[[Path, list[Any], int], None]  # what is left, what was promised, the number of the outcome


def campaign(record: Recording, check: Check, place: Path, *, cuts: int, samples: int, seed: int = 0) -> int:
    """Cuts a recording again and again; returns how many outcomes were checked."""
    count = 0
    for cut in record.cuts(cuts, seed):
        for sample in range(samples):
            tree = after_power_loss(record, cut, random.Random(f"{seed} {cut} {sample}"))
            left = write_tree(tree, place / f"{cut}-{sample}")
            try:
                check(left, record.promised(cut), count)
            except BaseException as error:
                before = "; ".join(str(one) for one in record.log[max(record.start, cut - 6) : cut])[:1500]
                error.add_note(f"cut {cut} of {len(record.log)}, sample {sample}, seed {seed}, after {before}")
                error.add_note(f"left: {left}: {sorted(tree)}")
                raise
            count += 1
    print(f"{count} outcomes of {len(record.cuts(cuts, seed))} cuts in {len(record.log) - record.start} operations")
    return count


# --- the disk ---------------------------------------------------------------------------------------------------------


def outcomes(record: Recording, count: int = 200) -> list[Tree]:
    return [after_power_loss(record, len(record.log), random.Random(seed)) for seed in range(count)]


def test_a_recording_replayed_is_the_folder_itself(tmp_path: Path):
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "old.txt").write_text("old")
    with recording(tmp_path) as record:
        (tmp_path / "new").mkdir()
        with (tmp_path / "new" / "file.txt").open("w") as file:
            for number in range(3):
                file.write(f"{number}\n" * 10)
                file.flush()
                os.fsync(file.fileno())
        (tmp_path / "before" / "old.txt").write_text("overwritten")
        write_whole(tmp_path / "new" / "whole.txt", b"whole")
        (tmp_path / "new").rename(tmp_path / "renamed")
        (tmp_path / "renamed" / "file.txt").replace(tmp_path / "before" / "moved.txt")
        (tmp_path / "before" / "old.txt").unlink()
    assert everything(record) == read_tree(tmp_path)
    assert sorted(read_tree(tmp_path)) == ["before", "before/moved.txt", "renamed", "renamed/whole.txt"]


def test_a_number_that_the_file_system_gives_again_is_a_new_file(tmp_path: Path):
    record = Recording(tmp_path.resolve())
    (tmp_path / "z").write_bytes(b"old")
    record.scan()
    number = os.stat(tmp_path / "z").st_ino
    (tmp_path / "b").write_bytes(b"new")
    os.replace(tmp_path / "b", tmp_path / "z")  # as safetensors does, without a call that is seen
    (tmp_path / "a").mkdir()
    record._numbers[os.stat(tmp_path / "a").st_ino] = record._numbers.pop(number)
    record.scan()
    assert everything(record) == read_tree(tmp_path)


def test_the_disk_keeps_what_was_synced_and_may_lose_or_tear_the_rest(tmp_path: Path):
    with recording(tmp_path) as record:
        write_whole(tmp_path / "safe", b"0123456789", durable=True)
        write_whole(tmp_path / "safe", b"abcdefghij")  # a rename without a sync of the content
        (tmp_path / "lost").mkdir()
        write_whole(tmp_path / "lost" / "inside", b"klm", durable=True)  # in a folder whose own name is not durable
    found = outcomes(record)
    contents = {tree.get("safe") for tree in found}
    assert {b"0123456789", b"abcdefghij", b"", bytes(10)} < contents
    assert any(content and b"abcdefghij".startswith(content) and len(content) < 10 for content in contents)
    assert None not in contents, "the name was synced"
    assert {"lost" in tree for tree in found} == {True, False}
    assert all(tree["lost/inside"] == b"klm" for tree in found if "lost" in tree)


# --- training ---------------------------------------------------------------------------------------------------------


def watched(record: Recording, records: Iterable[Record]) -> None:
    """Trains, and notes as promised each checkpoint that the run tells of."""
    for one in records:
        record.scan()  # every line of metrics.jsonl is a write of its own
        if isinstance(one, CheckpointRecord):
            verdict = read_verdict(Path(one.path))
            assert verdict is not None
            record.promise((one.step, verdict.finite))


def stopping(after: int) -> Callable[[], bool]:
    asked = iter(range(1, 10**6))
    return lambda: next(asked) >= after


@dataclasses.dataclass(frozen=True)
class Training:
    """A run that was stopped and resumed on a recorded disk, and the same run undisturbed."""

    load: Callable[..., LoadedConfig]
    record: Recording
    whole: Path

    def check(self, left: Path, promised: list[Any], number: int, *, resume: bool = True) -> None:
        run = left / RUN
        point, _ = find_resume_point(run, "auto")
        if promised:
            assert point is not None, "there is a checkpoint to resume from"
            assert read_checkpoint(point).step >= promised[-1][0], "no checkpoint that was told of is lost"
            verify_checkpoint(checkpoint_to_load(run, best=True))
        if not resume:
            return
        told = list(flatout.train(self.load(*SMALL, f"output.folder={run}"), resume="auto"))
        assert not [one.message for one in told if isinstance(one, NoticeRecord) and "is kept" in one.message]
        steps, wanted = (dict(list_checkpoints(at / "checkpoints")).keys() for at in (run, self.whole))
        if point is None or point.name not in {path.name for path in (self.whole / "checkpoints").iterdir()}:
            assert steps == wanted, "the same are kept"  # a run that had reached its end saves and removes no more
        others = [path for path in (run / "checkpoints").iterdir() if (path / "model.safetensors").exists()]
        assert len(others) == len(steps), "nothing large is left over"
        for name in ("model", "optimizer", "run"):
            mine, theirs = (getattr(read_checkpoint(checkpoint_to_load(at)), name) for at in (run, self.whole))
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs), f"{name} is bit-equal"
        rows = read_metrics(run / "metrics.jsonl")
        logged = [row["step"] for row in rows if row["type"] == "step"]
        assert logged == sorted(set(logged)), "no step is told twice"
        assert rows[-1]["type"] == "end"


@pytest.fixture(params=[False, True], ids=["at once", "beside"])
def training(request: pytest.FixtureRequest, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    list(flatout.train(tiny(*SMALL, "output.folder=whole")))  # which prepares the data, too
    disk = tmp_path / "disk"
    disk.mkdir()
    if request.param:
        monkeypatch.setattr(saver, "SMALL", 0)
    config = tiny(*SMALL, f"output.folder={disk / RUN}")
    with recording(disk) as record:
        watched(record, flatout.train(config, stop=stopping(5)))
        watched(record, flatout.train(config, resume="auto"))
    assert everything(record) == read_tree(disk), "nothing escaped the recording"
    assert [step for step, _ in record.promised(len(record.log))] == [2, 4, 5, 6, 8, 10]
    return Training(tiny, record, Path("whole"))


def test_a_run_keeps_its_checkpoints(training: Training, tmp_path: Path):
    def check(left: Path, promised: list[Any], number: int) -> None:
        training.check(left, promised, number, resume=number % 6 == 5)

    campaign(training.record, check, tmp_path / "cuts", cuts=10, samples=2)
    assert losses_without_syncs(training, tmp_path) >= 3, "such a campaign would find a sync that is missing"


def losses_without_syncs(training: Training, tmp_path: Path) -> int:
    """In how many of ten outcomes a promise is broken where the system ignores fsync."""
    log = [one for one in training.record.log if not isinstance(one, Sync)]
    deaf, lost = dataclasses.replace(training.record, log=log), 0
    last = max(index for index, one in enumerate(log) if isinstance(one, Promise)) + 1
    for seed in range(10):
        left = write_tree(after_power_loss(deaf, last, random.Random(seed)), tmp_path / f"deaf-{seed}")
        try:
            training.check(left, deaf.promised(last), seed, resume=False)
        except (AssertionError, UserError):
            lost += 1
    return lost


@pytest.mark.slow
def test_a_run_keeps_its_checkpoints_wherever_it_is_cut(training: Training, tmp_path: Path):
    assert campaign(training.record, training.check, tmp_path / "cuts", cuts=110, samples=3) == 330


def test_a_resume_loses_no_row_that_was_on_the_disk(tiny, tmp_path: Path):
    disk = tmp_path / "disk"
    config = tiny(*SMALL, f"output.folder={disk / RUN}")
    list(flatout.train(config, stop=stopping(3)))
    with recording(disk) as record:
        run = flatout.train(config, resume="auto")
        next(run)
        run.close()
    assert everything(record) == read_tree(disk)

    def check(left: Path, promised: list[Any], number: int) -> None:
        rows = read_metrics(left / RUN / "metrics.jsonl")
        assert [row["step"] for row in rows if row["type"] == "step"] == [1, 2, 3]

    campaign(record, check, tmp_path / "cuts", cuts=100, samples=3)


@pytest.mark.slow
def test_a_resume_after_a_power_loss_may_lose_its_power_too(training: Training, tmp_path: Path):
    """What the first cut left is durable; the resume is recorded and cut again."""
    record = training.record
    for number, cut in enumerate(record.cuts(8, seed=3)):
        disk = tmp_path / f"disk-{number}"
        write_tree(after_power_loss(record, cut, random.Random(number)), disk)
        promised = record.promised(cut)
        with recording(disk) as second:
            watched(second, flatout.train(training.load(*SMALL, f"output.folder={disk / RUN}"), resume="auto"))

        def check(left: Path, later: list[Any], count: int, promised: list[Any] = promised) -> None:
            training.check(left, [*promised, *later], count)

        campaign(second, check, tmp_path / f"cuts-{number}", cuts=4, samples=3, seed=number)


# --- divergence -------------------------------------------------------------------------------------------------------


def diverge(tiny, tmp_path: Path) -> tuple[Recording, Path]:
    flatout.prepare(tiny(*SMALL))
    disk = tmp_path / "disk"
    disk.mkdir()
    config = tiny(*SMALL, *DIVERGING, f"output.folder={disk / RUN}")
    with recording(disk) as record:
        with pytest.raises(DivergedError) as error:
            watched(record, flatout.train(config))
        words = shlex.split(error.value.hint.partition(": ")[2])
        point = Path(words[words.index("--resume") + 1])
        record.promise((read_checkpoint(point).step, True))
    assert everything(record) == read_tree(disk)
    return record, point.relative_to(disk)


def diverged_check(tiny, point: Path, complete: int, resume_every: int) -> Check:
    def check(left: Path, promised: list[Any], number: int) -> None:
        run = left / RUN
        if any(finite for _, finite in promised):
            chosen, _ = find_resume_point(run, "auto")
            assert chosen is not None
            verdict = read_verdict(chosen)
            assert verdict is None or verdict.finite
        if len(promised) == complete:
            verify_checkpoint(left / point)
            if number % resume_every == 0:
                words = [*DIVERGING, "optim.learning_rate=1e-3", "optim.clip=1", f"output.folder={run}"]
                told = list(flatout.train(tiny(*SMALL, *words), resume=left / point))
                assert told[-1].step == 20

    return check


def test_a_diverging_run_keeps_a_finite_checkpoint(tiny, tmp_path: Path):
    record, point = diverge(tiny, tmp_path)
    check = diverged_check(tiny, point, len(record.promised(len(record.log))), 1000)
    campaign(record, check, tmp_path / "cuts", cuts=6, samples=2)


@pytest.mark.slow
def test_a_diverging_run_keeps_a_finite_checkpoint_wherever_it_is_cut(tiny, tmp_path: Path):
    record, point = diverge(tiny, tmp_path)
    check = diverged_check(tiny, point, len(record.promised(len(record.log))), 1)
    assert campaign(record, check, tmp_path / "cuts", cuts=40, samples=3) == 120


# --- preparing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Preparing:
    """Datasets of several parts from the same text, by two configs."""

    load: Callable[..., LoadedConfig]
    wanted: dict[str, Tree]

    def prepare(self, kind: str, folder: Path, *, overwrite: bool = False) -> None:
        share = {"first": 0.2, "second": 0.3}[kind]
        words = ["data.source=rows", "data.tokenizer=bytes", "data.split=document"]
        config = self.load(*words, f"data.validation={share}", f"data.folder={folder / 'data/set'}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "SHARD_TOKENS", 600)
            flatout.prepare(config, workers=0, overwrite=overwrite)

    def check(self, old: str | None, new: str) -> Check:
        """Before prepare returned there is the old dataset, the new one, or none; the same command makes the new one.

        A dataset of a kind that is there is opened and compared byte for byte.
        """

        def check(left: Path, promised: list[Any], number: int) -> None:
            folder = left / "data/set"
            there = (folder / "manifest.json").exists()
            if promised or there:
                open_dataset(folder, verify="full")
                assert self.is_one_of(folder, [new] if promised or old is None else [old, new])
            overwrite = not promised and (old is not None or number % 2 == 0)
            self.prepare(new, left, overwrite=overwrite)
            open_dataset(folder, verify="full")
            assert self.is_one_of(folder, [new])
            if overwrite or not there:  # else nothing was done, and nothing is looked at but the dataset
                large = [path for path in left.rglob("*") if path.suffix in (".part", ".bin") and path.parent != folder]
                assert not large, "nothing large is left over"

        return check

    def is_one_of(self, folder: Path, kinds: list[str]) -> bool:
        content = {name: raw for name, raw in read_tree(folder).items() if name != MARK}
        return content in [self.wanted[kind] for kind in kinds]


@pytest.fixture
def preparing(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparing:
    monkeypatch.setattr(plan, "PART_BYTES", 1024)
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 1024)
    Path("rows").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": f"row {row} of file {number} " * 4}) for row in range(12)]
        Path(f"rows/{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    preparing = Preparing(tiny, {})
    for kind in ("first", "second"):
        preparing.prepare(kind, tmp_path / kind)
        preparing.wanted[kind] = read_tree(tmp_path / kind / "data/set")
    assert preparing.wanted["first"] != preparing.wanted["second"]
    return preparing


def prepared(preparing: Preparing, disk: Path, case: str) -> tuple[Recording, Check]:
    """A first prepare, one that takes the place of a dataset, or one that finds the unfinished parts of another."""
    disk.mkdir()
    if case == "over a dataset":
        preparing.prepare("first", disk)
    if case == "over unfinished parts":
        record, _ = prepared(preparing, disk.with_name("unfinished"), "anew")
        middle = (record.start + len(record.log)) // 2
        disk.rmdir()
        whole = dataclasses.replace(record, log=record.log[:middle])
        write_tree(everything(whole), disk)
        assert len(list(disk.rglob("*.part"))) >= 2
    with recording(disk) as record:
        preparing.prepare("second", disk, overwrite=case == "over a dataset")
        record.promise("prepared")
    assert everything(record) == read_tree(disk)
    return record, preparing.check("first" if case == "over a dataset" else None, "second")


CASES = ["anew", "over a dataset", "over unfinished parts"]


@pytest.mark.parametrize("case", CASES)
def test_a_dataset_is_whole_or_absent(preparing: Preparing, tmp_path: Path, case: str):
    record, check = prepared(preparing, tmp_path / "disk", case)
    campaign(record, check, tmp_path / "cuts", cuts=4, samples=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_dataset_is_whole_or_absent_wherever_it_is_cut(preparing: Preparing, tmp_path: Path, case: str):
    record, check = prepared(preparing, tmp_path / "disk", case)
    assert campaign(record, check, tmp_path / "cuts", cuts=30, samples=3) == 90


# --- adapters and exports ---------------------------------------------------------------------------------------------


def write_model(kind: str, folder: Path, value: float) -> None:
    """An adapter, which takes the place of one, or an export, which does not."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(layers=1, width=16, heads=2, context=8), 61)
    files = {"notes.json": b"{}", "additional_chat_templates/other.jinja": b"{{ messages }}"}
    if kind == "adapter":
        adapters = attach(model, AdapterPlan(rank=2), seed=0)
        with torch.no_grad():
            adapters.flat.fill_(value)
        save_adapter(adapters, folder, base="a/model", files=files)
    else:
        export_huggingface(model, folder, end_of_text=0, files=files)


def model_campaign(kind: str, tmp_path: Path, *, cuts: int, samples: int) -> int:
    """The folder is the old one, the new one or absent, and the new one once it was written. Writing again works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    place = Path("out/folder")
    write_model(kind, tmp_path / "old", 0.5)
    write_model(kind, tmp_path / "new", 1.0)
    old, new = read_tree(tmp_path / "old"), read_tree(tmp_path / "new")
    if kind == "adapter":
        assert old != new
        write_model(kind, disk / place, 0.5)
    with recording(disk) as record:
        write_model(kind, disk / place, 1.0)
        record.promise("written")
    assert everything(record) == read_tree(disk)

    def content(folder: Path) -> Tree:
        return {name: raw for name, raw in read_tree(folder).items() if name != MARK}

    def check(left: Path, promised: list[Any], number: int) -> None:
        folder = left / place
        if promised:
            assert content(folder) == new
        elif folder.exists():
            assert content(folder) in (old, new)
        if kind == "adapter" or not folder.exists():
            write_model(kind, folder, 1.0)
        assert content(folder) == new
        if kind == "adapter":
            large = [path for path in left.rglob("*.safetensors") if path.parent != folder]
            assert not large, "nothing large is left over"

    return campaign(record, check, tmp_path / "cuts", cuts=cuts, samples=samples)


@pytest.mark.parametrize("kind", ["adapter", "export"])
def test_a_model_folder_is_whole_or_absent(tmp_path: Path, kind: str):
    model_campaign(kind, tmp_path, cuts=3, samples=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "export"])
def test_a_model_folder_is_whole_or_absent_wherever_it_is_cut(tmp_path: Path, kind: str):
    assert model_campaign(kind, tmp_path, cuts=20, samples=3) == 60


# --- one call at a time, cut everywhere -------------------------------------------------------------------------------


def test_the_mark_of_a_base_outlives_a_power_loss(tmp_path: Path):
    disk = tmp_path / "disk"
    (disk / "step-00000001").mkdir(parents=True)
    with recording(disk) as record:
        assert mark_as_base(disk / "step-00000001", tmp_path)
    assert all("step-00000001/base-of.txt" in tree for tree in outcomes(record, 20))


def test_a_verdict_leaves_nothing_that_keeps_its_checkpoint_from_being_removed(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path / "disk", make(1))
    with recording(tmp_path / "disk") as record:
        write_verdict(path, Verdict(loss=1.0, progress={}))
        record.promise("judged")

    def check(left: Path, promised: list[Any], number: int) -> None:
        verdict = read_verdict(left / path.name)
        assert verdict is not None or not promised
        assert remove_checkpoint(left / path.name)

    campaign(record, check, tmp_path / "cuts", cuts=100, samples=3)


def test_a_removed_checkpoint_is_whole_or_gone(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path / "disk", make(1))
    with recording(tmp_path / "disk") as record:
        assert remove_checkpoint(path)

    def check(left: Path, promised: list[Any], number: int) -> None:
        if (left / path.name).exists():
            verify_checkpoint(left / path.name)
            assert remove_checkpoint(left / path.name)
        sweep_leftovers(left)
        assert not [one for one in left.rglob("*") if one.is_file() and one.name != MARK], "no file is left over"

    campaign(record, check, tmp_path / "cuts", cuts=100, samples=6)


def test_an_unfinished_checkpoint_is_swept_away(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    with recording(tmp_path / "disk") as record:
        path, _ = write_checkpoint(tmp_path / "disk" / "checkpoints", make(1))
        record.promise("saved")

    def check(left: Path, promised: list[Any], number: int) -> None:
        folder = left / "checkpoints"
        sweep_leftovers(folder)
        large = {one.parent.name for one in left.rglob("*.safetensors")}
        assert large <= {path.name}, "nothing large is left over"
        assert large or not promised
        if large:
            verify_checkpoint(folder / path.name)

    campaign(record, check, tmp_path / "cuts", cuts=100, samples=3)


@pytest.mark.parametrize("begun", [None, LOCK_MARK + b"pid 1 on another\n", b"pid 1 on another\n"])
def test_a_run_folder_is_known_as_ours(tmp_path: Path, begun: bytes | None):
    """So a run that lost its power can go on in its folder, or begin again there before its first checkpoint."""
    disk = tmp_path / "disk"
    (disk / RUN).mkdir(parents=True)
    if begun:
        write_checkpoint(disk / RUN / "checkpoints", make(1))
        (disk / RUN / "run.lock").write_bytes(begun)
        (disk / RUN / "config.yaml").write_text("model: {}")
    with recording(disk) as record, run_lock(disk / RUN) as lock:
        lock.accept()
        write_whole(disk / RUN / "config.yaml", b"model: {layers: 2}")

    def check(left: Path, promised: list[Any], number: int) -> None:
        check_own(left / RUN)

    assert campaign(record, check, tmp_path / "cuts", cuts=100, samples=20) >= 80
