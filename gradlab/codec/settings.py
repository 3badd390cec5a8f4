"""Settings of codecs and wrappers: fields with a range, a unit and a help text, and how to read them from plain JSON.

A setting is declared in one line: `density: float = setting(0.01, above=0, most=1, unit="share of elements",
help="sent")`. The check of a value and its message, the row in `gradlab methods`, and the values that the contract
suite tries follow from it.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.codec.contract import Codec

Made = TypeVar("Made")
_KEY = "gradlab"  # of a dataclass field's metadata


@dataclass(frozen=True)
class Setting:
    """The range, unit and meaning of a settings field.

    above, least: a number has to be above this, or at least this.
    below, most: a number has to be below this, or at most this.
    choices: the allowed values.
    also: further allowed values outside the range, such as 0 for never.
    symbol: the paper's.
    """

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()
    also: tuple[Any, ...] = ()
    unit: str = ""
    symbol: str = ""
    help: str = ""

    def allows(self, value: Any) -> bool:
        """Return whether a value other than None is allowed; False also for NaN and for a value of another type."""
        if value in self.also:
            return True
        if self.choices:
            return value in self.choices
        if self.bounded and (not isinstance(value, (int, float)) or value != value):  # a large int is no float
            return False
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    @property
    def bounded(self) -> bool:
        """Whether the value is a number with a lower or an upper bound."""
        return any(bound is not None for bound in (self.above, self.least, self.below, self.most))

    def expected(self, hint: Any) -> str:
        """Describe the allowed values in words, for messages and tables. hint: the field's type."""
        parts = [self._range(hint), *(f"or {value!r}" for value in self.also)]
        if _is_optional(hint) and (parts[0] or self.also):
            parts.append("or None")
        return ", ".join(part for part in parts if part)

    def _range(self, hint: Any) -> str:
        if self.choices:
            return _one_of(self.choices)
        if not self.bounded:
            return ""
        low, high = (self.above if self.least is None else self.least), (self.below if self.most is None else self.most)
        if low is not None and high is not None:
            if _is_whole(hint) and self.least is not None and self.most is not None:
                return f"{self.unit}, {low:g} to {high:g}" if self.unit else f"{low:g} to {high:g}"
            ends = f"{'(' if self.least is None else '['}{low:g}, {high:g}{')' if self.most is None else ']'}"
            return f"a {self.unit or 'number'} in {ends}"
        words = {"above": self.above, "at least": self.least, "below": self.below, "at most": self.most}
        [text] = [f"{word} {bound:g}" for word, bound in words.items() if bound is not None]
        return f"{self.unit}, {text}" if self.unit and _is_whole(hint) else text


def setting(
    default: Any = MISSING,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: Collection[Any] = (),
    also: Sequence[Any] = (),
    unit: str = "",
    symbol: str = "",
    help: str = "",
) -> Any:
    """Make a field of a settings class, with its range, unit and help.

    None is allowed if the field's type allows it. The arguments after `default` are described in `Setting`.

    default: the value if none is given. Without a default the setting is required.

    >>> from gradlab.codec import setting
    >>> field = setting(0.01, above=0, most=1, unit="share of elements", help="the elements that are sent")
    >>> field.default
    0.01
    """
    range_of = Setting(above, least, below, most, tuple(choices), tuple(also), unit, symbol, help)
    return dataclasses.field(default=default, metadata={_KEY: range_of})


@dataclass(frozen=True)
class Field:
    """One setting of a codec.

    default: `dataclasses.MISSING` if the setting is required.
    hint: the field's type, resolved.
    about: its range, unit and help.
    """

    name: str
    default: Any
    hint: Any
    about: Setting

    @property
    def type(self) -> str:
        return type_text(self.hint)

    @property
    def expected(self) -> str:
        """The allowed values in words: the range with its unit, or the type if there is no range."""
        return self.about.expected(self.hint) or self.type

    @property
    def values(self) -> str:
        """The allowed values in words, without the unit, for a table that shows it elsewhere."""
        return dataclasses.replace(self.about, unit="").expected(self.hint) or self.type


_known: WeakKeyDictionary[type, tuple[Field, ...]] = WeakKeyDictionary()


def fields_of(settings: type) -> tuple[Field, ...]:
    """Return the fields of a settings class, in order, with their types resolved in the class's own module."""
    if settings not in _known:
        _known[settings] = _resolved(settings)
    return _known[settings]


def _resolved(settings: type) -> tuple[Field, ...]:
    try:
        hints = get_type_hints(settings, include_extras=False)
    except NameError as error:
        raise GradlabError(f"{settings.__qualname__}: type of a setting: {error}") from None
    return tuple(
        Field(f.name, f.default, hints[f.name], f.metadata.get(_KEY, Setting()))
        for f in dataclasses.fields(settings)
        if f.init
    )


def build_settings(codec: type[Codec], values: Mapping[str, Any]) -> Any:
    """Build a codec's settings from plain JSON values, and defaults. A list becomes a tuple if the setting's type is
    one."""
    if not isinstance(values, Mapping):
        raise GradlabError(f"{kind(codec)} {codec.name}: settings are {str(values)[:80]!r}, expected names with values")
    fields = {field.name: field for field in fields_of(codec.Settings)}
    unknown = sorted(map(str, set(values) - set(fields)))
    if unknown:
        known = ", ".join(fields) or "none"
        raise GradlabError(f"{kind(codec)} {codec.name} has no setting {', '.join(unknown)}; it has: {known}")
    made: Any = built(codec.Settings, codec.name, values)
    check_ranges(made, codec.name)
    return made


