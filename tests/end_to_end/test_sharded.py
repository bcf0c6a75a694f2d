"""FSDP2: the losses of one process, and checkpoints in slices that any number of processes goes on from."""

import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from flatout import api
from flatout.checkpoints.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint
from flatout.checkpoints.checkpoint_files import write_files
from flatout.config.catalogue import shipped_names
from flatout.device import Device
from flatout.engine import state
from flatout.engine.step import TrainStep
from flatout.errors import CheckpointError, UserError
from flatout.model.count import MemoryEstimate
from flatout.resolve import form as form_module
from flatout.world import World
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.parallel_runs import Told, attempt, learn, muon_in_both_forms, muon_updated, saved_again
from tests.ranks import WORKERS

QUIET = ["optim.learning_rate=3e-3", "checkpoint.keep=9"]
Make = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def words(tmp_path: Path, corpus: Path) -> Make:
    """(preset, words) of a kind of data, all of it in this test's folder; steps have windows for 1, 2, 3 and 4."""

    def make(kind: str, *more: str) -> tuple[str, list[str]]:
        shape = [*TINY, "train.batch_tokens=192", *QUIET]
        if kind == "text":
            return "shakespeare-char", [*shape, f"data.source={corpus}", *more]
        if kind == "stream":
            chance = random.Random(1)
            texts = [
                " ".join(chance.choice(["the", "old", "red", "fox", "ran."]) for _ in range(20)) for _ in range(60)
            ]
            lines = [json.dumps({"text": text}) for text in texts]
            (tmp_path / "rows.jsonl").write_text("\n".join(lines))
            stream = ["data.streaming=true", "data.tokenizer=bytes", "data.validation=0.2", "data.source=rows.jsonl"]
            return "shakespeare-char", [*shape, *stream, *more]
        if not (tmp_path / "base").exists():
            write_chat_model(tmp_path / "base")
            rows = [{"instruction": f"What is {n}?", "input": "", "output": "one " * (1 + n % 7)} for n in range(30)]
            (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        named = ["model.init_from=base", "chat.source=rows.json", "lora.rank=0", "chat.batch_samples=7"]
        quiet = ["eval.sample_tokens=4", "speed.device=cpu", "model.context=64", *QUIET]
        return "lora", [*named, *quiet, "train.epochs=null", *more]

    return make


def together(ranks: int, folder: Path, run: tuple[str, list[str]], form: str = "fsdp", **how) -> list[Told]:
    preset, words = run
    return WORKERS.run(ranks, _learn, folder, preset, [*words, f"parallel.form={form}"], how)


def _learn(folder: Path, preset: str, words: list[str], how: dict) -> Told:
    return learn(folder, preset, words, **how)


def check_alike(many: list[Told], one: Told, *, within: float, form: str = "fsdp", dealt: bool = True) -> None:
    for told in many:
        assert told.form == form
        assert told.losses == pytest.approx(one.losses, rel=0, abs=within)
        assert told.evaluations == pytest.approx(one.evaluations, rel=0, abs=max(within, 1e-6))
        assert told.samples == one.samples
        assert told.norms == pytest.approx(one.norms, rel=1e-5)
    if dealt:  # each has its share of every step, in the order of one process
        steps = zip(*(told.windows for told in many), strict=True)
        assert [list(itertools.chain(*shares)) for shares in steps] == one.windows


def check_equal(ours: Checkpoint, theirs: Checkpoint) -> None:
    for part in ("model", "optimizer"):
        mine, other = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == other.keys()
        assert all(mine[name].dtype == other[name].dtype and torch.equal(mine[name], other[name]) for name in mine)


KINDS = {
    "text": ["model.tied=false", "data.documents=apart", "optim.ema=0.8"],
    "text, accumulated": ["speed.micro_batch=2", "speed.checkpointing=full"],
    "stream": ["speed.micro_batch=3"],
    "samples": ["speed.micro_batch=2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_slices_learn_what_one_learns(tmp_path: Path, words: Make, kind: str):
    preset, run = words(kind.partition(",")[0], "train.steps=6", "eval.every=3", *KINDS[kind])
    one = learn(tmp_path, preset, [*run, "output.folder=one"], double=True)
    two = together(2, tmp_path, (preset, [*run, "output.folder=two"]), double=True)
    check_alike(two, one, within=1e-9, dealt=kind != "samples")


def test_slices_are_saved_read_anywhere_and_gone_on_from(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=6", "checkpoint.every=3", "model.layers=1", "optim.ema=0.8")
    whole = together(2, tmp_path, (preset, [*run, "output.folder=whole"]))
    folder = tmp_path / "whole" / "checkpoints" / "step-00000003"
    names = {path.name for path in folder.iterdir()}
    assert {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "run.safetensors"} <= names
    assert "model.safetensors" not in names
    verify_checkpoint(folder)
    # one process goes on from slices, and two from what it saved
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    one = learn(tmp_path, preset, [*run, "output.folder=cut", "train.steps=5"], resume="auto")
    assert one.losses == pytest.approx(whole[0].losses[3:5], abs=2e-5)
    assert (tmp_path / "cut" / "checkpoints" / "step-00000005" / "model.safetensors").is_file()
    last = together(2, tmp_path, (preset, [*run, "output.folder=cut"]), resume="auto")
    assert last[1].losses == pytest.approx(whole[0].losses[5:], abs=2e-5)
    # a model is loaded as from any checkpoint, and the plain form has the bytes of one process
    assert api.load_model(tmp_path / "whole", device="cpu").step == 6
    begun = together(2, tmp_path, (preset, [*run, "output.folder=begun", "model.init_from=whole", "train.steps=1"]))
    assert begun[0].losses[0] < whole[0].losses[0]
    plain = api.consolidate(folder, tmp_path / "plain")
    check_equal(read_checkpoint(plain), read_checkpoint(folder))
    with safe_open(plain / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(read_checkpoint(folder).model)


def test_a_slice_that_is_damaged_or_lost_is_named(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=1", "model.layers=1")
    together(2, tmp_path, (preset, [*run, "output.folder=run"]))
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    file = folder / "optimizer-00002-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002\.safetensors does not match"):
        verify_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002\.safetensors is missing"):
        read_checkpoint(folder)


def _short_of_memory(folder: Path, preset: str, words: list[str]) -> tuple[Told, int]:
    """A run in which a step does not fit the second process's device until slices are tried."""
    calls: list[int] = []

    def fits(memory: MemoryEstimate, device: Device) -> bool:
        calls.append(memory.total)
        return len(calls) > 1 or os.environ["RANK"] == "0"

    with mock.patch.object(form_module, "fits_well", fits):
        return learn(folder, preset, words), len(calls)


def test_where_a_step_does_not_fit_one_device_all_processes_take_slices(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=2", "model.layers=1", "output.folder=run")
    for told, tried in WORKERS.run(2, _short_of_memory, tmp_path, preset, run):
        assert told.form == "fsdp"
        assert tried == 1, "the last form is not asked"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    features = next(row for row in rows if row["type"] == "run")["features"]
    shown = next(feature for feature in features if feature["name"] == "parallel")
    assert (shown["asked"], shown["used"]) == ("auto", "fsdp")
    assert "with data a step needs about" in shown["why"]


def _disk_full(folder: Path, preset: str, words: list[str]) -> tuple[str, int]:
    """The second process finds the disk full in its first save; what each of them raises."""

    def write(*values: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_files(*values)

    with mock.patch.object(state, "write_files", write), pytest.raises(UserError) as raised:
        learn(folder, preset, words)
    return raised.value.message, raised.value.exit_code


def test_a_disk_that_is_full_for_one_process_ends_all(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=2", "model.layers=1", "parallel.form=fsdp", "output.folder=run")
    first, second = WORKERS.run(2, _disk_full, tmp_path, preset, run)
    assert (first[1], second[1]) == (5, 5)
    assert "rank 1 on" in second[0]
    assert "No space left on device" in second[0]
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def _short_of_memory_once(folder: Path, preset: str, words: list[str]) -> str:
    """Memory runs out in the second micro-batch of a step, when torch's FSDP has the gradients of the first."""
    real, passes = TrainStep.forward_backward, itertools.count(1)

    def forward_backward(step: TrainStep, *values: Any) -> torch.Tensor:
        if next(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more.")
        return real(step, *values)

    with mock.patch.object(TrainStep, "forward_backward", forward_backward):
        return attempt(folder, preset, words)


def test_a_step_that_ran_out_of_memory_is_not_taken_again_with_gradients_of_its_first_try(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=2", "speed.micro_batch=4", "parallel.form=fsdp", "output.folder=run")
    (said,) = WORKERS.run(1, _short_of_memory_once, tmp_path, preset, run)
    assert said.startswith("DeviceMemoryError: out of device memory")


REFUSED = {
    "lora.rank=4": "adapters",
    "optim.learning_rate=1e-3 parallel.reduce=bf16": "parallel.reduce",
    "speed.optimizer_state=8bit": "8-bit moments",
}


@pytest.mark.parametrize("words_", REFUSED)
def test_what_has_no_slices_is_refused_by_name(tmp_path: Path, words: Make, words_: str):
    preset, run = words("samples", "train.steps=1", *words_.split())
    said = WORKERS.run(2, attempt, tmp_path, preset, [*run, "parallel.form=fsdp", "output.folder=run"])
    assert REFUSED[words_] in said[0]
    assert not (tmp_path / "run").exists()


SHRUNK = ["model.layers=4", "model.width=16", "model.heads=2", "model.context=8", "train.steps=2", "speed.device=cpu"]
SHRUNK += ["train.batch_tokens=64", "train.tokens=null", "train.epochs=null", "eval.sample_tokens=0", "eval.tokens=64"]
TEXT = ["data.folder=data", "data.tokenizer=char", "data.validation=0.1", "data.split=contiguous"]
TEXT += ["clean.languages=null", "clean.drop=[]"]
TEXT += ["data.invalid_utf8=strict", "data.unknown_characters=error"]


def shrunk(preset: str, words: Make, corpus: Path) -> list[str]:
    """A preset's words, with nothing of its network and its optimizer changed but sizes and lengths."""
    if not preset.endswith("lora"):
        return [*SHRUNK, *TEXT, f"data.source={corpus}"]
    _, run = words("samples", "train.steps=2", "chat.batch_samples=8", "speed.accumulation=null")
    return [word for word in run if not word.startswith(("lora.rank", "optim."))]


def refusal_of(preset: str, form: str) -> str:
    """What of a preset has no slices."""
    if form == "data":
        return ""
    if preset.endswith("lora"):
        return "adapters (lora.rank) are not sharded"
    return "blocks of kind E (model.pattern) are not sharded" if preset.endswith(("eigenstate", "hybrid")) else ""


def check_presets(words_of: dict[str, list[str]], forms: Sequence[str], sizes: Sequence[str], folder: Path) -> None:
    """Two steps of each preset in each form; `hybrid` on two hosts. What cannot be sharded is refused by name."""
    for preset, form, size in itertools.product(words_of, forms, sizes):
        name, hosts = f"{preset}-{form}-{size}", 2 if form == "hybrid" else 1
        run = [*words_of[preset], f"parallel.form={form}", f"speed.micro_batch={size}", f"output.folder={name}"]
        said, *_ = WORKERS.run(2 * hosts, attempt, folder, preset, run, hosts)
        refusal = refusal_of(preset, form)
        assert refusal in said if refusal else said == "", (name, said)
        assert (folder / name / "checkpoints" / "step-00000002").exists() == (not refusal), name


def test_presets_train_in_slices(tmp_path: Path, words: Make, corpus: Path):
    different = ["record", "modern", "shakespeare-char", "gpt2-124m", "small-32k-hybrid"]
    few = {preset: [*shrunk(preset, words, corpus), "model.layers=2"] for preset in different}
    check_presets(few, ["fsdp"], ["2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("forms", [("data", "fsdp"), ("hybrid",)], ids=["one host", "two hosts"])
def test_every_preset_trains_in_every_form(tmp_path: Path, words: Make, corpus: Path, forms: Sequence[str]):
    every = {preset: shrunk(preset, words, corpus) for preset in shipped_names("preset")}
    check_presets(every, forms, ["null", "1"], tmp_path)


# --- all of it: `make test-slow` --------------------------------------------------------------------------------------

SLOW = {
    "text": [],
    "untied": ["model.tied=false", "data.documents=apart"],
    "accumulated": ["speed.micro_batch=1", "speed.checkpointing=full"],
    "stream": ["speed.micro_batch=3"],
    "samples": ["speed.micro_batch=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_any_number_of_processes_learns_what_one_learns(tmp_path: Path, words: Make, kind: str):
    data = kind if kind in ("stream", "samples") else "text"
    for exact, within in ((True, 1e-9), (False, 2e-5)):
        preset, run = words(data, "train.steps=30", "eval.every=10", *SLOW[kind])
        one = learn(tmp_path, preset, [*run, f"output.folder=one-{exact}"], double=exact)
        for form, ranks in itertools.product(("data", "fsdp"), (1, 2, 3, 4)):
            name = f"output.folder={form}-{ranks}-{exact}"
            many = together(ranks, tmp_path, (preset, [*run, name]), form, double=exact)
            worst = max(abs(a - b) for a, b in zip(many[0].losses, one.losses, strict=True))
            print(f"{kind} {form} {ranks} {'float64' if exact else 'fp32'}: {worst:.2e}")
            check_alike(many, one, within=within, form=form, dealt=data != "samples")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["speed.micro_batch=1"]])
def test_slices_inside_hosts_and_copies_between_them(tmp_path: Path, words: Make, more: list[str]):
    preset, run = words("text", "train.steps=10", "eval.every=5", *more)
    one = learn(tmp_path, preset, [*run, "output.folder=one"], double=True)
    four = together(4, tmp_path, (preset, [*run, "output.folder=four"]), "hybrid", double=True, hosts=2)
    check_alike(four, one, within=1e-9, form="hybrid")
    names = {path.name for path in (tmp_path / "four" / "checkpoints" / "step-00000010").iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= names


def check_muon(ranks: int, *, normuon: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others have
    one = muon_updated(World(), sharded=False, normuon=normuon)
    torch.set_num_threads(threads)
    copies, slices = zip(*WORKERS.run(ranks, muon_in_both_forms, normuon), strict=True)
    assert any(name.endswith(".momentum") for name in one)
    for name, expected in one.items():
        pieces = [told[name] for told in slices]
        pieces = [torch.cat(pieces)] if expected.ndim == 2 else pieces  # second moments are whole everywhere
        assert all(torch.equal(x, expected) for x in [*pieces, *(told[name] for told in copies)]), name


def test_two_processes_make_muons_update_of_one_bit_for_bit():
    check_muon(2, normuon=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("normuon", [False, True])
def test_any_number_of_processes_makes_muons_update_of_one_bit_for_bit(ranks: int, normuon: bool):
    check_muon(ranks, normuon=normuon)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "fsdp"])
def test_muon_learns_the_same_in_any_number_of_processes_and_goes_on_in_another(tmp_path: Path, words: Make, form: str):
    muon = ["optim.optimizer=normuon", "model.layers=2"]
    preset, run = words("text", "train.steps=6", "checkpoint.every=3", *muon)
    one = learn(tmp_path, preset, [*run, "output.folder=one"], double=True)
    for ranks in (2, 4):
        told = together(ranks, tmp_path, (preset, [*run, f"output.folder=many{ranks}"]), form, double=True)
        check_alike(told, one, within=1e-9, form=form)
    shutil.rmtree(tmp_path / "many4" / "checkpoints" / "step-00000006")
    last = learn(tmp_path, preset, [*run, "output.folder=many4"], resume="auto", double=True)
    assert last.losses == pytest.approx(one.losses[3:], abs=1e-9)


@pytest.mark.slow
def test_what_four_save_any_number_loads_bit_for_bit(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=4")
    together(4, tmp_path, (preset, [*run, "output.folder=four"]))
    saved = tmp_path / "four" / "checkpoints" / "step-00000004"
    reference = read_checkpoint(saved)
    for form, ranks in [("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("data", 2)]:
        target = tmp_path / f"{form}-{ranks}"
        values = (tmp_path, preset, [*run, f"parallel.form={form}"], saved, target)
        WORKERS.run(ranks, saved_again, *values)
        again = read_checkpoint(target / "step-00000004")
        check_equal(again, reference)
        plain, other = api.consolidate(again.path, tmp_path / f"plain-{form}-{ranks}"), tmp_path / "plain-fsdp-1"
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (plain / name).read_bytes() == (other / name).read_bytes()
    # one process that never was sharded writes those bytes, too
    saved_again(tmp_path, preset, run, saved, tmp_path / "alone")
    for name in ("model.safetensors", "optimizer.safetensors"):
        alone = tmp_path / "alone" / "step-00000004" / name
        assert alone.read_bytes() == (tmp_path / "plain-fsdp-1" / name).read_bytes()


@pytest.mark.slow
def test_a_run_goes_from_one_process_to_four_and_back(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=12", "checkpoint.every=4")
    one = learn(tmp_path, preset, [*run, "output.folder=one"])
    first = learn(tmp_path, preset, [*run, "output.folder=many"], stop_at=4)
    four = together(4, tmp_path, (preset, [*run, "output.folder=many"]), resume="auto", stop_at=4)
    last = learn(tmp_path, preset, [*run, "output.folder=many"], resume="auto")
    assert [*first.losses, *four[3].losses, *last.losses] == pytest.approx(one.losses, abs=2e-5)
    assert last.evaluations[-1] == pytest.approx(one.evaluations[-1], abs=2e-5)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["data", "fsdp"])
@pytest.mark.parametrize("more", [[], ["speed.micro_batch=4"], ["speed.kernels=torch"], ["model.tied=false"]])
def test_one_rank_over_nccl_learns_what_a_plain_run_learns(tmp_path: Path, words: Make, form: str, more: list[str]):
    preset, run = words("text", "train.steps=10", "model.width=128", "speed.device=cuda", *more)
    one = learn(tmp_path, preset, [*run, "output.folder=one"])
    many = together(1, tmp_path, (preset, [*run, "output.folder=many"]), form)
    assert many[0].form == form
    assert many[0].losses == pytest.approx(one.losses, rel=5e-3)  # bf16, in another order
    check = read_checkpoint(tmp_path / "many" / "checkpoints" / "step-00000010")
    assert all(torch.isfinite(tensor).all() for tensor in check.model.values())
