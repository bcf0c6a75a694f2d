"""Seconds from the command to the end of the first optimizer step of `gpt2-124m`, as JSON lines.

    python benchmarks/first_step.py DATA_FOLDER COMMIT [CASE ...] >> benchmarks/first_step.jsonl

Each case is a process of its own, as a user starts it, timed from outside until its first step record appears. The
first case fills the caches of Python's bytecode, of Triton and of torch's compiler; the others find them. The bytecode
goes into a folder of this script's own, since on some machines the installed packages cannot be written to, and Python
would compile two thousand files anew at each start (8 of 16 seconds, seen on a machine without bytecode).
"""

import json
import os
import subprocess
import sys
import tempfile
import time

CASES = {
    "cold": [],
    "again": [],
    "compiled-cold": ["speed.compile=default"],
    "compiled-again": ["speed.compile=default"],
}


def seconds_to_first_step(data: str, words: list[str], folder: str, bytecode: str) -> float:
    plan = [f"data.folder={data}", f"output.folder={folder}", "train.steps=3", "eval.tokens=65536",
            "eval.sample_tokens=0", "optim.warmup=2"]  # fmt: skip
    command = [sys.executable, "-m", "flatout.cli", "train", "gpt2-124m", "--json", *plan, *words]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        first = None
        for line in process.stdout:
            if first is None and json.loads(line)["type"] == "step":
                first = time.perf_counter() - began
    assert process.returncode == 0
    assert first is not None
    return first


def main() -> None:
    data, commit, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for case in names or CASES:
            words = CASES[case]
            seconds = seconds_to_first_step(data, words, f"{folder}/{case}", f"{folder}/bytecode")
            print(json.dumps({"case": case, "commit": commit, "seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
