"""Find methods by name: one file per method, found without registration; users register theirs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.codec.contract import Codec


class Registry:
    """The methods of one kind: one per file of a package, and the classes registered in this process.

    kind: "codec" or "wrapper", for messages.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self.registered: dict[str, type[Codec]] = {}

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the package's modules, sorted."""
        return listed(tuple(importlib.import_module(self.package).__path__))

    def names(self) -> list[str]:
        """List the names of all methods, sorted."""
        return sorted({*self.files, *self.registered})

    def get(self, name: str) -> type[Codec]:
        """Return the class of this name; a close match is named if there is none."""
        if name in self.registered:
            return self.registered[name]
        if name not in self.files:
            close = get_close_matches(str(name).lower(), self.names(), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            own = "; register your own first: gradlab.codec.register" if self.kind == "codec" else ""
            raise GradlabError(f"no {self.kind} {name!r}{hint} (there are: {', '.join(self.names())}{own})")
        method = defined(importlib.import_module(f"{self.package}.{name}"), name)
        if method is None:
            raise GradlabError(f"{self.package.rpartition('.')[2]}/{name}.py defines no {self.kind} named {name!r}")
        return method


@functools.cache
def defined(module: ModuleType, name: str) -> type[Codec] | None:
    """Return the class with an `exchange` and this `name` that a module defines, or None."""
    classes = (value for value in vars(module).values() if isinstance(value, type) and hasattr(value, "exchange"))
    return next((value for value in classes if value.__dict__.get("name") == name), None)


@functools.cache
def listed(path: tuple[str, ...]) -> tuple[str, ...]:
    """List the names of the modules in a package's `__path__`, sorted. A folder is read once in a process."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path)))


CODECS = Registry("codec", "gradlab.codecs")
WRAPPERS = Registry("wrapper", "gradlab.wrappers")
