"""Every fast path against its plain reference: outputs and gradients, odd shapes."""

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.config.schema import ModelConfig
from flatout.model.compiling import compile_counts
from flatout.model.operations import RMSNorm, Rotary, turned
from flatout.ops.attention import causal_attention, masked_attention
from flatout.ops.linear_cross_entropy import _torch_rows_loss, linear_cross_entropy, padded_logits
from flatout.ops.reference import IGNORED, attention_reference, causal_mask
from tests.references import linear_cross_entropy_reference, rms_norm_reference, rotate_reference


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
    visible = causal_mask(queries, keys, q.device).expand(2, -1, -1)
    fast = [masked_attention(q, k, v, visible)]  # as out of a cache, where there are more keys than queries
    fast += [causal_attention(q, k, v, backend="sdpa")] if queries == keys else []
    for y in fast:
        assert_same(y, attention_reference(q, k, v), [q, k, v])


def test_attention_out_of_a_cache_takes_any_layout_of_a_kernels_result(monkeypatch):
    """Some of a GPU's kernels return positions before heads, which cannot be viewed as groups of queries."""
    plain = torch.nn.functional.scaled_dot_product_attention
    q, k, v = draw(2, 6, 3, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 4, seed=2)
    expected = masked_attention(q, k, v, None)
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: plain(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert torch.equal(masked_attention(q, k, v, None), expected)


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


def test_the_heads_gradient_is_summed_in_fp32_however_many_chunks():
    """A sum over 256 chunks in bf16 would be off by percents."""
    hidden, weight = (draw(*shape, seed=seed).float().detach() for shape, seed in (((1024, 8), 0), ((16, 8), 1)))
    targets = torch.randint(16, (1024,), generator=torch.Generator().manual_seed(2))

    def gradient(chunk: int, path: str = "fused", *, narrow: bool = True) -> torch.Tensor:
        head = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            linear_cross_entropy(hidden, head, targets, path=path, chunk=chunk).backward()
        assert head.grad is not None
        assert head.grad.dtype == torch.float32
        return head.grad

    whole = gradient(1024)
    assert (gradient(4) - whole).norm() < 1e-5 * whole.norm()
    # This path rounds the gradient of each chunk, but not their sum.
    exact = gradient(1024, narrow=False)
    errors = [(gradient(chunk, "chunked") - exact).norm() / exact.norm() for chunk in (512, 4)]
    assert errors[1] < 1.5 * errors[0] < 5e-3


@pytest.mark.parametrize("path", ["plain", "chunked", "fused"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_cap_on_logits(path, smoothing):
    hidden, weight = draw(11, 5), draw(13, 5, seed=1)
    targets = torch.tensor([0, 12, 3, IGNORED, 5, 6, 7, IGNORED, 9, 10, 11])
    how = {"label_smoothing": smoothing, "cap": 1.5}
    fast = linear_cross_entropy(hidden, weight, targets, path=path, chunk=4, pad_vocab=8, **how)
    assert_same(fast, linear_cross_entropy_reference(hidden, weight, targets, **how), [hidden, weight])


def test_a_cap_is_taken_in_fp32_though_products_are_in_bf16():
    hidden, weight = (draw(*shape).detach().bfloat16() for shape in ((11, 5), (13, 5)))
    exact = 3.0 * torch.tanh(torch.nn.functional.linear(hidden, weight).float() / 3.0)
    assert torch.equal(padded_logits(hidden, weight, 1, cap=3.0), exact)


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
    rotary = Rotary(ModelConfig(width=8, heads=1, context=32)).double()
    rotary.fill()
    assert_same(turned(x, rotary(slice(offset, offset + x.shape[2]))), rotate_reference(x, 10000.0, offset), [x])


def test_rotary_angles_keep_their_digits_at_far_positions():
    rotary = Rotary(ModelConfig(width=64, heads=1, context=2**17))
    rotary.fill()
    rates_D = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles_TD = torch.arange(2**17 - 8, 2**17, dtype=torch.float64)[:, None] * rates_D
    cos_TD, sin_TD = rotary(slice(2**17 - 8, 2**17))
    torch.testing.assert_close(cos_TD, angles_TD.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin_TD, angles_TD.sin().float(), rtol=0, atol=1e-7)


def test_rotary_scores_depend_on_distance_only():
    rotary = Rotary(ModelConfig(width=8, heads=1, context=64)).double()
    rotary.fill()
    q, k = draw(1, 1, 1, 8).detach(), draw(1, 1, 1, 8, seed=1).detach()
    scores = [
        (turned(q, rotary(slice(at + 3, at + 4))) * turned(k, rotary(slice(at, at + 1)))).sum().item()
        for at in (0, 10, 40)
    ]
    assert scores[0] == pytest.approx(scores[1]) == pytest.approx(scores[2])


def test_rms_norm():
    x, norm = draw(3, 4, 10), RMSNorm(10).double()
    weight = norm.get_parameter("weight")
    with torch.no_grad():
        weight.copy_(draw(10, seed=1))
    assert_same(norm(x), rms_norm_reference(x, weight, 1e-5), [x, weight])


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rms_norm_without_weights(scale):
    x = draw(3, 4, 10).transpose(0, 1)
    norm = RMSNorm(10, weight=False, scale=scale)
    assert_same(norm(x), scale * rms_norm_reference(x, torch.ones(10, dtype=x.dtype), 1e-5), [x])


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_fused_loss_makes_none(scope, monkeypatch):
    hidden, weight, targets = draw(11, 5), draw(13, 5, seed=1), torch.arange(11)
    expected = linear_cross_entropy(hidden, weight, targets)
    made = []
    monkeypatch.setattr("flatout.ops.linear_cross_entropy._write_product", lambda *_, **__: made.append(1))
    with scope():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, path="fused", chunk=4), expected)
    assert not made


# --- head and loss under the compiler -----------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("path", ["plain", "chunked", "fused"])
def test_every_path_keeps_its_gradients_under_the_compiler(path, half):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (20, 11))
    targets = torch.randint(0, 11, (20,), generator=generator)

    def loss(hidden, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return linear_cross_entropy(hidden, weight, targets, path=path, chunk=8, pad_vocab=8) / 20

    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):  # torch 2.11's compiler warns about its own ways
        total = torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight)
    ours = torch.autograd.grad(total, (hidden, weight))
    theirs = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learning", [False, True])
