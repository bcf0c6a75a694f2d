"""`flatout config explain --json` of every preset, compared with a recording: each setting's value and source.

    python -m tests.recordings.test_explain --write    records anew

The cases are a preset by itself, as a CPU has it, with the overlays of two cards, and with a length in minutes. What
`train.minutes` leaves open is measured when a run starts, so `explain` shows it before any measurement. Presets with
a schedule that `train.minutes` refuses are also recorded with the one that the hint names.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

from flatout.config.catalogue import preset_names
from tests.called import call

RECORDING = Path(__file__).with_name("explain.json")
MOST_LINES = 60
WRITE = "python -m tests.recordings.test_explain --write"
MINUTES = "train.minutes=5"
CASES = (
    "",
    "--hardware 16gb",
    "--hardware 80gb",
    MINUTES,
    f"{MINUTES} optim.schedule=wsd optim.decay_fraction=0.6",
)

Case = dict[str, Any]  # setting -> [value, source]; of a refused command its exit code and stderr


def explained(preset: str, words: str) -> Case:
    outcome = call(["config", "explain", preset, *words.split(), "--json"])
    assert not outcome.trouble, outcome.trouble
    if outcome.code != 0:
        return {"exit code": outcome.code, "stderr": outcome.errors}
    case = {row["path"]: [row["value"], row["source"]] for row in json.loads(outcome.output)}
    return {**case, **({"stderr": outcome.errors} if outcome.errors else {})}


def explained_all(presets: list[str]) -> dict[str, Case]:
    return {f"{preset} {words}".strip(): explained(preset, words) for preset in presets for words in CASES}


def packed(cases: dict[str, Case]) -> dict[str, Case]:
    """The commonest outcomes, how each preset differs from them, and how its other cases differ from the preset's."""
    presets = [case for name, case in cases.items() if " " not in name]
    paths = dict.fromkeys(path for case in presets for path in case)
    counts = {path: Counter(json.dumps(case.get(path)) for case in presets) for path in paths}
    usual = {path: json.loads(count.most_common(1)[0][0]) for path, count in counts.items()}
    return {"": usual, **{name: changes(cases.get(parent(name), usual), case) for name, case in cases.items()}}


def parent(name: str) -> str:
    """The case that another one is stored against."""
    return name.split()[0] if " " in name else ""


def changes(base: Case, case: Case) -> Case:
    """What a case has other than its base; null is a setting that it lacks. A refused command is stored whole."""
    if "exit code" in case:
        return case
    return {path: case.get(path) for path in {**base, **case} if case.get(path) != base.get(path)}


def unpacked(recording: dict[str, Case]) -> dict[str, Case]:
    cases = {"": recording[""]}
    for name, case in recording.items():
        base = {} if "exit code" in case else cases[parent(name)]
        cases[name] = {path: value for path, value in {**base, **case}.items() if value is not None}
    del cases[""]
    return cases


def differences(was: dict[str, Case], found: dict[str, Case]) -> list[str]:
    return [
        f"{name}: {path}: was {shown(was[name].get(path))}, is {shown(case.get(path))}"
        for name, case in found.items()
        for path in dict.fromkeys([*was[name], *case])
        if was[name].get(path) != case.get(path)
    ]


def shown(value: Any) -> str:
    return f"{json.dumps(value[0])} ({value[1]})" if isinstance(value, list) else repr(value)


def test_explain_is_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `explain` looks for files of `tune lr` in the current folder
    was = unpacked(json.loads(RECORDING.read_text(encoding="utf-8")))
    presets = list(dict.fromkeys(name.split()[0] for name in was))
    assert set(preset_names()) <= set(presets), f"record it: {__doc__}"
    lines = differences(was, explained_all(presets))
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... {len(lines) - MOST_LINES} more"]
    intended = f"if that is intended: {WRITE}, and list it in tests/recordings/differences.md"
    assert not lines, "\n".join(["`config explain` differs from the recording:", *lines, intended])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True, help="record anew")
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        recording = packed(explained_all(preset_names()))
        os.chdir(RECORDING.parent)
    RECORDING.write_text("{\n" + ",\n".join(starmap(text_of, recording.items())) + "\n}\n", "utf-8")


def text_of(name: str, case: Case) -> str:
    """A line for each setting, so that a diff shows which have changed."""
    lines = ",".join(f"\n  {json.dumps(path)}: {json.dumps(value)}" for path, value in case.items())
    return f"{json.dumps(name)}: {{{lines}}}"


if __name__ == "__main__":
    main()
