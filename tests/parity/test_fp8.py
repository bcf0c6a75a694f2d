"""8-bit products against the plain form in torch: rounding, transposes, second outputs of kernels, layers, the head.

Triton's interpreter cannot make 8-bit floats (it drops carries), so without a GPU the kernels' own logic is tested with
fp32 in place of them, and torch rounds for the rest.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig
from flatout.model.gpt import build_model
from flatout.model.narrow import NarrowWeights
from flatout.ops.kernels import fp8
from flatout.ops.kernels.activation import KINDS as KINDS_OF_ACTIVATION
from flatout.ops.kernels.activation import activate, activate_backward, activated_linear
from flatout.ops.kernels.cross_entropy import cross_entropy_rows
from flatout.ops.kernels.heads import pack_heads, project_heads
from flatout.ops.kernels.linear import linear
from flatout.ops.kernels.stream import add_norm
from flatout.ops.linear_cross_entropy import linear_cross_entropy
from flatout.ops.reference import IGNORED
from flatout.ops.scales import E4M3, NarrowLinear, Scales, Slot
from tests.parity.checking import DEVICES, draw
from tests.references import fp8_linear_reference, fp8_rounded

pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("device", DEVICES),
]

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [E4M3, torch.float8_e5m2]


def near(mine: Tensor, theirs: Tensor, relative: float) -> None:
    """The whole difference against the whole size: single elements of an 8-bit product may be far off."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    assert mine.shape == theirs.shape
    assert torch.isfinite(mine).all()
    assert (mine - theirs).norm() <= relative * theirs.norm(), f"{(mine - theirs).norm() / theirs.norm():.3g}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (130, 48), (16, 1000)])
def test_quantise(shape, dtype, kind, device):
    x = draw(*shape, dtype=dtype, device=device, scale=7.0).detach()
    narrow = fp8.quantise(x, kind, turned=True)
    assert narrow.turned_CR is not None
    assert narrow.values_RC.dtype == kind
    assert torch.equal(narrow.turned_CR.float(), narrow.values_RC.float().t())
    assert narrow.values_RC.float().abs().max() == torch.finfo(kind).max  # the whole range is used
    torch.testing.assert_close(
        narrow.values_RC.float() * narrow.unit, fp8_rounded(x, kind).float(), rtol=4e-3, atol=0.0
    )
    flat = fp8.quantise(x, kind)
    assert flat.turned_CR is None
    assert torch.equal(flat.values_RC.view(torch.uint8), narrow.values_RC.view(torch.uint8))
    again = fp8.quantise(x, kind, turned=True)
    assert again.turned_CR is not None
    fp8.quantise(-x, kind, into=again)  # where it lies
    assert torch.equal(again.values_RC.float(), -narrow.values_RC.float())
    assert torch.equal(again.turned_CR.float(), -narrow.turned_CR.float())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_quantise_of_nothing_and_of_what_is_not_a_number(kind, device):
    for value in (0.0, 1e-38):
        narrow = fp8.quantise(torch.full((16, 16), value, device=device), kind)
        assert torch.isfinite(narrow.unit)
        assert (narrow.values_RC.float() == 0).all()
    for value in (float("nan"), float("inf"), -float("inf")):
        x = draw(16, 32, device=device).detach()
        x[3, 4] = value
        narrow = fp8.quantise(x, kind)
        assert torch.isnan(narrow.values_RC.float() * narrow.unit)[3, 4], "training would not notice"


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (130, 48), (70, 100)])
def test_rounding_kernels_with_fp32_in_place_of_8_bits(shape, dtype, device):
    """Scale and the edges of blocks, apart from the rounding itself."""
    x = draw(*shape, dtype=dtype, device=device).detach()
    values_RC, unit = torch.empty(shape, device=device), torch.empty((), device=device)
    fp8._launch(x, values_RC, unit, 448.0)
    torch.testing.assert_close(unit, x.float().abs().max() / 448.0)
    torch.testing.assert_close(values_RC, x.float() * (448.0 / x.float().abs().max()))


