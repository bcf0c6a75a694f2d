"""Triton's interpreter without what it does again and again: our kernels take a third of the time in it.

- For every launch, and every call of one jitted function from another, it looks through all of `triton.language` for
  what to replace, though from within a launch everything is replaced already.
- For every operation it builds several types and shapes anew, each out of half a dozen objects.
- It converts between fp32 and bf16 field by field, where moving the bits is enough.

What kernels compute stays the same, bit for bit, and so do the errors of wrong shapes and types.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def replace_once() -> None:
    """Changes the interpreter for the rest of this process."""
    from triton.runtime import interpreter

    # It works out for every sum whether an integer overflowed, and then tells nobody.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _replace_the_language_once(interpreter)
    _share_shapes(interpreter)
    _check_operands_fast(interpreter)
    _convert_bits(interpreter)


def _replace_the_language_once(interpreter: Any) -> None:
    from triton import language

    whole: Callable[..., Any] = interpreter._patch_lang
    whole_core: Callable[..., Any] = interpreter._patch_lang_core
    replaced: set[types.ModuleType] = set()
    checking = language.core.builtin(lambda: None).__code__

    @functools.cache
    def languages(function: types.FunctionType) -> frozenset[types.ModuleType]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module for module in modules if module in (language, language.core))

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch(function: types.FunctionType) -> Any:
        if languages(function) <= replaced:
            return interpreter._LangPatchScope()
        scope = Scope()
        scope._changes = whole(function)._changes
        replaced.update(languages(function))
        return scope

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if language.core.is_builtin(member):  # else it is replaced already, by a launch around this one
                scope.set_attr(package, name, interpreted(member))

    @functools.cache
    def interpreted(member: Any) -> Callable[..., Any]:
        # The wrapper of a builtin only checks that `_semantic` is given.
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checking else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*args, **named)

        return call

    def patch_core(lang: Any, scope: Any) -> None:
        whole_core(lang, scope)
        scope.set_attr(lang.dtype, "to_ir", lambda self, builder: self)  # a type stands for itself here

    interpreter._patch_lang = patch
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang_core = patch_core


class _Shape(NamedTuple):
    """What every block of one shape has in common."""

    of_type: Any
    of_tensor: Any
    numel: int
    numel_of_tensor: Any


def _share_shapes(interpreter: Any) -> None:
    """Types and tensors of one shape share it; the constructors of both do no more than keep their arguments."""
    from triton._utils import validate_block_shape
    from triton.language import core

    no_shape = _Shape(None, core.tuple([]), 1, core.constexpr(1))

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> _Shape:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        numel = validate_block_shape(sizes)
        of_type, of_tensor = core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes])
        shape = _Shape(of_type, of_tensor, numel, core.constexpr(numel))
        of_type.known = of_tensor.known = shape
        return shape

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = shape.__dict__.get("known") if type(shape) is core.tuple else None
        if known is None:
            known = shape_of(tuple([core._unwrap_if_constexpr(size) for size in shape]))
        self.element_ty, self.shape, self.numel, self.known = element_ty, known.of_type, known.numel, known

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.known if type.__class__ is core.block_type else no_shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.of_tensor, known.numel_of_tensor

    def make_handle(self: Any, data: np.ndarray, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.__class__ is not core.pointer_type and data.itemsize > (dtype.itemsize or 1):
            self.__post_init__()

    plain = frozenset((int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type))
    unwrap_any: Callable[..., Any] = core._unwrap_if_constexpr

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap_any(value)

    def same_type(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = unwrap(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core.block_type.__init__ = make_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = make_tensor
    core.dtype.__eq__ = same_type
    core._unwrap_if_constexpr = unwrap
    interpreter.TensorHandle.__init__ = make_handle


def _check_operands_fast(interpreter: Any) -> None:
    """Operands of one type and shape are taken as they are, and numbers take the type and shape of the other."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    any_operands: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
    any_shapes: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    floats = {"fp32": np.float32, "fp64": np.float64}
    integers = {name: np.dtype(name) for name in core.dtype.SINT_TYPES + core.dtype.UINT_TYPES if name != "int1"}
    ranges = {name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for name, kind in integers.items()}

    def number_like(value: float, tensor: Any) -> Any:
        """The number as a tensor like the other, or None where types have to be looked at."""
        name = tensor.dtype.name
        kind = floats.get(name)
        if kind is None:
            kind = integers.get(name)
            if kind is None or type(value) is not int or not ranges[name][0] <= value <= ranges[name][1]:
                return None
        # Zero of either sign is made a positive one.
        data = np.full(tensor.handle.data.shape, value if value != 0 else 0, dtype=kind)
        return core.tensor(interpreter.TensorHandle(data, tensor.dtype), tensor.type)

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        left, right = type(lhs), type(rhs)
        if left is core.tensor and right is core.tensor:
            if lhs.dtype.__class__ is core.pointer_type:
                if allow_lhs_ptr and rhs.dtype.name in integers:
                    return shapes(self, lhs, rhs)
            elif lhs.dtype.name == rhs.dtype.name and (not div_or_mod or lhs.dtype.name in floats):
                return shapes(self, lhs, rhs)
        elif arithmetic_check and left is core.tensor and (right is int or right is float):
            if (number := number_like(rhs, lhs)) is not None:
                return lhs, number
        elif (
            arithmetic_check
            and right is core.tensor
            and (left is int or left is float)
            and (number := number_like(lhs, rhs)) is not None
        ):
            return number, rhs
        return any_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def shapes(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if lhs.type.__class__ is core.block_type and rhs.type.__class__ is not core.block_type:
            return lhs, repeated(rhs, lhs)
        if rhs.type.__class__ is core.block_type and lhs.type.__class__ is not core.block_type:
            return repeated(lhs, rhs), rhs
        return any_shapes(self, lhs, rhs)

    def repeated(scalar: Any, block: Any) -> Any:
        handle = scalar.handle
        data = np.full(block.handle.data.shape, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
        return core.tensor(interpreter.TensorHandle(data, handle.dtype), block.type.with_element_ty(scalar.dtype))

    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.broadcast_impl_value = shapes


def _convert_bits(interpreter: Any) -> None:
    from triton import language

    kept = functools.cache(interpreter._get_np_dtype)
    any_types: Callable[..., Any] = interpreter._convert_float

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return np.dtype(np.uint64) if isinstance(element, language.pointer_type) else kept(element)

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        """The upper half of an fp32 number is a bf16 number; the interpreter has its own idea of the subnormal ones."""
        if rounding is None and (source.name, target.name) == ("bf16", "fp32"):
            bits = data.astype(np.uint32) << 16
        elif rounding is None and (source.name, target.name) == ("fp32", "bf16"):
            bits = np.ascontiguousarray(data).view(np.uint32)
        else:
            return any_types(data, source, target, rounding)
        if (((bits & 0x7FFFFFFF) - np.uint32(1)) < 0x7FFFFF).any():
            return any_types(data, source, target, rounding)
        return bits if target.name == "fp32" else (bits >> 16).astype(np.uint16)

    interpreter._get_np_dtype = numpy_type
    interpreter._convert_float = convert
