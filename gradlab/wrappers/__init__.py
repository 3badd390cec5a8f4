"""All wrappers, one file each, named after it. A new file here needs no registration."""

from __future__ import annotations

from gradlab.codec.registry import WRAPPERS
from gradlab.codec.wrapper import Wrapper

__all__ = ["get", "names"]


def names() -> list[str]:
    """List the names of all wrappers, sorted.

    >>> "error_feedback" in wrappers.names()
    True
    """
    return WRAPPERS.names()


def get(name: str) -> type[Wrapper]:
    """Return the wrapper class with this name.

    >>> wrappers.get("error_feedback")(codecs.make("topk", density=0.01))
    ErrorFeedback(TopK(density=0.01))

    Raises:
        GradlabError: if there is none. The message suggests a close match.
    """
    wrapper = WRAPPERS.get(name)
    assert issubclass(wrapper, Wrapper)
    return wrapper