@pytest.mark.parametrize("has_bias", [True, False])
def test_narrow_product_is_torchs_scaled_product(has_bias, device):
    a, b = draw(32, 64, device=device).detach(), draw(48, 64, device=device, seed=1).detach()
    a_8, b_8 = fp8.quantise(a, E4M3), fp8.quantise(b, E4M3)
    bias = draw(48, device=device, seed=2).detach() if has_bias else None
    mine = fp8.narrow_product(a_8.values_RC, a_8.unit, b_8.values_RC, b_8.unit, BF16, bias_M=bias)
    scaled = torch.ops.aten._scaled_mm.default
    theirs = scaled(a_8.values_RC, b_8.values_RC.t(), a_8.unit, b_8.unit, out_dtype=BF16)
    near(mine, theirs.float() + (0.0 if bias is None else bias), 6e-3)
    near(mine, fp8_rounded(a, E4M3) @ fp8_rounded(b, E4M3).t() + (0.0 if bias is None else bias), 6e-3)
    out = torch.zeros(32, 48, dtype=BF16, device=device)
    fp8.narrow_product(a_8.values_RC, a_8.unit, b_8.values_RC, b_8.unit, BF16, out=out, bias_M=bias)
    assert torch.equal(out, mine)


# --- delayed scales ---------------------------------------------------------------------------------------------------


def slots(device: str, *scales: float, recording: bool = True, kind: torch.dtype = E4M3) -> list[Slot]:
    table = Scales([kind] * len(scales), torch.device(device))
    table._set(torch.tensor(scales, device=device))
    table.rounding, table.recording = True, recording
    return [slot for slot in table.slots if slot is not None]


def highest(slot: Slot) -> Tensor:
    return slot.seen.view(FP32)


def check_slot(slot: Slot, wide: Tensor) -> None:
    """What a kernel handed over is the stored tensor, rounded with the slot's scale, and its exact maximum."""
    assert torch.equal(highest(slot), wide.detach().float().abs().max())
    found, values = slot.take(wide)
    assert found
    assert values is not None
    assert values.dtype == slot.kind
    assert values.shape == wide.shape
    expected = (wide.detach().float() * slot.scale).clamp(-slot.top, slot.top).to(slot.kind)
    assert torch.equal(values.float(), expected.float())
    assert slot.take(wide) == (False, None)  # once


@pytest.mark.grid
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (130, 48)])
def test_one_pass_over_a_foreign_tensor(shape, dtype, kind, recording, device):
    slot = slots(device, 8.0, recording=recording, kind=kind)[0]
    x = draw(*shape, dtype=dtype, device=device, scale=7.0).detach()
    values = fp8.narrow_values(slot, x)
    assert values is not None
    assert torch.equal(values.float() / 8.0, fp8_rounded(x, slot.kind, 8.0).float())
    assert torch.equal(highest(slot), x.float().abs().max() if recording else torch.zeros((), device=device))
    more = fp8.narrow_values(slot, x / 2)  # less than before: the record stays
    assert more is not None
    assert torch.equal(more.float() / 8.0, fp8_rounded(x / 2, slot.kind, 8.0).float())
    assert torch.equal(highest(slot), x.float().abs().max() if recording else torch.zeros((), device=device))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_too_large_is_clamped_and_what_is_not_a_number_stays_so(dtype, kind, device):
    slot = slots(device, 4.0, kind=kind)[0]
    x = torch.tensor([[slot.top, -slot.top, 1e30, -1e30, 1e-30, 0.0, -1.5, 1.0]], dtype=dtype, device=device)
    values = fp8.narrow_values(slot, x)
    assert values is not None
    expected = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0, 0.0, -6.0 / slot.top, 4.0 / slot.top]], device=device)
    assert torch.equal(values.float(), expected * slot.top)
    assert torch.equal(highest(slot), x.float()[0, 2])
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[0, 3] = bad
        values = fp8.narrow_values(slot, x)
        assert values is not None
        assert torch.isnan(values.float()).tolist() == [[False] * 3 + [True] + [False] * 4]
        assert not torch.isfinite(highest(slot))


