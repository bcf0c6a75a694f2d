"""Every attention backend against the reference, as far as this machine has them, and the questions asked of them."""

import functools
import itertools
import warnings

import pytest
import torch

from flatout.ops import attention as module
from flatout.ops.attention import (
    FA4,
    attention_failure,
    causal_attention,
    fa4_missing,
    packed,
    picked_kernel,
)
from flatout.ops.reference import attention_reference

CPU = torch.device("cpu")


def heads(groups: int, *, positions: int = 33, device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 16):
    generator = torch.Generator().manual_seed(groups)
    shapes = [(2, positions, count, size) for count in (4, groups, groups)]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_() for shape in shapes
    ]


def compare(backend: str, groups: int, tolerance: float, **more) -> None:
    q, k, v = heads(groups, **more)
    y = causal_attention(q, k, v, backend=backend)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    ours = torch.autograd.grad((y * weight).sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention_reference(*wide)
    theirs = torch.autograd.grad((expected * weight.double()).sum(), wide)
    for mine, other in zip((y, *ours), (expected, *theirs), strict=True):
        assert (mine.double() - other).abs().max() <= tolerance * (1 + other.abs().max())


@pytest.mark.parametrize("backend", ["sdpa", "flash", "reference"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_backends_of_a_cpu_equal_the_reference(backend, groups):
    compare(backend, groups, 1e-5)


def test_a_forced_kernel_leaves_torchs_flags_as_they_were():
    q, k, v = heads(4)
    names = ("flash_sdp_enabled", "cudnn_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
    before = [getattr(torch.backends.cuda, name)() for name in names]
    causal_attention(q, k, v, backend="flash")
    assert [getattr(torch.backends.cuda, name)() for name in names] == before
    with pytest.raises(RuntimeError):
        causal_attention(q, k, v, backend="cudnn")
    assert [getattr(torch.backends.cuda, name)() for name in names] == before, "also after an error"


@pytest.mark.parametrize("backend", ["cudnn", "fa4", "cudnn+fa4", "efficient"])
def test_decoding_never_meets_a_forced_kernel(backend):
    """Inference mode is decoding: it must work where the kernel cannot."""
    q, k, v = (x.detach() for x in heads(2))
    with torch.inference_mode():
        y = causal_attention(q, k, v, backend=backend)
    torch.testing.assert_close(y.clone(), attention_reference(q, k, v), rtol=1e-5, atol=1e-5)


def test_a_forced_kernel_works_under_the_compiler():
    forced = torch.compile(
        lambda q, k, v: causal_attention(q, k, v, backend="flash"), fullgraph=True, backend="aot_eager"
    )
    for positions in (33, 20):  # from the second length on, lengths are symbols to the compiler
        q, k, v = heads(4, positions=positions)
        torch.testing.assert_close(forced(q, k, v), causal_attention(q, k, v, backend="flash"))


def test_the_probe_says_why_not():
    shape = {"heads": 4, "groups": 2, "size": 16, "context": 32}
    for backend in ("sdpa", "reference", "flash"):
        assert attention_failure(backend, CPU, torch.float32, **shape) is None
    assert "cudnn" in (attention_failure("cudnn", CPU, torch.float32, **shape) or "")
    assert "efficient" in (attention_failure("efficient", CPU, torch.float32, **shape) or "")
    if fa4_missing() is not None:
        assert attention_failure("fa4", CPU, torch.float32, **shape) == "flash-attn-4 is not installed"


@pytest.mark.parametrize("backend", FA4)
@pytest.mark.parametrize("side_by_side", [True, False])
def test_fa4_between_its_two_kernels(side_by_side, backend, monkeypatch):
    """Stand-ins for what runs on a GPU only: layouts, what is kept, and where gradients go."""

    def forward(q_BTHD, k_BTGD, v_BTGD, *, causal, return_lse):
        assert causal
        assert return_lse
        y = attention_reference(*(x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))).transpose(1, 2)
        return y.contiguous(), torch.zeros(2, 4, 33), None, None, None

    def backward(q_BTHD, k_BTGD, v_BTGD, y_BTHD, dy_BTHD, lse_BHT, *, causal, **into):
        assert dy_BTHD.is_contiguous()
        parts = [x.detach().requires_grad_() for x in (q_BTHD, k_BTGD, v_BTGD)]
        with torch.enable_grad():
            y = attention_reference(*(x.transpose(1, 2) for x in parts)).transpose(1, 2)
        gradients = torch.autograd.grad(y, parts, dy_BTHD)
        if side_by_side:
            return [into[name].copy_(x) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)]
        assert not into
        return gradients

    def never(*_):
        raise AssertionError("the forward pass of another backend")

    parts_only = functools.partial(forward, causal=True, return_lse=True)
    monkeypatch.setattr(module, "fa4_kernels", lambda: (forward if backend == "fa4" else never, backward))
    monkeypatch.setattr(module, "_cudnn_forward", never if backend == "fa4" else lambda *parts: parts_only(*parts)[:2])
    if side_by_side:
        whole = torch.randn(2, 33, 8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        results = {}
        for name in (backend, "reference"):
            q, k, v = (part.transpose(1, 2) for part in whole.split([4, 2, 2], dim=2))
            y = causal_attention(q, k, v, backend=name)
            results[name] = (y, *torch.autograd.grad(y.square().sum(), (q, k, v)))
        for mine, other in zip(results[backend], results["reference"], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert packed([x.transpose(1, 2) for x in results[backend][1:]]) is not None
    else:
        compare(backend, 2, 1e-5)
    with pytest.raises(ValueError, match="no dropout"):
        causal_attention(*heads(2), backend=backend, dropout=0.1)


def test_the_probe_notices_a_wrong_result(monkeypatch):
    shape = {"heads": 2, "groups": 2, "size": 16, "context": 128}
    real = module._torch_attention
    monkeypatch.setattr(module, "_torch_attention", lambda *values: real(*values) + 0.1)
    assert "away from the reference" in (attention_failure("flash", CPU, torch.float32, **shape) or "")

    class Thrice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, dy):  # pyright: ignore
            return 3.0 * dy

    monkeypatch.setattr(module, "_torch_attention", lambda *values: Thrice.apply(real(*values)))
    assert "in its gradient" in (attention_failure("flash", CPU, torch.float32, **shape) or "")
    monkeypatch.setattr(module, "_torch_attention", lambda *values: real(*values) * float("nan"))
    assert "not finite" in (attention_failure("flash", CPU, torch.float32, **shape) or "")


def test_what_sdpa_picks_has_a_name():
    picked = picked_kernel(CPU, torch.float32, heads=4, groups=4, size=16, context=32)
    assert picked in ("flash", "math")


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("backend", ["sdpa", "flash", "cudnn", "efficient", "fa4", "cudnn+fa4"])
def test_backends_of_a_gpu_equal_the_reference(backend, groups):
    if backend in FA4 and fa4_missing() is not None:
        pytest.skip("flash-attn-4 is not installed")
    torch._dynamo.reset()
    shape = {"heads": 4, "groups": groups, "size": 64, "context": 256}
    assert attention_failure(backend, torch.device("cuda"), torch.bfloat16, **shape) is None
    compare(backend, groups, 2e-2, positions=256, device="cuda", dtype=torch.bfloat16, size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_backends_of_a_gpu_work_under_the_compiler(backend):
    torch._dynamo.reset()
    q, k, v = heads(4, positions=256, device="cuda", dtype=torch.bfloat16, size=64)
    forced = torch.compile(lambda q, k, v: causal_attention(q, k, v, backend=backend), fullgraph=True)
    y = forced(q, k, v)
    ours = torch.autograd.grad(y.float().square().sum(), (q, k, v))
    plain = causal_attention(q, k, v, backend="sdpa")
    theirs = torch.autograd.grad(plain.float().square().sum(), (q, k, v))
    for mine, other in zip((y, *ours), (plain, *theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("positions_first", [False, True])
def test_the_gradient_has_the_layout_of_the_result(compiled, positions_first):
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dx):  # pyright: ignore
            seen.append(dx.stride())
            return dx

    x = torch.randn(2, 3, 5, 4)
    x = (x.transpose(1, 2).contiguous().transpose(1, 2) if positions_first else x).requires_grad_()
    for turned in (False, True):
        function = module._SameLayout.apply
        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        with warnings.catch_warnings(action="ignore"):  # the compiler looks at .grad of what is no leaf
            y = function(Spy.apply(x))
        weight = torch.randn(2, 5, 3, 4).transpose(1, 2) if turned else torch.randn(2, 3, 5, 4)
        (dx,) = torch.autograd.grad((y * weight).sum(), x)
        assert torch.equal(dx, weight)
    assert seen == [x.stride()] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "cudnn"])
@pytest.mark.parametrize("positions_first", [False, True])
def test_gradients_are_right_in_whatever_layout_they_come(backend, positions_first):
    """In one process, one after the other: torch 2.11 by itself gets the second wrong with cuDNN."""
    q, k, v = heads(4, positions=192, device="cuda", dtype=torch.bfloat16, size=64)
    if not positions_first:
        q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention_reference(*wide).square().sum(), wide)
    for order in (lambda y: y, lambda y: y.transpose(1, 2).flatten(2), lambda y: y.flatten(2)):
        y = causal_attention(q, k, v, backend=backend)
        ours = torch.autograd.grad(order(y).float().square().sum(), (q, k, v))
        for mine, other in zip(ours, expected, strict=True):
            assert (mine.double() - other).abs().max() < 0.1


@pytest.mark.gpu
def test_sdpa_picks_a_fused_kernel_on_a_gpu():
    shapes = itertools.product([torch.bfloat16, torch.float16], [12, 4])
    for dtype, groups in shapes:
        picked = picked_kernel(torch.device("cuda"), dtype, heads=12, groups=groups, size=64, context=1024)
        assert picked in ("flash", "cudnn", "efficient")
