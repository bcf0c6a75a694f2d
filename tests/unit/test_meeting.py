"""Ranks that meet: what is told, and to whom, where one of them does not come."""

import socket
import threading

import pytest
import torch

from flatout.errors import UserError
from flatout.launch import Attempt, Launch, OtherProcessError
from flatout.parallel import ranks
from flatout.pulse import Pulse, State


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank 0 whose port is open, and that hangs before it answers."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), listening.getsockname(), strict=True):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "_LEAVE", ranks._LEAVE / 50)
    listening.detach()  # open to the end of the process: a thread of torch's waits for it


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("accepted", [False, True], ids=["at the first start", "later"])
def test_a_rank_0_that_does_not_answer_is_not_waited_for_forever(accepted: bool, monkeypatch: pytest.MonkeyPatch):
    told = Pulse()
    monkeypatch.setattr(ranks, "pulse", lambda: told)
    with pytest.raises(UserError) as raised:
        ranks._meet(Launch(1, 2, 1, 2, attempt=Attempt(accepted=accepted)), 0.2)
    if accepted:  # it has come before, so the command is not wrong: the agent starts all ranks again
        assert isinstance(raised.value, OtherProcessError)
        assert (raised.value.exit_code, told.state) == (1, State.TIMED_OUT)
    else:
        assert "rank 1 cannot reach rank 0" in raised.value.message
        assert (raised.value.exit_code, told.state) == (2, State.STARTING)


class FallsSilent:
    """A store whose host is lost after this rank has connected."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def set(self, *_: object) -> None:
        """torch sends, and waits for no answer."""

    def compare_set(self, *_: object) -> None:
        self.back.wait()

    check = compare_set


@pytest.mark.usefixtures("silent")
def test_a_store_that_falls_silent_is_not_waited_for_forever():
    store = FallsSilent()
    with pytest.raises(UserError, match=r"rank 1 cannot reach rank 0 at .*: it has stopped answering"):
        ranks._check_alike(Launch(1, 2, 1, 2), store, 0.2)  # pyright: ignore[reportArgumentType]
    store.back.set()


def test_a_turn_that_a_silent_store_never_gives_is_not_waited_for_forever():
    store = FallsSilent()
    world = ranks.Ranks(1, 2, 1, Pulse(), store=store, hosts=("a", "a"), timeout=0.2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(torch.distributed.DistNetworkError, match="the store timed out"), world.rank0_first():
        raise AssertionError("it is the turn of rank 0")
    store.back.set()
