"""Matrix products by cuBLASLt itself, each shape with the fastest of the library's own kernels.

torch takes the first kernel that the library suggests. The library suggests several, and on an H200 the best of them
was up to 28% faster than the first. So the first product of each shape tries them all, torch's way too, on its real
operands, and the fastest does the rest. A product can also take the tanh form of gelu of what it writes, or multiply by
its derivative, which saves a pass over memory; `multiply_gelu` and `multiply_by_gelu_slope` do so where it is faster.

The library is the one that torch has loaded, called through ctypes. Contract: a product with fp32 sums, rounded once.
Which kernel wins can differ from run to run, so deterministic runs do not come here.

cuBLASLt thinks in columns: a row-major [rows, columns] tensor is its (columns × rows) matrix, and D = A·B in rows is
Dᵀ = Bᵀ·Aᵀ for it.

Shape legend: M rows, K inner size, N columns of the result.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.ops.kernels.launch import column_sums

_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _VECTOR, _INPUT, _INPUT_STRIDE, _VECTOR_TYPE = 3, 4, 7, 8, 11, 12, 26
# What a product does to its result. gelu writes its own input as well, slope reads it, and sums are those of columns.
_EPILOGUES = {"plain": 1, "bias": 4, "gelu": 164, "slope": 192, "slope and sums": 208}
_WORKSPACE_BYTES = 32 * 2**20
_CANDIDATES = 32
_BURST_MILLISECONDS = 6.0
_SMALL = 2**31  # multiply-adds below which choosing costs more than it brings


class _Kernel(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library that torch uses is in this process already, so its name finds it."""
    version = (torch.version.cuda or "0").partition(".")[0]
    for name in (f"libcublasLt.so.{version}", f"cublasLt64_{version}.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def missing() -> str | None:
    """Why products cannot come from here, or None."""
    return None if _library() is not None else "torch's cuBLASLt was not found"


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} answered {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace(device: int) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """All that decides which kernels can do a product."""

    rows: int
    inner: int
    columns: int
    a_transposed: bool
    b_transposed: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    epilogue: str
    add: bool
    device: int


class _Product:
    """One shape: its description for the library, the kernels that can do it, and the one chosen."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _COMPUTE_FP32, _TYPES[torch.float32])
        # Transposed twice: the library's A is our b, seen in columns.
        self._set(_TRANSPOSE_A, ctypes.c_int32(shape.b_transposed))
        self._set(_TRANSPOSE_B, ctypes.c_int32(shape.a_transposed))
        self._set(_EPILOGUE, ctypes.c_uint32(_EPILOGUES[shape.epilogue]))
        if shape.epilogue in ("bias", "gelu", "slope and sums"):
            vector = torch.float32 if shape.epilogue == "slope and sums" else shape.dtype
            self._set(_VECTOR_TYPE, ctypes.c_int32(_TYPES[vector]))
            self._set(_VECTOR, ctypes.c_void_p(256))  # the search for kernels looks at its alignment only
        if shape.epilogue in ("gelu", "slope", "slope and sums"):
            self._set(_INPUT, ctypes.c_void_p(256))
            self._set(_INPUT_STRIDE, ctypes.c_int64(shape.columns))
        rows, inner, columns = shape.rows, shape.inner, shape.columns
        self.a = _layout(shape.dtype, *((inner, columns) if shape.b_transposed else (columns, inner)))
        self.b = _layout(shape.dtype, *((rows, inner) if shape.a_transposed else (inner, rows)))
        self.out = _layout(shape.out_dtype, columns, rows)
        self.kernels = self._find()
        self.launch: Callable[..., None] | None = None
        self.milliseconds = float("inf")

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def _find(self) -> list[_Kernel]:
        preference, limit = ctypes.c_void_p(), ctypes.c_size_t(_WORKSPACE_BYTES)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _call("cublasLtMatmulPreferenceSetAttribute", preference, 1, ctypes.byref(limit), ctypes.c_size_t(8))
        found, count = (_Kernel * _CANDIDATES)(), ctypes.c_int()
        library = _library()
        assert library is not None
        status = library.cublasLtMatmulAlgoGetHeuristic(
            _handle(self.shape.device), self.description, self.a, self.b, self.out, self.out, preference, _CANDIDATES,
            found, ctypes.byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return list(found[: count.value]) if status == 0 else []

    def run(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> None:
        if self.launch is None:
            # What is already in `out` must survive the trials when the product adds to it.
            target = torch.empty_like(out) if self.shape.add else out
            self.choose(a, b, target, bias, other_ways=[functools.partial(by_torch, add=self.shape.add)])
        assert self.launch is not None
        self.launch(a, b, out, bias)

    def choose(self, *arguments: Tensor | None, other_ways: Sequence[Callable[..., None]] = ()) -> None:
        ways = [functools.partial(self._by_library, kernel) for kernel in self.kernels]
        self.launch, self.milliseconds = _fastest([*ways, *other_ways], *arguments)

    def _by_library(
        self, kernel: _Kernel, a: Tensor, b: Tensor, out: Tensor, vector: Tensor | None, inputs: Tensor | None = None
    ) -> None:
        if vector is not None:
            self._set(_VECTOR, ctypes.c_void_p(vector.data_ptr()))
        if inputs is not None:
            self._set(_INPUT, ctypes.c_void_p(inputs.data_ptr()))
        pointer, device = ctypes.c_void_p, self.shape.device
        one, beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if self.shape.add else 0.0)
        target = pointer(out.data_ptr())
        _call(
            "cublasLtMatmul", _handle(device), self.description, ctypes.byref(one), pointer(b.data_ptr()), self.a,
            pointer(a.data_ptr()), self.b, ctypes.byref(beta), target, self.out, target, self.out,
            ctypes.byref(kernel.algorithm), pointer(_workspace(device).data_ptr()), ctypes.c_size_t(_WORKSPACE_BYTES),
            pointer(torch.cuda.current_stream(device).cuda_stream),
        )  # fmt: skip


def by_torch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, *, add: bool) -> None:
    """The same product by torch."""
    wider = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **wider, out=out)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, **wider, out=out)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], *sizes)
    return layout


def _fastest(ways: list[Callable[..., None]], *arguments: Any) -> tuple[Callable[..., None], float]:
    """The way with the shortest time per product in bursts of some milliseconds, and that time.

    Bursts, because a large chip at full load is held by its power limit, and the kernel that wins alone on a cool chip
    need not win then. A first round finds those worth a burst; in two more they take turns, so that a drifting clock
    treats them alike.
    """
    first = {number: _milliseconds(way, arguments, 2) for number, way in enumerate(ways)}
    limit = 1.25 * min(first.values())
    near = sorted((number for number in first if first[number] <= limit), key=lambda number: first[number])[:4]
    count = _burst(first[near[0]])
    rounds = [{number: _milliseconds(ways[number], arguments, count) for number in near} for _ in range(2)]
    best = {number: min(taken[number] for taken in rounds) for number in near}
    winner = min(near, key=lambda number: best[number])
    return ways[winner], best[winner]


def _burst(milliseconds: float) -> int:
    return max(4, min(100, round(_BURST_MILLISECONDS / max(milliseconds, 1e-3))))


def _milliseconds(way: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> float:
    """Milliseconds per call; infinite for a kernel that the library suggests and then refuses."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    try:
        way(*arguments)
        start.record()
        for _ in range(count):
            way(*arguments)
        end.record()
    except RuntimeError:
        return float("inf")
    end.synchronize()
    return start.elapsed_time(end) / count


_product = functools.cache(_Product)


def _transposed(tensor: Tensor) -> bool | None:
    """False for a row-major matrix, True for the transpose of one, None for anything else."""
    rows, columns = tensor.shape
    if tensor.stride() == (columns, 1):
        return False
    return True if tensor.stride() == (1, rows) else None


def multiply(
    a_MK: Tensor, b_KN: Tensor, *, bias_N: Tensor | None = None, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """a @ b + bias of half-precision CUDA matrices; into `out`, which may be of a wider type, or added to it."""
    if out is None:
        out = torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=a_MK.dtype, device=a_MK.device)
    epilogue = "plain" if bias_N is None else "bias"
    shape = _shape_of(a_MK, b_KN, epilogue=epilogue, out_dtype=out.dtype, add=add)
    if shape is None:
        by_torch(a_MK, b_KN, out, bias_N, add=add)
    else:
        _product(shape).run(a_MK, b_KN, out, bias_N)
    return out


def multiply_gelu(
    a_MK: Tensor, b_KN: Tensor, bias_N: Tensor, other_way: Callable[[], Any]
) -> tuple[Tensor, Tensor] | None:
    """(a @ b + bias, gelu of it) by one kernel, or None where there is none or `other_way` to the same is faster."""
    shape = _shape_of(a_MK, b_KN, epilogue="gelu", out_dtype=a_MK.dtype)
    way = None if shape is None else _gelu(shape)
    if way is None or way.lost:
        return None
    out_MN = torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=a_MK.dtype, device=a_MK.device)
    sum_MN = torch.empty_like(out_MN)
    return (sum_MN, out_MN) if way.run(other_way, a_MK, b_KN, out_MN, bias_N, sum_MN) else None


