"""Damaged adapters, merges, exports and samples: every damage is found, or changes nothing that is read."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from flatout import api
from flatout.config.load import load_config
from flatout.data.samples import open_samples
from flatout.errors import UserError
from flatout.front.models import template_of
from flatout.model.adapter_files import adapter_tensors
from flatout.model.seal import CARDS, SEAL
from tests.chat_models import write_chat_model
from tests.damaged import damage_folder

KINDS = ("adapter", "merge", "export", "samples")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    """A base, and one folder of each kind that was made from it."""
    here = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        write_chat_model(here / "base", "marked")
        many = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
        Path("rows.json").write_text(json.dumps(many), encoding="utf-8")
        words = ["model.init_from=base", "chat.source=rows.json", "model.context=64", "train.steps=1", "lora.rank=2"]
        quiet = ["eval.sample_tokens=2", "speed.device=cpu", "train.epochs=null"]
        list(api.train(load_config("lora", [*words, *quiet, "output.folder=run", "data.folder=samples"])))
        shutil.copytree("run/adapter", "adapter")
        api.merge("run", "merge", dtype="fp32")
        api.export("base", "export")
        yield here


def read(kind: str, folder: Path) -> Any:
    """All that a user of the folder sees of it."""
    if kind == "samples":
        found = open_samples(folder)
        assert found.val is not None
        arrays = [part for split in (found.train, found.val) for part in (split.tokens, split.labelled, split.offsets)]
        return json.dumps(found.manifest), [array.tobytes() for array in arrays]
    loaded = api.load_model(folder, device="cpu")
    tensors = dict(loaded.model.named_parameters()) if loaded.adapters is None else adapter_tensors(loaded.adapters)
    template = template_of(loaded)
    return (
        {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()},
        loaded.tokenizer.fingerprint,
        None if template is None else template.texts,
        loaded.stops,
        None if loaded.description is None else loaded.description.values,
        None if loaded.adapters is None else loaded.adapters.plan,
    )


def campaign(place: Path, scratch: Path, kind: str, seeds: range) -> dict[str, int]:
    """What became of each damage. A harmless one leaves everything equal; anything else that is read is an error."""
    expected, outcomes = read(kind, place / kind), {"found": 0, "harmless": 0}
    for seed in seeds:
        folder = scratch / "damaged"
        shutil.copytree(place / kind, folder)
        done = damage_folder(folder, random.Random(f"{kind} {seed}"))
        error = None
        try:
            outcome = read(kind, folder)
        except UserError as raised:
            error, outcome = raised, None
        if error is None:
            assert outcome == expected, f"{done} was not noticed"
            assert done == f"{SEAL} delete" or done.split()[0] in CARDS, "no other file may change without a word"
            outcomes["harmless"] += 1
        else:
            assert (error.exit_code, bool(error.hint)) == (3, True), done
            assert done.split()[0] in error.message, (done, error.message)
            outcomes["found"] += 1
        shutil.rmtree(folder)
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_damages_are_found(place, tmp_path, kind):
    assert campaign(place, tmp_path, kind, range(12))["found"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_damages_are_found(place, tmp_path, kind):
    outcomes = campaign(place, tmp_path, kind, range(100, 250))
    print(kind, outcomes)
    assert outcomes["found"] >= 110


@pytest.mark.parametrize(("kind", "verb"), [("adapter", "load"), ("merge", "finetune"), ("merge", "base")])
def test_every_way_to_open_a_folder_looks(place, tmp_path, monkeypatch, kind, verb):
    monkeypatch.chdir(place)
    shutil.copytree(place / kind, tmp_path / kind)
    name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    raw = bytearray((tmp_path / kind / name).read_bytes())
    raw[-1] ^= 1
    (tmp_path / kind / name).write_bytes(raw)
    folder = str(tmp_path / kind)
    words = ["chat.source=rows.json", "model.context=64", "train.steps=1", "train.epochs=null", "output.name=x"]
    more = ["model.init_from=base", f"lora.init_from={folder}"] if verb == "load" else [f"model.init_from={folder}"]

    def opened() -> Any:
        if verb == "base":
            return api.load_model("adapter", device="cpu", base=folder)
        return list(api.train(load_config("lora", [*words, *more])))

    with pytest.raises(UserError, match=rf"{name} is not as flatout\.json has it") as caught:
        opened()
    assert "delete flatout.json" in caught.value.hint


def test_more_files_are_fine_and_a_change_that_is_meant_is_taken(place, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(place / "export", folder)
    (folder / "README.md").write_text("mine")
    api.load_model(folder, device="cpu")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    if "generation_config.json" in json.loads((folder / SEAL).read_bytes())["files"]:
        with pytest.raises(UserError, match="generation_config"):
            api.load_model(folder, device="cpu")
    (folder / SEAL).unlink()
    assert 3 in api.load_model(folder, device="cpu").stops
