"""What the kernel tests share."""

from collections.abc import Iterator

import pytest
import torch

from tests.parity.checking import GuardedMemory


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedMemory]:
    guarded = GuardedMemory()
    monkeypatch.setattr(torch, "empty", guarded.make)
    monkeypatch.setattr(torch, "empty_like", guarded.make_like)
    yield guarded
    guarded.check()