def test_nothing_is_rounded_before_scales_are_known(device):
    slot = slots(device, 0.0)[0]
    slot.scales.rounding = False
    x = draw(7, 50, device=device).detach()
    assert fp8.narrow_values(slot, x) is None
    assert torch.equal(highest(slot), x.abs().max())
    slot.scales.recording = False
    assert fp8.narrow_values(slot, 2 * x) is None
    assert torch.equal(highest(slot), x.abs().max())


def test_a_slot_gives_its_values_to_nobody_else(device):
    slot = slots(device, 1.0)[0]
    x, other = draw(4, 16, device=device).detach(), draw(4, 16, device=device, seed=1).detach()
    values = torch.zeros(4, 16, device=device).to(E4M3)
    for wide in (other, x[:2], x.view(torch.int32)):
        slot.hand_over(x, values)
        assert slot.take(wide) == (False, None)
    slot.hand_over(x, values)
    x += 1  # written into since
    assert slot.take(x) == (False, None)
    slot.hand_over(x, values)
    assert slot.take(x.view(2, 2, 16))[1] is values


@pytest.mark.grid
@pytest.mark.parametrize("residual", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width", "centred"), [(1, 16, True), (5, 24, False), (9, 100, True)])
def test_norm_rounds_its_output_and_the_branch_gradient(rows, width, centred, residual, device):
    slot, branch_slot = slots(device, 64.0, 2.0**10)
    x, branch = draw(rows, width, dtype=residual, device=device), draw(rows, width, dtype=BF16, device=device, seed=1)
    weight, bias = draw(width, device=device, seed=2), draw(width, device=device, seed=3)
    given = (x, branch, bias, weight, bias if centred else None)
    x_new, h = add_norm(*given, centred=centred, eps=1e-5, dtype=BF16, slot=slot, branch_slot=branch_slot)
    plain = add_norm(*given, centred=centred, eps=1e-5, dtype=BF16)
    assert torch.equal(h, plain[1])
    check_slot(slot, h)
    sent = [draw(rows, width, dtype=part.dtype, device=device, seed=4 + i).detach() for i, part in enumerate(plain)]
    inputs = [x, branch, weight, bias]
    mine = torch.autograd.grad([x_new, h], inputs, sent)
    for a, b in zip(mine, torch.autograd.grad(plain, inputs, sent), strict=True):
        assert torch.equal(a, b)
    check_slot(branch_slot, mine[1])


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["gelu", "relu2", "swiglu"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 16), (3, 530)])
def test_activation_rounds_its_output_and_its_gradient(rows, hidden, kind, dtype, device):
    slot, gradient_slot = slots(device, 64.0, 2.0**10)
    columns = 2 * hidden if kind == "swiglu" else hidden
    pre = draw(rows, columns, dtype=dtype, device=device, scale=2.0).detach()
    bias = draw(columns, device=device, seed=1).detach()
    number = KINDS_OF_ACTIVATION[kind]
    active = activate(pre, bias, number, slot)
    assert torch.equal(active, activate(pre, bias, number))
    check_slot(slot, active)
    sent = draw(rows, hidden, dtype=dtype, device=device, seed=2).detach()
    dpre, dbias, _ = activate_backward(sent, pre, bias, number, again=False, slot=gradient_slot)
    plain = activate_backward(sent, pre, bias, number, again=False)
    assert torch.equal(dpre, plain[0])
    assert torch.equal(dbias, plain[1])
    check_slot(gradient_slot, dpre)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("batch", "positions", "heads", "groups", "size"), [(1, 1, 1, 1, 8), (2, 5, 3, 1, 24)])