def multiply_by_gelu_slope(
    a_MK: Tensor, b_KN: Tensor, inputs_MN: Tensor, other_way: Callable[[], Any]
) -> tuple[Tensor, Tensor] | None:
    """((a @ b) · gelu'(inputs), its column sums in fp32), or None where `other_way` to the same is faster."""
    shape = _shape_of(a_MK, b_KN, epilogue="slope and sums", out_dtype=a_MK.dtype)
    way = None if shape is None else _gelu(shape)
    if way is None or way.lost:
        return None
    out_MN = torch.empty_like(inputs_MN)
    sums_N = torch.empty(b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
    return (out_MN, sums_N) if way.run(other_way, a_MK, b_KN, out_MN, sums_N, inputs_MN) else None


class _Gelu:
    """One shape of a product with gelu in it: whether it pays, and how it is done."""

    def __init__(self, shape: _Shape) -> None:
        self.ways: list[tuple[_Product, Callable[..., None]]] = []
        for epilogue in ("slope and sums", "slope") if shape.epilogue == "slope and sums" else (shape.epilogue,):
            product = _product(dataclasses.replace(shape, epilogue=epilogue))
            if product.kernels:
                self.ways.append((product, _with_sums_of_ours if epilogue == "slope" else _as_it_is))
        self.lost = not self.ways

    def run(self, other_way: Callable[[], Any], *arguments: Tensor) -> bool:
        """Does it and says so, or says that the other way is faster. The first call tries every way."""
        if self.ways[0][0].launch is None:
            times = []
            for product, whole in self.ways:
                product.choose(*arguments)
                assert product.launch is not None
                count = _burst(product.milliseconds)
                times.append(min(_milliseconds(whole, (product, *arguments), count) for _ in range(2)))
            other = min(_milliseconds(other_way, (), _burst(min(times))) for _ in range(2))
            self.ways = [self.ways[times.index(min(times))]]
            self.lost = other <= min(times)
        if not self.lost:
            product, whole = self.ways[0]
            whole(product, *arguments)
        return not self.lost


def _as_it_is(product: _Product, *arguments: Tensor) -> None:
    assert product.launch is not None
    product.launch(*arguments)


def _with_sums_of_ours(product: _Product, a: Tensor, b: Tensor, out: Tensor, sums: Tensor, inputs: Tensor) -> None:
    """For cards whose library multiplies by the slope but does not sum up in fp32."""
    assert product.launch is not None
    product.launch(a, b, out, None, inputs)
    column_sums(out, sums)


_gelu = functools.cache(_Gelu)


def _shape_of(a_MK: Tensor, b_KN: Tensor, *, epilogue: str, out_dtype: torch.dtype, add: bool = False) -> _Shape | None:
    """What the library must know of a product; None for one that is left to torch."""
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    a_transposed, b_transposed = _transposed(a_MK), _transposed(b_KN)
    if rows * inner * columns < _SMALL or a_transposed is None or b_transposed is None or (rows | inner | columns) % 8:
        return None
    return _Shape(
        rows=rows,
        inner=inner,
        columns=columns,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        dtype=a_MK.dtype,
        out_dtype=out_dtype,
        epilogue=epilogue,
        add=add,
        device=a_MK.get_device(),
    )
