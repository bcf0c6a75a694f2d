"""Triton's interpreter without what it does again and again.

For every launch and every call of one jitted function from another it looks through all of `triton.language` for what
to replace, though from within a launch everything is replaced already: a third of the time that our kernels take in it.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np


def replace_once() -> None:
    """Changes the interpreter for the rest of this process; what kernels compute stays the same."""
    from triton import language
    from triton.runtime import interpreter

    whole: Callable[..., Any] = interpreter._patch_lang
    replaced: set[types.ModuleType] = set()

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
                interpreter._patch_attr(package, name, member, builder, scope)

    kept = functools.cache(interpreter._get_np_dtype)

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return np.dtype(np.uint64) if isinstance(element, language.pointer_type) else kept(element)

    # It works out for every sum whether an integer overflowed, and then tells nobody.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang = patch
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = numpy_type
