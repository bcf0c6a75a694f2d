"""Products of bf16 on a CPU, summed in fp32 and rounded once.

A CPU without instructions for bf16 takes 200 times as long for them as for fp32, which was a third of the tests' time.
The values are those of the CPUs that have such instructions, and of GPUs. Products of fp32 take twice as long where
they are small, since they go through Python: so a test asks for it, by the fixture `bf16_products`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_RETURNING = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_WRITING = {"mm.out": "mm", "addmm.out": "addmm", "bmm.out": "bmm", "addmm_": "addmm", "baddbmm_": "baddbmm"}


@contextlib.contextmanager
def summed_in_fp32() -> Iterator[None]:
    """Replaces torch's own kernels for bf16."""
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (*_RETURNING, *_WRITING)}
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # torch says that its kernels are replaced
            for name in _RETURNING:
                library.impl(name, _returning(kernels[name]), "CPU", with_keyset=True)
            for name, returning in _WRITING.items():
                library.impl(name, _writing(kernels[name], kernels[returning]), "CPU", with_keyset=True)
        yield


def _returning(kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, first: torch.Tensor, *more: Any, **named: Any) -> Any:
        if first.dtype != torch.bfloat16:
            return kernel.call_boxed(keys, first, *more, **named)
        result = kernel.call_boxed(keys, *map(_wide, (first, *more)), **{name: _wide(v) for name, v in named.items()})
        if isinstance(result, torch.Tensor):
            return result.bfloat16()
        # Attention's sums of exponentials, which come with its result, are fp32 beside bf16 too.
        return tuple(one if one.dim() == first.dim() - 1 else one.bfloat16() for one in result)

    return product


def _writing(kernel: Any, returning: Any) -> Callable[..., Any]:
    def product(keys: Any, first: torch.Tensor, *more: Any, out: torch.Tensor | None = None, **named: Any) -> Any:
        if first.dtype != torch.bfloat16:
            return kernel.call_boxed(keys, first, *more, **named, **({} if out is None else {"out": out}))
        result = returning.call_boxed(keys, *map(_wide, (first, *more)), **named)
        return first.copy_(result) if out is None else out.resize_(result.shape).copy_(result)

    return product


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
