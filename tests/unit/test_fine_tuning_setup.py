"""What setup decides for a fine-tuning run: memory that must suffice, and arithmetic by the card's capability."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.checkpoints.base_and_adapter import adapter_plan
from flatout.config.facts import names_in
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import RunConfig
from flatout.config.source import DEFAULT, Source
from flatout.config.unused import check_used
from flatout.data.sample_data import SampleOrder, SampleRows
from flatout.data.samples import Samples
from flatout.device import Device
from flatout.engine.setup import knows_no_end
from flatout.engine.state import Progress, capture
from flatout.engine.step import LossScale
from flatout.errors import CheckpointError, DoesNotFitError, HardwareError, UserError
from flatout.front.resuming import Origin, check_resumed
from flatout.model.adapters import attach
from flatout.model.gpt import build_model
from flatout.resolve import form
from flatout.resolve.case import Probes
from flatout.resolve.switches import resolve_speed
from tests.chat_models import write_chat_model
from tests.end_to_end.test_every_field import own_word
from tests.hints import ways_out, with_settings
from tests.set_up import set_up

pytestmark = pytest.mark.usefixtures("children_stay")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    named = ["model.init_from=base", "chat.source=rows.json", "speed.device=cpu", "model.context=64"]
    return lambda *more: [*named, *more]


# --- the base ---------------------------------------------------------------------------------------------------------


def test_a_base_that_never_saw_the_end_of_a_text_is_named():
    """Rows of the head of tokens that are not in the text move together, away from the others."""
    torch.manual_seed(0)
    words = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=8"]
    model = build_model(load_config("shakespeare", words).config.model, 32)
    assert not knows_no_end(model, 31)
    assert model.head.weight is not None
    with torch.no_grad():
        model.head.weight[28:] = model.head.weight[31]
    assert knows_no_end(model, 31)
    assert not knows_no_end(model, 3)
    assert not knows_no_end(model, None)


# --- memory -----------------------------------------------------------------------------------------------------------


def card(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """This machine with another amount of memory."""
    found = Device(torch_device=torch.device("cpu"), name="a small card", memory_bytes=int(memory), capability=None)
    monkeypatch.setattr("flatout.resolve.resolve.detect_device", lambda asked, local: found)


def test_a_run_that_does_not_fit_is_refused_with_what_would(words, monkeypatch):
    loaded = load_config("lora", words("chat.packing=false"))
    needed = set_up(loaded).plan.memory
    card(monkeypatch, needed.total)
    set_up(loaded)
    card(monkeypatch, 0.8 * needed.total)
    with pytest.raises(DoesNotFitError, match=r"a small card has") as refused:
        set_up(loaded)
    (way,) = ways_out(refused.value.hint)
    assert way[0].startswith("speed.micro_batch=")
    # Without the 15% by which an estimate may be off before a run is refused.
    assert set_up(load_config("lora", words("chat.packing=false", *way))).plan.memory.total <= 0.8 * needed.total


def test_where_one_row_does_not_fit_checkpointing_does(words, monkeypatch):
    def memory(*more: str) -> int:
        return set_up(load_config("lora", words("speed.micro_batch=1", "model.context=256", *more))).plan.memory.total

    rows = [{"instruction": "What is it? " * 20, "output": f"It is {n}."} for n in range(9)]
    Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    plain, full = memory(), memory("speed.checkpointing=full")
    assert full < plain / 1.2
    card(monkeypatch, 1.01 * full)
    with pytest.raises(DoesNotFitError) as refused:
        memory()
    assert "speed.checkpointing=full" in refused.value.hint
    memory("speed.checkpointing=full")
    card(monkeypatch, 1000)
    with pytest.raises(DoesNotFitError, match="needs about") as refused:
        memory("speed.checkpointing=full")
    assert refused.value.hint.startswith("take a smaller model")


def test_memory_goes_by_what_samples_fill_and_what_is_trained(words):
    def memory(*more: str) -> int:
        return set_up(load_config("lora", words(*more))).plan.memory.total

    assert memory("chat.batch_samples=2") < memory("chat.batch_samples=16")
    assert memory("lora.rank=2") < memory("lora.rank=64", "lora.alpha=null")
    assert memory("lora.rank=2") < memory("lora.rank=0") <= memory("lora.rank=0", "chat.train_on=all")


def test_the_largest_rows_are_those_of_the_heaviest_step():
    lengths = np.array([9] * 30 + [60, 62, 61, 63])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, labelled = np.ones(offsets[-1], np.uint16), np.arange(offsets[-1]) % 3 == 0
    samples = Samples(tokens, labelled, offsets)
    order = SampleOrder(len(lengths), 4, seed=1)
    rows = SampleRows(samples, batch_samples=order.batch_samples, row_tokens=64, packing=False)
    found = rows.largest(order, 4)
    assert (found.rows, found.row_tokens) == (4, 64)
    assert rows.largest(order, 1).rows == 1
    assert 0 < found.labels < found.rows * found.row_tokens


# --- arithmetic -------------------------------------------------------------------------------------------------------


def probes() -> Probes:
    return Probes(
        attention=lambda *_, **__: None,
        picked=lambda *_, **__: None,
        compiler=lambda _: None,
        products=lambda: None,
        triton=lambda: False,
    )


def gpu(capability: tuple[int, int], name: str) -> Device:
    return Device(torch_device=torch.device("cuda"), name=name, memory_bytes=11 * 2**30, capability=capability)


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [((7, 5), "Tesla T4", "fp16"), ((7, 0), "V100", "fp16"), ((8, 0), "A100", "bf16")],
)
def test_a_card_without_bf16_trains_in_fp16_by_its_capability(words, capability, name, expected):
    config = load_config("lora", words("speed.device=auto")).config
    speed = resolve_speed(config, gpu(capability, name), None, lambda _: DEFAULT, vocab=299, probes=probes())
    assert speed.precision == expected
    feature = next(feature for feature in speed.features if feature.name == "precision")
    assert (feature.asked, feature.used) == ("auto", expected)


def test_bf16_that_was_asked_for_is_refused_where_the_card_has_none(words):
    config = load_config("lora", words("speed.device=auto", "speed.precision=bf16")).config
    with pytest.raises(HardwareError, match=r"capability \(7, 5\)\) has no bf16"):
        resolve_speed(
            config,
            gpu((7, 5), "Tesla T4"),
            None,
            lambda _: Source("override", "command line"),
            vocab=299,
            probes=probes(),
        )


def test_beside_fp16_weights_adapters_are_fp32_and_the_loss_is_scaled(words, monkeypatch):
    """As on such a card, on the CPU: frozen weights in half precision, everything that is trained in fp32."""
    loaded = load_config("lora", words("train.steps=2", "train.epochs=null"))
    resolve = form.resolve_speed

    def as_fp16(*arguments, **settings):
        return dataclasses.replace(resolve(*arguments, **settings), precision="fp16")

    monkeypatch.setattr(form, "resolve_speed", as_fp16)
    run = set_up(loaded)
    assert run.adapters is not None
    assert {parameter.dtype for parameter in run.trained.saved.values()} == {torch.float32}
    assert run.adapters.flat.dtype == torch.float32
    assert {p.dtype for name, p in run.model.named_parameters() if "lora_" not in name} == {torch.float16}
    assert isinstance(run.step.loss_scale, LossScale)


def test_adapters_are_fp32_whatever_the_weights_are(words):
    config: RunConfig = load_config("lora", words()).config
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        model = build_model(config.model.model_copy(update={"layers": 1, "width": 32, "heads": 4}), 50).to(kind)
        assert {p.dtype for p in attach(model, adapter_plan(config.lora), 0).parameters()} == {torch.float32}


# What may change in the middle of a run: how adapters are trained and what the base is held in, not what they are.
FREE = ("dropout", "init_from", "quantize")


def test_a_run_goes_on_with_the_adapters_that_it_has(words):
    run = set_up(load_config("lora", words()))
    saved = dataclasses.replace(capture(run, Progress()), config=run.plan.settings.config.model_dump(mode="json"))
    origin = Origin(folder=Path("run"), asked=None, unusable=(), checkpoint=saved)
    for name in names_in("lora"):
        if name in FREE:
            continue
        own = own_word(f"lora.{name}")
        lora = load_config("lora", words(own)).config.lora
        settings = run.plan.settings
        other = dataclasses.replace(settings, config=settings.config.model_copy(update={"lora": lora}))
        with pytest.raises(CheckpointError) as refused:
            check_resumed(run.replanned(settings=other, lora=lora), origin)
        assert f"the checkpoint has lora.{name} " in refused.value.message
        (way,) = ways_out(refused.value.hint)
        assert load_config("lora", words(*with_settings([own], way))).config.lora == run.plan.lora


# --- settings that nobody reads ---------------------------------------------------------------------------------------


def refusal(loaded: LoadedConfig) -> str:
    with pytest.raises(UserError) as error:
        check_used(loaded)
    return str(error.value)


def test_what_is_never_read_is_refused_with_its_place(words, tmp_path):
    assert "command line: data.field is set" in refusal(load_config("lora", words("data.field=body")))
    (tmp_path / "mine.yaml").write_text("preset: lora\nclean:\n  drop: [quality]\n", encoding="utf-8")
    assert "mine.yaml:3: clean.drop is set" in refusal(load_config("mine.yaml", words()))


# The sizes and lengths of steps on plain text; samples have their own.
OF_TEXT = (
    "train.batch_tokens",
    "train.batch_stages",
    "train.length_stages",
    "train.window_stages",
    "eval.sample_prompt",
)


def test_what_is_about_plain_text_is_refused_beside_samples(words):
    about_text = [f"{section}.{name}" for section in ("data", "clean") for name in names_in(section)]
    for path in [*about_text, *OF_TEXT]:
        if path in ("data.folder", "data.streaming"):  # read, and refused by the schema
            continue
        assert f"{path} is set, but fine-tuning on chat.source does not use it" in refusal(
            load_config("lora", words(own_word(path)))
        )


@pytest.mark.parametrize(
    "word",
    ["window=9", "states=64"],
)
def test_fields_of_blocks_that_a_model_has_not_are_refused(word):
    message = refusal(load_config("shakespeare-char", [f"model.{word}"]))
    letter = "W" if word.startswith("window") else "E"
    assert (
        f"command line: model.{word.partition('=')[0]} is set, but no block of model.pattern=A is {letter}" in message
    )
    check_used(load_config("shakespeare-char", ["model.pattern=EWA", "model.dropout=0", f"model.{word}"]))
    assert "speed.scan" in refusal(load_config("shakespeare-char", ["speed.scan=chunked"]))
    for word, kinds in (
        ("model.kv_heads=2", "A or N or W"),
        ("model.rope_base=5000.0", "A or W"),
        ("speed.attention=sdpa", "A or N or W"),
    ):
        alone = load_config("shakespeare-char", ["model.pattern=E", "model.dropout=0", word])
        assert f"no block of model.pattern=E is {kinds}" in refusal(alone)
        check_used(load_config("shakespeare-char", ["model.pattern=EW", "model.dropout=0", word]))
    never = load_config("shakespeare-char", ["model.pattern=AAAE", "model.layers=3", "model.states=64"])
    assert "no block of model.pattern=AAAE is E where model.layers=3" in refusal(never)


@pytest.mark.parametrize("name", ["rate", "decay"])
def test_a_tied_head_has_no_settings_of_its_own(name):
    message = refusal(load_config("shakespeare-char", ["model.tied=true", f"optim.head_{name}=0.3"]))
    assert f"optim.head_{name} is set, but the head has the embedding's weights" in message
    assert f"optim.embedding_{name}" in message


def test_defaults_presets_and_what_is_read_pass(words):
    check_used(load_config("lora", words("data.folder=here", "data.tokenizer=char", "train.batch_tokens=16384")))
    check_used(load_config("shakespeare-char", []))
    check_used(load_config("lora", words("lora.rank=0", "lora.alpha=null")))
