"""Moments in 8 bits and moments on the host, against torch's AdamW; and their way to disk and back."""

import pytest
import torch

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.step import LossScale, TrainStep
from flatout.errors import CheckpointError
from flatout.model.gpt import GPT, build_model
from flatout.ops.adam8 import (
    BLOCK,
    SIGNED_STEP,
    UNSIGNED_STEP,
    Settings,
    adam8_reference,
    blocks_of,
    decode,
    encode,
    lots,
)
from flatout.optim.adamw import EightBitAdamW
from tests.made_optimizers import made_optimizers

VOCAB = 71
MODEL = ModelConfig(layers=1, width=64, heads=2, context=8, bias=True)
KINDS = {"fp32": {}, "8bit": {"state": "8bit"}, "host": {"offload": True}}


def make(kind: str, *, fused: bool = True, seed: int = 1, **more) -> tuple[GPT, TrainStep]:
    model = build_model(MODEL, VOCAB, seed=seed)
    rates = more.pop("rates", [1e-2, 2e-2, 3e-2, 4e-2])
    return model, TrainStep(
        model,
        made_optimizers(model, OptimConfig(), rates=rates, fused=fused, **KINDS[kind]),
        clip=0.05,
        micro_batch=4,
        **more,
    )


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 8, 8), generator=generator)
    return tokens, targets


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- the number format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signed", "step"), [(True, SIGNED_STEP), (False, UNSIGNED_STEP)])
def test_values_come_back_within_half_a_step(signed, step):
    generator = torch.Generator().manual_seed(0)
    x = 10 ** (torch.rand(3000, generator=generator) * 4 - 9)  # four decades: 2^-13.3
    x = x * torch.where(torch.rand(3000, generator=generator) < 0.5, -1.0, 1.0) if signed else x
    codes, scales = encode(x, signed=signed)
    assert (codes.shape, codes.dtype, scales.dtype) == ((blocks_of(3000), BLOCK), torch.uint8, torch.int16)
    back = decode(codes, scales, 3000, signed=signed)
    assert ((back - x).abs() / x.abs()).max() <= (2**step - 1) / (2**step + 1) * 1.01
    again = decode(*encode(back, signed=signed), 3000, signed=signed)
    assert torch.equal(again, back), "a value that does not change is stored again without error"


def test_rounding_by_lot_is_right_on_average():
    x = torch.logspace(-4, 0, 256)
    total = torch.zeros_like(x)
    for step in range(2000):
        total += decode(*encode(x, signed=False, lot_N=lots(256, torch.tensor(float(step)))[1]), 256, signed=False)
    assert ((total / 2000 - x) / x).abs().max() < 6e-3


def test_a_slow_second_moment_moves():
    """A change of a thousandth a step is less than any step of the grid: rounding to the nearest would lose it."""
    x = torch.ones(BLOCK)
    for step in range(2000):
        lot = lots(BLOCK, torch.tensor(float(step)))[1]
        x = decode(*encode(0.999 * x, signed=False, lot_N=lot), BLOCK, signed=False)
    assert x.mean() == pytest.approx(0.999**2000, rel=0.2)


def test_zeros_tiny_and_huge_values():
    x = torch.zeros(600)
    assert torch.equal(decode(*encode(x, signed=True), 600, signed=True), x)
    x[0], x[1], x[300] = 1e30, 1e-30, 1e-44
    back = decode(*encode(x, signed=False), 600, signed=False)
    assert back[0] == pytest.approx(1e30, rel=0.04)
    assert 0 < back[1] < 1e24, "what is divided by never becomes zero while it is not"
    assert back[300] == 0.0, "below fp32's own grid"
    assert (back[2:] == 0.0).all()
    assert decode(*encode(x, signed=True), 600, signed=True)[1] == 0.0


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_the_first_8bit_update_is_torchs(fused):
    """Moments start at zero, so nothing has been rounded yet."""
    model, step = make("8bit", fused=fused)
    twin, plain = make("fp32", fused=fused)
    step(*batch())
    plain(*batch())
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_the_update_on_the_host_is_torchs(fused):
    model, step = make("host", fused=fused)
    twin, plain = make("fp32", fused=fused)
    for seed in range(6):
        ours, theirs = step(*batch(seed)), plain(*batch(seed))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_8bit_moments_stay_near_torchs():
    model, step = make("8bit", rates=[2e-3])
    twin, plain = make("fp32", rates=[2e-3])
    for seed in range(30):
        ours, theirs = step(*batch(seed % 3)), plain(*batch(seed % 3))
        assert abs(ours[0] - theirs[0]) < 0.02
    (narrow,), (wide,) = step.optimizer.optimizers, plain.optimizer.optimizers
    assert isinstance(narrow, EightBitAdamW)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        mine, exact = narrow.state[p], wide.state[q]
        assert torch.equal(mine["step"], exact["step"])
        if narrow.quantised(p):
            assert mine["exp_avg"].dtype == torch.uint8
            total = sum(value.nbytes for key, value in mine.items() if key != "step")
            assert total <= p.numel() * 2.02 + BLOCK * 2
        else:
            assert mine["exp_avg"].dtype == torch.float32, "small tensors keep fp32"


