"""All wrappers, one file each, named after it. A new file here needs no registration."""

from __future__ import annotations

from gradlab.codec.registry import WRAPPERS
from gradlab.codec.wrapper import Wrapper

__all__ = ["get", "names"]


def names() -> list[str]:
    """List the names of all wrappers, sorted."""
    return WRAPPERS.names()


def get(name: str) -> type[Wrapper]:
    """Return the wrapper class with this name.

    Raises:
        GradlabError: if there is none. The message suggests a close match.
    """
    wrapper = WRAPPERS.get(name)
    assert issubclass(wrapper, Wrapper)
    return wrapper
