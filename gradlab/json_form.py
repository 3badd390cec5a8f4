"""Compare JSON that somebody else may have written with the form that its reader expects, once, before it is read.

A form is a type (`str`, `bool`, `int`, or `float` for any finite number), a tuple of forms of which one must fit, with
`None` for null, a list of one form for a list, a dict of forms by key for an object (a key that ends in "?" may be
missing, other keys are not looked at), `{str: form}` for an object of any keys, or `object` for anything.
"""

from __future__ import annotations

import math
from typing import Any

from gradlab.errors import GradlabError

_SHOWN = 60  # characters of what came


def require_form(value: Any, form: Any, where: object) -> Any:
    """Return a value that has a form.

    >>> from gradlab.json_form import require_form
    >>> require_form({"step": 5, "rules": ["a"]}, {"step": int, "rules?": (None, [str])}, "run.jsonl")
    {'step': 5, 'rules': ['a']}
    """
    found = _difference(value, form, "")
    if found is not None:
        place, came, expected = found
        text = repr(came)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise GradlabError(f"{where}: {place.lstrip('.') or 'all of it'} is {shown}, expected {expected}")
    return value


def _difference(value: Any, form: Any, place: str) -> tuple[str, Any, str] | None:
    """Return where a value first differs from a form, what is there, and what should be."""
    if isinstance(form, tuple):
        differences = [_difference(value, one, place) for one in form]
        # One in a part is of a value of the right kind.
        inner = [one for one in differences if one is not None and one[0] != place]
        return None if None in differences else inner[0] if inner else (place, value, _words(form))
    if isinstance(form, list) and isinstance(value, list):
        return _first((one, form[0], f"{place}[{number}]") for number, one in enumerate(value))
    if isinstance(form, dict) and isinstance(value, dict):
        if str in form:
            return _first((one, form[str], f"{place}.{name}") for name, one in value.items())
        named = ((name.removesuffix("?"), name.endswith("?"), inner) for name, inner in form.items())
        for name, optional, inner in named:
            if name not in value and not optional:
                return place, sorted(value)[:5], f"an object with {name!r}"
            if name in value and (found := _difference(value[name], inner, f"{place}.{name}")) is not None:
                return found
        return None
    return None if _fits(value, form) else (place, value, _words(form))


def _first(parts: Any) -> tuple[str, Any, str] | None:
    return next((found for part in parts if (found := _difference(*part)) is not None), None)


def _fits(value: Any, form: Any) -> bool:
    """Whether a value is of a plain kind."""
    if form is float and type(value) in (int, float):
        try:
            return math.isfinite(float(value))
        except OverflowError:  # a whole number beyond all floats
            return False
    return form is object or (value is None if form is None else type(value) is form)


def _words(form: Any) -> str:
    """Name what a form takes."""
    if isinstance(form, tuple):
        return " or ".join(map(_words, form))
    if isinstance(form, list):
        return "a list"
    if isinstance(form, dict):
        return "an object"
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a finite number", None: "null"}
    return names.get(form, "anything")
