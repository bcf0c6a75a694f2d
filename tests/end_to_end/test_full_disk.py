"""A disk that is full at any of the writes of a run: the run ends, is resumed when there is room, and ends the same."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.config.load import load_config
from flatout.engine import saver
from flatout.errors import FullDiskError
from flatout.records import Record
from tests.conftest import TINY
from tests.disk import snapshot
from tests.end_to_end.test_finetune_folders import PRETRAIN, QUIET
from tests.full_disk import Disk

pytestmark = [
    pytest.mark.usefixtures("children_stay"),
    pytest.mark.skipif(sys.platform != "linux", reason="which files are open is read from /proc"),
]

RUN = "disk/run"
SAVES = ["eval.every=2", "checkpoint.every=2", "checkpoint.keep=1", "eval.sample_tokens=0", f"output.folder={RUN}"]
# Of records, what does not depend on the clock and the memory of this machine.
FIELDS = ("type", "step", "start_step", "loss", "grad_norm", "learning_rate", "applied", "tokens", "best", "reason",
          "text", "path", "message", "checkpoint", "best_step", "best_loss")  # fmt: skip
KINDS = ("step", "eval", "checkpoint", "epoch")  # a resume adds records of others
TIMES = {"seconds", "epoch_seconds", "bytes", "sha256", "manifest"}  # and hashes and sizes of files with times in them


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if key not in TIMES}
    return value


def outcome(folder: Path) -> dict[str, Any]:
    """All files, byte for byte where there are no times in them."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.name == "run.lock":  # each process that held it has a line there
            continue
        content: Any = None if path.is_dir() else path.read_bytes()
        if path.name == "metrics.jsonl":
            rows = [{field: row.get(field) for field in FIELDS} for row in map(json.loads, content.splitlines())]
            rows = [row for row in rows if row["type"] in KINDS]
            content = sorted(json.dumps(row) for row in rows)  # a save beside training is told of when it is done
        elif path.suffix == ".json":
            content = untimed(json.loads(content))
        found[path.relative_to(folder).as_posix()] = content
    return found


