"""SIGKILL at any moment of a prepare: the next one goes on, and the bytes are those of an undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.folders import MARK

ROOT = Path(__file__).parents[2]


def prepare(corpus: Path, folder: Path, workers: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    words = [
        "prepare", "gpt2-124m", f"data.source={corpus}", f"data.folder={folder}", "data.split=document",
        "data.validation=0.1", "clean.drop=[exact_duplicates]", "--workers", str(workers), "--json",
    ]  # fmt: skip
    command = [sys.executable, "-m", "tests.end_to_end.small_parts", "32768", *words]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)


def contents(folder: Path) -> dict[str, bytes]:
    # A kill right after the rename leaves the mark, which no longer fits the folder's name and means nothing.
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MARK}


def make_corpus(folder: Path, megabytes: float) -> Path:
    """Several files, one compressed, with repeated rows and a few that are broken."""
    import gzip

    choose = random.Random(5)
    words = ["the", "model", "reads", "tokens", "and", "learns", "slowly", "über", "漢字", "\u2028"]
    folder.mkdir()
    for number in range(4):
        rows = []
        while sum(map(len, rows)) < megabytes * 1e6 / 4:
            text = " ".join(choose.choices(words, k=choose.randrange(3, 400)))
            rows.append(json.dumps({"text": text}, ensure_ascii=False) if choose.random() > 0.01 else '{"text": broken')
            if choose.random() < 0.05:
                rows.append(rows[-1])
        raw = "\n".join(rows).encode("utf-8")
        if number == 2:
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(raw, 1))
        else:
            (folder / f"{number}.jsonl").write_bytes(raw)
    return folder


def campaign(tmp_path: Path, kills: int, megabytes: float, longest: float, seed: int) -> tuple[int, int]:
    """Kills prepares at random moments; returns how many kills found finished parts, and how often one ended first."""
    choose = random.Random(seed)
    corpus = make_corpus(tmp_path / "corpus", megabytes)
    assert prepare(corpus, tmp_path / "whole", 2).wait() == 3  # some rows are broken
    wanted = contents(tmp_path / "whole")
    folder, work = tmp_path / "data", tmp_path / ".data.partial"
    killed = went_on = finished = 0

    def check() -> None:
        assert contents(folder) == wanted
        assert not work.exists()
        shutil.rmtree(folder)

    while killed < kills:
        process = prepare(corpus, folder, choose.choice([0, 1, 2]))
        deadline = time.monotonic() + choose.uniform(0.0, longest)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is None:
            went_on += any((work / "parts").glob("*.part"))
            # The packer alone, or its workers with it: both happen.
            kill = os.kill if choose.random() < 0.5 else os.killpg
            kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            if folder.exists():  # killed after the rename
                assert contents(folder) == wanted
                shutil.rmtree(folder)
        else:
            assert process.returncode == 3
            finished += 1
            check()
    assert prepare(corpus, folder, 2).wait() == 3
    check()
    return went_on, finished


def test_a_few_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=3, megabytes=0.7, longest=2.0, seed=1)


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    went_on, finished = campaign(tmp_path, kills=50, megabytes=8.0, longest=6.0, seed=2)
    print(f"{went_on} of 50 kills found finished parts; {finished} prepares ended before their kill")
    assert went_on >= 25
