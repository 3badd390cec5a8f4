"""Files under attack: some cases of each format; `make fuzz` runs more of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from campaigns.fuzz import REFUSED, TAKEN, outcome
from campaigns.fuzzed import FORMATS, Format


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")  # numpy's, of kinds of numbers that a damaged header names
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_falls(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    with closing(form):
        ended = list(outcomes(name, form, tmp_path))
    assert REFUSED in ended


def outcomes(name: str, form: Format, folder: Path) -> Iterator[str]:
    for number in range(30):
        case = form.case(np.random.default_rng([number]))
        ended = outcome(case, folder / form.file_name)
        assert ended in (REFUSED, TAKEN), f"{name}:{number} {case.kind}: {ended}"
        yield ended
