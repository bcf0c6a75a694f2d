"""What one of several processes does by itself: which errors are about others, and which device is its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.config.load import load_config
from flatout.device import Device
from flatout.parallel import ranks
from flatout.pulse import Pulse, State
from tests.set_up import set_up


@pytest.mark.parametrize(
    ("message", "others"),
    [
        ("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10402.", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("shape '[2, 3]' is invalid for input of size 5", False),
    ],
)
def test_errors_of_torchs_own_collectives_are_about_other_ranks(message: str, others: bool):
    pulse = Pulse()
    pulse.set_state(State.WORKING)
    assert ranks._is_about_others(RuntimeError(message), pulse) == others


def test_a_lost_rank_is_told_of_in_one_sentence():
    said = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10402. Check the logs of it."
    assert ranks._lost(1, RuntimeError(said)).message.endswith("Connection closed by peer [127.0.0.1]:10402")


def test_processes_with_and_without_a_gpu_are_refused_before_they_wait_for_each_other():
    facts = {"host": "a", "flatout": "1", "torch": "2"}
    gpu, cpu = {**facts, "backend": "cpu:gloo,cuda:nccl"}, {**facts, "host": "b", "backend": "gloo"}
    assert ranks._refusal([gpu, gpu]) is None
    assert ranks._refusal([cpu, cpu]) is None
    told = ranks._refusal([gpu, cpu, gpu])
    assert told is not None
    assert told[0] == 0
    assert told[1].message == "rank 1 on b sees no GPU, and others do"


class Chosen(Exception):
    pass


def test_a_process_works_on_its_own_gpu_from_the_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Kernels and events go by torch's current device, which would be the first GPU for all of them."""
    card: dict[str, Any] = {"name": "card", "memory_bytes": 2**33, "capability": (9, 0)}

    def choose(device: torch.device) -> None:
        raise Chosen(device)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "flatout.resolve.resolve.detect_device", lambda *_: Device(torch_device=torch.device("cuda", 1), **card)
    )
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(Chosen, match="cuda:1"):
        set_up(load_config("shakespeare-char"))
    assert not list(tmp_path.iterdir())
