"""`gradlab timeline`: a real trace of torch.profiler, times that are counted anew, and files that hold no trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.analysis.forecast.profiled import read_profile
from gradlab.chrome_trace import length, union, without
from gradlab.errors import GradlabError
from jobs.profiler_tasks import STEPS
from support.command_line import Command
from support.laws import law
from support.process_pool import ProcessPool

RANKS = 4  # all of the pool: a trace tells the world's number
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12)


def covered(intervals: list[tuple[int, int]]) -> np.ndarray:
    busy = np.zeros(60, bool)
    for start, seconds in intervals:
        busy[start : start + seconds] = True
    return busy


@law(INTERVALS, INTERVALS)
def test_intervals_are_counted_second_by_second(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = (union(np.array([(a, a + n) for a, n in each], float).reshape(-1, 2)) for each in (one, other))
    assert length(first) == covered(one).sum()
    assert length(without(first, second)) == (covered(one) & ~covered(other)).sum()
    assert length(union(np.concatenate([first, second]))) == (covered(one) | covered(other)).sum()


def test_a_trace_of_a_real_run(pool: ProcessPool, tmp_path: Path, gradlab: Command) -> None:
    path, packed = tmp_path / "rank0.json", tmp_path / "rank0.json.gz"
    parameters = pool.run("jobs.profiler_tasks:plain_trace", RANKS, path=str(path))[0]
    packed.write_bytes(gzip.compress(path.read_bytes()))
    code, text, _ = gradlab("timeline", path)
    assert code == 0
    assert text.startswith(f"{STEPS} steps of rank 0 of {RANKS}.\nA step takes ")
    assert "Forecast of the wait on this link, measured " in text
    read = json.loads(gradlab("timeline", packed, "--json")[1])
    assert (read["rank"], read["ranks"], read["steps"]) == (0, RANKS, STEPS)
    assert sum(read["bucket_bytes"]) == 4 * parameters
    assert 0 <= read["exposed_seconds"] <= read["exchanging_seconds"] <= read["seconds"]
    assert 0 < read["reducing_seconds"] <= read["exchanging_seconds"]
    assert read["computing_seconds"] == pytest.approx(read["seconds"] - read["exposed_seconds"])
    assert set(read["forecast_seconds"]) == {"plain DDP", "16 bits", "int4"}
    assert read["forecast_seconds"]["16 bits"] < read["forecast_seconds"]["plain DDP"]


def event(name: str, cat: str, start: float, stop: float, **told: Any) -> dict[str, Any]:
    """An event of torch.profiler, in seconds."""
    return {"ph": "X", "name": name, "cat": cat, "tid": 1, "ts": 1e6 * start, "dur": 1e6 * (stop - start), "args": told}


def on_gpu(dtype: str = "Float", numel: int = 10**6) -> dict[str, Any]:
    """Two steps of 4 seconds on a GPU, 3 of them computing, and 2 exchanging with 1 of these beside."""
    events = []
    for start in (0, 4):
        told = {"Collective name": "allreduce", "dtype": dtype, "In msg nelems": numel}
        events += [
            event(f"ProfilerStep#{start}", "user_annotation", start, start + 4),
            event("sgemm", "kernel", start, start + 3),
            event("aten::mm", "cpu_op", start, start + 4),
            event("nccl:all_reduce", "user_annotation", start, start + 4),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", start + 2, start + 4, **told),
        ]
    return {"traceEvents": events, "distributedInfo": {"rank": 3, "world_size": 2}}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_gpu_is_read_by_its_kernels(tmp_path: Path) -> None:
    steps = read_profile(written(tmp_path / "gpu.json", on_gpu()))
    assert (steps.rank, steps.steps, steps.seconds, steps.computing_seconds) == (3, 2, 4, 3)
    assert (steps.exchanging_seconds, steps.reducing_seconds, steps.exposed_seconds) == (2, 2, 1)
    assert steps.bucket_bytes == (4 * 10**6,)
    # A ring of two sends each byte once, with headers.
    assert steps.link.bits_per_second == pytest.approx(8 * 1.06 * 4e6 / 2)
    left = steps.forecast_seconds
    assert left["plain DDP"] > 1.5 * left["16 bits"] > 0
    unmarked = [one for one in on_gpu()["traceEvents"] if one["cat"] == "kernel"]
    unmarked += [event("Optimizer.step#SGD.step", "user_annotation", end - 1, end) for end in (4, 8)]
    assert read_profile(written(tmp_path / "gpu.json", unmarked)).seconds == 4  # from one optimizer step to the next
    half = read_profile(written(tmp_path / "gpu.json", on_gpu("BFloat16")))
    assert half.bucket_bytes == (2 * 10**6,)
    assert set(half.forecast_seconds) == {"16 bits", "int4"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"distributedInfo": {}}, "no run of several ranks"),
        ({"distributedInfo": {"world_size": 10**12}}, "nodes"),
        ({"traceEvents": [one | {"args": {}} for one in on_gpu()["traceEvents"]]}, "record_shapes=True"),
        ({"traceEvents": [one for one in on_gpu()["traceEvents"] if "nccl" not in one["name"]]}, "nothing was exch"),
    ],
)
def test_why_there_is_no_forecast(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    steps = read_profile(written(tmp_path / "gpu.json", on_gpu() | change))
    assert not steps.forecast_seconds
    assert reason in steps.sentences[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(on_gpu())[:-40], "is not JSON: expected a trace of torch.profiler"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "not a trace of torch.profiler .*: KeyError: 'traceEvents'"),
        ("[3]", "not a trace"),
        ("[]", "holds no two steps: call step"),
        ([event("a", "kernel", 0, 1) | {"dur": "x"}], "not a trace"),
        ([event("a", "kernel", 1, 0)], "not a trace of .*: an event without a time, or of a negative one"),
        ([event("a", "kernel", 0, 1) | {"ts": 10**400}], "not a trace"),
        (on_gpu() | {"distributedInfo": {"rank": "first"}}, "not a trace"),
    ],
)
def test_files_that_hold_no_trace(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        read_profile(written(tmp_path / "trace.json", content))


def test_what_is_packed_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    whole = gzip.compress(json.dumps(on_gpu()).encode())
    for content in (whole[:-20], b"no gzip", whole[:10] + b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(GradlabError, match=r"trace.json.gz is not gzip, or cut off: expected a trace of torch"):
            read_profile(path)
    path.write_bytes(gzip.compress(bytes(10**6)))
    monkeypatch.setattr("gradlab.analysis.forecast.profiled._MOST_BYTES", 10**5)
    with pytest.raises(GradlabError, match="larger than 100000 bytes"):
        read_profile(path)
