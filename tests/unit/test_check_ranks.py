"""The doctor's checks of several GPUs, on machines that are described."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.config.load import load_config
from flatout.diagnose.check_environment import check_nccl
from flatout.diagnose.check_ranks import (
    Link,
    Meeting,
    RankFacts,
    Several,
    check_rank_data,
    check_ranks,
    links_of_nvml,
    mount_of,
)
from flatout.diagnose.check_run import check_memory
from flatout.finding import Finding, exit_code
from flatout.tuning.cluster import llama_words
from tests.unit.test_doctor import DISK, H200, TRIALS, decided, machine, visit

EIGHT = machine(cards=tuple(dataclasses.replace(H200, identity=f"GPU-{number}") for number in range(8)))
LINKED = tuple(Link(pair=(one, two), nvlink=True, peer=True) for one in range(4) for two in range(one + 1, 4))
RANKS = tuple(
    RankFacts(
        rank=rank,
        host=f"host{rank // 2}",
        device="NVIDIA H200",
        python="3.12.1",
        nccl="2.27.5",
        shared_memory_bytes=2**34,
        data="a" * 64,
        reduce_seconds=1e-3,
    )
    for rank in range(4)
)
MET = Meeting(place="host0:29500", backend="nccl", ranks=RANKS, folder="/shared")
FOUR = Several(
    size=4,
    asked=True,
    nccl="2.27.5",
    links=LINKED,
    shared_memory_bytes=2**34,
    mounts={"run folder": ("/shared/runs", "nfs4")},
    interfaces=("lo", "eth0", "ib0"),
)


def findings(several: Several = FOUR, kind: str = "cuda", **facts: Any) -> dict[str, Finding]:
    return {one.name: one for one in check_ranks(several, EIGHT, kind, **facts) if one is not None}


def met(*changes: tuple[int, dict[str, Any]], **of_meeting: Any) -> Several:
    """Four ranks on two hosts, some of them otherwise."""
    ranks = list(RANKS)
    for rank, change in changes:
        ranks[rank] = dataclasses.replace(ranks[rank], **change)
    return dataclasses.replace(FOUR, meeting=dataclasses.replace(MET, ranks=tuple(ranks), **of_meeting))


def test_a_healthy_host_and_healthy_ranks():
    for several in (FOUR, met()):
        assert {one.status for one in findings(several).values()} == {"ok"}
    found = findings(met(), parameters=124_000_000, step_seconds=0.5)
    assert found["ranks"].found == "4 on 2 hosts met at host0:29500, gradients by nccl"
    assert found["all-reduce"].found == (
        "25 MiB in 1.00 ms by NCCL: bus bandwidth 39.32 GB/s; gradients take 18.9 ms a step"
    )
    assert found["run folder"].found == "/shared/runs is on nfs4, and 4 ranks see it"


def test_one_gpu_and_nobody_asked_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert not [one for one in visit() if one.area == "ranks"]
    assert [one for one in visit(machine=EIGHT) if one.area == "ranks"], "eight are worth a look"


def test_what_was_asked_for_is_bad_and_what_is_possible_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = ["train.batch_tokens=1536"]  # 12 windows of 128
    found = {one.name: one for one in visit(*words, machine=EIGHT) if one.area == "ranks"}
    assert found["batch"].status == "note"
    asked = visit(*words, machine=EIGHT, gpus=8)
    found = {one.name: one for one in asked if one.area == "ranks"}
    assert found["batch"].status == "bad"
    assert (
        "train.batch_tokens=2048, or start as many processes as divide 12: 1, 2, 3, 4, 6, 12" in found["batch"].advice
    )
    assert exit_code(asked) == 2
    found = {one.name: one for one in visit(gpus=2, disk=DISK, trials=TRIALS) if one.area == "ranks"}
    assert found["ranks"].found == "2 GPUs were asked for, and this host has 1"
    assert not [one for one in visit(gpus=1) if one.area == "ranks"]


def test_memory_is_that_of_the_form_that_training_takes():
    """A 7B model fits no card whole, and eight cards in slices."""
    words = [*llama_words("7b", [], batch=True), "train.batch_tokens=32768", "speed.memory_limit=60"]
    words += ["speed.checkpointing=full"]

    def step(ranks: int, *more: str) -> Finding:
        plan, _ = decided(" ".join([*words, *more]), "gpt-124m", EIGHT, ranks=ranks)
        found = [one for one in check_memory(plan, EIGHT, 0, ranks) if one is not None]
        return next(one for one in found if one.name == "a step")

    assert step(1).status == "bad"
    assert step(8, "parallel.form=data").status == "bad"
    assert step(8).status == "ok"
    assert " in each of 8 ranks, parallel.form=fsdp; " in step(8).found


def test_cards_of_two_kinds_are_as_slow_as_the_slower():
    mixed = machine(cards=(H200, H200, dataclasses.replace(H200, name="NVIDIA A100"), H200))
    found = next(one for one in check_ranks(FOUR, mixed, "cuda") if one is not None)
    assert (found.status, found.found) == ("warn", "3 x NVIDIA H200, 1 x NVIDIA A100")


def test_links():
    def linked(*links: Link) -> Finding:
        return findings(dataclasses.replace(FOUR, links=links))["links"]

    pcie = Link(pair=(0, 1), nvlink=False, peer=True, way="one PCIe switch")
    assert linked(*LINKED).found == "NVLink between all pairs"
    assert linked(pcie).found == "PCIe between all pairs (one PCIe switch)"
    assert linked(pcie, *LINKED[1:]).found == "PCIe between GPUs 0 and 1 (one PCIe switch)"
    slow = [dataclasses.replace(pcie, pair=(0, number), way="") for number in range(1, 7)]
    assert linked(*slow, *LINKED[1:]).found == ("PCIe between GPUs 0 and 1, 0 and 2, 0 and 3, 0 and 4 and 2 more pairs")
    apart = linked(dataclasses.replace(pcie, peer=False), *LINKED[1:])
    assert (apart.status, apart.found) == (
        "warn",
        "GPUs 0 and 1 cannot read each other's memory (one PCIe switch lies between)",
    )
    assert "links" not in findings(dataclasses.replace(FOUR, links=()))


def test_nvml_tells_links_by_the_cards_identities():
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda name: int(name.removeprefix("GPU-")),
        nvmlDeviceGetP2PStatus=lambda one, two, index: 0 if index == "read" or (one, two) == (5, 3) else 1,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, two: 50,
        NVML_P2P_CAPS_INDEX_NVLINK="nvlink",
        NVML_P2P_CAPS_INDEX_READ="read",
        NVML_P2P_STATUS_OK=0,
    )
    cards = [EIGHT.cards[5], EIGHT.cards[3], EIGHT.cards[0]]
    links = links_of_nvml(nvml, cards)
    assert [(link.pair, link.nvlink, link.peer) for link in links] == [
        ((0, 1), True, True),
        ((0, 2), False, True),
        ((1, 2), False, True),
    ]
    assert links[0].way == "the link between processors"
    assert links_of_nvml(nvml, [*cards, dataclasses.replace(H200, identity="")]) == ()


PLANTED: list[tuple[Several, str, str, str]] = [
    (dataclasses.replace(FOUR, nccl=None), "nccl", "bad", "this torch has no NCCL"),
    (dataclasses.replace(FOUR, shared_memory_bytes=2**26), "shared memory", "warn", "64 MiB"),
    (
        dataclasses.replace(FOUR, mounts={"run folder": ("runs", "fuse.gcsfuse")}),
        "run folder",
        "warn",
        "runs is on fuse.gcsfuse, a bucket",
    ),
    (met((3, {"error": "process 2 of this host has no GPU"})), "ranks", "bad", "rank 3 on host1: process 2"),
    (met((3, {"unseen": "x"}), (2, {"unseen": "x"})), "run folder", "bad", "rank 2 on host1 (and 1 more) does not see"),
    (met((2, {"python": "3.11.0"})), "Python", "warn", "rank 0 on host0 has 3.12.1, rank 2 on host1 has 3.11.0"),
    (met((1, {"nccl": "2.26.2"})), "NCCL", "bad", "rank 1 on host0 has 2.26.2"),
    (met((1, {"device": "NVIDIA A100"})), "device", "warn", "rank 1 on host0 has NVIDIA A100"),
    (met((2, {"variables": {"NCCL_ALGO": "Ring"}})), "variables", "warn", "rank 2 on host1 has NCCL_ALGO=Ring"),
    (met((1, {"reduce_error": "it did not end within 30 s"})), "all-reduce", "bad", "by NCCL, rank 1 on host0: it did"),
    (met((2, {"shared_memory_bytes": 2**26})), "shared memory", "warn", "64 MiB"),
]


@pytest.mark.parametrize(("several", "name", "status", "words"), PLANTED, ids=lambda value: str(value)[:30])
def test_planted_problems(several: Several, name: str, status: str, words: str):
    found = findings(several)[name]
    assert (found.status, found.area) == (status, "ranks")
    assert words in found.found
    assert found.advice


def test_sending_that_takes_longer_than_computing_is_a_warning():
    found = findings(met(), parameters=1_500_000_000, step_seconds=0.1)["all-reduce"]
    assert found.status == "warn"
    assert "gradients take 229 ms a step, and a rank computes 100 ms at least" in found.found
    assert "parallel.reduce=bf16 halves it" in found.advice
    narrow = findings(met(), reduce="bf16", parameters=1_500_000_000, step_seconds=0.1)["all-reduce"]
    assert "gradients take 114 ms" in narrow.found
    assert "bf16" not in narrow.advice


def test_nvlink_that_is_slow_is_a_warning():
    ranks = [(rank, {"reduce_seconds": 1e-2, "host": "host0"}) for rank in range(4)]
    assert findings(met(*ranks))["all-reduce"].status == "warn"
    assert findings(met((0, {"reduce_seconds": 1e-2})))["all-reduce"].status == "ok", "hosts are no NVLink"


def test_data_of_ranks():
    def told(*changes: tuple[int, dict[str, Any]], folder: bool = False) -> list[Finding]:
        words = ["data.source=null", "data.folder=/data"] if folder else ["data.source=texts"]
        return list(check_rank_data(met(*changes).ranks, load_config("gpt2-124m", words).config.data))

    (same,) = told()
    assert (same.area, same.status, same.found) == ("data", "ok", "the same data (aaaaaaaaaaaa) on 4 ranks")
    (other,) = told((2, {"data": "b" * 64}))
    assert (other.status, exit_code([other])) == ("bad", 3)
    assert "rank 2 on host1 has data bbbbbbbbbbbb, others have aaaaaaaaaaaa" in other.found
    (prepared,) = told((2, {"data": None}))
    assert prepared.status == "note"
    (lacking,) = told((2, {"data": None}), folder=True)
    assert (lacking.status, lacking.found) == ("bad", "rank 2 on host1 has no prepared data in /data")
    assert told(*((rank, {"data": None}) for rank in range(4))) == []


def test_variables_of_nccl():
    def told(several: Several = FOUR, **variables: str) -> dict[str, Finding]:
        return {one.name: one for one in check_nccl(variables, several.interfaces, several.hosts)}

    assert told()["variables"].found == "none of NCCL or gloo is set"
    assert told(NCCL_P2P_DISABLE="1")["NCCL_P2P_DISABLE"].status == "warn"
    assert told(NCCL_P2P_DISABLE="0")["variables"].found == "set: NCCL_P2P_DISABLE=0"
    assert told(NCCL_IB_DISABLE="1")["NCCL_IB_DISABLE"].status == "note"
    assert told(met(), NCCL_IB_DISABLE="1")["NCCL_IB_DISABLE"].status == "warn"
    assert told(NCCL_DEBUG="WARN")["variables"].status == "ok"
    assert told(NCCL_SOCKET_IFNAME="eth,ens")["variables"].found == "set: NCCL_SOCKET_IFNAME=eth,ens"
    assert told(NCCL_SOCKET_IFNAME="^docker")["variables"].status == "ok"
    missing = told(NCCL_SOCKET_IFNAME="ens")["NCCL_SOCKET_IFNAME"]
    assert (missing.status, "lo, eth0, ib0" in missing.advice) == ("bad", True)
    assert told(GLOO_SOCKET_IFNAME="eth")["GLOO_SOCKET_IFNAME"].status == "bad", "gloo takes whole names"
    assert told(met(), GLOO_SOCKET_IFNAME="lo")["GLOO_SOCKET_IFNAME"].status == "bad"
    by_torchrun = told(TORCH_NCCL_ASYNC_ERROR_HANDLING="1")
    assert by_torchrun["variables"].found == "none of NCCL or gloo is set"
    assert told(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")["TORCH_NCCL_ASYNC_ERROR_HANDLING"].status == "warn"


def test_the_mount_of_a_path():
    text = "\n".join(
        [
            "29 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
            "40 29 0:50 / /shared rw - nfs4 server:/export rw",
            r"41 29 0:51 / /my\040disk rw shared:1 - xfs /dev/sdb rw",
            "42 29 0:52 / /bucket rw - fuse mountpoint-s3 rw",
        ]
    )
    assert mount_of("/shared/runs/a", text) == "nfs4"
    assert mount_of("/sharedby", text) == "ext4"
    assert mount_of("/my disk/a", text) == "xfs"
    assert mount_of("/bucket", text) == "fuse.mountpoint-s3"
    assert mount_of("/x", "") == ""


def test_a_described_machine_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = {one.name: one for one in visit(machine=EIGHT, several=met()) if one.area in ("ranks", "data")}
    assert found["on all ranks"].status == "ok"
    assert found["links"].status == "ok"
