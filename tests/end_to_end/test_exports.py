"""Exports that are proven: against other libraries before they appear, byte by byte later, and sent to the Hub."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import main
from flatout.config.load import load_config
from flatout.errors import CheckpointError, UserError
from flatout.front import proof
from flatout.front.exporting import check_export
from flatout.model import llama_cpp
from tests.hub_standin import stand_in

pytestmark = pytest.mark.usefixtures("children_stay")
pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp (xllamacpp) is not installed")

SHAPE = ["model.layers=2", "model.width=64", "model.heads=4", "model.context=128", "data.tokenizer=bytes"]
QUIET = ["eval.tokens=512", "eval.sample_tokens=0", "eval.every=0", "checkpoint.every=0", "speed.device=cpu"]
SHORT = ["train.steps=20", "train.batch_tokens=1024", "optim.warmup=5", *QUIET]
RUNS = {
    "gpt2": ["shakespeare", "model.family=gpt2", "model.tied=true", "model.norm=layernorm", "model.qk_norm=false",
             "model.embedding_norm=false"],
    "llama": ["shakespeare", "model.qk_norm=false", "model.norm=rmsnorm", "model.kv_heads=2",
              "model.embedding_norm=false"],
    "modern": ["modern", "data.source=shakespeare", "model.width=96", "train.minutes=null", "train.tokens=null"],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a short run of each shape, which becomes the current one."""
    here = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for name, (preset, *words) in RUNS.items():
            shape = [word for word in SHAPE if word.split("=")[0] not in {one.split("=")[0] for one in words}]
            list(flatout.train(load_config(preset, [*shape, *words, *SHORT, f"output.folder={name}"])))
        yield here


def export(run: str, folder: str, **how: str) -> list[str]:
    notes: list[str] = []
    flatout.export(run, folder, notice=notes.append, **how)
    return notes


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "most"), [("fp32", 2e-3), ("bf16", 0.05), ("q8_0", 0.1)])
@pytest.mark.parametrize("shape", RUNS)
def test_llama_cpp_gives_our_greedy_tokens(shape: str, dtype: str, most: float, runs: Path, tmp_path: Path):
    """64 of 64 in fp32. In narrower types a first difference lies between candidates that are as near as `most`."""
    export(shape, str(tmp_path / "out"), format="gguf", dtype=dtype)
    loaded = flatout.load_model(shape, device="cpu")
    prompt, plain = loaded.tokenizer.encode("ROMEO:\nWhat").tolist(), int(loaded.tokenizer.encode("a")[0])
    ours = list(prompt)
    for _ in range(64):
        ours.append(int(loaded(ours)[-1].argmax()))
    (path,) = (tmp_path / "out").glob("*.gguf")
    found, _ = llama_cpp.log_probabilities(path, ours[:-1], plain=plain, most=20)
    rows = loaded(ours[:-1]).log_softmax(-1)[len(prompt) - 1 :]
    theirs = torch.full_like(rows, float("-inf"))
    for place, likeliest in enumerate(found[len(prompt) - 1 :]):
        theirs[place, list(likeliest)] = torch.tensor(list(likeliest.values()))
    assert (theirs - rows)[theirs.isfinite()].abs().max() < most
    same = theirs.argmax(-1) == rows.argmax(-1)
    if dtype == "fp32":
        assert same.all()
    elif not same.all():
        first = int((~same).nonzero()[0])
        assert rows[first].max() - rows[first, theirs[first].argmax()] < 0.05


@needs_llama_cpp
def test_llama_cpp_cuts_text_as_the_exported_tokenizer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The proof gives it the held text itself; another pre-tokenizer's name in the file is found out."""
    monkeypatch.chdir(tmp_path)
    words = [*SHAPE[:-1], "data.tokenizer=bpe-512", "train.steps=2", *SHORT[1:], "output.folder=run"]
    list(flatout.train(load_config("shakespeare", words)))
    assert "llama.cpp" in export("run", "out", format="gguf")[0]
    path = Path("out/model-F32.gguf")
    raw = path.read_bytes()
    at = raw.index(b"gpt-2", raw.index(b"tokenizer.ggml.pre"))
    path.write_bytes(raw[:at] + b"viking"[:5] + raw[at + 5 :])
    Path("out/flatout.json").unlink()
    with pytest.raises(UserError):
        proof.prove(path, proof.held_text(flatout.load_model("run", device="cpu")), "fp32")


