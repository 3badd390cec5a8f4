"""Names of a package that are imported when they are first asked for, so that importing the package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions by which Python looks a package's names up and lists them.

        __getattr__, __dir__ = lazy_names(__name__, {"Plan": "gradlab.plan"})

    Args:
        package: its full name.
        homes: by name, the module that has it. A module that is offered itself is its own home.

    Returns:
        The package's `__getattr__` and `__dir__`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return home if home.__name__ == f"{package}.{name}" else getattr(home, name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, listed
