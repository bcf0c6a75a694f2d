"""8-bit products against the plain form in torch: rounding, transposes, layers, the head, and a short training.

Triton's interpreter cannot make 8-bit floats (it drops carries), so without a GPU the kernels' own logic is tested with
fp32 in place of them, and torch rounds for the rest.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import build_model
from flatout.ops.kernels import fp8
from flatout.ops.kernels.activation import activated_linear
from flatout.ops.kernels.cross_entropy import cross_entropy_rows
from flatout.ops.kernels.heads import project_heads
from flatout.ops.kernels.linear import linear
from flatout.ops.linear_cross_entropy import linear_cross_entropy
from flatout.ops.reference import IGNORED, fp8_linear_reference, fp8_rounded
from tests.parity.checking import DEVICES, draw

pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("device", DEVICES),
]

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [fp8.E4M3, fp8.E5M2]


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
    assert narrow.values_RC is not None
    assert narrow.turned_CR is not None
    assert narrow.values_RC.dtype == kind
    assert torch.equal(narrow.turned_CR.float(), narrow.values_RC.float().t())
    assert narrow.values_RC.float().abs().max() == torch.finfo(kind).max  # the whole range is used
    torch.testing.assert_close(
        narrow.values_RC.float() * narrow.unit, fp8_rounded(x, kind).float(), rtol=4e-3, atol=0.0
    )
    only_turned = fp8.quantise(x, kind, values=False, turned=True)
    assert only_turned.values_RC is None
    assert only_turned.turned_CR is not None
    assert torch.equal(only_turned.turned_CR.view(torch.uint8), narrow.turned_CR.view(torch.uint8))
    flat = fp8.quantise(x, kind)
    assert flat.turned_CR is None
    assert flat.values_RC is not None
    assert torch.equal(flat.values_RC.view(torch.uint8), narrow.values_RC.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_quantise_of_nothing_and_of_what_is_not_a_number(kind, device):
    for value in (0.0, 1e-38):
        narrow = fp8.quantise(torch.full((16, 16), value, device=device), kind)
        assert narrow.values_RC is not None
        assert torch.isfinite(narrow.unit)
        assert (narrow.values_RC.float() == 0).all()
    for value in (float("nan"), float("inf"), -float("inf")):
        x = draw(16, 32, device=device).detach()
        x[3, 4] = value
        narrow = fp8.quantise(x, kind)
        assert narrow.values_RC is not None
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
    a_8, b_8 = fp8.quantise(a, fp8.E4M3), fp8.quantise(b, fp8.E4M3)
    assert a_8.values_RC is not None
    assert b_8.values_RC is not None
    bias = draw(48, device=device, seed=2).detach() if has_bias else None
    mine = fp8.narrow_product(a_8.values_RC, a_8.unit, b_8.values_RC, b_8.unit, BF16, bias_M=bias)
    scaled = torch.ops.aten._scaled_mm.default
    theirs = scaled(a_8.values_RC, b_8.values_RC.t(), a_8.unit, b_8.unit, out_dtype=BF16)
    near(mine, theirs.float() + (0.0 if bias is None else bias), 6e-3)
    near(mine, fp8_rounded(a, fp8.E4M3) @ fp8_rounded(b, fp8.E4M3).t() + (0.0 if bias is None else bias), 6e-3)
    out = torch.zeros(32, 48, dtype=BF16, device=device)
    fp8.narrow_product(a_8.values_RC, a_8.unit, b_8.values_RC, b_8.unit, BF16, out=out, bias_M=bias)
    assert torch.equal(out, mine)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("dw", ["bf16", "fp8"])
def test_linear(dw, dtype, device):
    x, weight = draw(2, 24, 32, dtype=dtype, device=device), draw(48, 32, device=device, seed=1)
    exact_x, exact_weight = (value.detach().float().requires_grad_() for value in (x, weight))
    y, expected = linear(x, weight, fp8=True, dw=dw), fp8_linear_reference(exact_x, exact_weight)
    # The matrix unit adds up with fewer bits forward.
    near(y, expected, 1e-5 if dtype == FP32 and device == "cpu" else 8e-3)
    sent = draw(2, 24, 48, dtype=dtype, device=device, seed=2).detach()
    y.backward(sent)
    expected.backward(sent.float())
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    near(x.grad, exact_x.grad, 1e-5 if dtype == FP32 and device == "cpu" else 8e-3)
    near(weight.grad, exact_weight.grad, 1e-5 if dw == "bf16" else 8e-2)


def test_layers_with_a_linear_inside(device):
    """Queries, keys and values, and the MLP's way down, are the plain layers with 8-bit products in them."""
    h, weight, bias = (
        draw(2, 8, 32, device=device),
        draw(64, 32, device=device, seed=1),
        draw(64, device=device, seed=2),
    )
    heads = project_heads(h, weight, bias, heads=2, groups=1, fp8=True)
    expected = (fp8_linear_reference(h, weight) + bias).view(2, 8, 4, 16).transpose(1, 2).split([2, 1, 1], dim=1)
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
        mine = activated_linear(pre, bias, down, kind="gelu", keep=keep, fp8=True)
        theirs = fp8_linear_reference(F.gelu(pre + bias, approximate="tanh"), down)
        near(mine, theirs, 8e-3)
        sent = draw(16, 32, device=device, seed=5).detach()
        inputs = [pre, bias, down]
        for a, b in zip(
            torch.autograd.grad(mine, inputs, sent), torch.autograd.grad(theirs, inputs, sent), strict=True
        ):
            near(a, b, 8e-3)


