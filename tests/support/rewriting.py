"""Rewrite the assertions of test files once for all of pytest's workers, of which each would rewrite every file."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]


def rewrite_share(config: pytest.Config, number: int, workers: int) -> None:
    """Rewrite every `workers`-th file from `number` on, for this worker and the others to load.

    pytest rewrites a file when it is imported, unless its cache holds it. Workers import all files at the same time and
    in the same order, so that none would find what another rewrote.
    """
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(TESTS.rglob("test_*.py"))[number::workers]:
        folder = rewrite.get_cache_dir(path)
        cached = folder / (path.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, cached) is None:
            folder.mkdir(parents=True, exist_ok=True)
            of_source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, of_source, cached)
