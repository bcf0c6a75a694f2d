"""Matrix products by cuBLASLt, each shape with the fastest of the library's kernels.

torch uses the first kernel that the library suggests. The library suggests several, and on an H200 the best one was up
to 28% faster than the first. So the first product of each shape times all of them, and torch's product, on the real
operands; the fastest is used from then on. A kernel can also apply the tanh form of gelu, which saves a pass over
memory; `multiply_gelu` uses it if that is faster.

The library is the one that torch has loaded, called through ctypes. Contract: products with fp32 sums, rounded once.
The fastest kernel can differ from run to run, so deterministic runs do not use this module.

cuBLASLt is column-major: a row-major [rows, columns] tensor is a (columns × rows) matrix to it, and D = A·B becomes
Dᵀ = Bᵀ·Aᵀ.

Shape legend: M rows, K inner size, N columns of the result.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _INPUT, _INPUT_STRIDE, _BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26
_PLAIN, _WITH_BIAS, _GELU_WITH_BIAS = 1, 4, 164  # epilogues; the last writes its input as well
_WORKSPACE_BYTES = 32 * 2**20
_CANDIDATES = 32
_BURST_MILLISECONDS = 6.0
_SMALL = 2**31  # multiply-adds: tuning smaller products takes more time than it saves


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
    """torch has loaded the library already, so it is found by its name."""
    version = (torch.version.cuda or "0").partition(".")[0]
    for name in (f"libcublasLt.so.{version}", f"cublasLt64_{version}.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def missing() -> str | None:
    """Why cuBLASLt cannot be used, or None."""
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
    """All that determines which kernels can compute a product."""

    rows: int
    inner: int
    columns: int
    a_transposed: bool
    b_transposed: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    add: bool
    device: int
    strides: tuple[int, int, int]  # from row to row, or from column to column, of a, b and the result
    gelu: bool = False


class _Product:
    """A shape: its description for the library, the suggested kernels, and the chosen one."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _COMPUTE_FP32, _TYPES[torch.float32])
        # The library's A is our b in column-major order.
        self._set(_TRANSPOSE_A, ctypes.c_int32(shape.b_transposed))
        self._set(_TRANSPOSE_B, ctypes.c_int32(shape.a_transposed))
        epilogue = _GELU_WITH_BIAS if shape.gelu else _WITH_BIAS if shape.bias else _PLAIN
        self._set(_EPILOGUE, ctypes.c_uint32(epilogue))
        if shape.bias:
            self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[shape.dtype]))
            self._set(_BIAS, ctypes.c_void_p(256))  # the heuristic only reads its alignment
        if shape.gelu:
            self._set(_INPUT, ctypes.c_void_p(256))
            self._set(_INPUT_STRIDE, ctypes.c_int64(shape.columns))
        rows, inner, columns = shape.rows, shape.inner, shape.columns
        a_stride, b_stride, out_stride = shape.strides
        self.a = _layout(shape.dtype, *((inner, columns) if shape.b_transposed else (columns, inner)), b_stride)
        self.b = _layout(shape.dtype, *((rows, inner) if shape.a_transposed else (inner, rows)), a_stride)
        self.out = _layout(shape.out_dtype, columns, rows, out_stride)
        self.kernels = self._candidates()
        self.launch: Callable[..., None] | None = None
        self.worth = True  # whether gelu in the epilogue is the faster way

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def _candidates(self) -> list[_Kernel]:
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
            # A product that adds to `out` must not change it during the trials.
            target = torch.empty_like(out) if self.shape.add else out
            ways = [functools.partial(self._by_library, kernel) for kernel in self.kernels]
            ways.append(functools.partial(by_torch, add=self.shape.add))
            self.launch, _ = _fastest(ways, a, b, target, bias)
        self.launch(a, b, out, bias)

    def run_gelu(
        self, a: Tensor, b: Tensor, bias: Tensor, other_way: Callable[[], Any]
    ) -> tuple[Tensor, Tensor] | None:
        """(sum, gelu of it), or None if `other_way` computes both faster."""
        if not self.kernels or not self.worth:
            return None
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        inputs = torch.empty_like(out)
        if self.launch is None:
            ways = [functools.partial(self._by_library, kernel) for kernel in self.kernels]
            self.launch, own = _fastest(ways, a, b, out, bias, inputs)
            other = min(milliseconds(other_way, (), _burst(own)) for _ in range(2))
            self.worth = own < other
            if not self.worth:
                return None
        self.launch(a, b, out, bias, inputs)
        return inputs, out

    def _by_library(
        self, kernel: _Kernel, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, inputs: Tensor | None = None
    ) -> None:
        if bias is not None:
            self._set(_BIAS, ctypes.c_void_p(bias.data_ptr()))
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


