"""One file per method; the file's name is the codec's id. A new file here is found by itself; others are registered."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import TypeVar

from gradlab.codec import Codec
from gradlab.codec_settings import build_settings
from gradlab.errors import GradlabError
from gradlab.registry import find_method, method_names

Own = TypeVar("Own", bound=type[Codec])
_registered: dict[str, type[Codec]] = {}


def names() -> list[str]:
    """Ids of all codecs, sorted."""
    return sorted({*method_names(__path__), *_registered})


def get(name: str) -> type[Codec]:
    """The codec class with this id.

    Raises:
        GradlabError: if there is none; close matches are named.
    """
    return _registered.get(name) or find_method("codec", __name__, __path__, name, _registered)


def register(codec: Own) -> Own:
    """Make a codec of your own known by its `name` in this process, for plans and artifacts; returns it (a decorator).

    Every process that builds or loads a plan with it has to do so: an artifact holds names and settings, never code. A
    class of the same module and name takes the old one's place, as after a reload.

    Raises:
        GradlabError: for a class that is no complete codec, or a name that another one has.
    """
    if not (isinstance(codec, type) and issubclass(codec, Codec)) or inspect.isabstract(codec):
        raise GradlabError(f"codecs.register: {codec!r} is no codec with an exchange of its own")
    if missing := [what for what in ("name", "family", "Settings", "formula") if not hasattr(codec, what)]:
        raise GradlabError(f"codecs.register: {codec.__qualname__} has no {missing[0]}")
    if not isinstance(codec.name, str) or not codec.name.isidentifier():
        raise GradlabError(f"codecs.register: {codec.__qualname__} has the name {codec.name!r}, expected an identifier")
    if not (isinstance(codec.Settings, type) and is_dataclass(codec.Settings)):
        raise GradlabError(f"codecs.register: {codec.__qualname__}.Settings is no dataclass")
    known = _registered.get(codec.name)
    another = known is not None and (known.__module__, known.__qualname__) != (codec.__module__, codec.__qualname__)
    if codec.name in method_names(__path__) or another:
        raise GradlabError(f"codecs.register: there is a codec {codec.name!r} already")
    for settings in codec.candidates:
        build_settings(codec, settings)
    _registered[codec.name] = codec
    return codec
