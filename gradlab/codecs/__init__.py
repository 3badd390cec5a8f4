"""All codecs, one file each, named after it. A new file here needs no registration, and others need `register`."""

from __future__ import annotations

from typing import Any

from gradlab.codec import Codec, register
from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings

__all__ = ["get", "make", "names", "register"]


def names() -> list[str]:
    """List the names of all codecs, sorted.

    >>> "powersgd" in codecs.names()
    True
    """
    return CODECS.names()


def get(name: str) -> type[Codec]:
    """Return the codec class with this name.

    >>> codecs.get("topk").Settings()
    TopK.Settings(density=0.01, index_coding='fixed', across_layers=True)

    Raises:
        GradlabError: if there is none. The message suggests a close match.
    """
    return CODECS.get(name)


def make(name: str, **settings: Any) -> Codec:
    """Make the codec with this name.

    >>> codecs.make("topk", density=0.01)
    TopK(density=0.01)

    Args:
        name: such as "topk".
        settings: plain JSON values. The other settings have their defaults.

    Raises:
        GradlabError: for an unknown codec or setting, a wrong type, or a value out of range.
    """
    method = get(name)
    return method(build_settings(method, settings))
