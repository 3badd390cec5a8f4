"""Workers that come and go, on torchft: real processes, killed and started again."""

from __future__ import annotations

from typing import Any

import pytest

from support.elastic_workers import MISSING, Worker, run, wait_until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def ends(workers: list[Worker]) -> list[dict[str, Any]]:
    told = [one.wait() for one in workers]
    assert all("end" in one for one in told), told
    return told


def test_a_worker_is_killed_and_comes_back() -> None:
    with run({"steps": 40, "seconds": 0.02}, 4) as (workers, start, _):
        wait_until(lambda: all(one.steps >= 4 for one in workers), "the first steps")
        workers[2].kill()
        wait_until(lambda: workers[0].steps >= workers[2].steps + 4, "steps without it")
        workers[2] = start(2)
        first, *others = ends(workers)
        assert all(one["end"] == first["end"] for one in others)
        assert 3 in workers[0].all_of("workers")
        assert workers[2].all_of("joined")[0] > 4
        said = " ".join(workers[0].all_of("warned"))
        assert "w_2 gone: 3 workers go on; the residuals of the lost are lost" in said
        assert "w_2 come: 4 workers go on" in said
