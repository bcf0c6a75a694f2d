"""Ranks and hosts that were given different settings: refused by name before the first step, or the same run.

A few settings here; every setting of the schema, and thirty over two real hosts' agents, are `slow`.
"""

import dataclasses
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import flatout
from flatout.config.alike import MAY_DIFFER, different_settings, shared_settings
from flatout.config.facts import field_facts, names_in, section_paths
from flatout.config.load import load_config
from flatout.errors import UserError
from flatout.records import EvalRecord, StepRecord
from flatout.resolve import form as form_module
from tests.conftest import TINY
from tests.end_to_end.many import Command
from tests.end_to_end.test_every_field import BESIDE, OTHER
from tests.ranks import WORKERS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

SHORT = [*TINY, "model.layers=1", "train.steps=2", "train.batch_tokens=64", "eval.sample_tokens=0", "eval.tokens=96"]
SHORT += ["data.source=text.txt", "output.folder=run"]
# Where test_every_field has no other value, or one that needs a device.
MORE = {
    "output.trackers": "[tensorboard]",
    "parallel.form": "fsdp",
    "parallel.reduce": "bf16",
    "parallel.timeout": "50",
}


def words_for(field: str) -> tuple[list[str], list[str]]:
    """Words of rank 0, and those of rank 1, which has another value for a field."""
    other = MORE.get(field) or OTHER[field]
    beside = BESIDE.get(field, [])
    length = [] if any(word.startswith("train.epochs") for word in beside) else ["train.steps=2"]
    base = [*(word for word in SHORT if not word.startswith("train.steps")), *length, *beside]
    if isinstance(other, list):
        return base, [*base, *other]
    cleared = ["train.steps=null"] if field in ("train.epochs", "train.tokens") else []
    return base, [*base, *cleared, f"{field}={other}"]


def train_with(folder: str, first: list[str], second: list[str], hosts: int = 1) -> tuple[int, str, list[float]]:
    """One run, with other words in the second rank: exit code, error, and all losses."""
    rank = int(os.environ["RANK"])
    if hosts > 1:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folder)
    losses: list[float] = []
    try:
        with mock.patch("socket.gethostname", return_value=f"host-{rank if hosts > 1 else 0}"):
            for record in flatout.train(load_config("shakespeare-char", second if rank else first)):
                losses += [record.loss] if isinstance(record, StepRecord | EvalRecord) else []
    except UserError as error:
        return error.exit_code, f"error: {error.message}\nhint: {error.hint}", losses
    return 0, "", losses


def check(field: str, folder: Path, hosts: int = 1) -> str:
    """Tries a field that differs; returns what became of it."""
    ended = WORKERS.run(2, train_with, str(folder), *words_for(field), hosts)
    (code, said, losses), (other_code, other_said, other_losses) = ended
    assert code == other_code, ended
    if code == 0:
        assert field in MAY_DIFFER
        assert losses == other_losses
        assert len(losses) == 3
        return "harmless"
    assert code == 2, ended
    assert not losses
    assert not other_losses
    assert not (folder / "run").exists(), "a refused command leaves the disk as it was"
    assert f"{field} is " in said + other_said, ended
    if field not in MAY_DIFFER:
        assert "have different settings" in said
        assert other_said == said or hosts == 1, "once on every host"
    return "refused"


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(corpus.read_bytes())
    return tmp_path


FEW = ["optim.learning_rate", "train.batch_tokens", "train.steps", "checkpoint.every", "parallel.form", "eval.tokens"]


def test_settings_of_one_rank_alone_are_refused_by_name(folder: Path):
    assert {field: check(field, folder) for field in FEW} == dict.fromkeys(FEW, "refused")
    assert check("optim.clip", folder, hosts=2) == "refused"
    assert check("data.folder", folder) == "harmless"


def test_every_setting_that_may_differ_is_one_and_has_a_reason():
    assert set(MAY_DIFFER) <= set(field_facts())
    assert all(MAY_DIFFER.values())
    words = ("parallel.reduce=fp32", "parallel.reduce=bf16")
    first, other = (shared_settings(load_config("shakespeare-char", [word])) for word in words)
    assert "parallel.reduce is fp32 and bf16" in different_settings(first, other, ("rank 0", "rank 1")).message


def test_of_many_differences_the_first_are_named_and_the_rest_counted():
    first, other = ({f"optim.setting{number}": value for number in range(11)} for value in (1, 2))
    error = different_settings(first, other, ("rank 0 on a", "rank 1 on b"))
    assert error.message.count(" is 1 and 2") == 8
    assert error.message.endswith("optim.setting7 is 1 and 2 and 3 more")


