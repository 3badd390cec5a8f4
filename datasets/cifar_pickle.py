"""Read a published Python batch of CIFAR-10 opcode by opcode: nothing in the file is called, imported or built.

The batches are pickles that Python 2 wrote (protocol 2): a dictionary with a list of labels and a NumPy array.
`pickletools.genops` only splits a stream into opcodes. The stack machine below follows the few opcodes that such a
file needs. A call in the pickle becomes an inert record (`_Call`), from which the array's bytes are taken.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlab.datasets.splits import CLASSES, MAX_IMAGES, reason
from gradlab.errors import GradlabError

_PIXELS = 3072
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype")
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING"),
    *("BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
}
_FRESH: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWFALSE": lambda: False,
    "NEWTRUE": lambda: True,
}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = {"BINPUT", "LONG_BINPUT"}
_GET = {"BINGET", "LONG_BINGET"}
_MARK = object()


@dataclass(eq=False)
class _Call:
    """A call that unpickling would have made: its name, its arguments, and the state it would have set."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


def read_batch(content: bytes, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch: uint8 pixels (samples, 3072) and int64 labels (samples,).

    Args:
        content: the file's bytes.
        source: the file's name, for messages.
    Raises:
        GradlabError: if the stream is damaged, has an opcode or a name that no such batch has, or its array and labels
            do not fit each other.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about escapes in damaged text
            batch = _follow(content, source)
        pixels, labels = _entry(batch, "data"), _entry(batch, "labels")
        array = _array(pixels)
    except GradlabError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise GradlabError(f"{source}: not a CIFAR-10 batch ({reason(error)}): get the file again") from error
    sound = isinstance(labels, list) and all(type(label) is int and 0 <= label < CLASSES for label in labels)
    if not sound or len(labels) != len(array):
        raise GradlabError(f"{source}: expected {len(array)} labels from 0 to {CLASSES - 1}")
    return array, np.array(labels, dtype=np.int64)


def _follow(content: bytes, source: str) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "STOP":
            break
        if name in _PUT:
            memo[argument] = stack[-1]
        elif name in _GET:
            stack.append(memo[argument])
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "GLOBAL":
            stack.append(_inert_name(argument, source))
        elif name != "PROTO":
            _apply(name, stack, source)
    return stack.pop()


def _inert_name(name: str, source: str) -> _Call:
    if name not in _NAMES:
        raise GradlabError(f"{source}: refers to {name[:80]!r}, which no CIFAR-10 batch does; nothing was run")
    return _Call(name)


def _apply(name: str, stack: list[Any], source: str) -> None:
    """Apply one opcode that changes only the stack."""
    if name == "MARK":
        stack.append(_MARK)
    elif name in _FRESH:
        stack.append(_FRESH[name]())
    elif name in _FIXED_TUPLES:
        size = _FIXED_TUPLES[name]
        items = [stack.pop() for _ in range(size)]
        stack.append(tuple(reversed(items)))
    elif name == "TUPLE":
        stack.append(tuple(_above_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _above_mark(stack)
        _expect(stack[-1], list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else _above_mark(stack)
        _expect(stack[-1], dict).update(_pairs(items))
    elif name == "REDUCE":
        arguments, called = _expect(stack.pop(), tuple), _expect(stack.pop(), _Call)
        stack.append(_Call(called.name, arguments))
    elif name == "BUILD":
        state = stack.pop()
        _expect(stack[-1], _Call).state = state
    else:
        raise GradlabError(f"{source}: pickle opcode {name}, which no CIFAR-10 batch has; nothing was run")


def _above_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _pairs(items: list[Any]) -> dict[str, Any]:
    keys, values = items[::2], items[1::2]
    texts = [key.decode("ascii") if isinstance(key, bytes) else _expect(key, str) for key in keys]
    return dict(zip(texts, values, strict=True))


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _entry(batch: Any, key: str) -> Any:
    entries = _expect(batch, dict)
    if key not in entries:
        raise ValueError(f"no entry {key!r}")
    return entries[key]


def _array(value: Any) -> np.ndarray:
    """Return the array (samples, 3072) of an `ndarray` state: (version, shape, dtype, Fortran order, raw bytes)."""
    call = _expect(value, _Call)
    _, shape, dtype, fortran, raw = _expect(call.state, tuple)
    kind = _expect(dtype, _Call)
    is_bytes = kind.name == "numpy dtype" and kind.arguments[:1] in (("u1",), ("|u1",))
    if call.name not in _RECONSTRUCT or not is_bytes or fortran is not False:
        raise ValueError("its data is no row-major uint8 array")
    # Check that sizes are numbers before a message shows them: nested tuples can print without end.
    sizes = [_expect(size, int) for size in _expect(shape, tuple)]
    if len(sizes) != 2 or not 1 <= sizes[0] <= MAX_IMAGES or sizes[1] != _PIXELS:
        raise ValueError(f"its data has the shape {sizes[:4]}, expected (samples, {_PIXELS})")
    # Python 2 strings are bytes; genops hands them over as Latin-1 text.
    content = raw.encode("latin-1") if isinstance(raw, str) else _expect(raw, bytes)
    if len(content) != sizes[0] * _PIXELS:
        raise ValueError(f"its data has {len(content)} bytes, expected {sizes[0]} x {_PIXELS}")
    return np.frombuffer(content, np.uint8).reshape(sizes)
