"""Delayed scales by their rule, and copies of weights that are never stale, whoever moves the weight."""

import math

import pytest
import torch

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.model.execution import Execution
from flatout.model.gpt import build_model
from flatout.model.narrow import LAYERS, ModelNarrow, NarrowWeights, gradient_slot, input_slot
from flatout.ops.scales import ACTIVATION, E4M3, GRADIENT, Scales
from flatout.optim.adamw import HostAdamW
from flatout.optim.optimizers import Optimizers
from tests.made_optimizers import made_optimizers

E5M2 = torch.float8_e5m2
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def record(scales: Scales, *values: float) -> None:
    scales.seen_S.copy_(torch.tensor(values).view(torch.int32))


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("highest", [1e-29, 3e-7, 0.99, 1.0, 1.01, 448.0, 57344.0, 3e38])
def test_a_scale_is_the_largest_power_of_two_with_one_binary_order_to_spare(highest, kind):
    scales = Scales([kind], CPU)
    record(scales, highest)
    scales.update()
    scale = scales.scale_S.item()
    assert math.log2(scale).is_integer()
    top = torch.finfo(kind).max
    assert scale * highest <= top / 2 < 2 * scale * highest * 1.0001
    assert scales.unit_S.item() == 1.0 / scale
    assert scales.seen_S.item() == 0
    assert scales.rounding


def test_a_scale_stays_where_nothing_finite_was_seen():
    scales = Scales([E4M3, E5M2, E4M3, None], CPU)
    record(scales, 1.0, 1.0, 1.0, 0.0)
    scales.update()
    before = scales.scale_S.clone()
    assert before.tolist() == [128.0, 16384.0, 128.0, 0.0]
    record(scales, math.inf, math.nan, 0.0, 0.0)
    scales.update()
    assert torch.equal(scales.scale_S, before)
    record(scales, 8.0, 0.5, 1.0, 0.0)
    scales.update()
    assert scales.scale_S.tolist() == [16.0, 32768.0, 128.0, 0.0]


def test_a_scale_falls_at_once_and_rises_by_one_binary_order_a_step():
    scales = Scales([E4M3], CPU)
    seen = []
    for highest in (1.0, 1000.0, 1e-3, 1e-3, 1e-3, 3.0):
        record(scales, highest)
        scales.update()
        seen.append(scales.scale_S.item())
    assert seen == [128.0, 0.125, 0.25, 0.5, 1.0, 2.0]


def test_measuring_goes_on_until_every_slot_has_seen_something():
    """A scale out of the air would round small gradients to nothing."""
    scales = Scales([E4M3, E5M2], CPU)
    for step in range(6):
        record(scales, 1.0, 0.0)
        scales.update()
        assert not scales.rounding, step
    record(scales, 1.0, 0.5)
    scales.update()
    assert scales.rounding
    assert scales.scale_S.tolist() == [128.0, 32768.0]


@pytest.mark.parametrize("saved", [None, torch.ones(3), torch.tensor([4.0, 0.0])], ids=str)
def test_saved_scales_that_do_not_cover_the_layers_are_told(saved):
    scales = Scales([E4M3, E4M3], CPU)
    record(scales, 1.0, 1.0)
    scales.update()
    record(scales, 9.0, 9.0)
    assert "measured anew" in (scales.assign({} if saved is None else {"fp8.scales": saved}) or "")
    assert not scales.rounding
    assert not scales.seen_S.any()
    assert scales.assign({"fp8.scales": torch.tensor([4.0, 2.0])}) is None
    assert scales.rounding


def test_slots_look_into_the_table():
    scales = Scales([None, E4M3, E5M2], CPU)
    assert scales.slots[0] is None
    slot = scales.slots[2]
    assert slot is not None
    assert all(number.data_ptr() % 16 == 0 for number in (slot.scale, slot.unit, slot.seen))
    record(scales, 0.0, 1.0, 4.0)
    scales.update()
    assert (slot.scale.item(), slot.unit.item()) == (4096.0, 1.0 / 4096.0)
    scales.assign({**scales.tensors(), "fp8.scales": torch.tensor([0.0, 2.0, 8.0])})
    assert (slot.scale.item(), slot.unit.item()) == (8.0, 0.125)


# --- copies of weights ------------------------------------------------------------------------------------------------


def fresh(weights: NarrowWeights, parameters: list[torch.nn.Parameter]) -> bool:
    """Whether all copies hold what the weights hold now."""
    for parameter in parameters:
        copy = weights.copy_of(parameter, BF16)
        if not torch.equal(copy.values_MK, parameter.detach().to(BF16)):
            return False
    return True


def update(optimizer: Optimizers) -> None:
    device = optimizer.parameters[0].device
    optimizer.create_state()
    optimizer.update(torch.ones((), device=device), torch.ones((), dtype=torch.bool, device=device))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", [{}, {"state": "8bit"}, {"offload": True}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_update_by_any_optimizer_is_noticed(how, fused, device):
    model = build_model(ModelConfig(layers=1, width=64, heads=2, context=8), 7, seed=1).to(device)
    optimizer = made_optimizers(model, OptimConfig(learning_rate=0.1), fused=fused, **how)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    weights = NarrowWeights()
    assert fresh(weights, matrices)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.detach().clone() for parameter in matrices]
        update(optimizer)
        assert all(not torch.equal(a, b) for a, b in zip(before, matrices, strict=True)), "the update moves all"
        assert fresh(weights, matrices)


