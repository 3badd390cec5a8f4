"""The noise scale of a run while it goes on, and its slow ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradlab.run_log import WatchedLog
from gradlab.runtime.engine.statistics import noise_scale
from jobs.live_tasks import STEPS, gaussian
from support.command_line import Command
from support.laws import thorough
from support.process_pool import ProcessPool

SIGNAL = 0.25
RANKS = 3


def dense(rank: int) -> float:
    """The scale by appendix A.1 from a rank's gradients and dense means, batch sizes 1 and N."""
    small, big = 0.0, 0.0
    for step in range(STEPS):
        gradients = np.stack([gaussian(one, step, SIGNAL).double().numpy() for one in range(RANKS)])
        small, big = small + (gradients[rank] ** 2).sum(), big + (gradients.mean(0) ** 2).sum()
    signal = (RANKS * big - small) / (RANKS - 1)
    noise = (small - big) / (1 - 1 / RANKS)
    return noise / signal


@pytest.mark.parametrize(
    ("codec", "settings", "wraps", "tolerance"),
    [
        thorough("cast", {}, [], 0.002),
        thorough("block_scaled", {"dtype": "int4", "aggregation": "gather"}, [], 0.03),
        ("qsgd", {"bits": 4, "aggregation": "gather"}, [], 0.05),
        ("topk", {"density": 0.25}, ["error_feedback"], 0.2),
    ],
)
def test_the_noise_scale_of_a_compressed_run_is_that_of_its_gradients(
    pool: ProcessPool, codec: str, settings: dict[str, object], wraps: list[str], tolerance: float
) -> None:
    """Compression errors of each rank's own do not move it; over 150 gradients it is near the planted one."""
    arguments = {"codec": codec, "settings": settings, "wraps": wraps, "signal": SIGNAL}
    for rank, scale in enumerate(pool.run("jobs.live_tasks:noise_scale", RANKS, **arguments)):
        assert scale == pytest.approx(dense(rank), rel=tolerance)
        assert scale == pytest.approx(1 / SIGNAL, rel=0.05 + tolerance)


def test_codecs_whose_errors_ranks_share_have_none(pool: ProcessPool) -> None:
    settings = {"rank": 2}
    for codec, chosen, wraps in (("powersgd", settings, []), ("topk", {}, ["ef21"])):
        arguments = {"codec": codec, "settings": chosen, "wraps": wraps, "signal": SIGNAL}
        assert pool.run("jobs.live_tasks:noise_scale", 2, **arguments) == [None, None]
    assert noise_scale([[1.0, 1.0, 1.0]], 1) is None
    assert noise_scale([], 2) is None
    assert noise_scale([[1.0, 1.0, 0.5]], 2) == np.inf  # contributions that share nothing


def test_a_rank_of_the_slow_node_is_named_under_fsdp2(pool: ProcessPool) -> None:
    """Inside a node ranks wait for each other before any hook sees a gradient."""
    assert {rank // 2 for rank in pool.run("jobs.live_tasks:slow_node", 4, slow=3)} == {1}


def test_a_slow_rank_is_named(pool: ProcessPool, tmp_path: Path, gradlab: Command) -> None:
    path = tmp_path / "run.jsonl"
    pool.run("jobs.live_tasks:slow_rank", RANKS, slow=1, path=str(path))
    code, text, _ = gradlab("watch", path, "--once")
    assert code == 0
    assert "rank 1 is slow: its gradients are ready after" in text
    last = json.loads(gradlab("watch", path, "--json")[1])["last"]
    assert last["slowest_rank_seconds"] > 0.1  # it sleeps so long
    path.write_text('{"step": 1, "slowest_rank": 2, "slowest_rank_seconds": 1.2, "usual_rank_seconds": 1.0}\n')
    assert len(WatchedLog(path).lines()) == 1  # much the same for all
