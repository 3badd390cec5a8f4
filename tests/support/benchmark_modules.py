"""Import benchmarks' modules for a test, and leave no trace of them in the process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from gradlab.codec.registry import CODECS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDERS = (BENCHMARKS, *(path for path in BENCHMARKS.iterdir() if path.is_dir()))


@contextmanager
def benchmark_modules(*names: str) -> Iterator[Mapping[str, ModuleType]]:
    """The modules of these names. The control codecs that they register are of no concern to other tests."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CODECS, "registered", dict(CODECS.registered))
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        yield {name: importlib.import_module(name) for name in names}
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in FOLDERS:
            del sys.modules[name]
