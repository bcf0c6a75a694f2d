"""Resident memory of a prepare against the size of its input, as JSON lines.

    python benchmarks/prepare_memory.py COMMIT MEGABYTES... >> benchmarks/prepare_memory.jsonl

Protocol: generated text (words of 2 to 12 letters, Zipf-like, seeded) of each size, once as one .txt file, which is one
document, and once as JSON lines of about 4 kB each; GPT-2 BPE, two worker processes, exact duplicates off. The figure
is the sum of the peaks of resident memory of the command and its workers, as the system counts them (VmHWM). The
largest sum at one moment is lower, and depends on whether the peaks of two workers happen to meet.
"""

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from prepare_rate import family

LINE = 4000


def paragraphs(megabytes: int, seed: int = 7):
    choose = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(choose.choices(letters, range(26, 0, -1), k=choose.randrange(2, 13))) for _ in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    written = 0
    while written < megabytes * 1_000_000:
        text = " ".join(choose.choices(words, weights, k=LINE // 6)) + ".\n"
        written += len(text)
        yield text


def main() -> None:
    commit, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]]
    for form in ("txt", "jsonl"):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / f"text.{form}"
                with source.open("w", encoding="utf-8") as file:
                    for text in paragraphs(size):
                        file.write(text if form == "txt" else json.dumps({"text": text}) + "\n")
                print(json.dumps(measure(source, size, form, commit)), flush=True)


def measure(source: Path, size: int, form: str, commit: str) -> dict[str, object]:
    target = source.parent / "out"
    shutil.rmtree(target, ignore_errors=True)
    words = [
        "prepare", "gpt2-124m", f"data.source={source}", f"data.folder={target}", "--json", "--workers", "2",
        "data.split=contiguous", "data.validation=0.01",
    ]  # fmt: skip
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "flatout.cli", *words], stdout=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    over = threading.Event()
    watcher = threading.Thread(target=watch_peaks, args=(process.pid, peaks, over))
    watcher.start()
    answer, _ = process.communicate()
    over.set()
    watcher.join()
    assert process.returncode == 0, process.returncode
    facts = json.loads(answer)
    return {
        "benchmark": "memory of prepare",
        "figure": "sum of the peaks of the processes",
        "commit": commit,
        "form": form,
        "megabytes": size,
        "peak_resident_mb": round(sum(peaks.values()) / 1e6, 1),
        "by_process_mb": sorted(round(peak / 1e6, 1) for peak in peaks.values()),
        "seconds": round(time.perf_counter() - started, 1),
        "tokens": facts["train_tokens"] + facts["val_tokens"],
        "documents": facts["documents"],
    }


def watch_peaks(root: int, peaks: dict[int, int], over: threading.Event) -> None:
    """Keep the peak of resident memory of a process and of each of its children."""
    while not over.wait(0.05):
        for pid in family(root):
            try:
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            if found:
                peaks[pid] = int(found[1]) * 1024


if __name__ == "__main__":
    main()