def test_the_compiler_does_not_look_into_the_fused_loss(learning):
    """It would reorder the chunks, and the one of torch 2.11 fails at sums in a wider type than their products'."""
    hidden, weight = (torch.randn(n, 6, requires_grad=learning) for n in (20, 11))
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _):
        pieces = [piece for piece in graph.modules() if isinstance(piece, torch.fx.GraphModule)]
        seen.extend(str(node.target) for piece in pieces for node in piece.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    loss = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)
    loss(hidden, weight, torch.arange(20) % 11, path="fused", chunk=8, pad_vocab=8)
    assert seen.count("flatout.loss_and_gradients.default") == 1
    assert not [name for name in seen if "mm" in name or "softmax" in name]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("learning", "frozen"), [(False, False), (True, False), (True, True)])
def test_the_fused_loss_tells_the_compiler_what_it_will_return(dtype, learning, frozen):
    hidden, weight, targets = torch.randn(20, 6, dtype=dtype), torch.randn(11, 6), torch.arange(20) % 11
    how = (0.1, 8, 8, "torch", False, False, learning, frozen, 0.0)
    operation = torch.ops.flatout.loss_and_gradients.default
    torch.library.opcheck(operation, (hidden, weight, targets, *how))
    with FakeTensorMode():  # no card is needed to ask what the operation would do on one
        values = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (hidden, weight, targets)]
        promised = operation(*values, *how)
    for made, told in zip(operation(hidden, weight, targets, *how), promised, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (told.shape, told.stride(), told.dtype)
        assert told.device.type == "cuda"


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_softmax_of_a_chunk_compiled_is_the_same(smoothing, gradient, dtype):
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.tensor([0, 12, 3, IGNORED, 5, 6, 10])
    torch._dynamo.reset()
    compiled = torch.compile(_torch_rows_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    ours, theirs = logits.clone(), logits.clone()
    losses = compiled(ours, targets, 13, smoothing, gradient)
    torch.testing.assert_close(losses, _torch_rows_loss(theirs, targets, 13, smoothing, gradient))
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, logits) == (not gradient)
    if gradient:
        assert (ours[:, 13:] == 0).all()
        assert (ours[3] == 0).all()


def test_the_softmax_inside_the_fused_loss_is_compiled_once_for_each_shape(monkeypatch):
    """As on a GPU. torch watches the first call of compiled code, and a later one may be recorded as a CUDA graph."""
    shapes: list[torch.Size] = []

    def backend(graph: torch.fx.GraphModule, inputs):
        shapes.append(inputs[0].shape)
        return graph.forward

    torch._dynamo.reset()
    softmax = torch.compile(_torch_rows_loss, backend=backend, dynamic=False)
    monkeypatch.setattr("flatout.ops.linear_cross_entropy._torch_rows_loss", softmax)
    hidden, weight = (torch.randn(n, 6, requires_grad=True) for n in (20, 11))
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        loss(hidden, weight, torch.arange(20) % 11, path="fused", chunk=8, pad_vocab=8).backward()
    assert shapes == [(8, 16), (4, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_fused_loss_compiled_on_a_gpu(smoothing, dtype):
    """torch's operations alone, a padded vocabulary, several chunks of which the last is shorter."""
    tokens, width, vocab = 4000, 128, 1013
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).cuda().requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).cuda().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator).cuda()
    targets[5:50] = IGNORED

    def loss(hidden, weight):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            how = {"label_smoothing": smoothing, "path": "fused", "chunk": 1024, "pad_vocab": 64}
            return linear_cross_entropy(hidden, weight, targets, **how) / tokens

    torch._dynamo.reset()
    before = compile_counts()
    total = torch.compile(loss, fullgraph=True, dynamic=False)(hidden, weight)
    ours = torch.autograd.grad(total, (hidden, weight))
    done = compile_counts().since(before)
    assert (done.graphs, done.breaks) == (3, 0), "the whole, and the softmax of a whole and of a shorter chunk"
    expected = loss(hidden, weight)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    # A gradient of the logits may be rounded to the neighbour in half precision: compiled code has another exp.
    error = 1e-5 if dtype is None else 2e-3
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < error * other.norm()


