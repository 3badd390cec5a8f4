"""The ranges of a compressed run that torch.profiler shows."""

from __future__ import annotations

from support.process_pool import ProcessPool

STEPS = 3


def test_a_profiler_shows_buckets_and_the_workers_ranges(pool: ProcessPool) -> None:
    """It shows other threads on demand alone, so that buckets' ranges begin in the thread of the hook."""
    for seen in pool.run("jobs.profiler_tasks:ranges", 2, all_threads=True):
        names, groups = seen["names"], seen["groups"]
        assert seen["equal"]
        assert set(names) == {f"gradlab::{name}" for name in ("exchange", "encode", "send", "wait", "decode")}
        assert names["gradlab::encode"] >= STEPS * groups
        assert names["gradlab::decode"] >= 2 * STEPS * groups  # PowerSGD has two rounds
    for seen in pool.run("jobs.profiler_tasks:ranges", 2, all_threads=False):
        assert seen["equal"]
        assert set(seen["names"]) == {"gradlab::exchange"}
        assert seen["names"]["gradlab::exchange"] >= STEPS  # a bucket each at first, in DDP's first step
