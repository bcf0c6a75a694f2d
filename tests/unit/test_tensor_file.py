"""Our writer of safetensors against the library's: the same bytes, also where a piece ends inside a tensor."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout import files
from flatout.files import sync_and_hash
from flatout.model import weights
from flatout.model.weights import write_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def some_tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    numbers = torch.randn(7, 5, generator=generator)
    named = {f"{'zyx'[n % 3]}.{n}": (9 * numbers).to(kind) for n, kind in enumerate(kinds)}
    named |= {"one": torch.tensor(3), "none": torch.empty(0, 4), "turned": numbers.t(), "café": numbers[2:4]}
    return {name: tensor.to(device) for name, tensor in named.items()}


@pytest.mark.parametrize("piece", [1, 64, 2**24])
@pytest.mark.parametrize("device", DEVICES)
def test_the_bytes_are_the_librarys(tmp_path: Path, monkeypatch, device, piece):
    monkeypatch.setattr(weights, "PIECE", piece)
    tensors = some_tensors(device)
    told = write_tensors(tmp_path / "ours", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert told == sync_and_hash(tmp_path / "ours")


@pytest.mark.parametrize("device", DEVICES)
def test_many_pieces_come_back_as_they_were(tmp_path: Path, monkeypatch, device):
    monkeypatch.setattr(weights, "PIECE", 1000)
    tensors = {str(n): torch.randn(97, 31, device=device) for n in range(20)}
    write_tensors(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())


def test_nothing_at_all_is_a_file_too(tmp_path: Path):
    write_tensors(tmp_path / "ours", {})
    save_file({}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {})
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("written", [0, 3])
def test_a_failing_disk_is_told_and_no_thread_is_left(tmp_path: Path, monkeypatch, written):
    calls = []

    def fail(file, view):
        calls.append(len(view))
        if len(calls) > written:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(weights, "PIECE", 100)
    monkeypatch.setattr(files, "_write_all", fail)
    with pytest.raises(OSError, match="No space") as caught:
        write_tensors(tmp_path / "file", {"a": torch.zeros(1000)})
    assert caught.value.errno == 28


def test_a_part_that_the_system_takes_is_gone_on_from(tmp_path: Path, monkeypatch):
    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, view):
            return self.file.write(view[:7])

    write = files._write_all
    monkeypatch.setattr(files, "_write_all", lambda file, view: write(Slow(file), view))
    write_tensors(tmp_path / "ours", {"a": torch.arange(100)})
    save_file({"a": torch.arange(100)}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
