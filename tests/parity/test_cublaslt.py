"""Products by the fastest of cuBLASLt's kernels against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from flatout.ops.kernels import cublaslt


@pytest.mark.parametrize(("library", "reason"), [(None, "torch's cuBLASLt was not found"), (object(), None)])
def test_without_the_library_the_reason_is_told(monkeypatch, library, reason):
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    assert cublaslt.missing() == reason


def test_the_library_is_there_where_torch_has_cuda():
    assert (cublaslt.missing() is None) == (torch.version.cuda is not None)


@pytest.mark.parametrize("add", [False, True])
def test_torchs_way_writes_or_adds(add):
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    out = torch.full((5, 3), 2.0 if add else float("nan"))
    cublaslt.by_torch(a, b, out, None, add=add)
    torch.testing.assert_close(out, a @ b + (2.0 if add else 0.0))


def test_how_a_matrix_lies_in_memory():
    matrix = torch.randn(6, 4)
    assert cublaslt._transposed(matrix) is False
    assert cublaslt._transposed(matrix.t()) is True
    assert cublaslt._transposed(matrix[:, :3]) is False  # rows may be apart
    assert cublaslt._transposed(matrix[:, ::2]) is None
    assert cublaslt._transposed(torch.randn(4, 6)[::2]) is False
    assert cublaslt._transposed(torch.randn(4, 6)[:, :2].t()) is True


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a_transposed", "b_transposed"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("kind", ["plain", "bias", "wide", "added"])
def test_products_are_those_of_float64(dtype, a_transposed, b_transposed, kind):
    rows, inner, columns = 2048, 1024, 1536
    a = torch.randn(inner, rows, device="cuda", dtype=dtype).t() if a_transposed else None
    a = torch.randn(rows, inner, device="cuda", dtype=dtype) if a is None else a
    b = torch.randn(columns, inner, device="cuda", dtype=dtype).t() if b_transposed else None
    b = torch.randn(inner, columns, device="cuda", dtype=dtype) if b is None else b
    bias = torch.randn(columns, device="cuda", dtype=dtype) if kind == "bias" else None
    expected = a.double() @ b.double() + (0.0 if bias is None else bias.double())
    wide = torch.float32 if kind in ("wide", "added") else dtype
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=wide)
    if kind == "added":
        out = torch.randn_like(out)
        expected += out.double()
    for _ in range(2):  # the first call tries kernels, the second uses the one chosen
        before = out.clone()
        got = cublaslt.multiply(a, b, bias_N=bias, out=before, add=kind == "added")
        assert got is before
        error = (got.double() - expected).norm() / expected.norm()
        assert error < (1e-5 if wide == torch.float32 else 4e-3), f"{error:.2g}"


@pytest.mark.gpu
def test_small_and_odd_products_go_to_torch():
    before = cublaslt._product.cache_info().currsize
    for rows, inner, columns in ((3, 5, 7), (4096, 1023, 1024), (64, 64, 64)):
        a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(cublaslt.multiply(a, b), a @ b)
    assert cublaslt._product.cache_info().currsize == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_in_the_product(dtype):
    rows, inner, columns = 2048, 1024, 1536
    x, w = torch.randn(rows, inner, device="cuda", dtype=dtype), torch.randn(columns, inner, device="cuda", dtype=dtype)
    w, bias = w / inner**0.5, torch.randn(columns, device="cuda", dtype=dtype)
    expected = x.double() @ w.double().t() + bias.double()
    for _ in range(2):  # the first call tries kernels, the second uses the one chosen
        both = cublaslt.multiply_gelu(x, w.t(), bias, lambda: torch.cuda._sleep(2_000_000))
        if both is None:
            pytest.skip("this card's library has no gelu in its products")
        pre, active = both
        torch.testing.assert_close(pre.double(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(active.double(), F.gelu(expected, approximate="tanh"), rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
def test_gelu_is_left_alone_where_another_way_is_faster():
    x, w = (torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        assert cublaslt.multiply_gelu(x, w.t(), bias, lambda: None) is None


@pytest.mark.gpu
def test_products_of_matrices_whose_rows_are_apart():
    rows, inner, columns, rank = 2048, 1024, 1536, 24
    wide_a = torch.randn(rows, inner + rank, device="cuda", dtype=torch.bfloat16)
    wide_b = torch.randn(columns + rank, inner + rank, device="cuda", dtype=torch.bfloat16)
    before = cublaslt._product.cache_info().currsize
    for a, b in [(wide_a, wide_b[:columns].t()), (wide_a[:, :inner], wide_b[:columns, :inner].t())]:
        wide_out = torch.full((rows, columns + rank), 7.0, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            cublaslt.multiply(a, b, out=wide_out[:, :columns])
        expected = a.double() @ b.double()
        assert (wide_out[:, :columns].double() - expected).norm() / expected.norm() < 4e-3
        assert (wide_out[:, columns:] == 7.0).all()
    dy = torch.randn(rows, columns + rank, device="cuda", dtype=torch.bfloat16)
    dx = cublaslt.multiply(dy, wide_b[:, :inner])
    expected = dy.double() @ wide_b[:, :inner].double()
    assert (dx.double() - expected).norm() / expected.norm() < 4e-3
    assert cublaslt._product.cache_info().currsize == before + 3, "none of them was left to torch"
