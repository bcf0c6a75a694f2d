"""Preparing enwik8 with GPT-2 BPE against tiktoken's own batch encode and against `datasets.map`, on the same cores.

    python benchmarks/prepare_rate.py ENWIK8 ROUNDS COMMIT >> benchmarks/prepare_rate.jsonl

Protocol: training text is bytes 0 to 90M, validation text bytes 90M to 95M, one document per `<page>`. Each round times
the three one after the other, in fresh processes, and the row holds the best of each, since other work on the machine
only ever slows one down. Ours is the whole command: start of Python, reading, tokenizing in worker processes, writing
parts, merging, hashing, flushing. tiktoken is `encode_ordinary_batch` alone, with the split it
publishes, on texts in memory, with as many threads
as there are cores; `datasets.map` is the usual recipe, one process per core, tokenizer warm, from an in-memory dataset
to Arrow files, without writing a token file afterwards. Resident memory is the largest sum over our processes, sampled.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TRAIN, VAL = 90_000_000, 95_000_000

PEERS = """
import re, sys, time
from pathlib import Path
import tiktoken, tiktoken_ext.openai_public
from flatout.corpus.shipped import gpt2_tokens
def gpt2():
    return tiktoken.Encoding(
        "gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str,
        mergeable_ranks={token: rank for rank, token in enumerate(gpt2_tokens())},
        special_tokens={"<|endoftext|>": 50256}, explicit_n_vocab=50257,
    )
kind, cores, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
pages = []
for name in ("train.txt", "val.txt"):
    text = (folder / name).read_bytes().decode("utf-8", "replace")
    pages += [page for page in re.split(r"(?m)^(?=[ \\t]*<page>)", text) if page]
encoding = gpt2()
if kind == "tiktoken":
    encoding.encode_ordinary_batch(pages[:50], num_threads=cores)
    started = time.perf_counter()
    encoded = encoding.encode_ordinary_batch(pages, num_threads=cores)
    seconds = time.perf_counter() - started
    tokens = sum(map(len, encoded)) + len(pages)
else:
    import datasets
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": pages})
    data.save_to_disk(str(folder / "pages"))
    data = datasets.load_from_disk(str(folder / "pages"))
    def encode(row):
        global made
        if "made" not in globals():
            made = gpt2()
        ids = made.encode_ordinary(row["text"])
        ids.append(made.eot_token)
        return {"ids": ids, "len": len(ids)}
    def encode_batch(rows):
        global made
        if "made" not in globals():
            made = gpt2()
        return {"ids": [made.encode_ordinary(text) + [made.eot_token] for text in rows["text"]]}
    batched = kind == "datasets-batched"
    started = time.perf_counter()
    done = data.map(encode_batch if batched else encode, batched=batched, remove_columns=["text"], num_proc=cores)
    seconds = time.perf_counter() - started
    tokens = sum(len(row) for row in done["ids"])
print(seconds, tokens)
"""


def main() -> None:
    source, rounds, commit = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cores = len(os.sched_getaffinity(0))
    raw = source.read_bytes()
    seconds: dict[str, list[float]] = {"flatout": [], "tiktoken": [], "datasets": [], "datasets-batched": []}
    counts: dict[str, object] = {}
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "train.txt").write_bytes(raw[:TRAIN])
        (place / "val.txt").write_bytes(raw[TRAIN:VAL])
        for _ in range(rounds):
            spent, facts, resident = ours(place, cores)
            seconds["flatout"].append(spent)
            counts["flatout"] = [facts["train_tokens"], facts["val_tokens"]]
            peak = max(peak, resident)
            for kind in ("tiktoken", "datasets", "datasets-batched"):
                shutil.rmtree(place / "pages", ignore_errors=True)
                command = [sys.executable, "-c", PEERS, kind, str(cores), folder]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                seconds[kind].append(float(answer[-2]))
                counts[kind] = int(answer[-1])
    megabytes = VAL / 1e6
    rate = {kind: megabytes / min(spent) for kind, spent in seconds.items()}
    row = {
        "benchmark": "prepare enwik8, GPT-2 BPE",
        "commit": commit,
        "cores": cores,
        "rounds": rounds,
        "megabytes_per_second": {kind: round(value, 2) for kind, value in rate.items()},
        "of_tiktoken_batch": round(rate["flatout"] / rate["tiktoken"], 3),
        "of_datasets_map": round(rate["flatout"] / max(rate["datasets"], rate["datasets-batched"]), 3),
        "seconds": {kind: [round(value, 2) for value in spent] for kind, spent in seconds.items()},
        "tokens": counts,
        "peak_resident_mb": round(peak / 1e6, 1),
    }
    print(json.dumps(row))


def ours(place: Path, cores: int) -> tuple[float, dict[str, object], int]:
    shutil.rmtree(place / "out", ignore_errors=True)
    words = [
        "prepare", "gpt2-124m", f"data.source={place / 'train.txt'}", f"data.validation={place / 'val.txt'}",
        "data.document_start=<page>", "data.invalid_utf8=replace", f"data.folder={place / 'out'}", "--json",
        "--workers", str(cores),
    ]  # fmt: skip
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "flatout.cli", *words], stdout=subprocess.PIPE, text=True)
    peak = [0]
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, peak, over))
    watcher.start()
    answer, _ = process.communicate()
    spent = time.perf_counter() - started
    over.set()
    watcher.join()
    assert process.returncode == 0, process.returncode
    return spent, json.loads(answer), peak[0]


def watch(root: int, peak: list[int], over: threading.Event) -> None:
    """Keep the largest sum of resident memory over a process and its children."""
    while not over.wait(0.05):
        peak[0] = max(peak[0], sum(resident(pid) for pid in family(root)))


def family(root: int) -> list[int]:
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        children = []
    # Threads start children too, so every task of the process is asked.
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            children += task.read_text().split()
        except OSError:
            continue
    return [root, *(pid for child in sorted(set(children)) for pid in family(int(child)))]


def resident(pid: int) -> int:
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
