"""The run's own random stream, apart from everyone else's.

torch draws dropout from process-wide generators. A run swaps its own state in for the length of one step and out
again, so that code between two steps (a notebook cell, a sample, an evaluation) can draw as it likes without changing
what is learned, and the state to save is always at hand.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flatout.device import ONE_AT_A_TIME


class RandomStream:
    """The stream of one process: each of several draws numbers of its own."""

    def __init__(self, seed: int, device: torch.device, rank: int = 0) -> None:
        self.device = device
        if rank:
            digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
        self.cpu_state = torch.Generator().manual_seed(seed).get_state()
        self.device_state: Tensor | None = None
        if device.type in ("cuda", "mps"):
            self.device_state = torch.Generator(device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with ONE_AT_A_TIME:
            outside_cpu, outside_device = torch.get_rng_state(), self._get_device_state()
            torch.set_rng_state(self.cpu_state)
            self._set_device_state(self.device_state)
            try:
                yield
            finally:
                self.cpu_state, self.device_state = torch.get_rng_state(), self._get_device_state()
                torch.set_rng_state(outside_cpu)
                self._set_device_state(outside_device)

    def tensors(self) -> dict[str, Tensor]:
        states = {"random.cpu": self.cpu_state}
        if self.device_state is not None:
            states[f"random.{self.device.type}"] = self.device_state
        return states

    def assign(self, tensors: dict[str, Tensor]) -> None:
        """Takes over saved states; a run that moved to another kind of device starts that device's stream anew."""
        self.cpu_state = tensors["random.cpu"]
        if self.device_state is not None:
            self.device_state = tensors.get(f"random.{self.device.type}", self.device_state)

    def _get_device_state(self) -> Tensor | None:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.mps.get_rng_state() if self.device.type == "mps" else None

    def _set_device_state(self, state: Tensor | None) -> None:
        if state is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.mps.set_rng_state(state)
