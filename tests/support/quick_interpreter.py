"""Triton's interpreter without most of what it does anew for each operation, which is half of its time.

It patches the language for every function that a kernel calls, though the launch has done so, and makes a type, with
what a tensor says of it, for every value.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language
from triton.language import core
from triton.runtime import interpreter


@functools.cache
def quicken() -> None:
    """Replace what is slow in the interpreter, once in a process."""
    interpreter._get_np_dtype = _kept_with_its_type("numpy", interpreter._get_np_dtype)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = functools.partial(_patch_all, interpreter._patch_lang)
    interpreter.InterpretedFunction.__call__ = lambda self, *given, **named: self.rewrite()(*given, **named)
    interpreter.np_umulhi_u64 = _high_product
    core.block_type.__new__, core.block_type.__init__ = _one_of_each(core.block_type.__init__)
    core.tensor.__init__ = _tensor_of_type(core.tensor.__init__)


@functools.cache
def _builtins(of: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(of) if core.is_builtin(member)]


def _patch_builtin(of: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(of):
        interpreter._patch_attr(of, name, member, builder, scope)


def _patch_all(real: Any, _kernel: Any) -> Any:
    return real(SimpleNamespace(__globals__={"language": triton.language, "core": core}))


def _high_product(a: Any, b: Any) -> Any:
    """Upper 64 bits of products of uint64, from products of halves, none of which overflows."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    return (a >> half) * (b >> half) + (middle >> half) + ((a & low) * (b >> half) + (middle & low) >> half)


def _kept_with_its_type(name: str, real: Any) -> Any:
    """What a function says of a type, kept as an attribute of it."""

    def known(of: Any) -> Any:
        kept = vars(of)
        if name not in kept:
            kept[name] = real(of)
        return kept[name]

    return known


def _one_of_each(real: Any) -> Any:
    """One object for equal types of blocks."""
    known: dict[Any, Any] = {}

    def make(cls: Any, element: Any, shape: Any) -> Any:
        key = (element.name, *[one.value if isinstance(one, core.constexpr) else one for one in shape])
        if key not in known:
            known[key] = object.__new__(cls)
            real(known[key], element, shape)
        return known[key]

    return make, lambda self, element, shape: None


def _tensor_of_type(real: Any) -> Any:
    def of_type(of: Any) -> dict[str, Any]:
        first = object.__new__(core.tensor)
        real(first, None, of)
        return vars(first)

    known = _kept_with_its_type("of_tensors", of_type)

    def start(self: Any, handle: Any, of: Any) -> None:
        vars(self).update(known(of), handle=handle)

    return start
