"""Damage in the folder of an unfinished prepare: the dataset is byte-identical, or an error names the way out."""

import json
import random
import shutil
from pathlib import Path

import pytest

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus import sources
from flatout.data import plan
from flatout.data.pack import pack_corpus
from flatout.data.plan import request_of
from flatout.data.shards import Manifest
from flatout.errors import DataError
from flatout.folders import MARK
from flatout.records import PrepareProgress
from tests.damaged import DISK_DAMAGES, damage_on_disk

TEXTS = [f"document {number} says {'ho ' * (number % 7)}" for number in range(60)]


def prepare(place: Path, folder: str, *, stop: bool = False, overwrite: bool = False) -> Manifest:
    def progress(told: PrepareProgress) -> None:
        if stop and told.phase == "merging":
            raise KeyboardInterrupt

    data = DataConfig(source=str(place / "in"), tokenizer="bytes", split="document", validation=0.3)
    request = request_of(data, CleanConfig(drop=["exact_duplicates"]))
    return pack_corpus(request, place / folder, workers=0, progress=progress, overwrite=overwrite)


def hint_of(place: Path) -> str | None:
    """The hint with which a prepare is refused; None where it succeeds."""
    try:
        prepare(place, "data")
    except DataError as error:
        return error.hint
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def campaign(place: Path, damages: int, seed: int) -> tuple[int, int]:
    """Damages one thing at a time; returns how often the dataset came out the same, and how often it was refused."""
    choose = random.Random(seed)
    (place / "in").mkdir()
    (place / "in" / "array.json").write_text(json.dumps([{"text": f"{text} in an array"} for text in TEXTS]))
    (place / "in" / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "broken"]))
    prepare(place, "whole")
    wanted = contents(place / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(place, "data", stop=True)
    work, kept = place / ".data.partial", place / "kept"
    shutil.copytree(work, kept)
    things = sorted(path.relative_to(kept) for path in kept.rglob("*"))
    assert {"plan.json", "read-here.json", MARK} <= {path.name for path in things}
    same = refused = 0
    for number in range(damages):
        # Every thing in turn, so that a short campaign meets all of them.
        thing, how = things[number % len(things)], choose.choice(DISK_DAMAGES)
        damage_on_disk(work / thing, how, choose)
        hint = hint_of(place)
        if hint is None:
            same += 1
        else:
            assert "--overwrite" in hint, (thing, how)
            prepare(place, "data", overwrite=True)
            refused += 1
        assert contents(place / "data") == wanted, (thing, how)
        shutil.rmtree(place / "data")
        shutil.rmtree(work, ignore_errors=True)  # where it was refused as not ours, it stayed
        assert sorted(path.name for path in place.iterdir()) == ["in", "kept", "whole"], (thing, how)
        shutil.copytree(kept, work)
    return same, refused


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of parts; the array is read by the process itself, which takes a note of it."""
    monkeypatch.setattr(plan, "PART_BYTES", 1500)
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 1500)


def test_a_few_damages(tmp_path: Path) -> None:
    same, refused = campaign(tmp_path, 12, seed=1)
    assert same >= 10
    assert refused <= 2  # a damaged mark


@pytest.mark.slow
def test_hundreds_of_damages(tmp_path: Path) -> None:
    same, refused = campaign(tmp_path, 300, seed=2)
    print(f"300 damages: {same} datasets the same to the byte, {refused} refused with a way out that worked")
    assert same >= 250
