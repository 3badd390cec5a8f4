"""Settings of codecs and wrappers from plain JSON values, and the checks they share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from gradlab.codec import Codec
from gradlab.errors import GradlabError


def build_settings(codec: type[Codec], values: Mapping[str, Any]) -> Any:
    """Settings of a codec from plain JSON values.

    Raises:
        GradlabError: for an unknown setting, a wrong type, or a value out of range (checked by the settings class).
    """
    if not isinstance(values, Mapping):
        raise GradlabError(f"{kind(codec)} {codec.name}: settings are {str(values)[:80]!r}, expected names with values")
    fields = {f.name: f for f in dataclasses.fields(codec.Settings)}
    unknown = sorted(map(str, set(values) - set(fields)))
    if unknown:
        known = ", ".join(fields) or "none"
        raise GradlabError(f"{kind(codec)} {codec.name} has no setting {', '.join(unknown)}; it has: {known}")
    for name, value in values.items():
        _check_type(codec.name, fields[name], value)
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise GradlabError(f"{kind(codec)} {codec.name} needs the setting {missing[0]}")
    return codec.Settings(**values)


def kind(codec: type[Codec] | Codec) -> str:
    """ "wrapper" or "codec", for messages."""
    return "wrapper" if codec.family == "wrapper" else "codec"


_ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "None": lambda v: v is None,
    "int": lambda v: type(v) is int,
    "float": lambda v: (type(v) is float and math.isfinite(v)) or (type(v) is int and abs(v) < 2**53),
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str,
}


def _check_type(codec: str, setting: Any, value: Any) -> None:
    wanted = setting.type if isinstance(setting.type, str) else setting.type.__name__
    if not any(_ACCEPTED[part](value) for part in wanted.split(" | ")):
        raise GradlabError(f"{codec}: setting {setting.name} = {repr(value)[:80]}, expected {wanted}")


def require(condition: bool, codec: str, setting: str, value: object, expected: str) -> None:
    """Check of one setting's range.

    Raises:
        GradlabError: "<codec>: setting <setting> = <value>, expected <expected>".
    """
    if not condition:
        raise GradlabError(f"{codec}: setting {setting} = {value!r}, expected {expected}")
