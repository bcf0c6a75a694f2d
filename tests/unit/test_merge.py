"""Merging: in fp32, rounded once, and honest about what rounding took."""

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.model.adapted import AdaptedLinear
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import Adapters, attach
from flatout.model.gpt import GPT, build_model
from flatout.model.merge import merge, merged_matrix
from tests.parity.checking import one_part

TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def adapted(size=0.05, dtype=torch.float32, **plan) -> tuple[GPT, Adapters]:
    gpt = build_model(ModelConfig(layers=2, width=32, heads=4, kv_heads=2, context=16, qk_norm=False), 61).to(dtype)
    adapters = attach(gpt, AdapterPlan(rank=4, **plan), seed=0)
    with torch.no_grad():
        adapters.flat.add_(size * torch.randn(adapters.flat.shape, generator=torch.Generator().manual_seed(1)))
    return gpt, adapters


def layer_with_update(relative: float) -> AdaptedLinear:
    """bf16 weights of std 0.02 and an update of rank 16 with the given share of their size."""
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.Linear(512, 704, bias=False)
    with torch.no_grad():
        base.weight.normal_(0, 0.02, generator=generator)
    layer = AdaptedLinear(base.to(torch.bfloat16), one_part(704, 16, 1.0), ["x"], dropout=0.0, dora=False)
    with torch.no_grad():
        layer.lora_a.normal_(generator=generator)
        layer.lora_b["x"].normal_(generator=generator)
        update = layer.lora_b["x"] @ layer.lora_a
        layer.lora_b["x"].mul_(relative * base.weight.float().norm() / update.norm())
    return layer


@pytest.mark.parametrize(
    ("relative", "unchanged", "lost", "kept"),
    [(5e-4, 0.886, 0.895, 0.29), (5e-3, 0.335, 0.32, 0.988), (5e-2, 0.0375, 0.033, 1.0)],
)
def test_bf16_loses_small_updates_and_fp32_does_not(relative, unchanged, lost, kept, monkeypatch):
    """The figures of the field notes: 88% unchanged and 89% lost, 31%, 3%."""
    layer = layer_with_update(relative)
    merged, sums = merged_matrix(layer, torch.bfloat16)
    found = sums.retention()
    assert merged.dtype == torch.bfloat16
    assert found.relative_update == pytest.approx(relative, rel=1e-3)
    assert found.unchanged == pytest.approx(unchanged, abs=0.01)
    assert found.lost == pytest.approx(lost, abs=0.012)
    assert found.kept == pytest.approx(kept, abs=0.015)
    moved = merged.double() - layer.weight.detach().double()
    update = (layer.lora_b["x"] @ layer.lora_a).detach().double()
    assert found.kept == pytest.approx(float((moved * update).sum() / update.square().sum()), rel=1e-3)
    monkeypatch.setattr("flatout.model.merge.ROWS_AT_ONCE", 100)
    merged, sums = merged_matrix(layer, torch.float32)
    assert sums.retention().kept == pytest.approx(1.0, abs=1e-4)
    assert sums.retention().lost < 1e-3
    torch.testing.assert_close(merged.double(), layer.weight.detach().double() + update, rtol=1e-6, atol=1e-9)


def test_the_rounding_of_the_base_is_no_loss_of_the_update():
    """Of an fp32 base, most rows without an update: written as bf16, all of these move, but not by the adapter."""
    base = torch.nn.Linear(64, 128, bias=False)
    layer = AdaptedLinear(base, one_part(128, 4, 1.0), ["x"], dropout=0.0, dora=False)
    with torch.no_grad():
        layer.lora_a.normal_(generator=torch.Generator().manual_seed(0))
        layer.lora_b["x"].zero_()
        layer.lora_b["x"][:16] = 1.0
    merged, sums = merged_matrix(layer, torch.bfloat16)
    assert torch.equal(merged[16:], base.weight[16:].to(torch.bfloat16))
    assert not torch.equal(merged[16:].float(), base.weight[16:])
    assert sums.unchanged >= 112 * 64
    update = (layer.lora_b["x"] @ layer.lora_a)[:16].detach().double()
    moved = merged[:16].double() - base.weight[:16].detach().bfloat16().double()
    assert sums.wrong == pytest.approx(float((moved - update).square().sum()), rel=1e-3)
    assert sums.along == pytest.approx(float((moved * update).sum()), rel=1e-6)


