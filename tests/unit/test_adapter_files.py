"""Adapter files: whole or not at all, both ways; what is damaged or foreign is refused by name."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError, ResourceError
from flatout.files import canonical_json
from flatout.folders import _write_mark
from flatout.model import adapter_files
from flatout.model.adapter_files import (
    CONFIG,
    WEIGHTS,
    OccupiedError,
    load_adapter,
    load_into,
    read_origin,
    save_adapter,
)
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import Adapters, attach
from flatout.model.gpt import GPT, build_model
from flatout.model.seal import SEAL
from tests.chat_models import as_a_stranger

TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def model(**settings) -> GPT:
    values = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, **settings}
    return build_model(ModelConfig(**values), 61)


def trained(gpt: GPT | None = None, **plan) -> Adapters:
    adapters = attach(gpt or model(), AdapterPlan(**{"rank": 4, "alpha": 8, **plan}), seed=0)
    with torch.no_grad():
        adapters.flat.add_(0.05 * torch.randn(adapters.flat.shape, generator=torch.Generator().manual_seed(1)))
    return adapters


def all_values(adapters: Adapters) -> torch.Tensor:
    """Without the padding of the flat tensor, which is not saved."""
    return torch.cat([parameter.detach().flatten() for parameter in adapters.parameters()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(trained(dora=True), tmp_path / "adapter", base="a/model")
    return as_a_stranger(tmp_path / "adapter")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_adapter(trained(dora=True), tmp_path / "adapter", base="a/model")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dora": True, "rank_stabilised": True},
        {"targets": ("v_proj", "q_proj"), "ranks": (("v_proj", 7),), "alphas": (("q_proj", 3.5),)},
        {"targets": ("1.self_attn.q_proj", "up_proj"), "dropout": 0.1},
    ],
    ids=str,
)
def test_what_is_written_comes_back_bit_for_bit(tmp_path, plan):
    adapters = trained(**plan)
    size = save_adapter(adapters, tmp_path / "a", base="a/model")
    assert size == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    again, origin = load_adapter(model(), tmp_path / "a")
    assert torch.equal(all_values(again), all_values(adapters))
    assert torch.equal(again.model.eval().logits(TOKENS), adapters.model.eval().logits(TOKENS))
    assert origin.folder == tmp_path / "a"
    for name in ("rank", "alpha", "dropout", "rank_stabilised", "dora", "ranks", "alphas"):
        assert getattr(origin.plan, name) == getattr(adapters.plan, name), name
    save_adapter(again, tmp_path / "b", base="a/model")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_names_whose_order_matters_mean_the_same_in_a_file(tmp_path):
    ranks = (("self_attn.q_proj", 2), ("q_proj", 5), ("1.self_attn.q_proj", 3))
    adapters = trained(ranks=ranks)
    save_adapter(adapters, tmp_path / "adapter")
    again, origin = load_adapter(model(), tmp_path / "adapter")
    assert again.choices == adapters.choices
    assert len(origin.plan.ranks) == 2
    other = trained(ranks=ranks[::-1])
    assert other.choices != adapters.choices
    save_adapter(other, tmp_path / "other")
    assert load_adapter(model(), tmp_path / "other")[0].choices == other.choices


def test_fused_matrices_are_written_apart(folder):
    tensors = load_file(folder / WEIGHTS)
    assert {name: tuple(t.shape) for name, t in tensors.items() if ".layers.0.self_attn.k_proj." in name} == {
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": (4, 32),
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight": (16, 4),
        "base_model.model.model.layers.0.self_attn.k_proj.lora_magnitude_vector": (16,),
    }
    assert len(tensors) == 2 * 7 * 3
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_it_can_be_read_into_adapters_that_are_there(folder):
    adapters = attach(model(), AdapterPlan(rank=4, alpha=8, dora=True, dropout=0.3), seed=9)
    before = adapters.model.logits(TOKENS)
    load_into(adapters, folder)
    assert torch.equal(all_values(adapters), all_values(trained(dora=True)))
    assert not torch.allclose(adapters.model.eval().logits(TOKENS), before)
    other = attach(model(), AdapterPlan(rank=5, alpha=8, dora=True), seed=9)
    with pytest.raises(CheckpointError, match="rank is 4, here it is 5"):
        load_into(other, folder)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("rank", 4, 5),
        ("alpha", 8, 4),
        ("alphas", (("q_proj", 3.5),), ()),
        ("ranks", (("q_proj", 2),), ()),
        ("dora", True, False),
        ("rank_stabilised", True, False),
    ],
)
def test_adapters_with_other_settings_take_nothing(tmp_path, name, theirs, ours):
    save_adapter(trained(**{name: theirs}), tmp_path / "adapter")
    adapters = attach(model(), AdapterPlan(**{"rank": 4, "alpha": 8, name: ours}), seed=9)
    before = all_values(adapters).clone()
    with pytest.raises(CheckpointError, match=rf": {name} is .*, here it is "):
        load_into(adapters, tmp_path / "adapter")
    assert torch.equal(all_values(adapters), before)


def test_training_on_may_have_another_dropout(folder):
    adapters, origin = load_adapter(model(), folder, dropout=0.25)
    assert (adapters.plan.dropout, origin.plan.dropout) == (0.25, 0.0)
    assert adapters.layers[0, "qkv"].dropout == 0.25


def test_narrower_types_are_read(folder):
    tensors = load_file(folder / WEIGHTS)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / WEIGHTS)
        adapters, _ = load_adapter(model(), folder)
        assert adapters.flat.dtype == torch.float32
        torch.testing.assert_close(all_values(adapters), all_values(trained(dora=True)), rtol=1e-2, atol=1e-3)


def test_fields_that_old_files_lack_have_pefts_defaults(folder):
    (folder / CONFIG).write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    plan = read_origin(folder).plan
    assert (plan.rank, plan.alpha, plan.dropout, plan.dora, plan.rank_stabilised) == (8, 8, 0.0, False, False)


def test_names_that_fit_nothing_pass_as_long_as_others_fit(tmp_path):
    save_adapter(trained(targets=("q_proj",)), tmp_path / "a")
    as_a_stranger(tmp_path / "a")
    change(tmp_path / "a", target_modules=["q_proj", "query_key_value"])
    adapters, origin = load_adapter(model(), tmp_path / "a")
    assert origin.plan.targets == ("q_proj", "query_key_value")
    assert {choice.target.name for choice in adapters.choices} == {"q_proj"}
    assert torch.equal(all_values(adapters), all_values(trained(targets=("q_proj",))))


# --- damaged and foreign ----------------------------------------------------------------------------------------------


def change(folder: Path, **fields: Any) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | fields))


def tensors_with(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS)


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


A, B, M = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", f"{Q}.lora_magnitude_vector"
LAYER_9 = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
DAMAGE: dict[str, tuple[Any, str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), CONFIG),
    "config cut": (lambda f: (f / CONFIG).write_text('{"peft_type": "LO'), "is not valid JSON"),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), "holds no JSON object"),
    "config is no text": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe\x00{"), "is not valid JSON"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "does not exist"),
    "weights cut": (cut, "cannot be read as safetensors"),
    "weights empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "cannot be read as safetensors"),
    "weights are text": (lambda f: (f / WEIGHTS).write_bytes(b"not safetensors at all"), "safetensors"),
    "a pickle": (pickled, "can run code"),
    "another method": (lambda f: change(f, peft_type="IA3"), "peft_type is 'IA3'"),
    "no method": (lambda f: change(f, peft_type=None), "peft_type is None"),
    "other modules": (lambda f: change(f, modules_to_save=["score"]), "modules_to_save is ['score']"),
    "another kind of biases": (lambda f: change(f, bias="some"), "bias is 'some'"),
    "a bias of its own": (lambda f: change(f, lora_bias=True), "lora_bias is True"),
    "pissa": (lambda f: change(f, init_lora_weights="pissa_niter_4"), "'pissa_niter_4'"),
    "loftq": (lambda f: change(f, init_lora_weights="loftq"), "'loftq'"),
    "a variant": (lambda f: change(f, use_qalora=True), "use_qalora is True"),
    "tokens of its own": (lambda f: change(f, trainable_token_indices=[1]), "trainable_token_indices"),
    "layers repeated": (lambda f: change(f, layer_replication=[[0, 2]]), "layer_replication"),
    "a field of tomorrow": (lambda f: change(f, use_something_new={"a": 1}), "use_something_new"),
    "rank is a word": (lambda f: change(f, r="16"), "r is '16'"),
    "rank is zero": (lambda f: change(f, r=0), "rank is 0"),
    "rank is another": (lambda f: change(f, r=5), "lora_A.weight has shape (4, 32)"),
    "alpha is not a number": (lambda f: change(f, lora_alpha=math.nan), "alpha is nan"),
    "dora is a word": (lambda f: change(f, use_dora="yes"), "use_dora is 'yes'"),
    "patterns are a list": (lambda f: change(f, rank_pattern=[1]), "rank_pattern is [1]"),
    "a rank is a word": (lambda f: change(f, rank_pattern={"q_proj": "x"}), "the rank of 'q_proj' is 'x'"),
    "targets are numbers": (lambda f: change(f, target_modules=[1, 2]), "target_modules is [1, 2]"),
    "no targets": (lambda f: change(f, target_modules=None), "target_modules is None"),
    "targets are elsewhere": (lambda f: change(f, target_modules=["query_key_value"]), "choose none"),
    "targets are broken": (lambda f: change(f, target_modules="(["), "not a list of names"),
    "fewer targets": (lambda f: change(f, target_modules=["q_proj"]), "no place"),
    "some layers": (lambda f: change(f, layers_to_transform=[1]), "layers_to_transform is [1]"),
    "some excluded": (lambda f: change(f, exclude_modules=["q_proj"]), "exclude_modules is ['q_proj']"),
    "without dora": (lambda f: change(f, use_dora=False), "lora_magnitude_vector"),
    "a tensor missing": (lambda f: tensors_with(f, **{B: None}), f"has no tensor {B}"),
    "a magnitude missing": (lambda f: tensors_with(f, **{M: None}), f"has no tensor {M}"),
    "a tensor too many": (lambda f: tensors_with(f, **{LAYER_9: torch.zeros(4, 32)}), f"holds tensor {LAYER_9}"),
    "an embedding's": (
        lambda f: tensors_with(f, **{"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 61)}),
        "embeddings and the output head",
    ),
    "another width": (lambda f: tensors_with(f, **{A: torch.zeros(4, 64)}), "shape (4, 64)"),
    "turned": (lambda f: tensors_with(f, **{B: torch.zeros(4, 32)}), "need (32, 4)"),
    "a vector": (lambda f: tensors_with(f, **{A: torch.zeros(128)}), "shape (128,)"),
    "whole numbers": (lambda f: tensors_with(f, **{A: torch.zeros(4, 32, dtype=torch.int32)}), "torch.int32"),
    "8 bits": (lambda f: tensors_with(f, **{A: torch.zeros(4, 32).to(torch.float8_e4m3fn)}), "float8"),
    "not a number": (lambda f: tensors_with(f, **{A: torch.full((4, 32), math.nan)}), "not finite"),
    "infinite": (lambda f: tensors_with(f, **{M: torch.full((32,), math.inf)}), "not finite"),
}


SLOW_PATTERN = r"(\w+\.?)+!"
DEEP = "[" * 5000 + "]" * 5000
DAMAGE |= {
    "a rank of a terabyte": (lambda f: change(f, r=10**12), "it must be a whole number from 1 to"),
    "a rank of gigabytes": (lambda f: change(f, r=2**20), "lora_A.weight has shape (4, 32)"),
    "a rank of gigabytes for some": (lambda f: change(f, rank_pattern={"q_proj": 2**20}), "has shape (4, 32)"),
    "an alpha beyond numbers": (lambda f: change(f, lora_alpha=10**400), "alpha is 1000"),
    "nested deeply": (lambda f: (f / CONFIG).write_text(DEEP), "nested more than 100 levels"),
    "a field nested deeply": (
        lambda f: (f / CONFIG).write_text(f'{{"peft_type": "LORA", "x": {DEEP}}}'),
        "nested more than 100 levels",
    ),
    "targets by a pattern": (lambda f: change(f, target_modules=SLOW_PATTERN), "not a list of names"),
    "ranks by a pattern": (lambda f: change(f, rank_pattern={SLOW_PATTERN: 4}), "only plain names"),
    "code of its own": (lambda f: change(f, auto_map={"AutoModel": "evil.Evil"}), "auto_map"),
    "weights by a link": (lambda f: linked(f / WEIGHTS), "a link that leads out of its folder"),
    "a config by a link": (lambda f: linked(f / CONFIG), "a link that leads out of its folder"),
}


def linked(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_adapters_are_refused_and_the_model_stays(folder, kind):
    damage, says = DAMAGE[kind]
    damage(folder)
    gpt = model()
    before = gpt.logits(TOKENS)
    with pytest.raises(CheckpointError) as caught:
        load_adapter(gpt, folder)
    assert says in str(caught.value), str(caught.value)
    assert caught.value.hint
    assert caught.value.exit_code == 3
    assert torch.equal(gpt.logits(TOKENS), before)
    assert all(parameter.requires_grad for parameter in gpt.parameters())


@pytest.mark.parametrize(
    "settings",
    [{"width": 40}, {"layers": 1}, {"layers": 3}, {"kv_heads": 4}, {"mlp": "relu2"}, {"mlp_width": 64}],
    ids=str,
)
def test_the_adapter_of_another_base_is_refused(folder, settings):
    with pytest.raises(CheckpointError, match="another base model"):
        load_adapter(model(**settings), folder)


def test_an_adapter_of_gpt2_is_none_of_a_llama(tmp_path):
    save_adapter(trained(model(family="gpt2", kv_heads=None)), tmp_path / "a")
    with pytest.raises(CheckpointError, match="choose none"):
        load_adapter(model(), tmp_path / "a")


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_an_older_adapter_is_replaced_with_what_lies_beside_it(ours):
    save_adapter(trained(rank=2), ours, files={"tokenizer.json": b"{}"})
    assert sorted(path.name for path in ours.iterdir()) == [CONFIG, WEIGHTS, SEAL, "tokenizer.json"]
    assert read_origin(ours).plan.rank == 2
    assert [path.name for path in ours.parent.iterdir()] == ["adapter"]
    save_adapter(trained(rank=3), ours)
    assert sorted(path.name for path in ours.iterdir()) == [CONFIG, WEIGHTS, SEAL], "what is gone is gone"


@pytest.mark.parametrize("moment", ["write_tensors", "write_new", "seal"])
def test_what_fails_leaves_the_old_adapter_and_no_rubbish(ours, monkeypatch, moment):
    folder = ours
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapter_files, moment, fail)
    with pytest.raises(ResourceError, match="No space left"):
        save_adapter(trained(rank=2), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_a_rename_that_fails_puts_the_old_one_back(ours, monkeypatch):
    folder = ours
    rename, calls = adapter_files.os.rename, []

    def fail_once(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(adapter_files.os, "rename", fail_once)
    with pytest.raises(ResourceError):
        save_adapter(trained(rank=2), folder)
    assert read_origin(folder).plan.rank == 4
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_a_folder_with_something_else_is_not_touched(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    for name in ("photos", "file"):
        with pytest.raises(OccupiedError, match="is there already"):
            save_adapter(trained(), tmp_path / name)
    assert (tmp_path / "photos" / "one.jpg").read_bytes() == b"x"
    (tmp_path / "empty").mkdir()
    save_adapter(trained(), tmp_path / "empty")
    save_adapter(trained(), tmp_path / "deep" / "er" / "adapter")


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "link"])
def test_an_adapter_with_something_of_the_users_is_not_replaced(ours, name):
    path = ours / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(ours.parent) if name == "link" else path.write_text("mine")
    before = {path.name: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    with pytest.raises(OccupiedError, match=name.partition("/")[0]):
        save_adapter(trained(rank=2), ours)
    assert {path.name: path.read_bytes() for path in ours.rglob("*") if path.is_file()} == before
    assert [path.name for path in ours.parent.iterdir()] == ["adapter"]


def test_a_stranger_s_adapter_is_not_replaced_and_a_damaged_one_of_ours_is(folder):
    with pytest.raises(OccupiedError, match="is there already"):
        save_adapter(trained(rank=2), folder)
    (folder / SEAL).write_bytes(canonical_json({"base": None, "quantize": "none", "step": 3}))  # an earlier version's
    save_adapter(trained(rank=2), folder)
    (folder / SEAL).write_bytes(b"{")
    save_adapter(trained(rank=3), folder)
    assert read_origin(folder).plan.rank == 3


def test_a_link_to_an_adapter_is_not_written_through(ours):
    link = ours.parent / "link"
    link.symlink_to(ours)
    with pytest.raises(OccupiedError, match="is there already"):
        save_adapter(trained(rank=2), link)
    assert read_origin(ours).plan.rank == 4


def test_what_a_killed_process_left_is_swept_away_and_nothing_else(ours):
    foreign = ours.parent / "adapter.tmp-0123abcd"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    left = ours.parent / "adapter.tmp-89abcdef"
    left.mkdir()
    _write_mark(left, left.name)
    save_adapter(trained(rank=2), ours)
    assert sorted(path.name for path in ours.parent.iterdir()) == ["adapter", foreign.name]


SEALS: dict[str, tuple[Any, str]] = {
    "empty": (lambda _: b"", "is damaged"),
    "cut": (lambda c: canonical_json(c)[:-20], "is damaged"),
    "nested deeply": (lambda _: DEEP.encode(), "nested more than 100 levels"),
    "a list": (lambda _: canonical_json([1]), "not in the form"),
    "spelled otherwise": (lambda c: json.dumps(c).encode(), "not in the form"),
    "another hash": (lambda c: canonical_json(c | {"sha256": "0" * 64}), "does not match its own"),
    "no format": (lambda c: sealed(c, format=None), "format"),
    "no files": (lambda c: sealed(c, files={}), "names no files"),
    "files are a list": (lambda c: sealed(c, files=[CONFIG]), "names no files"),
    "an entry is a text": (lambda c: sealed(c, files={CONFIG: "x"}), "no size and hash"),
    "a negative size": (lambda c: sealed(c, files={CONFIG: {"bytes": -1, "sha256": "x"}}), "no size and hash"),
    "a name outside": (lambda c: sealed(c, files={"../x": {"bytes": 1, "sha256": "x"}}), "no name of a file"),
    "a whole path": (lambda c: sealed(c, files={"/etc/passwd": {"bytes": 1, "sha256": "x"}}), "no name of a file"),
    "facts are a text": (lambda c: sealed(c, facts="x"), "facts are no object"),
    "a version of tomorrow": (lambda c: sealed(c, version=9), "update Flatout"),
    "no version": (lambda c: sealed(c, version=None), "version is no number"),
}


def sealed(content: dict[str, Any], **changes: Any) -> bytes:
    """Other content, with a hash that fits it."""
    body = {name: value for name, value in {**content, **changes}.items() if name != "sha256" and value is not None}
    return canonical_json({**body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()})


@pytest.mark.parametrize("kind", SEALS)
def test_a_manifest_that_is_damaged_or_of_another_shape_is_refused(ours, kind):
    make, says = SEALS[kind]
    (ours / SEAL).write_bytes(make(json.loads((ours / SEAL).read_bytes())))
    with pytest.raises(CheckpointError, match=says) as caught:
        load_adapter(model(), ours)
    assert SEAL in caught.value.message
    assert "flatout" in caught.value.hint.lower()


def test_what_is_written_is_what_the_library_writes(ours):
    tensors = load_file(ours / WEIGHTS)
    save_file(tensors, ours.parent / "theirs", metadata={"format": "pt"})
    assert (ours / WEIGHTS).read_bytes() == (ours.parent / "theirs").read_bytes()
