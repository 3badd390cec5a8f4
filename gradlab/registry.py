"""Find methods by the name of their file: one file per method, nothing to register."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from difflib import get_close_matches

from gradlab.codec import Codec
from gradlab.errors import GradlabError


def method_names(path: Iterable[str]) -> list[str]:
    """Names of the modules in a package's `__path__`, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(path))


def find_method(kind: str, package: str, path: Iterable[str], name: str, others: Iterable[str] = ()) -> type[Codec]:
    """The class called `name` in the package's module of that name.

    kind: "codec" or "wrapper", for messages; others: names that are known elsewhere, likewise.

    Raises:
        GradlabError: if there is none; close matches are named.
    """
    files = method_names(path)
    if name not in files:
        known = sorted({*files, *others})
        close = get_close_matches(str(name).lower(), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise GradlabError(f"no {kind} {name!r}{hint} (there are: {', '.join(known)})")
    module = importlib.import_module(f"{package}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Codec) and value.__dict__.get("name") == name:
            return value
    raise GradlabError(f"{package.rpartition('.')[2]}/{name}.py defines no {kind} named {name!r}")
