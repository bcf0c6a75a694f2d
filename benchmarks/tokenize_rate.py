"""How fast text becomes GPT-2 tokens on two cores: Flatout, tiktoken's own batch call, `datasets.map`, `tokenizers`.

    python benchmarks/tokenize_rate.py FILE [MEGABYTES] [ROUNDS] >> benchmarks/tokenize_rate.jsonl

FILE is enwik8, of which the first MEGABYTES (100) are used; a document begins at each line that begins with `  <page>`.
All candidates take turns, ROUNDS (5) times, and the best time of each counts: other work on the machine only ever adds
time. Every candidate must find the same number of tokens. One row per candidate, with its rate by the clock and by the
processor time that all of its threads and processes took, and the ratios to tiktoken's batch call on two threads; then
one row per candidate on one core, for a tenth of the documents and for 100,000 texts of 35 characters.

`flatout` is two worker processes that read their stretches of the file, tokenize and send back the ids, as `flatout
prepare` has them; starting the processes is not in its time, but is in the time of `datasets.map`, which has no other
way. `datasets.map` is also shown with its own best settings: batches, and ids written as 16-bit numbers.
"""

import json
import multiprocessing
import os
import platform
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = re.compile(r"(?m)^(?=  <page>)")
STRETCH = 2**24
WORKER_SECONDS = [0.0]  # processor time of workers that are still alive, which the system does not add up for us


@cache
def flatout_tokenizer() -> Any:
    from flatout.data.tokenizer import Gpt2Tokenizer

    return Gpt2Tokenizer()


@cache
def _ranks(tokens: tuple[bytes, ...]) -> dict[bytes, int]:
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_encoding() -> Any:
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from flatout.corpus.shipped import gpt2_tokens

    return tiktoken.Encoding(
        "gpt2-plain", pat_str=r50k_pat_str, mergeable_ranks=_ranks(gpt2_tokens()), special_tokens={}
    )


@cache
def library_tokenizer() -> Any:
    """The same vocabulary for the `tokenizers` library, which wants to know the pair that each token was made of."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from flatout.corpus.shipped import gpt2_tokens

    ranks = _ranks(gpt2_tokens())
    visible = sorted(set(range(256)) - set(range(33)) - set(range(127, 161)) - {173})
    hidden = [byte for byte in range(256) if byte not in visible]
    letter = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}

    def name(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((name(parts[0]), name(parts[1])))
    tokenizer: Any = Tokenizer(models.BPE(vocab={name(token): rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def stretch_tokens(job: tuple[str, int, int, bool]) -> tuple[list[bytes], float]:
    """What a worker does: read from byte `start` to `end`, cut into documents, tokenize. With the time it took."""
    path, start, end, batch = job
    started = time.process_time()
    with open(path, "rb") as file:
        file.seek(start)
        documents = PAGE.split(file.read(end - start).decode("utf-8", "replace"))
    tokenizer = flatout_tokenizer()
    encoded = tokenizer.encode_batch(documents) if batch else [tokenizer.encode(document) for document in documents]
    return [ids.tobytes() for ids in encoded], time.process_time() - started


def stretches(path: str, size: int) -> list[tuple[int, int]]:
    """About equal stretches of the file that begin with a document."""
    with open(path, "rb") as file:
        data = file.read(size)
    starts, start = [0], STRETCH
    while start < size and (found := data.find(b"\n  <page>", start)) >= 0:
        starts.append(found + 1)
        start = found + STRETCH
    return list(zip(starts, [*starts[1:], size], strict=True))


def map_one(row: dict[str, Any]) -> dict[str, Any]:
    return {"ids": tiktoken_encoding().encode_ordinary(row["text"])}


def map_many(rows: dict[str, Any]) -> dict[str, Any]:
    return {"ids": [tiktoken_encoding().encode_ordinary(text) for text in rows["text"]]}


def datasets_map(documents: list[str], batched: bool) -> Callable[[], int]:
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    source = datasets.Dataset.from_dict({"text": documents})
    kind = "uint16" if batched else "int64"
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value(kind))})

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            done = source.map(
                map_many if batched else map_one,
                batched=batched,
                num_proc=2,
                remove_columns=["text"],
                features=features,
                cache_file_name=str(Path(folder) / "done.arrow"),
            )
            return sum(len(chunk.values) for chunk in done.data.column("ids").chunks)

    return run


def processor_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + WORKER_SECONDS[0]


def best_times(candidates: dict[str, Callable[[], int]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds by the clock and of the processor, the least of each."""
    best = dict.fromkeys(candidates, (float("inf"), float("inf")))
    counts: set[int] = set()
    for _ in range(rounds):
        for name, run in candidates.items():
            clock, processor = time.perf_counter(), processor_seconds()
            counts.add(run())
            clock, processor = time.perf_counter() - clock, processor_seconds() - processor
            best[name] = min(best[name][0], clock), min(best[name][1], processor)
            print(f"{name}: {clock:.3f} s, processor {processor:.3f} s", file=sys.stderr)
    assert len(counts) == 1, f"the candidates disagree: {sorted(counts)} tokens"
    return best


