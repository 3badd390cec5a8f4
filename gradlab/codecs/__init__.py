"""One file per method; the file's name is the codec's id. A new file here is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches

from gradlab.codec import Codec
from gradlab.errors import GradlabError


def names() -> list[str]:
    """Ids of all codecs, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> type[Codec]:
    """The codec class with this id.

    Raises:
        GradlabError: if there is none; close matches are named.
    """
    if name not in names():
        close = get_close_matches(str(name).lower(), names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise GradlabError(f"no codec {name!r}{hint} (there are: {', '.join(names())})")
    module = importlib.import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Codec) and value.__dict__.get("name") == name:
            return value
    raise GradlabError(f"codecs/{name}.py defines no codec named {name!r}")