@pytest.mark.parametrize(("vocab", "smoothing"), [(101, 0.0), (101, 0.1), (9001, 0.1)])
def test_loss_kernel_writes_the_gradient_twice(vocab, smoothing, device):
    padded = F.pad(draw(7, vocab, device=device, scale=3.0).detach(), (0, -vocab % 16))
    targets = torch.tensor([0, 5, IGNORED, 100, 7, 50, IGNORED], device=device)
    kinds = [(FP32, 0.0)] if device == "cpu" else [(FP32, 0.0), (fp8.E4M3, 0.07)]
    for kind, rounding in kinds:
        gradient, narrow = padded.clone(), torch.empty(padded.shape, dtype=kind, device=device)
        options = {"vocab": vocab, "label_smoothing": smoothing, "gradient": True}
        losses = cross_entropy_rows(gradient, targets, narrow_NP=narrow, narrow_scale=448.0, **options)
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
    logits = fp8_rounded(hidden.detach().float(), fp8.E4M3) @ fp8_rounded(weight.detach(), fp8.E4M3).t()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert mine[0].item() == pytest.approx(expected.item(), rel=5e-3)
    assert mine[0].item() == pytest.approx(plain[0].item(), rel=2e-2)
    assert mine[1].dtype == hidden.dtype
    near(mine[1], plain[1], 0.08)
    near(mine[2], plain[2], 0.08)


def train(model: nn.Module, device: str, steps: int, **autocast) -> list[float]:
    """Losses of a few steps on a text with some structure."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, 61, (16, 1), generator=generator)
        tokens = ((start + 7 * torch.arange(17)) % 61).to(device)
        with torch.autocast(device, dtype=BF16, **autocast):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 256
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


MODEL = ModelConfig(family="gpt", layers=2, width=64, heads=4, context=16, dropout=0.0)


def test_training_with_emulated_8_bit_products(device, monkeypatch):
    """Every linear layer of the blocks in 8 bits, by the reference: the losses of 30 steps stay where they were."""
    plain = train(build_model(MODEL, 61, seed=1).to(device), device, 30, enabled=False)
    half = train(build_model(MODEL, 61, seed=1).to(device), device, 30, enabled=True)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: fp8_linear_reference(x, self.weight))
    narrow = train(build_model(MODEL, 61, seed=1).to(device), device, 30, enabled=False)
    assert narrow != plain
    assert plain[-1] < plain[0] - 0.5  # it learns something
    assert max(abs(a - b) for a, b in zip(narrow, plain, strict=True)) < 0.05
    assert max(abs(a - b) for a, b in zip(narrow, half, strict=True)) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize(
    "where", [("qkv",), ("out",), ("up",), ("down",), ("head",), ("qkv", "out", "up", "down", "head")]
)
def test_training_in_8_bits(where, device):
    def run(**how):
        execution = Execution(kernels="triton", loss="fused", pad_vocab=64, **how)
        return train(build_model(MODEL, 61, seed=1, execution=execution).to(device), device, 30, enabled=True)

    half, narrow = run(), run(fp8=where)
    assert narrow != half
    assert max(abs(a - b) for a, b in zip(narrow, half, strict=True)) < 0.05


@pytest.mark.gpu
def test_8_bit_products_at_full_size(device):
    x, weight = draw(8192, 768, dtype=BF16, device=device), draw(3072, 768, device=device, seed=1, scale=0.02)
    sent = draw(8192, 3072, dtype=BF16, device=device, seed=2).detach()
    exact_x, exact_weight = (value.detach().float().requires_grad_() for value in (x, weight))
    expected = fp8_linear_reference(exact_x, exact_weight)
    expected.backward(sent.float())
    for dw in ("bf16", "fp8"):
        x.grad = weight.grad = None
        y = linear(x, weight, fp8=True, dw=dw)
        near(y, expected, 1e-2)
        y.backward(sent)
        near(x.grad, exact_x.grad, 1e-2)
        near(weight.grad, exact_weight.grad, 5e-3 if dw == "bf16" else 8e-2)