@pytest.mark.parametrize("kind", ["8bit", "host"])
@pytest.mark.parametrize("fused", [True, False])
def test_nothing_moves_on_a_non_finite_gradient(kind, fused):
    model, step = make(kind, fused=fused)
    step(*batch())
    before = weights(model)
    moments = {name: value.clone() for name, value in step.optimizer.tensors().items()}
    handle = model.get_parameter("norm.weight").register_hook(lambda grad: grad * float("nan"))
    assert step(*batch(1))[2] == 0.0
    handle.remove()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, moments[name]) for name, value in step.optimizer.tensors().items())
    report = step(*batch(1))
    assert report[2] == 1.0
    assert report[3] == pytest.approx(0.02), "the schedule did not move either"


@pytest.mark.parametrize("kind", ["8bit", "host"])
def test_fp16s_loss_scale_cancels_out(kind):
    scaled, step = make(kind, loss_scale=LossScale.start(torch.device("cpu")))
    plain, twin = make(kind)
    for seed in range(3):
        torch.testing.assert_close(step(*batch(seed))[:4], twin(*batch(seed))[:4], rtol=1e-3, atol=1e-5)
    for (name, mine), theirs in zip(scaled.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs[1], rtol=1e-2, atol=2e-3, msg=name)


def test_the_host_notices_weights_that_somebody_else_wrote():
    model, step = make("host")
    step(*batch())
    with torch.no_grad():
        model.embedding.weight.fill_(0.5)
    step(*batch(1))
    assert (model.embedding.weight - 0.5).abs().max() < 0.1


# --- saving and restoring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "8bit", "host"])
def test_saved_and_restored_it_goes_on_bit_for_bit(kind):
    model, step = make(kind)
    for seed in range(3):
        step(*batch(seed))
    other, fresh = make(kind, seed=9)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    saved = {name: value.clone() for name, value in step.optimizer.tensors().items()}
    fresh.optimizer.assign(saved, "a file")
    fresh.updates.copy_(step.updates)
    back = fresh.optimizer.tensors()
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    for seed in range(3, 6):
        assert torch.equal(step(*batch(seed)), fresh(*batch(seed)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_host_goes_on_with_moments_of_the_device():
    model, step = make("fp32")
    for seed in range(3):
        step(*batch(seed))
    other, fresh = make("host")
    fresh.optimizer.assign(step.optimizer.tensors(), "the checkpoint")
    fresh.updates.copy_(step.updates)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    assert torch.equal(fresh(*batch(3)), step(*batch(3)))
    for (name, a), b in zip(other.named_parameters(), model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6, name


@pytest.mark.parametrize(("origin", "target"), [("fp32", "8bit"), ("8bit", "fp32"), ("8bit", "host")])
def test_moments_of_another_kind_are_refused(origin, target):
    _, step = make(origin)
    step(*batch(0))
    _, fresh = make(target)
    with pytest.raises(CheckpointError, match="this optimizer needs"):
        fresh.optimizer.assign(step.optimizer.tensors(), "the checkpoint")


def test_state_of_another_model_is_refused():
    _, step = make("8bit")
    with pytest.raises(CheckpointError, match=r"unknown blocks\.7"):
        step.optimizer.assign({"blocks.7.weight.exp_avg": torch.zeros(1)}, "the checkpoint")


def test_all_moments_or_none(monkeypatch):
    """Memory that runs out halfway leaves no half of a state behind."""
    for kind in KINDS:
        _, step = make(kind)
        (optimizer,) = step.optimizer.optimizers
        real, left = optimizer.fresh_state, [3]

        def failing(parameter, real=real, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("no memory")
            return real(parameter)

        monkeypatch.setattr(optimizer, "fresh_state", failing)
        with pytest.raises(torch.OutOfMemoryError):
            step.optimizer.create_state()
        assert not step.optimizer.tensors()


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 255, 256, 4099])
def test_the_kernel_equals_the_plain_form(count):
    pytest.importorskip("triton")
    from flatout.ops.kernels.updates import adam8

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(count)
    blocks = blocks_of(count)
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    states = []
    for _ in range(2):
        state = [torch.zeros(blocks, BLOCK, dtype=torch.uint8), torch.full((blocks,), -30000, dtype=torch.int16)]
        states.append([torch.ones(count).to(device), *(x.clone().to(device) for x in (*state, *state))])
    for step in range(1, 6):
        g = (torch.randn(count, generator=generator) * torch.rand(count, generator=generator) ** 6).to(device)
        skip = 1.0 if step == 3 else 0.0
        if skip:
            g[0] = float("nan")
        before = [x.clone() for x in states[0]]
        numbers = [0.01, 1 - 0.9**step, (1 - 0.95**step) ** 0.5, 4.0, skip, float(step)]
        scalars = torch.tensor(numbers, device=device)
        for update, (weight, *codes) in zip((adam8, adam8_reference), states, strict=True):
            update(weight, g, codes, scalars, Settings(**settings))
        if skip:
            assert all(torch.equal(a, b) for a, b in zip(states[0], before, strict=True))
        torch.testing.assert_close(states[0][0], states[1][0], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(states[0][1:], states[1][1:], strict=True):
            # logarithms may round differently, and then a lot falls differently: rarely, and by one step of the grid
            assert (mine != theirs).float().mean() < 0.01
        states[1] = [x.clone() for x in states[0]]