def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], *sizes)
    return layout


def _fastest(ways: list[Callable[..., None]], *arguments: Any) -> tuple[Callable[..., None], float]:
    """The fastest way and its time per product, measured in bursts of some milliseconds.

    Bursts, because under full load a large GPU is power-limited, and another kernel may be the fastest then. A first
    round selects candidates; in two more rounds these take turns, so that a drifting clock affects all alike.
    """
    first = {number: milliseconds(way, arguments, 2) for number, way in enumerate(ways)}
    limit = 1.25 * min(first.values())
    near = sorted((number for number in first if first[number] <= limit), key=lambda number: first[number])[:4]
    count = _burst(first[near[0]])
    rounds = [{number: milliseconds(ways[number], arguments, count) for number in near} for _ in range(2)]
    best = {number: min(taken[number] for taken in rounds) for number in near}
    winner = min(near, key=lambda number: best[number])
    return ways[winner], best[winner]


def _burst(milliseconds: float) -> int:
    return max(4, min(100, round(_BURST_MILLISECONDS / max(milliseconds, 1e-3))))


def milliseconds(way: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> float:
    """Milliseconds per call; infinite for a kernel that fails although the library suggested it."""
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
    """False for a row-major matrix, True for the transpose of one, None for other layouts. Rows may be strided."""
    rows, columns = tensor.shape
    down, along = tensor.stride()
    if along == 1 and down >= columns:
        return False
    return True if down == 1 and along >= rows else None


def multiply(
    a_MK: Tensor,
    b_KN: Tensor,
    *,
    bias_N: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
    tuned: bool = True,
) -> Tensor:
    """a @ b + bias, written to `out`, which on CUDA may be fp32 for half-precision matrices, or added to it.

    `tuned`: by the fastest kernel, for half-precision CUDA matrices; otherwise by torch.
    """
    if out is None:
        out = torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=a_MK.dtype, device=a_MK.device)
    shape = _shape_of(a_MK, b_KN, out, bias=bias_N is not None, out_dtype=out.dtype, add=add) if tuned else None
    if shape is None:
        by_torch(a_MK, b_KN, out, bias_N, add=add)
    else:
        _product(shape).run(a_MK, b_KN, out, bias_N)
    return out


def multiply_gelu(
    a_MK: Tensor, b_KN: Tensor, bias_N: Tensor, other_way: Callable[[], Any]
) -> tuple[Tensor, Tensor] | None:
    """(a @ b + bias, gelu of it) by one kernel; None if there is no such kernel or `other_way` is faster."""
    shape = _shape_of(a_MK, b_KN, None, bias=True, out_dtype=a_MK.dtype, gelu=True)
    return None if shape is None else _product(shape).run_gelu(a_MK, b_KN, bias_N, other_way)


def _shape_of(
    a_MK: Tensor,
    b_KN: Tensor,
    out: Tensor | None,
    *,
    bias: bool,
    out_dtype: torch.dtype,
    add: bool = False,
    gelu: bool = False,
) -> _Shape | None:
    """The product's description; None for one that torch computes. Without `out` the result will be dense."""
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    a_transposed, b_transposed = _transposed(a_MK), _transposed(b_KN)
    if rows * inner * columns < _SMALL or a_transposed is None or b_transposed is None or (rows | inner | columns) % 8:
        return None
    if out is not None and (out.stride(1) != 1 or out.stride(0) < columns):
        return None
    strides = (max(a_MK.stride()), max(b_KN.stride()), columns if out is None else out.stride(0))
    # The library's heuristic assumes operands at multiples of 256 bytes, as torch allocates them.
    if any(stride % 8 for stride in strides) or any(x.data_ptr() % 256 for x in (a_MK, b_KN, out) if x is not None):
        return None
    return _Shape(
        rows=rows,
        inner=inner,
        columns=columns,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        dtype=a_MK.dtype,
        out_dtype=out_dtype,
        bias=bias,
        add=add,
        device=a_MK.get_device(),
        strides=strides,
        gelu=gelu,
    )
