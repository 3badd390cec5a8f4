"""One file per wrapper; the file's name is the wrapper's id. A new file here is found by itself."""

from __future__ import annotations

from gradlab.codec.registry import WRAPPERS
from gradlab.codec.wrapper import Wrapper


def names() -> list[str]:
    """List the ids of all wrappers, sorted."""
    return WRAPPERS.names()


def get(name: str) -> type[Wrapper]:
    """Return the wrapper class with this id.

    Raises:
        GradlabError: if there is none; the message names close matches.
    """
    found = WRAPPERS.get(name)
    assert issubclass(found, Wrapper)
    return found