def test_packing_rounds_what_it_packs(batch, positions, heads, groups, size, dtype, device):
    slot = slots(device, 2.0**10)[0]
    parts = [
        draw(batch, count, positions, size, dtype=dtype, device=device, seed=i, scale=1.0 + i).detach()
        for i, count in enumerate((heads, groups, groups))
    ]
    packed, sums = pack_heads(parts, sums=True, slot=slot)
    plain = pack_heads(parts, sums=True)
    assert torch.equal(packed, plain[0])
    assert torch.equal(sums, plain[1])
    check_slot(slot, packed)


def narrow_linear(weight: Tensor, x: Slot | None = None, dy: Slot | None = None) -> NarrowLinear:
    copy = NarrowWeights().copy_of(weight, BF16 if x is None else E4M3)
    return NarrowLinear(copy=copy, generation=copy.generation, x=x, dy=dy)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_linear(dtype, device):
    x, weight = draw(2, 24, 32, dtype=dtype, device=device), draw(48, 32, device=device, seed=1)
    exact_x, exact_weight = (value.detach().float().requires_grad_() for value in (x, weight))
    x_slot, dy_slot = slots(device, 64.0, 1024.0)
    y = linear(x, weight, narrow=narrow_linear(weight, x_slot, dy_slot))
    expected = fp8_linear_reference(exact_x, exact_weight, 64.0, 1024.0)
    # The matrix unit adds up with fewer bits forward.
    near(y, expected, 1e-5 if dtype == FP32 and device == "cpu" else 8e-3)
    sent = draw(2, 24, 48, dtype=dtype, device=device, seed=2).detach()
    y.backward(sent)
    expected.backward(sent.float())
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    near(x.grad, exact_x.grad, 1e-5 if dtype == FP32 and device == "cpu" else 8e-3)
    near(weight.grad, exact_weight.grad, 1e-5)
    assert torch.equal(highest(x_slot), x.detach().float().abs().max())
    assert torch.equal(highest(dy_slot), sent.float().abs().max())


