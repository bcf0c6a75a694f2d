"""The profile in two ranks: both take part, and the first one prints."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.cli import main
from tests.conftest import TINY
from tests.ranks import WORKERS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def call_here(folder: str, words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """A command line as the rank that this process is."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name, value in variables.items():
            patch.setenv(name, value)
        code = main(words)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def call(ranks: int, folder: Path, words: list[str], **variables: str) -> list[dict[str, Any]]:
    """Exit code and what was printed, of a command line in every rank."""
    return WORKERS.run(ranks, call_here, str(folder), words, variables)


def test_all_ranks_are_profiled_and_the_first_one_writes(corpus: Path, tmp_path: Path):
    words = ["profile", *TINY, f"data.source={corpus}", "--steps", "1"]
    first, second = call(2, tmp_path, words)
    assert (first["code"], second["code"]) == (0, 0), first["err"]
    assert (second["out"], second["err"]) == ("", "")
    assert "\nRanks\n" in first["out"]
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["lines"]
    report = json.loads((tmp_path / "profile" / "lines" / "profile.json").read_text("utf-8"))
    ranks = report["ranks"]
    assert len(ranks["step_seconds"]) == len(ranks["busy_seconds"]) == len(ranks["reduction_seconds"]) == 2
    assert all(seconds > 0 for seconds in ranks["busy_seconds"])
    assert report["reduction_seconds"] == ranks["reduction_seconds"][0] > 0
    gradients = next(part["measured"] for part in report["memory"] if part["name"] == "gradients")
    assert gradients <= ranks["reduced_bytes"] == ranks["sent_bytes"] < 1.5 * gradients
    assert {"optimizer", "reduction"} <= {part["name"] for part in report["ranges"]}
    assert report["seconds_by_kind"]["communication"] > 0
    refused, other = call(2, tmp_path, [*words, "--out", "profile"])
    assert (refused["code"], other["code"], other["err"]) == (2, 2, "")
    assert "is there already" in refused["err"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor"], "2 processes were started, and `flatout doctor` works in one"),
        (["profile", "--quack"], "unknown option '--quack'"),
        (["profile", "parallel.joi=3"], "command line: parallel.joi is not a known key"),
        (["train", "--view", "--json"], "--view and --json exclude each other"),
    ],
)
def test_a_mistake_in_the_words_is_told_by_one_rank(words: list[str], said: str, tmp_path: Path):
    first, second = call(2, tmp_path, words)
    assert (first["code"], second["code"]) == (2, 2)
    error, hint = first["err"].splitlines()
    assert error == f"error: {said}"
    assert hint.startswith("hint: ")
    assert second["err"] == ""
    assert list(tmp_path.iterdir()) == []
