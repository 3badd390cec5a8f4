"""One file per method; the file's name is the codec's id. A new file here is found by itself; others are registered."""

from __future__ import annotations

from typing import Any

from gradlab.codec import Codec, register
from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings

__all__ = ["get", "make", "names", "register"]


def names() -> list[str]:
    """Ids of all codecs, sorted."""
    return CODECS.names()


def get(name: str) -> type[Codec]:
    """The codec class with this id.

    Raises:
        GradlabError: if there is none; close matches are named.
    """
    return CODECS.get(name)


def make(name: str, **settings: Any) -> Codec:
    """The codec with this id and these settings, plain JSON values; others have their defaults.

    >>> make("topk", density=0.01)
    TopK(density=0.01)

    Raises:
        GradlabError: for an unknown codec or setting, a wrong type, or a value out of range.
    """
    method = get(name)
    return method(build_settings(method, settings))
