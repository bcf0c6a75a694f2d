"""Processes that train together, kept from one test to the next: starting one takes longer than a small run.

Each is told by a line of JSON what to run and where the others are, and answers with a line. What a run yields comes
back as the records' own JSON.
"""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Workers:
    """Up to `most` processes; `train` runs one config in some of them."""

    def __init__(self, most: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "PYTHONPATH": path},
            )
            for _ in range(most)
        ]

    def train(self, ranks: int, folder: Path, words: Sequence[str], **more: Any) -> list[list[dict[str, Any]]]:
        """The records of every rank, or what it raised as `{"error": ...}`. `more` is for `work` below."""
        return self._asked(ranks, folder, words, **more)

    def call(self, ranks: int, folder: Path, words: Sequence[str], **environment: str) -> list[dict[str, Any]]:
        """A command line in every rank: its exit code, and what it prints, as `code`, `out` and `err`."""
        return [answer[0] for answer in self._asked(ranks, folder, words, called=True, variables=environment)]

    def _asked(self, ranks: int, folder: Path, words: Sequence[str], **more: Any) -> list[list[dict[str, Any]]]:
        port = str(free_port())
        chosen = self.processes[:ranks]
        for rank, process in enumerate(chosen):
            launched = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            launched |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            launched |= more.get("variables", {})
            asked = {"environment": launched, "folder": str(folder), "words": list(words), "rank": rank, **more}
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        answers = []
        for process in chosen:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a worker ended: its error is above"
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def counting() -> Iterator[npt.NDArray[np.int64]]:
    """Arrays from Python, of many lengths."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        yield (int(rng.integers(0, 32)) + np.arange(int(rng.integers(1, 60)))) % 32


def call(words: Sequence[str]) -> dict[str, Any]:
    from flatout.cli import main as command_line

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(words)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def work(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """One run in this process, as the rank that it was told to be."""
    import torch

    import flatout
    from flatout.config.load import load_config
    from flatout.engine import setup
    from flatout.model.gpt import GPT
    from flatout.records import record_to_json

    os.chdir(asked["folder"])
    build = setup._build

    def doubled(*args: Any, **how: Any) -> GPT:
        return build(*args, **how).double()

    torch.set_num_threads(1)
    data = {"data": counting} if asked.get("arrays") else {}
    setup._build = doubled if asked.get("double") else build
    os.environ.update(asked["environment"])
    try:
        if asked.get("called"):
            return [call(asked["words"])]
        config = load_config(asked.get("preset"), asked["words"])
        records = flatout.train(config, resume=asked.get("resume"), **data)
        return [json.loads(record_to_json(record)) for record in records]
    except Exception as error:  # noqa: BLE001 (the test says what it expects)
        return [{"error": type(error).__name__, "message": str(error)}]
    finally:
        setup._build = build
        for name in asked["environment"]:
            del os.environ[name]


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed must not get between the answers
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            out.write(json.dumps(work(json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
