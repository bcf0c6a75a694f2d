"""How fast shuffled windows come from disk, how much memory that takes, and how fast documents are packed.

    python benchmarks/read_rate.py make FOLDER GIB
    python benchmarks/read_rate.py methods FOLDER COMMIT >> benchmarks/read_rate.jsonl
    python benchmarks/read_rate.py loader FOLDER GIB_TO_READ concat|best_fit COMMIT >> benchmarks/read_rate.jsonl
    python benchmarks/read_rate.py pack DOCUMENTS COMMIT >> benchmarks/read_rate.jsonl

Protocol: `make` writes a dataset of random ids (real content, no holes) in shards of 100 million tokens. Batches are
512 windows of 1024 + 1 tokens in the order of training, seed 1337, so each window is a read of 2050 bytes somewhere on
the disk. "cold" drops the files from the page cache first (posix_fadvise DONTNEED); on a virtual machine the host may
still hold them. "warm" reads every file once before. Rates are of the wall clock, over all batches; `load_average`
tells how many other processes wanted the cores.

`methods` compares ways to gather, each in a process of its own: `memmap` copies rows out of plain memory maps;
`memmap-random` has MADV_RANDOM on them; `memmap-dontneed` also drops the mapped pages after each batch; `pread` reads
by position into the rows, in the order of the disk; `announced` is `TokenShards.gather`: the same, with all reads of a
batch announced first. `loader` is `HostLoader` with one worker up to the finished int64 batch on the CPU, memory taken
from /proc/self/status at 21 points on the way. `pack` is `best_fit` on log-normal lengths, context 1024.
"""

import hashlib
import json
import mmap
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.data.batch import Delivery, Span
from flatout.data.best_fit import best_fit
from flatout.data.loader import HostLoader, windows_of
from flatout.data.manifest import MANIFEST, OFFSET_DTYPE, TOKENIZER, VERSION, FileInfo, Manifest, SplitInfo
from flatout.data.positions import Schedule
from flatout.data.shards import TokenShards
from flatout.data.tokenizer import ByteTokenizer

CONTEXT, SEQUENCES, SEED, SHARD_TOKENS = 1024, 512, 1337, 100_000_000
METHODS = ("memmap", "memmap-random", "memmap-dontneed", "pread", "announced")
SECONDS = 20.0


def main() -> None:
    match sys.argv[1:]:
        case ["make", folder, gib]:
            make(Path(folder), int(float(gib) * 2**30))
        case ["methods", folder, commit]:
            for method in METHODS:
                for state in ("cold", "warm"):
                    subprocess.run([sys.executable, __file__, "method", folder, method, state, commit], check=True)
        case ["method", folder, method, state, commit]:
            show(measure_method(Path(folder), method, state), commit)
        case ["loader", folder, gib, packing, commit]:
            show(measure_loader(Path(folder), int(float(gib) * 2**30), packing), commit)
        case ["pack", documents, commit]:
            show(measure_packing(int(documents)), commit)
        case _:
            sys.exit(__doc__)


def show(row: dict[str, Any], commit: str) -> None:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cpu": model[0].partition(": ")[2] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "numpy": np.__version__,
    }
    print(json.dumps({**row, "commit": commit, "machine": machine}), flush=True)


def make(folder: Path, size: int) -> None:
    """Random ids below 257 in shards of their final size, with the manifest of any other dataset."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    tokenizer = ByteTokenizer()

    def store(name: str, data: memoryview | bytes) -> FileInfo:
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return FileInfo(name, memoryview(data).nbytes, hashlib.sha256(data).hexdigest())

    def split(name: str, tokens: int) -> SplitInfo:
        shards = []
        for number, start in enumerate(range(0, tokens, SHARD_TOKENS)):
            count = min(SHARD_TOKENS, tokens - start)
            ids = generator.integers(0, 256, count, dtype=np.uint8).astype("<u2")
            ids += generator.integers(0, 256, count, dtype=np.uint8) == 0
            shards.append(store(f"{name}-{number:05d}.bin", ids.data))
        lengths = lognormal_lengths(tokens // 400)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        starts = starts[starts < tokens].astype(OFFSET_DTYPE)
        return SplitInfo(tokens, len(starts), tokens, tuple(shards), store(f"{name}.offsets.bin", starts.data))

    manifest = Manifest(
        version=VERSION,
        dtype="uint16",
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(TOKENIZER, json.dumps(tokenizer.to_json()).encode()),
        splits={"train": split("train", size // 2), "val": split("val", 1_000_000)},
        settings={"source": "random ids"},
    )
    store(MANIFEST, manifest.to_bytes())


def lognormal_lengths(count: int) -> np.ndarray:
    """As many tokens as pages of the web have, roughly: half of them below 400, one in forty above 4000."""
    return np.random.default_rng(1).lognormal(6.0, 1.2, count).astype(np.int64) + 2


def set_cache(folder: Path, state: str) -> None:
    for path in folder.glob("train-*.bin"):
        with path.open("rb") as file:
            if state == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(2**24):
                    pass


def memory_mib() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) // 1024 for name in ("VmRSS", "RssFile", "RssAnon")}


def disk_bytes() -> int:
    """What this process has had read from storage, which a page cache that helps keeps below what it asked for."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_method(folder: Path, method: str, state: str) -> dict[str, Any]:
    shards = TokenShards(folder, "train")
    order = windows_of(shards, context=CONTEXT, stride=CONTEXT, seed=SEED).order
    gather = shards.gather if method == "announced" else other_gather(folder, shards, method)
    # Cold and warm runs of all methods read other windows than each other, so that none finds those of another cached.
    first = 10_000 * (2 * METHODS.index(method) + (state == "warm"))
    set_cache(folder, state)
    before, read, began, batches = memory_mib(), disk_bytes(), time.perf_counter(), 0
    while batches < 400 and time.perf_counter() - began < SECONDS:
        starts = order.indices((first + batches) * SEQUENCES, SEQUENCES) * CONTEXT
        rows = gather(starts, CONTEXT + 1)
        if not batches:
            assert np.array_equal(rows, shards.gather(starts, CONTEXT + 1)), "all methods give the same batches"
        batches += 1
    seconds = time.perf_counter() - began
    return {
        "what": "method",
        "method": method,
        "state": state,
        "corpus_gib": round(shards.tokens * 2 / 2**30, 2),
        "batches": batches,
        "tokens_per_second": round(batches * SEQUENCES * CONTEXT / seconds),
        "disk_bytes_per_window": round((disk_bytes() - read) / batches / SEQUENCES),
        "resident_mib": [before["VmRSS"], memory_mib()["VmRSS"]],
        "resident_file_mib": [before["RssFile"], memory_mib()["RssFile"]],
    }