@pytest.mark.parametrize(
    "plan",
    [{}, {"dora": True}, {"targets": ("q_proj", "v_proj"), "dora": True}, {"rank_stabilised": True}],
    ids=str,
)
def test_the_merged_model_is_the_adapted_one(plan):
    gpt, adapters = adapted(**plan)
    expected = gpt.logits(TOKENS)
    keys = dict(gpt.named_parameters())["blocks.0.attention.qkv.weight"]
    untouched = keys[32:48].clone()
    for layer in adapters.layers.values():  # as our kernels leave them
        layer.join(torch.float32)
    report = merge(adapters, torch.float32)
    torch.testing.assert_close(gpt.logits(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, AdaptedLinear) for module in gpt.modules())
    assert report.kept == pytest.approx(1.0, abs=1e-5)
    if "targets" in plan:
        assert torch.equal(keys[32:48], untouched), "keys have no adapter"


@pytest.mark.parametrize("dora", [False, True])
def test_a_matrix_is_merged_the_same_however_many_rows_at_once(dora, monkeypatch):
    _, adapters = adapted(dora=dora)
    whole = [merged_matrix(layer, torch.float32) for layer in adapters.layers.values()]
    monkeypatch.setattr("flatout.model.merge.ROWS_AT_ONCE", 5)
    for layer, (matrix, sums) in zip(adapters.layers.values(), whole, strict=True):
        pieces, by_pieces = merged_matrix(layer, torch.float32)
        torch.testing.assert_close(pieces, matrix, rtol=1e-6, atol=1e-7)
        assert by_pieces.weights == sums.weights
        assert by_pieces.update == pytest.approx(sums.update, rel=1e-5)


def test_a_refused_merge_changes_nothing():
    gpt, adapters = adapted(dtype=torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in gpt.named_parameters()}
    with pytest.raises(ValueError, match="bf16, fp16 or fp32"):
        merge(adapters, torch.float64)
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter, before[name])
    assert 0 < merge(adapters, torch.bfloat16).kept <= 1.05


def test_the_whole_model_has_the_type_asked_for_but_not_its_tables():
    gpt, adapters = adapted()
    merge(adapters, torch.bfloat16)
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.bfloat16}
    assert gpt.rotary is not None
    assert gpt.rotary.cos_TD.dtype == torch.float32
    gpt, adapters = adapted(dtype=torch.bfloat16)
    merge(adapters, torch.float32)
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="bf16, fp16 or fp32"):
        merge(adapted()[1], torch.float64)


@pytest.mark.parametrize("where", ["sum", "norm"])
def test_what_fp16_cannot_hold_is_refused_before_anything_is_changed(where):
    gpt, adapters = adapted()
    with torch.no_grad():
        if where == "sum":
            list(adapters.tensors())[-1].b.fill_(1e6)
        else:
            gpt.get_parameter("norm.weight")[0] = 1e5
    before = {name: parameter.clone() for name, parameter in gpt.named_parameters()}
    with pytest.raises(CheckpointError, match="range"):
        merge(adapters, torch.float16)
    assert all(torch.equal(parameter, before[name]) for name, parameter in gpt.named_parameters())
    merge(adapters, torch.bfloat16)


def test_an_adapter_that_does_nothing_loses_nothing():
    gpt = build_model(ModelConfig(layers=1, width=32, heads=4, context=16), 61)
    weight = gpt.blocks[0].mlp.up.weight.clone()
    report = merge(attach(gpt, AdapterPlan(rank=4), seed=0), torch.float32)
    assert (report.kept, report.lost, report.unchanged) == (1.0, 0.0, 1.0)
    assert torch.equal(gpt.blocks[0].mlp.up.weight, weight)


def test_a_broken_adapter_does_not_reach_the_weights():
    gpt, adapters = adapted()
    before = {name: parameter.clone() for name, parameter in gpt.named_parameters()}
    with torch.no_grad():
        adapters.layers[1, "down"].lora_b["down_proj"][0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        merge(adapters, torch.float32)
    assert torch.equal(gpt.blocks[0].attention.qkv.weight, before["blocks.0.attention.qkv.weight"])