def test_linear_with_a_copy_of_its_weights_that_stays(device):
    x, weight = draw(6, 32, dtype=BF16, device=device), draw(48, 32, device=device, seed=1)
    sent = draw(6, 48, dtype=BF16, device=device, seed=2).detach()
    results = []
    for narrow in (None, narrow_linear(weight)):
        y = linear(x, weight, narrow=narrow)
        results.append([y, *torch.autograd.grad(y, [x, weight], sent)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_weights_that_change_before_backward_are_an_error(device):
    x, weight = draw(6, 32, dtype=BF16, device=device), draw(48, 32, device=device, seed=1)
    weights = NarrowWeights()
    copy = weights.copy_of(weight, BF16)
    y = linear(x, weight, narrow=NarrowLinear(copy=copy, generation=copy.generation))
    with torch.no_grad():
        weight.mul_(2.0)
    weights.copy_of(weight, BF16)
    with pytest.raises(RuntimeError, match="between this forward pass and its backward"):
        y.sum().backward()


def test_layers_with_a_linear_inside(device):
    """Queries, keys and values, and the MLP's way down, are the plain layers with 8-bit products in them."""
    h, weight, bias = (
        draw(2, 8, 32, device=device),
        draw(64, 32, device=device, seed=1),
        draw(64, device=device, seed=2),
    )
    x_slot, dy_slot, pre_slot = slots(device, 64.0, 1024.0, 64.0)
    heads = project_heads(h, weight, bias, heads=2, groups=1, narrow=narrow_linear(weight, x_slot, dy_slot))[:3]
    plain = fp8_linear_reference(h, weight, 64.0, 1024.0) + bias
    expected = plain.view(2, 8, 4, 16).transpose(1, 2).split([2, 1, 1], dim=1)
    for mine, theirs in zip(heads, expected, strict=True):
        near(mine, theirs, 8e-3)
    sent = [draw(*part.shape, device=device, seed=4).detach() for part in heads]
    for a, b in zip(
        torch.autograd.grad(heads, [h, weight, bias], sent),
        torch.autograd.grad(expected, [h, weight, bias], sent),
        strict=True,
    ):
        near(a, b, 8e-3)
    pre, down = draw(16, 64, device=device), draw(32, 64, device=device, seed=3)
    for keep in (True, False):
        narrow = narrow_linear(down, x_slot, dy_slot)
        mine = activated_linear(pre, bias, down, kind="gelu", keep=keep, narrow=narrow, slot=pre_slot)
        theirs = fp8_linear_reference(F.gelu(pre + bias, approximate="tanh"), down, 64.0, 1024.0)
        near(mine, theirs, 8e-3)
        sent = draw(16, 32, device=device, seed=5).detach()
        inputs = [pre, bias, down]
        gradients = torch.autograd.grad(mine, inputs, sent)
        for a, b in zip(gradients, torch.autograd.grad(theirs, inputs, sent), strict=True):
            near(a, b, 8e-3)
        assert pre_slot.take(gradients[0])[0], "what up's backward wants is there"


def errors(gradient: Tensor, weight: Tensor, kind: torch.dtype, off: float) -> tuple[float, float]:
    """(of the whole product, of most single rows), with a scale for a gradient that is `off` times as large."""
    table = Scales([kind], gradient.device)
    table.seen_S.copy_((off * gradient.abs().max()).view(torch.int32))
    table.update()
    exact = gradient @ weight
    error = fp8_rounded(gradient, kind, float(table.scale_S)) @ weight - exact
    rows = error.norm(dim=1) / exact.norm(dim=1)
    return float(error.norm() / exact.norm()), float(rows.quantile(0.99))


@pytest.mark.grid
@pytest.mark.parametrize("off", [1.0, 8.0])
def test_gradients_are_better_off_in_e4m3(off, device):
    """Those of a model in training, and some with tails far heavier than that. The choice of ops/kernels/fp8.py."""
    model = build_model(ModelConfig(family="gpt", layers=2, width=32, heads=2, context=16, dropout=0.0), 61, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for step in range(80):
        tokens = (torch.randint(0, 61, (16, 1), generator=generator) + 7 * torch.arange(17)) % 61
        if step == 79:
            for name, layer in model.named_modules():
                if isinstance(layer, nn.Linear) and "blocks" in name:
                    layer.register_full_backward_hook(
                        lambda layer, _, sent, name=name: found.update({name: (sent[0].flatten(0, 1), layer.weight)})
                    )
        (model(tokens[:, :-1], tokens[:, 1:]) / 256).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) == 8
    for name, (gradient, weight) in found.items():
        better, worse = (errors(gradient, weight.detach(), kind, off) for kind in KINDS)
        assert better[0] < 0.6 * worse[0], name
        assert better[1] < worse[1], name
    normal, even = torch.randn(2048, 256, generator=generator), torch.rand(2048, 256, generator=generator)
    heavy = normal / even.sqrt() * torch.exp(1.5 * torch.randn(2048, 1, generator=generator))  # tokens differ in size
    assert heavy.abs().max() > 300 * heavy.square().mean().sqrt()
    weight = torch.randn(256, 64, generator=generator)
    better, worse = (errors(heavy, weight, kind, off) for kind in KINDS)
    assert better[0] < worse[0] < 0.06


@pytest.mark.parametrize(("vocab", "smoothing"), [(101, 0.0), (101, 0.1), (9001, 0.1)])
def test_loss_kernel_writes_the_gradient_twice(vocab, smoothing, device):
    padded = F.pad(draw(7, vocab, device=device, scale=3.0).detach(), (0, -vocab % 16))
    targets = torch.tensor([0, 5, IGNORED, 100, 7, 50, IGNORED], device=device)
    kinds = [(FP32, 0.0)] if device == "cpu" else [(FP32, 0.0), (E4M3, 0.07)]
    for kind, rounding in kinds:
        gradient, narrow = padded.clone(), torch.empty(padded.shape, dtype=kind, device=device)
        options = {"vocab": vocab, "label_smoothing": smoothing, "gradient": True}
        losses = cross_entropy_rows(gradient, targets, narrow_NP=narrow, **options)
        assert torch.equal(losses, cross_entropy_rows(padded.clone(), targets, **options))
        torch.testing.assert_close(narrow.float() / 448.0, gradient, rtol=1e-5 + rounding, atol=2.3e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_head_and_loss(dtype, device):
    hidden, weight = draw(37, 32, dtype=dtype, device=device), draw(101, 32, device=device, seed=1, scale=0.3)
    targets = torch.randint(0, 101, (37,), generator=torch.Generator().manual_seed(1)).to(device)
    targets[5:8] = IGNORED

    def run(narrow: bool):
        kernels = "triton" if device == "cuda" else "torch"
        with torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
            loss = linear_cross_entropy(
                hidden, weight, targets, path="fused", chunk=16, pad_vocab=8, kernels=kernels, fp8=narrow
            )
        return loss, *torch.autograd.grad(loss, [hidden, weight])

    mine, plain = run(True), run(False)
    logits = fp8_rounded(hidden.detach().float(), E4M3) @ fp8_rounded(weight.detach(), E4M3).t()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert mine[0].item() == pytest.approx(expected.item(), rel=5e-3)
    assert mine[0].item() == pytest.approx(plain[0].item(), rel=2e-2)
    assert mine[1].dtype == hidden.dtype
    near(mine[1], plain[1], 0.08)
    near(mine[2], plain[2], 0.08)


@pytest.mark.gpu
def test_8_bit_products_at_full_size(device):
    x, weight = draw(8192, 768, dtype=BF16, device=device), draw(3072, 768, device=device, seed=1, scale=0.02)
    sent = draw(8192, 3072, dtype=BF16, device=device, seed=2).detach()
    exact_x, exact_weight = (value.detach().float().requires_grad_() for value in (x, weight))
    expected = fp8_linear_reference(exact_x, exact_weight, 32.0, 2048.0)
    expected.backward(sent.float())
    x_slot, dy_slot = slots(device, 32.0, 2048.0)
    y = linear(x, weight, narrow=narrow_linear(weight, x_slot, dy_slot))
    near(y, expected, 1e-2)
    y.backward(sent)
    near(x.grad, exact_x.grad, 1e-2)
    near(weight.grad, exact_weight.grad, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_second_outputs_at_full_size(kind, device):
    """Many programs at one record, vectors of eight, all rows."""
    h_slot, branch_slot, g_slot, dpre_slot = slots(device, 64.0, 2.0**12, 64.0, 2.0**12)
    x, branch = (draw(8192, 768, dtype=BF16, device=device, seed=seed) for seed in (0, 1))
    weight, bias = draw(768, device=device, seed=2), draw(768, device=device, seed=3)
    how = {"centred": True, "eps": 1e-5, "dtype": BF16, "slot": h_slot, "branch_slot": branch_slot}
    _, h = add_norm(x, branch, bias, weight, bias, **how)
    check_slot(h_slot, h)
    (dbranch,) = torch.autograd.grad(h, [branch], draw(8192, 768, dtype=BF16, device=device, seed=4).detach())
    check_slot(branch_slot, dbranch)
    pre = draw(8192, 6144, dtype=BF16, device=device, seed=5).detach()
    active = activate(pre, None, KINDS_OF_ACTIVATION[kind], g_slot)
    check_slot(g_slot, active)
    sent = draw(*active.shape, dtype=BF16, device=device, seed=6).detach()
    check_slot(dpre_slot, activate_backward(sent, pre, None, KINDS_OF_ACTIVATION[kind], again=False, slot=dpre_slot)[0])
    parts = [draw(8, 12, 1024, 64, dtype=BF16, device=device, seed=seed).detach() for seed in range(3)]
    dpre_slot.seen.zero_()
    check_slot(dpre_slot, pack_heads(parts, sums=True, slot=dpre_slot)[0])
    dpre_slot.seen.zero_()
    foreign = draw(8192, 768, dtype=BF16, device=device, seed=7).detach()
    dpre_slot.hand_over(foreign, fp8.narrow_values(dpre_slot, foreign))
    check_slot(dpre_slot, foreign)
