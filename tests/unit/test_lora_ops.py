"""The adapter's product: gradients in float64, all forms against the plain one, odd shapes, poisoned memory, bf16."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.ops import lora
from flatout.ops.lora import (
    JoinedWeight,
    LoraLayout,
    LoraPart,
    dora_norm,
    lora_product,
    lora_reference,
    operands,
    wide_product,
)
from tests.parity.checking import draw, one_part, strided
from tests.parity.conftest import guarded_memory

__all__ = ["guarded_memory"]

pytestmark = pytest.mark.usefixtures("bf16_products")

# (inputs, layout): one part; three; of three the first and last with other ranks; rows that no multiple of 8 fits
LAYOUTS = {
    "whole": (16, one_part(24, 4, 0.5)),
    "qkv": (16, LoraLayout(24, (LoraPart(0, 16, 4, 2.0), LoraPart(16, 4, 4, 2.0), LoraPart(20, 4, 4, 2.0)))),
    "q and v": (13, LoraLayout(23, (LoraPart(0, 11, 3, 2.0), LoraPart(17, 6, 5, 1 / math.sqrt(5))))),
    "odd": (7, LoraLayout(5, (LoraPart(1, 3, 1, 1.0),))),
}


def values(layout: LoraLayout, inputs: int, shape=(2, 3), dtype=torch.float64, bias=True, seed=0) -> Any:
    x = draw(*shape, inputs, dtype=dtype, seed=seed + 1)
    weight = draw(layout.outputs, inputs, dtype=dtype, seed=seed + 2).detach()
    bias_O = draw(layout.outputs, dtype=dtype, seed=seed + 3).detach() if bias else None
    wide = torch.promote_types(dtype, torch.float32)
    a = draw(layout.rank, inputs, dtype=wide, seed=seed + 4)
    b = [draw(part.rows, part.rank, dtype=wide, seed=seed + 5 + i) for i, part in enumerate(layout.parts)]
    return x, weight, bias_O, a, b


def dora_values(layout: LoraLayout, weight: Tensor, a: Tensor, b: list[Tensor]):
    norm = dora_norm(weight, a, b, layout)
    magnitude = (norm * (1 + 0.3 * torch.rand_like(norm))).detach().requires_grad_()
    return magnitude, norm


def joined_of(weight, layout, a, b, dtype=None):
    joined = JoinedWeight(weight, layout, dtype)
    joined.refresh(a.detach(), [x.detach() for x in b])
    return joined


WAYS = {"in place": {}, "apart": {"in_place": False}}


@pytest.mark.grid
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_are_right_in_float64(kind, way, dora):
    inputs, layout = LAYOUTS[kind]
    how = WAYS[way]
    x, weight, bias, a, b = values(layout, inputs)
    magnitude, norm = dora_values(layout, weight, a, b) if dora else (None, None)

    def run(x, a, magnitude, *b):
        return lora_product(x, weight, bias, a, b, layout, magnitude_P=magnitude, norm_P=norm, **how)

    assert torch.autograd.gradcheck(run, (x, a, magnitude, *b), fast_mode=True)


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5,), (1,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_form_is_the_plain_one(guarded_memory, kind, way, bias, dora, shape):
    """Outputs and gradients, from memory full of NaN, of gradients that arrive strided."""
    inputs, layout = LAYOUTS[kind]
    how = WAYS[way]
    x, weight, bias_O, a, b = values(layout, inputs, shape, torch.float32, bias)
    magnitude, norm = dora_values(layout, weight, a, b) if dora else (None, None)
    options = {"magnitude_P": magnitude, "norm_P": norm}
    leaves = [x, a, *b, *([] if magnitude is None else [magnitude])]
    plain = lora_reference(x, weight, bias_O, a, b, layout, **options)
    dy = draw(*plain.shape, seed=9).detach()
    expected = torch.autograd.grad(plain, leaves, dy)
    fast = lora_product(x, weight, bias_O, a, b, layout, **how, **options)
    found = torch.autograd.grad(fast, leaves, strided(dy) if dy.ndim > 1 else dy)
    torch.testing.assert_close(fast, plain, rtol=2e-5, atol=2e-5)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_with_b_zero_it_is_the_base_product_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        for bias in (False, True):
            inputs, layout = LAYOUTS["qkv"]
            x, weight, bias_O, a, b = values(layout, inputs, (3, 5), dtype, bias)
            b = [torch.zeros_like(part) for part in b]
            base = torch.nn.functional.linear(x, weight, bias_O)
            assert torch.equal(lora_product(x, weight, bias_O, a, b, layout), base)
            norm = dora_norm(weight, a, b, layout)
            assert torch.equal(
                lora_product(x, weight, bias_O, a, b, layout, magnitude_P=norm.clone(), norm_P=norm), base
            )


def test_only_the_input_and_the_thin_product_are_kept():
    inputs, layout = 64, one_part(96, 4, 2.0)
    x, weight, _, a, b = values(layout, inputs, (128,), torch.float32, bias=False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = lora_product(x, weight, None, a, b, layout)
    with_tokens = [tuple(t.shape) for t in kept if t.shape[0] == 128]
    assert sorted(with_tokens) == [(128, 4), (128, 64)]
    y.sum().backward()
    assert weight.grad is None


def test_a_weight_that_is_trained_is_refused():
    inputs, layout = LAYOUTS["whole"]
    x, weight, bias, a, b = values(layout, inputs)
    with pytest.raises(ValueError, match="frozen"):
        lora_product(x, weight.requires_grad_(), bias, a, b, layout)


def test_frozen_adapters_get_no_gradient_but_the_input_does():
    inputs, layout = LAYOUTS["qkv"]
    x, weight, bias, a, b = values(layout, inputs)
    a, b = a.detach(), [part.detach() for part in b]
    (dx,) = torch.autograd.grad(lora_product(x, weight, bias, a, b, layout).sum(), x)
    (expected,) = torch.autograd.grad(lora_reference(x, weight, bias, a, b, layout).sum(), x)
    torch.testing.assert_close(dx, expected)


def test_dropout_is_on_the_adapters_input_alone():
    """The mask is found from the outside, and the plain form with that mask gives the same output and gradients."""
    layout = LoraLayout(12, (LoraPart(0, 6, 6, 2.0), LoraPart(8, 4, 6, 0.5)))
    x, weight, bias, a, b = values(layout, 6, (50,))
    how = {"dropout": 0.4}

    def run():
        torch.manual_seed(11)
        return lora_product(x, weight, bias, a, b, layout, **how)

    y = run()
    torch.manual_seed(11)
    keep = torch.nn.functional.dropout(torch.ones_like(x), 0.4)
    assert 0.3 < (keep == 0).double().mean() < 0.5
    plain = lora_reference(x, weight, bias, a, b, layout, keep=keep)
    torch.testing.assert_close(y, plain)
    dy = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad(y, [x, a, *b], dy), torch.autograd.grad(plain, [x, a, *b], dy), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(run(), y), "the same state of the generator, the same mask"


def test_dora_with_dropout_scales_the_dropped_product():
    layout = LoraLayout(9, (LoraPart(2, 5, 3, 2.0),))
    x, weight, bias, a, b = values(layout, 6, (40,))
    magnitude, norm = dora_values(layout, weight, a, b)
    options = {"magnitude_P": magnitude, "norm_P": norm}
    torch.manual_seed(3)
    y = lora_product(x, weight, bias, a, b, layout, dropout=0.5, **options)
    torch.manual_seed(3)
    keep = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
    factor = torch.ones(9, dtype=x.dtype)
    factor[2:7] = magnitude.detach() / norm
    delta = torch.zeros_like(weight)
    delta[2:7] = 2.0 * b[0].detach() @ a.detach()
    dropped = x.detach() * keep
    expected = x @ weight.T + bias + (factor - 1) * (dropped @ weight.T) + factor * (dropped @ delta.T)
    torch.testing.assert_close(y, expected)


def test_the_norm_is_that_of_the_adapted_rows(monkeypatch):
    inputs, layout = LAYOUTS["q and v"]
    _, weight, _, a, b = values(layout, inputs)
    monkeypatch.setattr(lora, "ROWS_AT_ONCE", 4)
    norm = dora_norm(weight, a, b, layout)
    whole = [
        weight[p.span] + p.scale * b_p @ a[s] for p, s, b_p in zip(layout.parts, layout.spans, b, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(norm, torch.cat([w.norm(dim=1) for w in whole]))
    assert not norm.requires_grad


# --- the joined buffer ------------------------------------------------------------------------------------------------


def test_the_joined_buffer_has_both_foldings_and_aligned_rows():
    inputs, layout = LAYOUTS["q and v"]
    _, weight, _, a, b = values(layout, inputs, dtype=torch.float32)
    joined = joined_of(weight, layout, a, b)
    a_RI, b_OR = operands(a, b, layout, torch.float32)
    assert torch.equal(joined.forward_OK, torch.cat([weight, b_OR], dim=1))
    assert torch.equal(joined.backward_JI, torch.cat([weight, a_RI]))
    assert joined.buffer.stride(0) * joined.buffer.element_size() % 16 == 0
    assert joined.weight_OI.untyped_storage().data_ptr() == joined.a_RI.untyped_storage().data_ptr()


def test_layouts_that_overlap_or_leave_the_matrix_are_refused():
    for parts in [(), (LoraPart(0, 9, 1, 1.0),), (LoraPart(0, 4, 1, 1.0), LoraPart(3, 2, 1, 1.0))]:
        with pytest.raises(ValueError, match="parts must"):
            LoraLayout(8, parts)


# --- narrow types -----------------------------------------------------------------------------------------------------


def peft_order(x, weight, a, b, scale):
    """result + lora_B(lora_A(x)) * scaling, every step rounded to bf16, as PEFT does under autocast."""
    base = x @ weight.T
    low = (x @ a.to(x.dtype).T) @ b.to(x.dtype).T
    return base + low * scale


@pytest.mark.parametrize("scale", [2.0, 16 / math.sqrt(12)])
def test_bf16_is_no_less_exact_than_pefts_order(scale):
    layout = one_part(192, 12, scale)
    x, weight, _, a, b = values(layout, 256, (300,), torch.bfloat16, bias=False)
    a = (a / 16).detach().requires_grad_()
    b = [(b[0] * 0.5).detach().requires_grad_()]
    exact_leaves = [t.detach().double().requires_grad_() for t in (x, a, b[0])]
    exact = lora_reference(exact_leaves[0], weight.double(), None, exact_leaves[1], [exact_leaves[2]], layout)
    dy = draw(300, 192, dtype=torch.bfloat16, seed=7).detach()
    expected = torch.autograd.grad(exact, exact_leaves, dy.double())

    def errors(y):
        found = torch.autograd.grad(y, [x, a, b[0]], dy)
        pairs = [(y.detach(), exact.detach()), *zip(found, expected, strict=True)]
        return [float((mine.double() - theirs).norm() / theirs.norm()) for mine, theirs in pairs]

    theirs = errors(peft_order(x, weight, a, b[0], scale))
    y = lora_product(x, weight, None, a, b, layout)
    assert y.dtype == torch.bfloat16
    for ours, peft, what in zip(errors(y), theirs, ("y", "dx", "dA", "dB"), strict=True):
        assert ours <= 1.02 * peft, (what, ours, peft)


def test_gradients_of_a_and_b_are_not_rounded_to_bf16():
    layout = one_part(32, 4, 1.0)
    x, weight, _, a, b = values(layout, 24, (64,), torch.bfloat16, bias=False)
    da, db = torch.autograd.grad(lora_product(x, weight, None, a, b, layout).float().square().sum(), [a, b[0]])
    for gradient in (da, db):
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float())


def test_autocast_decides_the_type_of_the_products():
    inputs, layout = LAYOUTS["qkv"]
    x, weight, bias, a, b = values(layout, inputs, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_product(x, weight, bias, a, b, layout)
        zero = lora_product(x, weight, bias, a, [torch.zeros_like(part) for part in b], layout)
        base = torch.nn.functional.linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(zero, base)
    gradients = torch.autograd.grad(y.float().sum(), [x, a, *b])
    assert [g.dtype for g in gradients] == [torch.float32] * 5


def test_adapters_may_be_bf16_too():
    inputs, layout = LAYOUTS["qkv"]
    x, weight, bias, a, b = values(layout, inputs, dtype=torch.bfloat16)
    a, b = a.detach().bfloat16().requires_grad_(), [part.detach().bfloat16().requires_grad_() for part in b]
    y = lora_product(x, weight, bias, a, b, layout)
    plain = lora_reference(*(t.double() for t in (x, weight, bias, a)), [part.double() for part in b], layout)
    assert (y.double() - plain).norm() / plain.norm() < 6e-3
    assert [g.dtype for g in torch.autograd.grad(y.sum(), [a, *b])] == [torch.bfloat16] * 4


def test_steps_for_kernels():
    narrow = torch.randn(6, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    assert torch.equal(wide_product(*narrow), narrow[0].float() @ narrow[1].float())


@pytest.mark.gpu
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_on_a_gpu_in_bf16(kind, way, dora):
    """The products with fp32 results, strided operands and mixed types are other ones there."""
    inputs, layout = LAYOUTS[kind]
    how = WAYS[way]
    x, weight, bias, a, b = values(layout, inputs, (64,), torch.bfloat16)
    x, weight, bias, a = (t.detach().cuda() for t in (x, weight, bias, a))
    b = [part.detach().cuda().requires_grad_() for part in b]
    for leaf in (x, a):
        leaf.requires_grad_()
    magnitude, norm = dora_values(layout, weight, a, b) if dora else (None, None)
    leaves = [x, a, *b, *([] if magnitude is None else [magnitude])]
    options: Any = {"magnitude_P": magnitude, "norm_P": norm}
    y = lora_product(x, weight, bias, a, b, layout, **how, **options)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    if magnitude is not None and norm is not None:
        options = {"magnitude_P": exact_leaves[-1], "norm_P": norm.double()}
    exact_b = exact_leaves[2 : 2 + len(b)]
    exact = lora_reference(exact_leaves[0], weight.double(), bias.double(), exact_leaves[1], exact_b, layout, **options)
    assert (y.double() - exact).norm() / exact.norm() < 1e-2
    # A gradient of a few numbers may be small by chance, and is then far off by its own measure: several of them count.
    found, expected = [], []
    for seed in range(16):
        dy = draw(*y.shape, dtype=y.dtype, device="cuda", seed=20 + seed).detach()
        found.append(torch.autograd.grad(y, leaves, dy, retain_graph=True))
        expected.append(torch.autograd.grad(exact, exact_leaves, dy.double(), retain_graph=True))
    for mine, theirs in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        ours, right = torch.stack(mine).double(), torch.stack(theirs)
        assert (ours - right).norm() / right.norm() < 1e-2
    assert [g.dtype for g in found[0][1:]] == [torch.float32] * (len(leaves) - 1)