# --- proof ------------------------------------------------------------------------------------------------------------


def test_an_export_says_what_it_is_and_how_it_was_checked(runs: Path, tmp_path: Path, capsys):
    for name, words in (("hub", ["--dtype", "bf16"]), ("gguf", ["--format", "gguf", "--dtype", "q8_0"])):
        folder = tmp_path / name
        assert main(["export", "modern", str(folder), *words]) == 0
        said = capsys.readouterr().out
        assert "note: checked on 64 tokens: logits of the written files differ from the model's by at most 0." in said
        library = {"hub": "transformers", "gguf": "xllamacpp"}[name]
        assert ("those of" in said) == (find_spec(library) is not None)
        card = (folder / "README.md").read_text()
        loaded = flatout.load_model("modern", device="cpu")
        facts = json.loads((folder / "flatout.json").read_text())["facts"]
        for part in (
            facts["weights"],
            str(loaded.dataset),
            "step 20",
            "validation loss | ",
            "  qk_norm: 1.2",
            "checked on",
        ):
            assert part in card, part
        assert str(runs) not in card, "no path of this machine"
    assert json.loads((tmp_path / "hub" / "generation_config.json").read_text())["eos_token_id"] == 256
    assert 'TEMPLATE """{{ .Prompt }}"""' in (tmp_path / "gguf" / "Modelfile").read_text()


