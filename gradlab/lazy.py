"""Names of a package that are imported when they are first asked for, so that importing the package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, from the module of each name; an offered module is its own
    home."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return home if home.__name__ == f"{package}.{name}" else getattr(home, name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, listed


@contextmanager
def needing(module: str, title: str) -> Iterator[None]:
    """Import a package that is there with an extra of its name; raise an error that names the extra where it is not."""
    extra = title.lower()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != extra:
            raise
        raise ModuleNotFoundError(f"{module} needs {title}: pip install 'gradlab[{extra}]'", name=extra) from None
