"""What the kernel tests share."""

from collections.abc import Iterator

import pytest
import torch
import torch.utils._device

from tests.bf16_products import summed_in_fp32
from tests.parity.checking import GuardedMemory


@pytest.fixture(scope="module", autouse=True)
def _products_in_every_type() -> Iterator[None]:
    with summed_in_fp32():
        yield


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedMemory]:
    # torch keeps a list of the functions that `torch.device("meta")` redirects: it must be made of the real ones.
    torch.utils._device._device_constructors()
    guarded = GuardedMemory()
    monkeypatch.setattr(torch, "empty", guarded.make)
    monkeypatch.setattr(torch, "empty_like", guarded.make_like)
    yield guarded
    guarded.check()