def test_files_that_compute_another_model_never_appear(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As if a matrix were written with its rows in another order."""
    from flatout.model import gguf_writer

    monkeypatch.setattr(gguf_writer, "turned", lambda x, heads: x.flip(0))
    with pytest.raises(CheckpointError, match="computes other logits than the model"):
        export("llama", str(tmp_path / "out"), format="gguf")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.iterdir())


def test_another_library_that_disagrees_stops_an_export(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(proof, "_transformers", lambda folder, ids: torch.zeros(len(ids), 257))
    with pytest.raises(CheckpointError, match=r"transformers .* computes other logits"):
        export("gpt2", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_without_another_library_our_own_reader_is_the_proof(runs: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(proof, "_library", lambda path: None)
    assert "no other library" in export("llama", str(tmp_path / "out"), format="gguf")[0]


def test_what_cannot_be_written_is_refused_with_the_way_out(runs: Path, tmp_path: Path, capsys):
    words = ["data.source=shakespeare", *SHAPE, "train.tokens=null", *SHORT, f"output.folder={tmp_path / 'run'}"]
    list(flatout.train(load_config("record", words)))
    for form in ("gguf", "huggingface"):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", form]) == 3
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "`flatout train modern data.source=shakespeare` trains one that can be exported" in lines[1]
    for wrong in (
        ["export", "llama"],
        ["export", "llama", str(tmp_path / "out"), "--check", str(tmp_path / "out")],
        ["export", "llama", str(tmp_path / "out"), "--dtype", "q8_0"],
        ["export", "llama", str(tmp_path / "out"), "--format", "gguf", "--adapter"],
    ):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 2


# --- checked later ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(runs: Path) -> list[tuple[str, Path]]:
    """Exports of all kinds, each with the run that it was written from."""
    found: list[tuple[str, Path]] = []
    for run, form, dtype in (("modern", "huggingface", "fp32"), ("gpt2", "gguf", "q8_0"), ("llama", "gguf", "bf16")):
        export(run, f"{run}-out", format=form, dtype=dtype)
        found.append((run, Path(f"{run}-out").absolute()))
    return found


def damaged(chance: random.Random, written: list[tuple[str, Path]], place: Path) -> tuple[str, Path, str]:
    """A copy of an export with one byte changed, each file as likely as another."""
    run, source = chance.choice(written)
    shutil.copytree(source, place)
    path = chance.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    raw = bytearray(path.read_bytes())
    at = chance.randrange(len(raw))
    raw[at] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    return run, place, f"{path.name}, byte {at}"


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_a_changed_byte_is_found(count: int, runs: Path, written: list[tuple[str, Path]], tmp_path: Path):
    chance = random.Random(count)
    for number in range(count):
        run, folder, what = damaged(chance, written, tmp_path / str(number))
        found = "nothing"
        try:
            check_export(folder, run)
        except UserError as error:
            found = error.message
        assert re.search(r"damaged|SHA-256|is not as|version", found), f"{what}: {found}"


def test_a_check_finds_other_weights_and_missing_hashes(runs: Path, written: list[tuple[str, Path]], capsys):
    run, folder = written[1]
    assert main(["export", "--check", str(folder), run]) == 0
    said = capsys.readouterr().out
    assert f"{folder}: every byte is as it was written" in said
    assert "checked on 64 tokens" in said
    assert main(["export", "--check", str(folder), "llama"]) == 3
    assert "was written from other weights than those of llama" in capsys.readouterr().err
    shutil.copytree(folder, "stranger")
    Path("stranger/flatout.json").unlink()
    assert main(["export", "--check", "stranger", run]) == 3
    assert "has no flatout.json that names the weights" in capsys.readouterr().err


def test_merged_adapters_are_checked_against_the_run(runs: Path, tmp_path: Path, capsys):
    rows = [json.dumps({"prompt": f"What is {n}?", "completion": f"It is {n}."}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["model.init_from=llama", f"chat.source={tmp_path / 'rows.jsonl'}", "train.epochs=null", "train.steps=3"]
    words += ["model.context=128", "lora.rank=2", "speed.device=cpu", "eval.sample_tokens=0"]
    run = str(tmp_path / "tuned")
    list(flatout.train(load_config("lora", [*words, f"output.folder={run}", f"data.folder={tmp_path / 'samples'}"])))
    for form, dtype in (("huggingface", "bf16"), ("gguf", "q8_0")):
        folder = str(tmp_path / form)
        assert main(["export", run, folder, "--format", form, "--dtype", dtype]) == 0
        assert main(["export", "--check", folder, run]) == 0
    assert 'TEMPLATE """' in (tmp_path / "gguf" / "Modelfile").read_text()
    assert "### Instruction:" in (tmp_path / "gguf" / "Modelfile").read_text()
    capsys.readouterr()


# --- the Hub ----------------------------------------------------------------------------------------------------------


def test_an_export_is_sent_to_the_hub_whole(runs: Path, tmp_path: Path):
    pytest.importorskip("huggingface_hub")

    def send(server, *words: str) -> subprocess.CompletedProcess[str]:
        source = str(Path(flatout.__file__).parents[1])
        env = {**os.environ, **server.environment(tmp_path / "home"), "PYTHONPATH": source}
        command = [sys.executable, "-m", "flatout", "export", *words, "--push", "org/name"]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    with stand_in() as server:
        done = send(server, "llama", str(tmp_path / "out"), "--format", "gguf")
        assert done.returncode == 0, done.stderr
        assert f"note: sent to {server.address}/org/name" in done.stdout
        assert server.created["visibility"] == "private"
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert server.files == {name: (tmp_path / "out" / name).read_bytes() for name in names}
        assert names == {"model-F32.gguf", "Modelfile", "README.md", "flatout.json"}
    with stand_in(refuses=True) as server:
        done = send(server, "--check", str(tmp_path / "out"), "llama")
        assert done.returncode == 3
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:", "Traceback"))]
        assert len(lines) == 2
        assert "could not be sent to the Hub as 'org/name'" in lines[0]
