"""One file per method; the file's name is the codec's id. A new file here is found by itself."""

from __future__ import annotations

from gradlab.codec import Codec
from gradlab.registry import find_method, method_names


def names() -> list[str]:
    """Ids of all codecs, sorted."""
    return method_names(__path__)


def get(name: str) -> type[Codec]:
    """The codec class with this id.

    Raises:
        GradlabError: if there is none; close matches are named.
    """
    return find_method("codec", __name__, __path__, name)