def test_the_hosts_optimizer_still_knows_its_own_writing():
    """It copies weights to the host again only when somebody else has written into them."""
    model = build_model(ModelConfig(layers=1, width=16, heads=2, context=8), 7, seed=1)
    optimizer = made_optimizers(model, OptimConfig(), fused=False, offload=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(optimizer)
    (host,) = optimizer.optimizers
    assert isinstance(host, HostAdamW)
    assert all(host.versions[p] == p._version for p in model.parameters())


def test_copies_are_made_only_when_a_weight_has_changed_and_stay_where_they_are():
    weight = torch.nn.Parameter(torch.randn(16, 32))
    weights = NarrowWeights()
    copy = weights.copy_of(weight, E4M3)
    assert copy.turned_KM is not None
    assert copy.unit is not None
    places = (copy.values_MK.data_ptr(), copy.turned_KM.data_ptr(), copy.unit.data_ptr())
    assert copy.generation == 1
    assert weights.copy_of(weight, E4M3) is copy
    assert copy.generation == 1
    with torch.no_grad():
        weight.mul_(3.0)
    assert weights.copy_of(weight, E4M3) is copy
    assert copy.generation == 2
    assert (copy.values_MK.data_ptr(), copy.turned_KM.data_ptr(), copy.unit.data_ptr()) == places
    assert torch.equal(copy.turned_KM.float(), copy.values_MK.float().t())
    torch.testing.assert_close(copy.values_MK.float() * copy.unit, weight.detach(), rtol=0.07, atol=1e-2)
    weight.data = torch.randn(16, 32)  # no version moves, but the memory is another
    assert weights.copy_of(weight, E4M3).generation == 3
    other = weights.copy_of(weight, BF16)
    assert other is not copy
    assert other.unit is None
    assert torch.equal(other.values_MK, weight.detach().to(BF16))
    assert weights.allocations == 2


def test_a_copy_first_made_for_sampling_can_be_written_in_training():
    weight = torch.nn.Parameter(torch.randn(16, 32))
    weights = NarrowWeights()
    with torch.inference_mode():
        weights.copy_of(weight, E4M3)
    with torch.no_grad():
        weight.add_(1.0)
    assert weights.copy_of(weight, E4M3).generation == 2


def test_which_layers_keep_what():
    config = ModelConfig(family="gpt", layers=2, width=32, heads=2, context=8, dropout=0.0)

    def narrow(**how):
        model = build_model(config, 7, seed=1, execution=Execution(kernels="triton", **how))
        return model.narrow.begin(BF16, recording=True)

    for block in narrow(fp8=("up", "out", "head")):
        for name in LAYERS:
            layer = getattr(block, name)
            assert (layer.x is not None) == (layer.dy is not None) == (name in ("up", "out"))
            assert layer.copy.values_MK.dtype == (E4M3 if name in ("up", "out") else BF16)
    for block in narrow(fp8=("up",)):
        x, dy = input_slot(block.up), gradient_slot(block.up)
        assert x is not None
        assert dy is not None
        assert (x.kind, dy.kind) == (ACTIVATION, GRADIENT)
    for block in narrow(fp8=("up",), checkpointing="full"):  # no memory to spare
        assert (block.qkv, block.out, block.down) == (None, None, None)
        assert block.up is not None
    model = build_model(config, 7, seed=1, execution=Execution(kernels="triton"))
    assert all(block.qkv is None for block in model.narrow.begin(torch.float32, recording=True))
    assert model.narrow.scales is None
    assert model.narrow.tensors() == {}


def test_other_switches_start_anew():
    config = ModelConfig(family="gpt", layers=1, width=32, heads=2, context=8, dropout=0.0)
    model = build_model(config, 7, seed=1, execution=Execution(kernels="triton", fp8=("up",)))
    before = model.prepare()
    assert model.prepare() == before
    scales = model.narrow.scales
    assert scales is not None
    scales.rounding = True
    assert model.prepare() != before
    model.use(Execution(kernels="triton", fp8=("down",)))
    assert model.narrow.scales is not scales
    model.use(Execution())
    assert model.narrow.scales is None
    assert model.prepare() is None


def test_copies_of_replaced_weights_go():
    layers = [{"qkv": torch.nn.Linear(4, 4, bias=False)}]
    narrow = ModelNarrow(layers, Execution(kernels="triton"))
    for _ in range(3):
        narrow.begin(BF16, recording=True)
        layers[0]["qkv"].load_state_dict({"weight": torch.randn(4, 4)}, assign=True)
    narrow.begin(BF16, recording=True)
    assert len(narrow.weights.copies) == len(narrow.weights.made_from) == 1


def test_a_failed_pass_leaves_no_records():
    narrow = ModelNarrow([{"qkv": torch.nn.Linear(4, 4, bias=False)}], Execution(kernels="triton", fp8=("qkv",)))
    scales = narrow.scales
    assert scales is not None
    scales.seen_S.fill_(7)
    narrow.drop()
    assert not scales.seen_S.any()