@pytest.mark.gpu
def test_the_fused_loss_compiled_keeps_the_logits_of_one_chunk_only():
    tokens, width, vocab, chunk = 16384, 256, 50257, 1024
    hidden = torch.randn(tokens, width, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")

    def loss(hidden, weight):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return linear_cross_entropy(hidden * 2, weight, targets, path="fused", chunk=chunk, pad_vocab=64)

    torch._dynamo.reset()
    compiled = torch.compile(loss, dynamic=False)
    compiled(hidden, weight).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total = compiled(hidden, weight)
    torch.cuda.synchronize()
    assert total.requires_grad
    logits, gradients = 2 * chunk * vocab, 4 * vocab * width + 2 * tokens * width
    rounded = 2 * vocab * width + 2 * tokens * width  # weights and hidden states
    assert torch.cuda.max_memory_allocated() - before < 2 * logits + 1.1 * (gradients + rounded)


def test_a_frozen_head_gets_no_gradient_and_changes_none():
    hidden = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, targets = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 11
    targets[3] = IGNORED
    gradients = []
    for trained in (True, False):
        for pad in (1, 8):
            head = weight.clone().requires_grad_(trained)
            loss = linear_cross_entropy(hidden, head, targets, path="fused", chunk=8, pad_vocab=pad)
            node: Any = loss.grad_fn
            assert len(node.saved_tensors) == (2 if trained else 1), (
                "a gradient of the head is made for one that learns"
            )
            gradients.append(torch.autograd.grad(loss, hidden)[0])
            assert torch.equal(head.detach(), weight)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