class Trials:
    """One run, repeated on the same disk with a failure at each of its operations."""

    def __init__(self, train: Callable[[], list[Record]], resume: Callable[[], list[Record]]) -> None:
        self.train, self.resume, self.state = train, resume, Path("state")
        Path("disk").mkdir(exist_ok=True)
        shutil.copytree("disk", "start")
        self.run(None)
        self.disk.check_all_seen()
        self.operations, self.expected = self.disk.operations(), outcome(Path("disk"))

    def run(self, at: str | None) -> list[Record]:
        for folder in ("disk", "state"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree("start", "disk")
        self.state.mkdir()
        self.disk = Disk(Path("disk"), self.state)
        if at is not None:
            self.disk.at.write_text(at)
        with self.disk.installed():
            return self.train()

    def fail_at(self, operation: str, *, begun: bool = True) -> str:
        """Runs with a disk that is full from this operation on; says how the run took it.

        Where the run had not `begun`, the same command is given again.
        """
        with pytest.raises(FullDiskError):
            self.run(operation)
        assert self.disk.met.exists(), f"{operation} did not come again"
        self.disk.make_room()
        refused = snapshot(Path("disk")) == snapshot(Path("start"))
        (self.resume if begun and not refused else self.train)()
        found = outcome(Path("disk"))
        assert not any(".tmp-" in name for name in found), operation
        for name, content in self.expected.items():
            assert found[name] == content, f"{operation}: {name}"
        return "refused" if refused else "ended"


def trainer(preset: str | None, words: list[str], **how: Any) -> Callable[[], list[Record]]:
    return lambda: list(flatout.train(load_config(preset, words), **how))


@pytest.fixture
def kinds(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Trials]:
    """The runs whose writes fail, by name."""
    monkeypatch.chdir(tmp_path)
    plain = [*TINY, "model.layers=1", f"data.source={corpus}", "train.steps=4", *SAVES]

    def make(kind: str) -> Trials:
        if kind.endswith("beside"):
            monkeypatch.setattr(saver, "SMALL", 0)
        preset, own = "shakespeare-char", plain
        train = trainer(preset, own)
        if kind == "back":  # to an older checkpoint: later ones step aside, best.json and the records go back
            list(flatout.train(load_config("shakespeare-char", [*plain, "checkpoint.keep=9"])))
            train = trainer("shakespeare-char", plain, resume=f"{RUN}/checkpoints/step-00000002")
        if kind == "damaged":  # the newest checkpoint, which steps aside
            list(flatout.train(load_config("shakespeare-char", [*plain, "checkpoint.keep=9"])))
            Path(RUN, "checkpoints/step-00000004/model.safetensors").unlink()
            train = trainer("shakespeare-char", plain, resume="auto")
        if kind.startswith("adapter"):
            rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
            Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
            base = [*PRETRAIN, f"data.source={corpus}", "data.tokenizer=bytes", "output.folder=disk/base"]
            list(flatout.train(load_config(None, base)))
            words = ["model.init_from=disk/base", "chat.source=rows.json", "optim.learning_rate=1e-2", "train.steps=4"]
            words += ["train.epochs=null", *QUIET, "model.context=96", *SAVES]
            list(flatout.train(load_config("lora", [*words, "output.folder=before"])))  # which makes the samples
            Path("disk/base/checkpoints/step-00000002/base-of.txt").unlink()
            preset, own = "lora", words
            train = trainer(preset, own)
        return Trials(train, trainer(preset, own, resume="auto"))

    return make


def file_of(operation: str) -> str:
    """What an operation is about: its file, whichever step and process it is of."""
    return re.sub(r"step-\d+(\.\w+-\*)?", r"step-N\1", operation.split(" ")[2])


def one_of_each(operations: list[str], *, first: bool = False) -> dict[str, str]:
    """The last or `first` operation on every file; the files of a checkpoint that is being written count as one."""
    named = {file_of(operation): operation for operation in (reversed(operations) if first else operations)}
    return {"checkpoint" if ".tmp-" in name and "step-N" in name else name: named[name] for name in named}


def test_a_full_disk_at_every_file_of_a_run(kinds: Callable[[str], Trials]):
    trials = kinds("at once")
    took = {name: trials.fail_at(operation) for name, operation in one_of_each(trials.operations).items()}
    refused = {name for name, how in took.items() if how == "refused"}
    assert refused <= {"run", *(name for name in took if name.startswith(("run/config.yaml", "run/run.lock")))}, took
    assert len(took) >= 12, took


def test_a_full_disk_beside_training(kinds: Callable[[str], Trials]):
    trials = kinds("beside")
    chosen = one_of_each(trials.operations)
    for name in ("checkpoint", "run/checkpoints/step-N/verdict.json", "run/checkpoints/step-N.old-*"):
        assert trials.fail_at(chosen[name]) == "ended"


def test_a_full_disk_at_the_adapter(kinds: Callable[[str], Trials]):
    trials = kinds("adapter")
    chosen, folder = one_of_each(trials.operations), "run/adapter"
    names = (f"{folder}.tmp-*/adapter_model.safetensors", folder, f"{folder}/.flatout-unfinished", f"{folder}.old-*")
    assert {name: trials.fail_at(chosen[name]) for name in names} == dict.fromkeys(names, "ended")


AT_THE_START = {
    "back": ["run/checkpoints/step-N.superseded", "run/metrics.jsonl.tmp-*", "run/best.json.tmp-*"],
    "damaged": ["run/checkpoints/step-N.damaged"],
    "adapter": ["base/checkpoints/step-N/base-of.txt"],
}


@pytest.mark.parametrize("kind", AT_THE_START)
def test_a_full_disk_at_the_start_of_a_run_with_something_before_it(kinds: Callable[[str], Trials], kind: str):
    trials = kinds(kind)
    chosen = one_of_each(trials.operations, first=True)
    for name in AT_THE_START[kind]:
        trials.fail_at(chosen[name], begun=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["at once", "beside", "back", "damaged", "adapter", "adapter beside"])
def test_a_full_disk_at_every_write_of_a_run(kinds: Callable[[str], Trials], kind: str):
    trials = kinds(kind)
    begun = kind not in AT_THE_START or kind == "adapter"
    took = {operation: trials.fail_at(operation, begun=begun) for operation in trials.operations}
    files = {file_of(operation) for operation in trials.operations}
    refused = [operation for operation, how in took.items() if how == "refused"]
    print(f"\n{kind}: {len(took)} writes of {len(files)} files, {len(refused)} refused before the start: {refused}")