def train_sized(folder: str, sizes: list[str], overlays: list[str]) -> str:
    """A run whose ranks were given different sizes or overlays: what a rank says."""
    rank = int(os.environ["RANK"])
    os.chdir(folder)
    words = ["data.source=text.txt", "data.tokenizer=char", "train.steps=1", "speed.device=cpu"]
    loaded = load_config("modern", words, size=sizes[rank], hardware=overlays[rank])
    try:
        next(flatout.train(loaded))
    except UserError as error:
        return error.message
    return ""


def test_a_size_or_an_overlay_of_one_rank_alone_is_refused_by_name(folder: Path):
    said = WORKERS.run(2, train_sized, str(folder), ["15m", "60m"], ["8gb", "8gb"])
    assert "have different settings: model.layers is 4 and 8" in said[0]
    assert '--size is "15m" and "60m"' in said[0]
    said = WORKERS.run(2, train_sized, str(folder), ["15m", "15m"], ["8gb", "16gb"])
    assert 'have different settings: --hardware is "8gb" and "16gb"' in said[0]


def decide_otherwise(folder: str, words: list[str]) -> tuple[int, str, list[float]]:
    """A run whose second rank has a device without bf16."""
    real = form_module.resolve_speed

    def resolve(*values: Any, **how: Any) -> Any:
        speed = real(*values, **how)
        return dataclasses.replace(speed, precision="fp16" if os.environ["RANK"] == "1" else "bf16")

    with mock.patch.object(form_module, "resolve_speed", resolve):
        return train_with(folder, words, words)


def test_switches_that_come_out_differently_are_refused_by_name(folder: Path):
    first, second = WORKERS.run(2, decide_otherwise, str(folder), SHORT)
    assert "cannot train together: speed.precision is bf16 and fp16" in first[1]
    assert (first[0], second[0]) == (2, 2)


def train_with_threads(folder: str, words: list[str]) -> tuple[int, str, list[float]]:
    """A run whose ranks find another number of threads in their environment."""
    count = 1 + int(os.environ["RANK"])
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # as torch does when it starts
    try:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(count)):
            return train_with(folder, words, words)
    finally:
        torch.set_num_threads(before)


def test_threads_that_the_environment_sets_differently_are_refused_by_name(folder: Path):
    first, second = WORKERS.run(2, train_with_threads, str(folder), SHORT)
    assert "cannot train together: speed.threads is 1 and 2" in first[1]
    assert (first[0], second[0]) == (2, 2)


# --- all of it: `make test-slow` --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2], ids=["two ranks", "two hosts"])
def test_every_setting_that_differs_is_refused_or_harmless(folder: Path, hosts: int):
    found: dict[str, str] = {}
    for field in field_facts():
        found[field] = check(field, folder, hosts)
        shutil.rmtree(folder / "run", ignore_errors=True)
    harmless = [field for field, became in found.items() if became == "harmless"]
    print(f"{len(found)} settings, {len(found) - len(harmless)} refused, harmless: {', '.join(harmless)}")
    assert len(harmless) >= len(MAY_DIFFER) - 2, "a CPU has no memory to limit, and compares its threads"


SOME = [path for section in section_paths() for path in [f"{section}.{name}" for name in names_in(section)][:3]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes where Linux lists them")
def test_hosts_whose_agents_were_given_different_settings_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Both hosts are this machine. Thirty settings and more, of all sections."""
    monkeypatch.chdir(folder)
    refused, harmless = 0, []
    for field in SOME:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        commands = []
        for host, words in enumerate(words_for(field)):
            meet = ["--gpus", "1", "--nodes", "2", "--node-rank", str(host), "--meet", place]
            Path(f"told-{host}").unlink(missing_ok=True)
            commands.append(Command(["shakespeare-char", *words, *meet], log=f"told-{host}"))
        codes = [command.wait(200) for command in commands]
        told = [command.told.splitlines() for command in commands]
        assert not any(command.left_behind() for command in commands)
        if codes == [0, 0]:
            assert field in MAY_DIFFER
            harmless.append(field)
            shutil.rmtree("run")
            continue
        refused += 1
        assert codes == [2, 2], (field, told)
        assert len(told[0]) == 2, told
        assert told[0] == told[1], "the same error and the same hint on both hosts"
        assert f"{field} is " in told[0][0]
        assert not Path("run").exists()
    print(f"{refused} refused on both hosts, harmless: {', '.join(harmless)}")
    assert refused >= 30
