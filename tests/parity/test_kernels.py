"""Every Triton kernel against plain mathematics in float64: outputs and gradients, odd shapes, hostile memory.

Without a GPU the kernels run in Triton's interpreter, with one they are compiled; the tests are the same.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig
from flatout.model.operations import Rotary
from flatout.ops.kernels import activation as activation_module
from flatout.ops.kernels.activation import KINDS, activate, activate_backward, activated_linear, linear_gelu
from flatout.ops.kernels.adapters import SwigluPass, add_adapter_gradients, by_our_kernel, by_products
from flatout.ops.kernels.cross_entropy import cross_entropy_rows
from flatout.ops.kernels.heads import pack_heads, project_heads
from flatout.ops.kernels.linear import linear
from flatout.ops.kernels.rotary import prepare_heads
from flatout.ops.kernels.stream import add_norm, dropout, embed
from flatout.ops.linear_cross_entropy import linear_cross_entropy
from flatout.ops.lora import LoraLayout, LoraPart
from flatout.ops.reference import IGNORED
from tests.parity.checking import (
    DEVICES,
    assert_near,
    compare,
    draw,
    rounded,
    shapes_and_types,
    strided,
)

# The interpreter computes masked lanes too, and numpy tells of every infinity in them.
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("device", DEVICES),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5


# --- norm and residual addition ---------------------------------------------------------------------------------


def norm_reference(x, branch, branch_bias, weight, bias, *, centred, stored):
    if branch is not None:
        x = x + branch if branch_bias is None else x + branch + branch_bias
        x = rounded(x, stored)
    n = x - x.mean(-1, keepdim=True) if centred else x
    h = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + EPS)
    h = h if weight is None else h * weight
    return x, h if bias is None else h + bias


@pytest.mark.grid
@pytest.mark.parametrize(
    ("rows", "width", "types"),
    shapes_and_types(
        [(1, 1), (3, 3), (6, 48), (2, 768), (3, 1000), (2, 2050)],
        [(FP32, FP32), (FP32, FP16), (BF16, BF16), (FP32, BF16)],
        more=(17, 100),
        many=(130, 100),
    ),
)
def test_add_norm(rows, width, types, device):
    stream, product = types
    kinds = [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, False, False),
        (True, True, False, True),
        (False, False, False, False),
        (False, True, False, False),
        (False, True, True, None),
        (True, True, False, None),
    ]
    for centred, has_branch, has_branch_bias, has_bias in kinds if stream == product and width < 100 else kinds[:2]:
        inputs = [
            draw(rows, width, dtype=stream, device=device),
            draw(rows, width, dtype=product, device=device, seed=1) if has_branch else None,
            draw(width, device=device, seed=2) if has_branch_bias else None,
            draw(width, device=device, seed=3) if has_bias is not None else None,  # nor has it weights
            draw(width, device=device, seed=4) if has_bias else None,
        ]
        compare(
            lambda *values, centred=centred: add_norm(*values, centred=centred, eps=EPS, dtype=product),
            lambda *values, centred=centred: norm_reference(*values, centred=centred, stored=stream),
            inputs,
            dtype=product,
            # A variance of nothing multiplies rounding by 1/sqrt(eps); three values of a row are nearly that.
            slack=1.0 if width > 3 else 20.0,
        )


@pytest.mark.grid
@pytest.mark.parametrize("types", [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize(("scaled", "rate"), [(True, 0.0), (False, 0.3), (True, 0.3)])
def test_add_norm_with_a_scale_and_dropout(types, scaled, rate, device):
    """The mask is that of `dropout` with the same seed."""
    stream, product = types
    rows, width, seed = 9, 40, torch.tensor(77, device=device)
    kept = dropout(torch.ones(rows, width, device=device), seed, rate).double() if rate else 1.0
    for centred, has_bias in ((True, True), (False, False)):
        inputs = [
            draw(rows, width, dtype=stream, device=device),
            draw(rows, width, dtype=product, device=device, seed=1),
            draw(width, device=device, seed=2) if has_bias else None,
            draw(width, device=device, seed=3),
            draw(width, device=device, seed=4) if centred else None,
            draw(width, device=device, seed=6) if scaled else None,
        ]

        def fast(*values, centred=centred):
            how = {"centred": centred, "eps": EPS, "dtype": product, "dropout": rate, "seed": seed if rate else None}
            return add_norm(*values[:5], **how, scale=values[5])

        def slow(x, branch, bias, weight, own_bias, scale, centred=centred):
            branch = (branch if bias is None else branch + bias) * kept
            branch = branch if scale is None else branch * scale
            return norm_reference(x, branch, None, weight, own_bias, centred=centred, stored=stream)

        compare(fast, slow, inputs, dtype=product)


def test_dropout_counts(device):
    x = torch.ones(64, 500, device=device, requires_grad=True)
    seeds = [torch.tensor(seed, device=device) for seed in (3, 4, 2**61)]
    results = [dropout(x, seed, 0.25) for seed in seeds]
    for y in results:
        assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
        assert (y == 0).float().mean(0).std() < 0.08, "no column is dropped more often than others"
    assert not torch.equal(results[0], results[1])
    assert torch.equal(dropout(x, seeds[0], 0.25), results[0])
    (gradient,) = torch.autograd.grad(results[0].sum(), x)
    assert torch.equal(gradient, results[0])


def test_add_norm_of_values_far_from_zero(device):
    """A variance from a difference of large numbers would be noise here."""
    x = (draw(5, 300, device=device).detach() + 1000.0).requires_grad_()
    weight = draw(300, device=device, seed=1)
    compare(
        lambda x, w: add_norm(x, None, None, w, None, centred=True, eps=EPS, dtype=FP32)[1],
        lambda x, w: norm_reference(x, None, None, w, None, centred=True, stored=FP32)[1],
        [x, weight],
        dtype=FP32,
        slack=20.0,
    )


def test_add_norm_takes_strided_inputs(device):
    x, branch = strided(draw(7, 48)).to(device), strided(draw(7, 48, seed=1)).to(device)
    x, branch = strided(x).requires_grad_(), strided(branch).requires_grad_()
    weight = draw(48, device=device, seed=2)
    compare(
        lambda x, b, w: add_norm(x, b, None, w, None, centred=False, eps=EPS, dtype=FP32),
        lambda x, b, w: norm_reference(x, b, None, w, None, centred=False, stored=FP32),
        [x, branch, weight],
        dtype=FP32,
    )


@pytest.mark.parametrize("used", [0, 1])
def test_add_norm_when_only_one_result_is_used(used, device):
    inputs = [draw(5, 48, device=device, seed=i) for i in (0, 1)]
    inputs += [draw(48, device=device, seed=2), draw(48, device=device, seed=3), draw(48, device=device, seed=4)]
    out = add_norm(*inputs, centred=True, eps=EPS, dtype=FP32)[used]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = norm_reference(*exact, centred=True, stored=FP32)[used]
    sent = draw(5, 48, device=device, seed=9).detach()
    mine = torch.autograd.grad(out, inputs, sent, allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, sent.double(), allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_near(a, b, FP32, "gradient")


# --- activations -------------------------------------------------------------------------------------------------


def activation_reference(pre, bias, kind):
    pre = pre if bias is None else pre + bias
    if kind == "swiglu":
        gate, value = pre.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * value
    if kind == "relu2":
        return torch.where(pre > 0, pre, 0.0).square()
    return 0.5 * pre * (1 + torch.tanh(math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)))


@pytest.mark.grid
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "dtype"),
    shapes_and_types(
        [(1, 1, 1), (9, 3, 7), (3, 1000, 3), (2, 768, 4)], [FP32, BF16], more=(40, 48, 5), many=(130, 48, 5)
    ),
)
def test_activated_linear(rows, hidden, width, kind, dtype, device):
    columns = 2 * hidden if kind == "swiglu" else hidden
    kinds = [(True, False), (True, True), (False, False)]
    for has_bias, keep in kinds if dtype == FP32 and hidden < 40 else kinds[:1]:
        inputs = [
            draw(rows, columns, dtype=dtype, device=device),
            draw(columns, device=device, seed=1) if has_bias else None,
            draw(width, hidden, device=device, seed=2, scale=hidden**-0.5),
        ]
        compare(
            lambda *values, keep=keep: activated_linear(*values, kind=kind, keep=keep),
            lambda pre, bias, weight: activation_reference(pre, bias, kind) @ weight.T,
            inputs,
            dtype=dtype,
            slack=1.0 if hidden > 1 else 4.0,
        )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("in_product", [True, False])
def test_an_mlp_whose_first_product_takes_gelu_along(in_product, keep, device, monkeypatch):
    """What cuBLASLt does in large products, done here by torch."""

    def gelu_too(a, b, bias, other_way):
        pre = a @ b + bias
        return (pre, F.gelu(pre, approximate="tanh")) if in_product else None

    monkeypatch.setattr(activation_module, "multiply_gelu", gelu_too)

    def mlp(x, up, bias, down):
        pre, active = linear_gelu(x, up, bias)
        assert (active is not None) == in_product
        return activated_linear(pre, bias, down, kind="gelu", keep=keep, active=active)

    inputs = [draw(6, 5, device=device), draw(9, 5, device=device, seed=1), draw(9, device=device, seed=2)]
    compare(
        mlp,
        lambda x, up, bias, down: activation_reference(x @ up.T, bias, "gelu") @ down.T,
        [*inputs, draw(4, 9, device=device, seed=3)],
        dtype=FP32,
        slack=4.0,
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_activation_of_large_and_tiny_values(kind, device):
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, 30.0, -30.0, 300.0, -300.0, 1e4, -1e4], device=device)
    pre = torch.stack([values, values.flip(0)]).contiguous()
    exact = pre.double().requires_grad_()
    expected = activation_reference(exact, None, kind)
    torch.testing.assert_close(activate(pre, None, KINDS[kind]), expected.float().detach(), rtol=1e-5, atol=1e-6)
    sent = torch.ones_like(expected)
    (theirs,) = torch.autograd.grad(expected, exact, sent)
    mine, _, again = activate_backward(sent.float(), pre, None, KINDS[kind], again=True)
    torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, expected.float().detach(), rtol=1e-5, atol=1e-6)


# --- linear layers and heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 1, 1), (17, 48, 100), (130, 3, 7)])
def test_linear(rows, width, out, dtype, device):
    x = draw(rows, width, dtype=dtype, device=device)
    weight = draw(out, width, device=device, seed=1, scale=width**-0.5)
    compare(linear, lambda x, w: x @ w.T, [x, weight], dtype=dtype, slack=2.0)
    compare(linear, lambda x, w: x @ w.T, [strided(x).requires_grad_(), weight], dtype=dtype, slack=2.0)


def test_weight_gradients_are_not_rounded_to_the_products_type(device):
    """65 rows of ones: 65 steps of bf16 would end at 65, 600 rows would stop at 256."""
    x, weight = torch.ones(600, 4, dtype=BF16, device=device), torch.zeros(3, 4, device=device, requires_grad=True)
    linear(x, weight).backward(torch.ones(600, 3, dtype=BF16, device=device))
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    assert (weight.grad == 600.0).all()


@pytest.mark.grid
@pytest.mark.parametrize(("dtype", "has_bias"), [(FP32, True), (BF16, True), (BF16, False)])
@pytest.mark.parametrize(
    ("batch", "positions", "heads", "groups", "size", "width"),
    [(1, 1, 1, 1, 1, 1), (2, 9, 4, 2, 3, 5), (1, 5, 6, 1, 48, 7), (1, 60, 1, 1, 4, 3), (1, 2, 12, 12, 64, 4)],
)
def test_project_heads(batch, positions, heads, groups, size, width, has_bias, dtype, device):
    columns = (heads + 2 * groups) * size
    inputs = [
        draw(batch, positions, width, dtype=dtype, device=device),
        draw(columns, width, device=device, seed=1, scale=width**-0.5),
        draw(columns, device=device, seed=2) if has_bias else None,
    ]

    def reference(h, weight, bias):
        packed = h @ weight.T if bias is None else h @ weight.T + bias
        every = packed.view(batch, positions, heads + 2 * groups, size).transpose(1, 2)
        return every.split([heads, groups, groups], dim=1)

    compare(
        lambda h, w, b: project_heads(h, w, b, heads=heads, groups=groups)[:3],
        reference,
        inputs,
        dtype=dtype,
        slack=2.0,
    )


def test_pack_heads_keeps_every_bit(device):
    parts = [draw(2, heads, 9, 5, dtype=BF16, device=device, seed=heads).detach() for heads in (4, 2, 2)]
    expected = torch.cat([part.transpose(1, 2).reshape(18, -1) for part in parts], dim=1)
    layouts = [
        parts,
        [strided(part) for part in parts],
        [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts],
    ]
    for layout in layouts:
        packed, sums = pack_heads(layout, sums=True)
        assert torch.equal(packed, expected)
        assert sums is not None
        assert_near(sums, expected.double().sum(0), FP32, "column sums")
    assert pack_heads(parts, sums=False)[1] is None


@pytest.mark.parametrize("sums", [True, False])
def test_pack_heads_finds_gradients_that_are_packed_already(sums, device):
    whole = draw(2, 9, 8, 5, dtype=BF16, device=device).detach()
    parts = [part.transpose(1, 2) for part in whole.split([4, 2, 2], dim=2)]
    out, totals = pack_heads(parts, sums=sums)
    assert out.data_ptr() == whole.data_ptr()
    assert torch.equal(out, whole.view(18, 40))
    if totals is not None:
        assert_near(totals, out.double().sum(0), FP32, "sums")
    apart = [parts[0], parts[2], parts[1]]
    assert pack_heads(apart, sums=False)[0].data_ptr() != whole.data_ptr(), "in another order they are not"


# --- norm and rotation of queries and keys ------------------------------------------------------------------------


def heads_reference(packed, q_weight, k_weight, cos, sin, heads, groups, *, scale=1.0, normed=False):
    every = packed.transpose(1, 2)
    out = []
    for x, weight in [(every[:, :heads], q_weight), (every[:, heads : heads + groups], k_weight)]:
        if weight is not None or normed:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 if weight is None else weight) * scale
        if cos is not None:
            first, second = x.chunk(2, dim=-1)
            x = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        out.append(x)
    return (*out, every[:, heads + groups :])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("batch", "positions", "heads", "groups", "size", "dtype"),
    shapes_and_types(
        [(1, 1, 1, 1, 2), (2, 17, 4, 2, 6), (3, 5, 3, 1, 48), (2, 9, 2, 1, 128), (2, 3, 1, 1, 100)],
        [FP32, BF16],
        more=(2, 40, 12, 4, 64),
        many=(2, 130, 3, 1, 64),
    ),
)
def test_prepare_heads(batch, positions, heads, groups, size, dtype, device):
    kinds = [
        ("both", True),
        ("none", True),
        ("both", False),
        ("keys", True),
        ("weightless", True),
        ("weightless", False),
    ]
    for norm, rope in kinds if dtype == FP32 and size < 64 else kinds[:1]:
        check_heads(batch, positions, heads, groups, size, norm, rope, dtype, device)


def check_heads(batch, positions, heads, groups, size, norm, rope, dtype, device):
    rotary = Rotary(ModelConfig(width=size, heads=1, context=positions + 3))
    rotary.fill()
    cos, sin = (rotary.cos_TD.to(device), rotary.sin_TD.to(device)) if rope else (None, None)
    inputs = [
        draw(batch, positions, heads + 2 * groups, size, dtype=dtype, device=device),
        draw(size, device=device, seed=1) if norm == "both" else None,
        draw(size, device=device, seed=2) if norm in ("both", "keys") else None,
    ]
    how = {"scale": 1.0 if norm == "keys" else 1.3, "normed": norm == "weightless"}

    def fast(packed, q_weight, k_weight):
        parts = packed.transpose(1, 2).split([heads, groups, groups], dim=1)
        q, k, v = prepare_heads(*parts, q_weight, k_weight, cos, sin, EPS, **how)
        assert q.transpose(1, 2).is_contiguous()  # attention needs no copy
        assert k.transpose(1, 2).is_contiguous()
        assert v.data_ptr() == parts[2].data_ptr()
        return q, k, v

    def slow(packed, q_weight, k_weight):
        turn = (None, None) if cos is None or sin is None else (cos[:positions].double(), sin[:positions].double())
        return heads_reference(packed, q_weight, k_weight, *turn, heads, groups, **how)

    compare(fast, slow, inputs, dtype=dtype, slack=1.0 if size > 2 else 20.0)


def test_prepare_heads_without_work_changes_nothing(device):
    q, k, v = draw(2, 3, 5, 4, device=device), *(draw(2, 1, 5, 4, device=device, seed=seed) for seed in (1, 2))
    assert prepare_heads(q, k, v, None, None, None, None, EPS) == (q, k, v)


def test_prepare_heads_leaves_gradients_packed(device):
    whole = draw(2, 9, 8, 6, dtype=BF16, device=device)
    apart = [part.detach().transpose(1, 2).requires_grad_() for part in whole.split([4, 2, 2], dim=2)]
    made = prepare_heads(*apart, None, None, None, None, EPS, normed=True)
    sent = [draw(*x.shape, dtype=BF16, device=device, seed=seed).detach() for seed, x in enumerate(made)]
    gradients = torch.autograd.grad(made, apart, sent)
    out, _ = pack_heads(list(gradients), sums=False)
    assert out.data_ptr() == gradients[0].data_ptr(), "nothing is copied"
    assert torch.equal(gradients[2], sent[2])


def test_prepare_heads_of_an_odd_size(device):
    """Odd heads cannot be turned, but they can be normed."""
    qkv = [draw(2, 3, 5, 3, device=device), *(draw(2, 1, 5, 3, device=device, seed=seed) for seed in (1, 4))]
    weights = [draw(3, device=device, seed=2), draw(3, device=device, seed=3)]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    compare(
        lambda q, k, v, a, b: prepare_heads(q, k, v, a, b, None, None, EPS),
        lambda q, k, v, a, b: (norm(q, a), norm(k, b), v),
        [*qkv, *weights],
        dtype=FP32,
        slack=4.0,
    )


# --- embedding ---------------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    ("batch", "positions", "vocab", "width"),
    [(1, 1, 1, 1), (3, 17, 7, 3), (2, 5, 101, 100), (5, 9, 50, 768), (1, 3, 9, 1000)],
)
def test_embed(batch, positions, vocab, width, learned, dtype, device):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (batch, positions), generator=generator).to(device)
    table = draw(vocab, width, device=device)
    rows = draw(positions, width, device=device, seed=1) if learned else None
    compare(
        lambda table, rows: embed(tokens, table, rows, dtype),
        lambda table, rows: F.embedding(tokens, table) + (0.0 if rows is None else rows),
        [table, rows],
        dtype=dtype,
    )


def test_embed_repeats_bit_for_bit_where_that_is_asked_for(device):
    tokens = torch.randint(0, 5, (4, 9), generator=torch.Generator().manual_seed(0)).to(device)
    sent = draw(4, 9, 48, dtype=BF16, device=device, seed=3).detach()
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            table, rows = draw(5, 48, device=device), draw(9, 48, device=device, seed=1)
            embed(tokens, table, rows, BF16).backward(sent)
            results.append((table.grad, rows.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.zeros(5, 48, dtype=torch.float64, device=device)
    expected.index_add_(0, tokens.flatten(), sent.double().flatten(0, 1))
    assert_near(results[0][0], expected, FP32, "table")
    assert_near(results[0][1], sent.double().sum(0), FP32, "positions")
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_a_second_micro_batch_adds_to_the_gradient(device):
    """The kernels add to a gradient that is there already instead of handing over one of their own."""
    tokens = torch.tensor([[1, 1, 3]], device=device)
    table, weight = draw(5, 48, device=device), draw(7, 48, device=device, seed=1)
    gradients = []
    for _ in range(3):
        linear(embed(tokens, table, None, BF16), weight).backward(torch.ones(1, 3, 7, dtype=BF16, device=device))
        assert table.grad is not None
        assert weight.grad is not None
        gradients.append((table.grad.clone(), weight.grad.clone()))
    for index in (1, 2):
        for first, later in zip(gradients[0], gradients[index], strict=True):
            torch.testing.assert_close(later, first * (index + 1))


def test_embed_never_reads_beyond_its_table(device):
    table = draw(4, 48, device=device)
    x = embed(torch.tensor([[0, 4, -1, 3]], device=device), table, None, FP32)
    assert torch.equal(torch.isnan(x).all(-1)[0].cpu(), torch.tensor([False, True, True, False]))
    x.backward(torch.ones_like(x))
    assert table.grad is not None
    assert table.grad.sum(1).tolist() == [48.0, 0.0, 0.0, 48.0]


# --- cross-entropy -----------------------------------------------------------------------------------------------


def loss_reference(logits_NV, targets_N, smoothing, cap=0.0):
    """(loss per row, gradient of their sum), in float64."""
    exact = logits_NV.detach().double().requires_grad_()
    bent = cap * torch.tanh(exact / cap) if cap else exact
    log_p = bent - torch.logsumexp(bent, dim=-1, keepdim=True)
    labelled = targets_N != IGNORED
    at_target = log_p.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
    losses = torch.where(labelled, -(1 - smoothing) * at_target - smoothing * log_p.mean(-1), 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), gradient


def check_rows(logits_NV, targets_N, *, columns, smoothing, dtype, atol, cap=0.0):
    vocab = logits_NV.shape[1]
    losses, gradient = loss_reference(logits_NV, targets_N, smoothing, cap)
    padded = torch.full((logits_NV.shape[0], columns), float("nan"), dtype=dtype, device=logits_NV.device)
    padded[:, :vocab] = logits_NV.detach()
    before = padded.clone()
    options = {"vocab": vocab, "label_smoothing": smoothing, "cap": cap}
    evaluated = cross_entropy_rows(padded, targets_N, gradient=False, **options)
    assert torch.equal(padded.nan_to_num(-7.0), before.nan_to_num(-7.0))  # without a gradient nothing is written
    mine = cross_entropy_rows(padded, targets_N, gradient=True, **options)
    assert mine.dtype == FP32
    assert torch.equal(mine, evaluated)
    torch.testing.assert_close(mine.double(), losses, rtol=1e-5, atol=atol)
    # The interpreter cuts bf16 off where a GPU rounds.
    rounding = 0.0 if dtype == FP32 else 4e-3 if logits_NV.is_cuda else 8e-3
    torch.testing.assert_close(padded[:, :vocab].double(), gradient, rtol=1e-5 + rounding, atol=atol)
    assert (padded[:, vocab:] == 0).all()
    assert (padded[targets_N == IGNORED] == 0).all()
    assert (mine[targets_N == IGNORED] == 0).all()


@pytest.mark.grid
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("rows", "vocab", "pad", "dtype"),
    shapes_and_types(
        [(1, 1, 1), (3, 1, 8), (5, 7, 64), (5, 101, 8), (3, 1000, 64), (2, 17001, 8)],
        [FP32, BF16],
        more=(17, 300, 1),
        many=(130, 101, 1),
    ),
)
def test_cross_entropy_rows(rows, vocab, pad, smoothing, dtype, device):
    logits = draw(rows, vocab, dtype=dtype, device=device, scale=3.0)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    targets[1::4] = IGNORED
    columns = vocab + -vocab % pad
    check_rows(logits, targets, columns=columns, smoothing=smoothing, dtype=dtype, atol=2e-6)


@pytest.mark.parametrize(("vocab", "smoothing", "cap"), [(101, 0.2, 2.0), (17001, 0.0, 5.0)])
def test_cross_entropy_with_a_cap(vocab, smoothing, cap, device):
    logits = draw(4, vocab, device=device, scale=6.0)
    targets = torch.tensor([0, vocab - 1, IGNORED, 7], device=device)
    columns = vocab + -vocab % 8
    check_rows(logits, targets, columns=columns, smoothing=smoothing, dtype=FP32, atol=5e-6, cap=cap)


def test_cross_entropy_when_nothing_is_labelled(device):
    logits, targets = draw(5, 101, device=device), torch.full((5,), IGNORED, device=device)
    check_rows(logits, targets, columns=104, smoothing=0.1, dtype=FP32, atol=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_extreme_logits(smoothing, device):
    logits = torch.zeros(6, 101, device=device)
    logits[0] = 1e4  # all equal, and large
    logits[1] = -1e4
    logits[2, 5] = 1e4  # one wins, and is right
    logits[3, 5] = 1e4  # one wins, and is wrong
    logits[4, 7] = -1e4
    logits[5] = 1e4
    logits[5, 9] = 1e4 + 1
    targets = torch.tensor([0, 3, 5, 6, 7, 9], device=device)
    # A logit of 1e4 has steps of 1e-3 in fp32.
    check_rows(logits, targets, columns=128, smoothing=smoothing, dtype=FP32, atol=2e-3)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("pad", [1, 8, 64])
def test_fused_head_and_loss(pad, smoothing, dtype, device):
    rows, width, vocab = 13, 24, 37
    hidden = draw(rows, width, dtype=dtype, device=device)
    weight = draw(vocab, width, device=device, seed=1, scale=width**-0.5)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    targets[2:4] = IGNORED

    def fast(hidden, weight):
        with torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
            return linear_cross_entropy(
                hidden,
                weight,
                targets,
                label_smoothing=smoothing,
                pad_vocab=pad,
                path="fused",
                chunk=5,
                kernels="triton",
            )

    def slow(hidden, weight):
        log_p = torch.log_softmax(hidden @ weight.T, dim=-1)[targets != IGNORED]
        right = log_p.gather(1, targets[targets != IGNORED][:, None])
        return -(1 - smoothing) * right.sum() - smoothing * log_p.mean(-1).sum()

    compare(fast, slow, [hidden, weight], dtype=dtype, slack=2.0)


# --- the shapes of real models -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 1024, 2048])
def test_kernels_at_full_size(width, device):
    rows, heads = 4096, width // 64
    x, branch = draw(rows, width, device=device), draw(rows, width, dtype=BF16, device=device, seed=1)
    vectors = [draw(width, device=device, seed=seed) for seed in (2, 3, 4)]
    compare(
        lambda *values: add_norm(*values, centred=True, eps=EPS, dtype=BF16),
        lambda *values: norm_reference(*values, centred=True, stored=FP32),
        [x, branch, *vectors],
        dtype=BF16,
    )
    packed = draw(4, 1024, 3 * heads, 64, dtype=BF16, device=device)
    rotary = Rotary(ModelConfig(width=64, heads=1, context=1024))
    rotary.fill()
    cos, sin = rotary.cos_TD.to(device), rotary.sin_TD.to(device)

    def fast(packed, q_weight, k_weight):
        return prepare_heads(*packed.transpose(1, 2).split(heads, dim=1), q_weight, k_weight, cos, sin, EPS)

    compare(
        fast,
        lambda packed, a, b: heads_reference(packed, a, b, cos.double(), sin.double(), heads, heads),
        [packed, draw(64, device=device, seed=1), draw(64, device=device, seed=2)],
        dtype=BF16,
    )
    tokens = torch.randint(0, 50257, (4, 1024), generator=torch.Generator().manual_seed(0)).to(device)
    compare(
        lambda table, rows: embed(tokens, table, rows, BF16),
        lambda table, rows: F.embedding(tokens, table) + rows,
        [draw(50257, width, device=device), draw(1024, width, device=device, seed=1)],
        dtype=BF16,
    )


@pytest.mark.gpu
def test_cross_entropy_at_full_size(device):
    logits = draw(512, 50257, dtype=BF16, device=device, scale=4.0)
    targets = torch.randint(0, 50257, (512,), generator=torch.Generator().manual_seed(1)).to(device)
    check_rows(logits, targets, columns=50304, smoothing=0.0, dtype=BF16, atol=1e-5)


# --- gradients of adapters --------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("rows", "inputs", "parts"),
    [
        (70, 40, [(0, 24, 3, 2.0), (24, 8, 5, 2.0), (40, 8, 3, 0.5)]),
        (130, 200, [(0, 150, 16, 1.5)]),
        (9, 8, [(3, 5, 70, 1.0)]),
        pytest.param(
            5000, 1024, [(0, 1024, 16, 2.0), (1024, 128, 16, 2.0), (1152, 128, 16, 2.0)], marks=pytest.mark.gpu
        ),
        pytest.param(3001, 1000, [(0, 3000, 8, 2.0), (3000, 3000, 8, 1.0)], marks=pytest.mark.gpu),
    ],
)
def test_adapter_gradients_by_one_kernel(rows, inputs, parts, dtype, device):
    layout = LoraLayout(max(48, sum(parts[-1][:2])), tuple(LoraPart(*part) for part in parts))
    outputs, rank = layout.outputs, layout.rank
    dy = draw(rows, outputs + rank + 3, dtype=dtype, device=device).detach()[:, : outputs + rank]
    x = draw(rows, inputs + 5, dtype=dtype, device=device, seed=1).detach()[:, :inputs]
    u = draw(rows, rank, dtype=dtype, device=device, seed=2).detach()
    shapes = [(rank, inputs), *((part.rows, part.rank) for part in layout.parts)]
    start = [draw(*shape, device=device, seed=3 + i).detach() for i, shape in enumerate(shapes)]
    expected = [total.double() for total in start]
    for part, span, total in zip(layout.parts, layout.spans, expected[1:], strict=True):
        expected[0][span] += part.scale * dy[:, outputs:][:, span].double().t() @ x.double()
        total += dy[:, part.span].double().t() @ u[:, span].double()
    at_once, one_by_one = [(x, u)], [(x, None), (None, u)]
    for way, calls in itertools.product((by_our_kernel, by_products, add_adapter_gradients), (at_once, one_by_one)):
        totals = [total.clone() for total in start]
        for of_a, of_b in calls:
            way(totals, dy, of_a, of_b, layout)
        for index, (mine, theirs) in enumerate(zip(totals, expected, strict=True)):
            assert_near(mine, theirs, FP32, f"{way.__name__} {len(calls)} {index}", 10.0)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("rows", "hidden", "ranks"),
    [
        (70, 40, (3, 5, 16)),
        (130, 72, (16, 16, 16)),
        pytest.param(5000, 2816, (16, 16, 16), marks=pytest.mark.gpu),
        pytest.param(3001, 1000, (8, 64, 32), marks=pytest.mark.gpu),
    ],
)
def test_swiglu_and_the_gradients_of_adapters_around_it(rows, hidden, ranks, in_place, dtype, device):
    """Every way leaves the gradient of pre, adds to the gradients of A after it and of B before it, and to no other."""
    down = LoraLayout(48, (LoraPart(0, 48, ranks[0], 1.5),))
    up = LoraLayout(2 * hidden, (LoraPart(0, hidden, ranks[1], 2.0), LoraPart(hidden, hidden, ranks[2], 2.0)))
    dout = draw(rows, hidden, dtype=dtype, device=device).detach()
    pre = draw(rows, 2 * hidden + 16, dtype=dtype, device=device, seed=1).detach()[:, : 2 * hidden]
    dy = draw(rows, 48 + ranks[0], dtype=dtype, device=device, seed=2).detach()
    u = draw(rows, up.rank, dtype=dtype, device=device, seed=3).detach()
    shapes = [(ranks[0], hidden), (48, ranks[0]), (up.rank, 32), (hidden, ranks[1]), (hidden, ranks[2])]
    start = [draw(*shape, device=device, seed=4 + i).detach() for i, shape in enumerate(shapes)]
    exact = pre.double().requires_grad_()
    gate, value = exact.split(hidden, dim=1)
    y = F.silu(gate) * value
    (dpre,) = torch.autograd.grad(y, exact, dout.double())
    expected = [total.double() for total in start]
    expected[0] += 1.5 * dy[:, 48:].double().t() @ y.detach()
    expected[3] += dpre[:, :hidden].t() @ u[:, : ranks[1]].double()
    expected[4] += dpre[:, hidden:].t() @ u[:, ranks[1] :].double()
    wide = dtype == FP32 and device == "cuda"  # which `run` does apart
    for way in (SwigluPass.apart, SwigluPass.run) if wide else (SwigluPass.apart, SwigluPass.in_one, SwigluPass.run):
        totals, mine = [total.clone() for total in start], pre.clone()
        there = SwigluPass(
            dout_NM=dout.clone(), pre_NC=mine, into_NC=mine if in_place else torch.empty_like(mine), dy_NJ=dy, u_NR=u,
            down=down, up=up, down_places=totals[:2], up_places=totals[2:],
        )  # fmt: skip
        way(there)
        assert_near(there.into_NC, dpre, dtype, f"{way.__name__} dpre")
        for index, (total, other) in enumerate(zip(totals, expected, strict=True)):
            if index in (1, 2):
                assert torch.equal(total, start[index])
            else:
                assert_near(total, other, dtype, f"{way.__name__} {index}", 10.0 if dtype == FP32 else 1.0)
