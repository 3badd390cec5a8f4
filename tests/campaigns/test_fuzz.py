"""Files under attack: some cases of each format; the campaign runs more of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from campaigns.fuzz import REFUSED, TAKEN, outcome
from campaigns.fuzzed import FORMATS, Format
from campaigns.fuzzed.messages import TASK, drawn_case, judged
from gradlab.errors import GradlabError
from support.process_pool import ProcessPool


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")  # numpy's, of kinds of numbers that a damaged header names
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "network"])  # which has the pool below
def test_nothing_falls(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    with closing(form):
        ended = list(outcomes(name, form, tmp_path))
    assert REFUSED in ended


def test_ranks_refuse_what_one_of_them_sends_or_share_a_result(pool: ProcessPool) -> None:
    """Between processes of Gloo, where a length that is announced is taken memory for, and errors must reach all."""
    ended = []
    for number in (0, 1, 2, 11, 14):  # one or more of each
        case = drawn_case(np.random.default_rng([number]), ["topk, smallest coding", "two_way ecsq", "chunk_topk"], 2)
        try:
            judged(case["family"], pool.run(TASK, ranks=case.pop("world_size"), **case))
            ended.append(TAKEN)
        except GradlabError:
            ended.append(REFUSED)
    assert set(ended) == {TAKEN, REFUSED}


def outcomes(name: str, form: Format, folder: Path) -> Iterator[str]:
    for number in range(2 if name == "report" else 4):  # a page with figures takes a quarter of a second
        case = form.case(np.random.default_rng([number]))
        ended = outcome(case, folder / form.file_name)
        assert ended in (REFUSED, TAKEN), f"{name}:{number} {case.kind}: {ended}"
        yield ended
