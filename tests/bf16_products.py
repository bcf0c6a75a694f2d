"""Products of bf16 on a CPU, summed in fp32 and rounded once.

A CPU without instructions for bf16 takes 200 times as long for them as for fp32, which was a third of the tests' time.
The values are those of the CPUs that have such instructions, and of GPUs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("aten", "IMPL")
_RETURNING = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_WRITING = {"mm.out": "mm", "addmm.out": "addmm", "bmm.out": "bmm", "addmm_": "addmm", "baddbmm_": "baddbmm"}


def sum_in_fp32() -> None:
    """Replaces torch's own kernels for bf16, for the rest of this process."""
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (*_RETURNING, *_WRITING)}
    with warnings.catch_warnings(action="ignore"):  # torch says that its kernels are replaced
        for name in _RETURNING:
            _LIBRARY.impl(name, _returning(kernels[name]), "CPU", with_keyset=True)
        for name, returning in _WRITING.items():
            _LIBRARY.impl(name, _writing(kernels[name], kernels[returning]), "CPU", with_keyset=True)


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
