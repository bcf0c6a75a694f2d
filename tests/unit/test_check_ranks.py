"""The doctor's checks of several GPUs, on machines that are described."""

import dataclasses
from pathlib import Path

import pytest

from flatout.diagnose.check_data import TokenFacts
from flatout.diagnose.check_environment import check_nccl
from flatout.diagnose.check_run import Several, check_memory, check_ranks
from flatout.diagnose.machine import Machine
from flatout.finding import Finding, exit_code
from flatout.tuning.cluster import llama_words
from tests.unit.test_doctor import DISK, H200, TRIALS, decided, machine, visit

EIGHT = machine(cards=tuple(dataclasses.replace(H200, identity=f"GPU-{number}") for number in range(8)))
FOUR = Several(size=4, asked=True, nccl="2.27.5", shared_memory_bytes=2**34)


def findings(several: Several = FOUR, base: Machine = EIGHT, kind: str = "cuda") -> dict[str, Finding]:
    return {one.name: one for one in check_ranks(several, base, kind) if one is not None}


def test_a_healthy_host_is_all_green():
    found = findings()
    assert {one.status for one in found.values()} == {"ok"}
    assert set(found) == {"ranks", "nccl", "links", "shared memory"}
    assert found["ranks"].found == "4 x NVIDIA H200"
    assert set(findings(kind="cpu")) == {"ranks"}


def test_one_gpu_is_quiet_unless_several_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert not [one for one in visit() if one.area == "ranks"]
    assert [one for one in visit(machine=EIGHT) if one.area == "ranks"], "eight are worth a look"


def test_what_was_asked_for_is_bad_and_what_is_possible_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = ["train.batch_tokens=1536"]  # 12 windows of 128
    found = {one.name: one for one in visit(*words, machine=EIGHT) if one.area == "ranks"}
    assert found["batch"].status == "note"
    asked = visit(*words, machine=EIGHT, gpus=8)
    (refused,) = [one for one in asked if one.status == "bad"]
    assert "train.batch_tokens=2048, or start as many processes as divide 12" in refused.advice
    assert exit_code(asked) == 2
    found = {one.name: one for one in visit(gpus=2, disk=DISK, trials=TRIALS) if one.area == "ranks"}
    assert found["ranks"].found == "2 GPUs were asked for, and this host has 1"
    assert not [one for one in visit(gpus=1) if one.area == "ranks"]


def test_memory_is_that_of_the_form_that_training_takes():
    """A 7B model fits no card whole, and eight cards in slices."""
    words = [*llama_words("7b", [], batch=True), "train.batch_tokens=32768", "speed.memory_limit=60"]
    words += ["speed.checkpointing=full"]

    def step(ranks: int, *more: str) -> Finding:
        plan = decided(" ".join([*words, *more]), "gpt-124m", EIGHT, TokenFacts(vocab=32000), ranks)
        found = [one for one in check_memory(plan, EIGHT, 0, ranks) if one is not None]
        return next(one for one in found if one.name == "a step")

    assert step(1).status == "bad"
    assert step(8, "parallel.form=data").status == "bad"
    assert step(8).status == "ok"
    assert " in each of 8 ranks, parallel.form=fsdp; " in step(8).found


MIXED = machine(cards=(H200, H200, dataclasses.replace(H200, name="NVIDIA A100"), H200))


@pytest.mark.parametrize(
    ("several", "base", "name", "status", "words"),
    [
        (FOUR, MIXED, "ranks", "warn", "3 x NVIDIA H200, 1 x NVIDIA A100"),
        (dataclasses.replace(FOUR, nccl=None), EIGHT, "nccl", "bad", "this torch has no NCCL"),
        (dataclasses.replace(FOUR, shared_memory_bytes=2**26), EIGHT, "shared memory", "warn", "64 MiB"),
        (
            dataclasses.replace(FOUR, apart=((0, 1), (0, 2))),
            EIGHT,
            "links",
            "warn",
            "GPUs 0 and 1 cannot read each other's memory, nor can 1 other pair",
        ),
    ],
)
def test_planted_problems(several: Several, base: Machine, name: str, status: str, words: str):
    found = findings(several, base)[name]
    assert (found.status, found.area) == (status, "ranks")
    assert words in found.found
    assert found.advice


def test_variables_of_nccl():
    def found(**variables: str) -> dict[str, Finding]:
        return {one.name: one for one in check_nccl(variables)}

    assert found()["variables"].found == "none of NCCL or gloo is set"
    assert found(NCCL_P2P_DISABLE="1")["NCCL_P2P_DISABLE"].status == "warn"
    assert found(NCCL_P2P_DISABLE="0")["variables"].found == "set: NCCL_P2P_DISABLE=0"
    assert found(NCCL_IB_DISABLE="1")["NCCL_IB_DISABLE"].status == "note"
    assert found(NCCL_DEBUG="WARN")["variables"].status == "ok"
    assert found(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")["TORCH_NCCL_ASYNC_ERROR_HANDLING"].status == "warn"


def test_a_described_machine_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = {one.name: one for one in visit(machine=EIGHT, several=FOUR) if one.area == "ranks"}
    assert found["links"].status == "ok"