def built(settings: type[Made], owner: str, values: Mapping[str, Any]) -> Made:
    """Build a class of settings from plain JSON values of some of its fields; `owner` is for messages."""
    fields = {field.name: field for field in fields_of(settings)}
    converted = {name: _converted(owner, fields[name], value) for name, value in values.items()}
    missing = [field.name for field in fields.values() if field.default is MISSING and field.name not in values]
    if missing:
        raise GradlabError(f"{owner} needs the setting {missing[0]}")
    return settings(**converted)


def check_ranges(settings: Any, owner: str) -> None:
    """Refuse values outside of the ranges of `setting` fields; `owner` is for messages."""
    declared = dataclasses.is_dataclass(settings) and any(_KEY in f.metadata for f in dataclasses.fields(settings))
    for field in fields_of(type(settings)) if declared else ():
        _check_range(owner, field, getattr(settings, field.name))


def _check_range(codec: str, field: Field, value: Any) -> None:
    if value is not None and not _is_plainly(field.hint, value):
        raise GradlabError(f"{codec}: setting {field.name} = {repr(value)[:80]}, expected {field.type}")
    if not (field.about.allows(value) if value is not None else _is_optional(field.hint) or field.hint is Any):
        raise GradlabError(f"{codec}: setting {field.name} = {repr(value)[:80]}, expected {field.expected}")


def kind(codec: type[Codec] | Codec) -> str:
    """Return the word for a codec in messages, "wrapper" or "codec"."""
    return "wrapper" if codec.about.family == "wrapper" else "codec"


def plain(value: Any) -> Any:
    """Convert a setting's value, or settings by name, to plain JSON: tuples become lists."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return _listed(value)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


# --- types ---

_SCALARS: dict[Any, Callable[[Any], bool]] = {
    types.NoneType: lambda v: v is None,
    int: lambda v: type(v) is int and abs(v) < 2**63,
    float: lambda v: (type(v) is float and math.isfinite(v)) or (type(v) is int and abs(v) < 2**53),
    bool: lambda v: type(v) is bool,
    str: lambda v: type(v) is str,
    Any: lambda v: True,
}


class _MismatchError(Exception):
    """A value is not of the type."""


def _converted(codec: str, field: Field, value: Any) -> Any:
    try:
        return _as(field.hint, value)
    except _MismatchError:
        message = f"{codec}: setting {field.name} = {repr(value)[:80]}, expected {field.type}"
        raise GradlabError(message) from None
    except TypeError as error:
        raise GradlabError(f"{codec}: setting {field.name} is of type {error}, which no JSON value is") from None


def _as(hint: Any, value: Any) -> Any:
    """Convert a JSON value to a type; `_MismatchError`: it is not of the type; TypeError: no JSON value has the
    type."""
    if hint in _SCALARS:
        return _fits(_SCALARS[hint](value), value)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _as_one_of(args, value)
    if origin is Literal:
        return _fits(any(type(value) is type(known) and value == known for known in args), value)
    if (hint if origin is None else origin) is tuple:
        return _as_tuple(args or (Any, ...), value)
    raise TypeError(type_text(hint))


def _fits(sound: bool, value: Any) -> Any:
    if not sound:
        raise _MismatchError
    return value


def _as_one_of(hints: Sequence[Any], value: Any) -> Any:
    for hint in hints:
        try:
            return _as(hint, value)
        except _MismatchError:
            continue
    raise _MismatchError


def _as_tuple(args: Sequence[Any], value: Any) -> Any:
    _fits(isinstance(value, (list, tuple)), value)
    if args[-1] is ...:
        return tuple(_as(args[0], item) for item in value)
    _fits(len(value) == len(args), value)
    return tuple(_as(hint, item) for hint, item in zip(args, value, strict=True))


def type_text(hint: Any) -> str:
    """Describe a type in words: "int | None", "'max' or 'l2'", "a list of int"."""
    if hint is types.NoneType:
        return "None"
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_text, args))
    if origin is Literal:
        return _one_of(args)
    if origin is tuple:
        return f"a list of {', '.join(type_text(arg) for arg in args if arg is not ...)}"
    return getattr(hint, "__name__", str(hint))


def _one_of(values: Sequence[Any]) -> str:
    if len(values) <= 2:
        return " or ".join(map(repr, values))
    return f"one of {', '.join(map(str, values))}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_plainly(hint: Any, value: Any) -> bool:
    """Return whether a value is of one of the plain types of a hint; True if the hint has others."""
    types_ = _alternatives(hint)
    if not all(one in _SCALARS and one is not Any for one in types_):
        return True
    if isinstance(value, bool):
        return bool in types_
    return isinstance(value, types_) or (isinstance(value, int) and float in types_)


def _is_optional(hint: Any) -> bool:
    return types.NoneType in _alternatives(hint)


def _is_whole(hint: Any) -> bool:
    return int in _alternatives(hint)


def require(condition: bool, codec: str, setting: str, value: object, expected: str) -> None:
    """Refuse a setting unless a condition between settings holds. The range of a single setting belongs to its
    field."""
    if not condition:
        raise GradlabError(f"{codec}: setting {setting} = {value!r}, expected {expected}")