def print_rows(best: dict[str, tuple[float, float]], first: dict[str, Any], texts: int) -> None:
    """A row per candidate; ratios are to the first one."""
    clock, processor = next(iter(best.values()))
    for name, (seconds, busy) in best.items():
        row = {
            "candidate": name,
            "mb_per_s": round(first["bytes"] / 1e6 / seconds, 2),
            "mb_per_processor_s": round(first["bytes"] / 1e6 / busy, 2),
            "us_per_text": round(seconds / texts * 1e6, 2),
            "ratio": round(clock / seconds, 3),
            "processor_ratio": round(processor / busy, 3),
        }
        print(json.dumps({**first, **row}), flush=True)


def main() -> None:
    path, megabytes, rounds = [*sys.argv[1:], *["100", "5"][len(sys.argv) - 2 :]]
    size, rounds = 10**6 * int(megabytes), int(rounds)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs = stretches(path, size)
    documents: list[str] = []
    with open(path, "rb") as file:
        for start, end in jobs:
            documents += PAGE.split(file.read(end - start).decode("utf-8", "replace"))
    versions = {name: version(name) for name in ("tiktoken", "tokenizers", "datasets", "numpy")}
    shared = {"cores": os.cpu_count(), "python": platform.python_version(), **versions}

    ours, theirs = flatout_tokenizer(), tiktoken_encoding()
    with multiprocessing.get_context("spawn").Pool(2, initializer=flatout_tokenizer) as pool:

        def in_workers(batch: bool) -> int:
            tokens = 0
            for result, seconds in pool.imap(stretch_tokens, [(path, *job, batch) for job in jobs]):
                tokens += sum(map(len, result)) // 2
                WORKER_SECONDS[0] += seconds
            return tokens

        two = {
            "tiktoken batch, 2 threads": lambda: sum(map(len, theirs.encode_ordinary_batch(documents, num_threads=2))),
            "flatout encode, 2 processes": lambda: in_workers(False),
            "flatout encode_batch, 2 processes": lambda: in_workers(True),
            "datasets.map, 2 processes": datasets_map(documents, False),
            "datasets.map batched uint16, 2 processes": datasets_map(documents, True),
        }
        print_rows(best_times(two, rounds), {"text": Path(path).name, "bytes": size, **shared}, len(documents))

    few = documents[: len(documents) // 10]
    bytes_of_few = sum(len(text.encode()) for text in few)
    letters = random.Random(0)
    short = ["".join(letters.choices("CCCCcccNOno()12=#[]@HF", k=35)) for _ in range(100_000)]
    for name, texts, count in (("a tenth of it", few, bytes_of_few), ("100,000 of 35 characters", short, 3_500_000)):
        one = {
            "tiktoken encode_ordinary, 1 core": lambda texts=texts: sum(
                len(theirs.encode_ordinary(text)) for text in texts
            ),
            "flatout encode, 1 core": lambda texts=texts: sum(len(ours.encode(text)) for text in texts),
            "flatout encode_batch, 1 core": lambda texts=texts: sum(map(len, ours.encode_batch(texts))),
            "tokenizers encode_batch_fast, 1 core": lambda texts=texts: sum(
                len(each.ids) for each in library_tokenizer().encode_batch_fast(texts, add_special_tokens=False)
            ),
        }
        print_rows(best_times(one, rounds), {"text": name, "bytes": count, **shared}, len(texts))


if __name__ == "__main__":
    main()
