"""Every fast path against its plain reference: outputs and gradients, odd shapes."""

import warnings

import pytest
import torch

from flatout.model.layers import RMSNorm, Rotary
from flatout.ops.attention import causal_attention
from flatout.ops.linear_cross_entropy import linear_cross_entropy, padded_logits
from flatout.ops.reference import (
    IGNORED,
    attention_reference,
    linear_cross_entropy_reference,
    rms_norm_reference,
    rotate_reference,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


def assert_same(fast, slow, inputs):
    torch.testing.assert_close(fast, slow)
    weight = torch.randn(fast.shape, dtype=fast.dtype, generator=torch.Generator().manual_seed(9))
    mine = torch.autograd.grad((fast * weight).sum(), inputs)
    theirs = torch.autograd.grad((slow * weight).sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 1), (1, 9), (3, 9)])
def test_attention(heads, groups, queries, keys):
    q, k, v = draw(2, heads, queries, 6), draw(2, groups, keys, 6, seed=1), draw(2, groups, keys, 6, seed=2)
    fast = causal_attention(q, k, v, backend="sdpa")
    assert_same(fast, attention_reference(q, k, v), [q, k, v])


def test_attention_is_causal():
    q, k, v = draw(1, 2, 9, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2)
    before = causal_attention(q, k, v, backend="sdpa")
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[:, :, 5:], v2[:, :, 5:] = 100.0, -100.0
    after = causal_attention(q, k2, v2, backend="sdpa")
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:])


@pytest.mark.parametrize("pad", [1, 8, 64])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_linear_cross_entropy(pad, smoothing):
    hidden, weight = draw(11, 5), draw(13, 5, seed=1)
    targets = torch.tensor([0, 12, 3, IGNORED, 5, 6, 7, IGNORED, 9, 10, 11])
    fast = linear_cross_entropy(hidden, weight, targets, label_smoothing=smoothing, pad_vocab=pad)
    slow = linear_cross_entropy_reference(hidden, weight, targets, label_smoothing=smoothing)
    assert_same(fast, slow, [hidden, weight])


def test_all_targets_ignored_is_zero_loss_and_zero_gradient():
    hidden, weight = draw(4, 5), draw(13, 5, seed=1)
    loss = linear_cross_entropy(hidden, weight, torch.full((4,), IGNORED))
    assert loss == 0.0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, [hidden, weight]))


def test_padding_never_reaches_the_logits():
    hidden, weight = draw(4, 5), draw(13, 5, seed=1)
    padded = padded_logits(hidden, weight, 64)
    assert padded.shape == (4, 13)
    torch.testing.assert_close(padded, hidden @ weight.T)


def test_half_precision_losses_are_summed_in_fp32():
    hidden, weight = draw(300, 5).bfloat16(), draw(13, 5, seed=1).bfloat16()
    assert linear_cross_entropy(hidden, weight, torch.zeros(300, dtype=torch.int64)).dtype == torch.float32


@pytest.mark.parametrize("offset", [0, 5])
def test_rotary(offset):
    x = draw(2, 3, 7, 8)
    rotary = Rotary(8, 32, 10000.0).double()
    rotary.fill()
    assert_same(rotary(x, offset), rotate_reference(x, 10000.0, offset), [x])


def test_rotary_scores_depend_on_distance_only():
    rotary = Rotary(8, 64, 10000.0).double()
    rotary.fill()
    q, k = draw(1, 1, 1, 8).detach(), draw(1, 1, 1, 8, seed=1).detach()
    scores = [(rotary(q, position + 3) * rotary(k, position)).sum().item() for position in (0, 10, 40)]
    assert scores[0] == pytest.approx(scores[1]) == pytest.approx(scores[2])


def test_rms_norm():
    x, norm = draw(3, 4, 10), RMSNorm(10).double()
    with torch.no_grad():
        norm.weight.copy_(draw(10, seed=1))
    assert_same(norm(x), rms_norm_reference(x, norm.weight, 1e-5), [x, norm.weight])


@pytest.mark.parametrize("path", ["plain", "chunked", "fused"])
def test_every_path_keeps_its_gradients_under_the_compiler(path):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (20, 11))
    targets = torch.randint(0, 11, (20,), generator=generator)

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, path=path, chunk=8, pad_vocab=8) / 20

    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):  # torch 2.11's compiler warns about its own ways
        total = torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight)
    ours = torch.autograd.grad(total, (hidden, weight))
    theirs = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