def other_gather(folder: Path, shards: TokenShards, method: str) -> Callable[[np.ndarray, int], np.ndarray]:
    """What `TokenShards.gather` does, in the ways it does not do it. Windows across two shards are left to it."""
    files = [(folder / info.name).open("rb") for info in shards.manifest.splits["train"].shards]
    bounds = np.cumsum([0, *(info.bytes // 2 for info in shards.manifest.splits["train"].shards)])
    maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files] if "memmap" in method else []
    if method in ("memmap-random", "memmap-dontneed"):
        for mapped in maps:
            mapped.madvise(mmap.MADV_RANDOM)
    arrays = [np.frombuffer(mapped, dtype="<u2") for mapped in maps]

    def gather(starts: np.ndarray, length: int) -> np.ndarray:
        result = np.empty((len(starts), length), dtype="<u2")
        buffer = result.reshape(-1).view(np.uint8).data
        numbers = np.searchsorted(bounds, starts, side="right") - 1
        for row in np.argsort(starts).tolist():
            number, start = int(numbers[row]), int(starts[row])
            if start + length > bounds[number + 1]:
                result[row] = shards.read(start, length)
            elif maps:
                first = start - int(bounds[number])
                result[row] = arrays[number][first : first + length]
            else:
                target = buffer[row * length * 2 : (row + 1) * length * 2]
                os.preadv(files[number].fileno(), [target], (start - int(bounds[number])) * 2)
        if method == "memmap-dontneed":
            for mapped in maps:
                mapped.madvise(mmap.MADV_DONTNEED)
        return result

    return gather


def measure_loader(folder: Path, size: int, packing: str) -> dict[str, Any]:
    shards = TokenShards(folder, "train")
    how = {"seed": SEED, "best_fit": packing == "best_fit"}
    windows = windows_of(shards, context=CONTEXT, stride=CONTEXT, **how)
    batches = size // (SEQUENCES * CONTEXT * 2)
    set_cache(folder, "cold")
    memory, rates, read = [], [], disk_bytes()
    delivery = Delivery(device=torch.device("cpu"), workers=1)
    schedule = Schedule.constant(SEQUENCES, CONTEXT)
    usage_before = cpu_seconds()
    with HostLoader(windows, delivery, Span(schedule=schedule, first_step=0, last_step=batches)) as loader:
        next(loader)
        memory.append(memory_mib())
        began = last = time.perf_counter()
        done, part = 0, max(1, (batches - 1) // 20)
        for done, _ in enumerate(loader, 1):
            if done % part == 0:
                now = time.perf_counter()
                rates.append(round(part * SEQUENCES * CONTEXT / (now - last)))
                memory.append(memory_mib())
                last = now
        seconds = time.perf_counter() - began
    return {
        "what": "loader",
        "packing": packing,
        "state": "cold",
        "corpus_gib": round(shards.tokens * 2 / 2**30, 2),
        "epochs": round(batches * SEQUENCES / windows.order.windows, 3),
        "read_gib": round(done * SEQUENCES * CONTEXT * 2 / 2**30, 2),
        "disk_gib": round((disk_bytes() - read) / 2**30, 2),
        "workers": 1,
        "tokens_per_second": round(done * SEQUENCES * CONTEXT / seconds),
        "slowest_twentieth": min(rates),
        "fastest_twentieth": max(rates),
        "cores_used": round((cpu_seconds() - usage_before) / seconds, 2),
        "resident_mib": [point["VmRSS"] for point in memory],
        "resident_file_mib": [point["RssFile"] for point in memory],
    }


def measure_packing(documents: int) -> dict[str, Any]:
    lengths = lognormal_lengths(documents)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    packing = best_fit(lengths, CONTEXT)
    seconds = time.perf_counter() - began
    return {
        "what": "pack",
        "documents": documents,
        "tokens": int(lengths.sum()),
        "seconds": round(seconds, 2),
        "windows": packing.windows,
        "padding": round(packing.padding, 6),
        "lower_bound_windows": -(-packing.pairs // CONTEXT),
        "peak_mib_above_lengths": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
        "kept_mib": (packing.first.nbytes + packing.starts.nbytes + packing.sizes.nbytes) // 2**20,
    }


if __name__ == "__main__":
    main()
