"""`gradlab doctor` and `gradlab.doctor`: links from measured times, what models wait; on real ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from gradlab.analysis.forecast.diagnosis import (
    HALF,
    PLAIN,
    cores_of,
    link_of,
    link_to_json,
    read_link,
    sentences,
    slow_messages,
    slow_ranks,
    step_texts,
    waiting,
)
from gradlab.analysis.forecast.link import Link, Transfer, all_gather, all_reduce
from gradlab.analysis.forecast.network import NOT_MEASURED, Network
from gradlab.analysis.forecast.plans import forecast
from gradlab.analysis.forecast.real_steps import link_in_training, times_of_sharded_steps, times_of_steps
from gradlab.analysis.forecast.simulator import Node
from gradlab.analysis.forecast.step_time import FLAT, HSDP
from gradlab.cli.doctor import _count_of, _take_names_of_launchers
from gradlab.cli.options import links_of
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime.doctor import _interface, _local_size
from support.command_line import Command
from support.laws import law, thorough
from support.process_pool import ProcessPool
from support.warm_python import python


def times_on(link: Link, ranks: int) -> dict[str, Any]:
    """Times of a link as they would be measured without noise."""
    timed = []
    for kind, describe in (("all-reduce", all_reduce), ("all-gather", all_gather)):
        for nbytes in (4096, 2**18, 2**24):
            transfer = describe(nbytes, ranks)
            seconds = link.busy_seconds(transfer) + link.delay_seconds(transfer)
            timed.append({"collective": kind, "nbytes": nbytes, "seconds": seconds})
            if kind == "all-reduce":
                path = nbytes * (ranks - 1) // ranks
                half = Transfer(path, path, ranks - 1, scattered=True)
                seconds = link.busy_seconds(half) + link.delay_seconds(half)
                timed.append({"collective": "reduce-scatter", "nbytes": nbytes, "seconds": seconds})
    message = {"ranks": [0, 1], "latency_seconds": link.latency_seconds, "bits_per_second": link.bits_per_second}
    return {"ranks": ranks, "timed": timed, "messages": [message]}


@law(st.integers(2, 64), st.floats(1e6, 1e12), st.floats(0, 1e-2), st.floats(0, 1e-2), st.floats(1, 3), st.floats(1, 3))
def test_a_link_is_found_again_from_the_times_that_it_makes(
    ranks: int, rate: float, latency: float, fixed: float, gathers: float, scatters: float
) -> None:
    link = Link(rate, latency, collective_seconds=fixed, gather_factor=gathers, scatter_factor=scatters)
    found = link_of(times_on(link, ranks))
    assert found.bits_per_second == pytest.approx(rate, rel=1e-4)
    assert found.latency_seconds == latency
    assert found.gather_factor == pytest.approx(gathers, rel=1e-4)
    assert found.scatter_factor == pytest.approx(scatters, rel=1e-4)
    assert found.collective_seconds == pytest.approx(fixed, rel=1e-6, abs=1e-9 + 1e-6 * latency * ranks)


def test_times_that_do_not_grow_with_bytes_are_refused() -> None:
    measured = times_on(Link(1e9), 2)
    for one in measured["timed"]:
        one["seconds"] = 1e-3
    with pytest.raises(GradlabError, match=r"take no longer for more bytes: measure for longer \(--seconds\)"):
        link_of(measured)


def test_a_measured_link_is_taken_in_place_of_a_speed(tmp_path: Path) -> None:
    link = Link(2e8, 1e-3, collective_seconds=1e-4, gather_factor=1.5)
    path = tmp_path / "link.json"
    path.write_text(json.dumps({"link": link_to_json(link)}))
    assert read_link(path) == link
    assert links_of(str(path), "1ms") == [link]


@pytest.mark.parametrize(
    "written",
    ["[]", "{}", '{"link": 3}', '{"link": {"bits_per_second": 1e9}}', '{"link": {"bits_per_second": "fast"}}'],
)
def test_other_files_are_no_links(written: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(written)
    with pytest.raises(GradlabError, match="holds no link with bits_per_second"):
        read_link(path)


@pytest.mark.parametrize("value", [0, -1.0, 1e400, math.nan])
def test_impossible_speeds_are_refused(value: float, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    costs = link_to_json(Link(1e9)) | {"bits_per_second": value, "latency_seconds": value}
    path.write_text(json.dumps({"link": costs}))
    with pytest.raises(GradlabError, match=r"link\.json: "):
        read_link(path)


def test_slow_ranks_and_pairs_are_named() -> None:
    assert slow_ranks([1.0, 1.1, 2.0, 0.9]) == {2: 2.0}
    assert slow_ranks([3.0, 1.5]) == {0: 2.0}
    usual = [{"ranks": [n, n + 1], "bits_per_second": 1e9, "latency_seconds": 1e-4} for n in range(3)]
    slow = {"ranks": [3, 0], "bits_per_second": 1e8, "latency_seconds": 1e-4}
    assert slow_messages([*usual, slow]) == ["ranks 3 and 0: 100 Mbit/s, where 1 Gbit/s is usual"]


@pytest.mark.parametrize(("cores", "named"), [(1, False), (8, True)])
def test_ranks_that_share_cores_are_named_later(cores: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside each other on few cores they vary so much by chance."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    times = times_on(Link(1e8, 1e-4), 2)
    checkup = {"nodes": [0, 0], "hosts": ["a"] * 2, "work_seconds": [1.0, 1.4], "between": None, "inside": times}
    said = sentences(checkup, {"inside": link_of(times)}, [])
    assert any(line.startswith("Rank 1 (a) takes 1.4 times as long") for line in said) == named


def test_16_bits_between_nodes_are_the_codecs() -> None:
    """`gradlab recommend` writes a plan there: PyTorch's hook would send every rank's gradients between nodes."""
    network = Network([Link(1e8, 1e-4)], [2], NOT_MEASURED, node=Node(2, Link(1e9)))
    layers = [Layer("w", (512, 512), "linear")]
    [(_, pair)] = forecast(Plan.uniform(layers, "cast"), network).comparisons
    step = waiting(layers, None, network.links[0], 2, network.node, ["int4"])
    found = step.seconds
    assert pair.half.seconds < found[HALF] < found[PLAIN] == pair.ways[FLAT].seconds
    assert found[HSDP] == pair.ways[HSDP].seconds
    assert step.traffic.endswith("most time goes to gradients between nodes (100 Mbit/s)")


def test_a_step_that_waits_is_told_in_one_line() -> None:
    step = waiting(1_000_000, 0.1, Link(1e8, 1e-4), 4, None, ["int4"])
    assert step.seconds["int4"] < step.seconds[HALF] < step.seconds[PLAIN]
    times = times_on(Link(1e8, 1e-4), 4)
    checkup = {"nodes": [0, 1, 2, 3], "hosts": ["a"] * 4, "work_seconds": [1.0] * 4, "between": times, "inside": None}
    checkup |= {"interface": "eth0", "interface_bits_per_second": 1e9}
    first, link, text = sentences(checkup, {"between": link_of(times)}, step_texts([step]))
    assert (first, link) == (
        "4 ranks on 4 nodes.",
        "Between nodes: 100 Mbit/s of the 1 Gbit/s of eth0, 100 µs one way.",
    )
    assert text.startswith("A model of 1M parameters that computes 100 ms takes 5")
    assert "% of it waiting; 16 bits " in text
    assert "; int4 every 30 steps 1" in text


def test_ranks_of_a_machine_share_its_cores() -> None:
    count = os.cpu_count() or 1
    for hosts, cores in ((["a"] * 4 * count, 0.25), (["a"] * count + ["b"], 1.0), (["a"], min(2.0, count))):
        assert cores_of({"hosts": hosts}) == cores


def test_the_interface_is_the_named_one_or_the_default_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    assert _interface(tmp_path) == ("", 0.0)
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text("Iface Destination\nib0 0000000A\neth7 00000000\n")
    for name, speed in (("eth7", "25000"), ("ib0", "-1")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "speed").write_text(f"{speed}\n")
    assert _interface(tmp_path) == ("eth7", 25e9)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert _interface(tmp_path) == ("", 0.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "../../secret")
    assert _interface(tmp_path) == ("", 0.0)


def test_names_of_other_launchers_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(GradlabError, match=r"RANK, WORLD_SIZE, MASTER_ADDR is not set: start it by torchrun"):
        _take_names_of_launchers()
    for name, value in {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    _take_names_of_launchers()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("3", "8", "1")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert _local_size() == 2
    assert [_count_of(text) for text in ("124M", "1.3b", "4096")] == [124_000_000, 1_300_000_000, 4096]
    for text in ("", "12", "1e9", "2T", "-3M", "11B"):
        with pytest.raises(GradlabError, match="expected numbers from 1k to 10B"):
            _count_of(text)


def test_it_is_started_by_a_launcher(gradlab: Command) -> None:
    code, out, err = gradlab("doctor")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "gradlab doctor measures between ranks" in err


def test_nodes_of_two_ranks_are_measured_inside_and_between(pool: ProcessPool) -> None:
    results = pool.run("jobs.doctor_tasks:checkup", 4, local=2)
    assert all(one == results[0] for one in results)
    found = results[0]
    assert found["nodes"] == [0, 0, 1, 1]
    assert [one["ranks"] for one in found["inside"]["messages"]] == [[0, 1], [2, 3]]
    assert [one["ranks"] for one in found["between"]["messages"]] == [[0, 2]]
    assert found["inside"]["ranks"] == found["between"]["ranks"] == 2
    assert min(one["seconds"] for one in found["between"]["timed"]) > 0
    assert len(found["work_seconds"]) == 4


def test_an_odd_ring_is_measured_all_round(pool: ProcessPool) -> None:
    [found, *_] = pool.run("jobs.doctor_tasks:checkup", 3, local=1)
    assert [one["ranks"] for one in found["between"]["messages"]] == [[0, 1], [1, 2], [2, 0]]
    assert found["inside"] is None


def test_nodes_of_other_sizes_are_refused(pool: ProcessPool) -> None:
    said = "3 ranks on nodes of [2] ranks, expected as many on each node"
    assert pool.run("jobs.doctor_tasks:checkup", 3, local=2) == [said] * 3


def test_two_ranks_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "link.json"
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradlab"]
    asked = ["doctor", "--seconds", "0.2s", "--parameters", "100k", "--out", str(out)]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 ranks on 1 node."
    written = json.loads(out.read_text())
    seconds: dict[str, dict[int, float]] = {}
    for one in written["checkup"]["inside"]["timed"]:
        seconds.setdefault(one["collective"], {})[one["nbytes"]] = one["seconds"]
    assert set(seconds) == {"all-reduce", "all-gather", "reduce-scatter"}
    for of_kind in seconds.values():  # on a machine that is busy, more bytes than the time was for
        assert of_kind[max(of_kind)] >= 2 * min(of_kind.values()) or max(of_kind) == 2**26
    assert [one["ranks"] for one in written["checkup"]["inside"]["messages"]] == [[0, 1]]
    assert len(written["checkup"]["work_seconds"]) == 2
    assert read_link(out).bits_per_second > 1e6


def moments(
    link: Link, computing: list[float], shares: list[float], sizes: list[int], steps: int, buffers: float = 0.0
) -> list[list[list[list[float]]]]:
    """Steps of ranks with clocks of their own over a link that carries one bucket after another, when all are ready.

    shares: parts of computing that are done when each bucket is ready.
    buffers: seconds that each rank waits for buffers before it computes.
    """
    rows: list[list[list[list[float]]]] = [[] for _ in computing]
    began = 0.0
    for _ in range(steps):
        free, ended = began, []
        for share, nbytes in zip(shares, sizes, strict=True):
            transfer = all_reduce(nbytes, len(computing))
            free = (
                max(free, began + share * max(computing)) + link.busy_seconds(transfer) + link.delay_seconds(transfer)
            )
            ended.append(free)
        for rank, (own, seconds) in enumerate(zip(rows, computing, strict=True)):
            ready = [began + share * seconds for share in shares]
            moved = 100 * rank + buffers * (len(own) + 1)
            own.append([[n, a + moved, b + moved, 0.0] for n, a, b in zip(sizes, ready, ended, strict=True)])
            own[-1][0][3] = buffers
        began = free
    return rows


@law(
    st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    st.lists(st.tuples(st.floats(0, 1), st.integers(10**6, 10**8)), min_size=1, max_size=5),
    st.floats(1e7, 1e11),
)
def test_what_steps_are_made_of_is_found_again_from_the_moments_of_their_buckets(
    computing: list[float], buckets: list[tuple[float, int]], rate: float
) -> None:
    shares, sizes = [*sorted(share for share, _ in buckets)[:-1], 1.0], [nbytes for _, nbytes in buckets]
    link = Link(rate)
    times = times_of_steps(moments(link, computing, shares, sizes, 4))
    assert times is not None
    exchanging = [
        link.busy_seconds(one) + link.delay_seconds(one) for one in (all_reduce(n, len(computing)) for n in sizes)
    ]
    assert times.steps == 3
    assert times.computing == pytest.approx(computing)
    assert times.exchanging == pytest.approx(exchanging, rel=1e-4, abs=1e-9)
    assert times.computing_seconds == pytest.approx(max(computing))
    assert [a + b for a, b in zip(times.computing, times.waiting, strict=True)] == pytest.approx(
        [times.seconds] * len(computing)
    )
    assert [sum(of_rank) for of_rank in times.exposed] == pytest.approx(times.waiting, abs=1e-9)
    later = times_of_steps(moments(link, computing, shares, sizes, 4, buffers=0.5))
    assert later is not None
    assert later.computing == pytest.approx(times.computing)
    assert (later.seconds, later.computing_seconds) == pytest.approx((times.seconds + 0.5, times.computing_seconds))
    assert later.waiting == pytest.approx([seconds + 0.5 for seconds in times.waiting])
    assert link_in_training(Link(1e6), times).bits_per_second == pytest.approx(rate, rel=1e-3)
    assert link_in_training(Link(1e6, 100.0), times).bits_per_second == 1e6


def test_a_single_step_tells_nothing() -> None:
    assert times_of_steps(moments(Link(1e9), [0.1, 0.2], [1.0], [10**6], 1)) is None


def test_steps_in_a_block_are_told_and_train_as_in_plain_ddp(pool: ProcessPool, tmp_path: Path) -> None:
    """On a number of ranks that is no power of two; afterwards too, with a recorder or compression."""
    results = pool.run("jobs.doctor_tasks:around_steps", 3, folder=str(tmp_path))
    assert all(one["equal"] == {"compress": True, "TraceRecorder": True} for one in results)
    first, *others = results
    training = first["summary"]["training"]
    assert all(one["summary"]["training"] == training and one["lines"] == [] for one in others)
    assert (training["steps"], sum(training["nbytes"])) == (3, 4 * (24 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4))
    assert len(training["nbytes"]) > 1
    assert [len(of_rank) for of_rank in training["exposed"]] == [len(training["nbytes"])] * 3
    assert first["rate"] == first["summary"]["link"]["bits_per_second"] > 0
    assert set(first["summary"]["steps"][0]["seconds"]) == {PLAIN, HALF, "int4", "int4 every 30 steps"}
    head, step, bus, *rest = first["lines"]
    assert head == "3 ranks on 3 nodes."
    assert step.startswith("A step takes ")
    assert bus.startswith("Bus bandwidth: ")
    assert rest[0].startswith("Between nodes: ")
    assert rest[1].startswith("A model of 6.02k parameters that computes ")


@pytest.mark.parametrize("way", ["all", "nodes", thorough("parts")])
def test_sharded_steps_are_told_and_train_as_in_plain_fsdp(pool: ProcessPool, way: str) -> None:
    """With micro-batches; afterwards too, plainly and with compression."""
    results = pool.run("jobs.doctor_tasks:around_sharded_steps", 4, way=way)
    assert all(one["equal"] for one in results)
    first, *others = results
    training, lines = first["summary"]["training"], first["lines"]
    assert all(one["summary"]["training"] == training and one["lines"] == [] for one in others)
    kinds = ["gathers of parameters", "reduce-scatters", "averages between nodes"]
    kinds = {"all": kinds[:2], "nodes": kinds, "parts": kinds[2:]}[way]  # 2 nodes of 1 shard, in 2 parts
    assert (training["steps"], list(training["collectives"])) == (3, kinds)
    if way != "parts":
        gathered, reduced = (training["nbytes"][kind] for kind in kinds[:2])
        assert 2 * reduced < gathered < 4 * reduced  # in both passes of two micro-batches, the root's in the first
    assert len(training["computing"]) == 4
    assert training["seconds"] >= max(training["computing"])
    if way == "nodes":
        assert training["nbytes"][kinds[2]] == reduced // 2
    assert lines[1].startswith("A step takes ")
    assert all(kind in lines[1] for kind in ("computing", *kinds))
    if way == "parts":
        assert first["summary"]["steps"] == []
    else:
        [told] = first["summary"]["steps"]
        assert list(told["seconds"]) == ["as it is", "gradients in int4", "parameters in int8", "both"]
        assert any("compress_fsdp" in line for line in lines)


def test_sharded_times_are_those_of_the_rank_that_waits_for_nobody() -> None:
    """Ranks that come early wait in a collective for the others, which is no time of its bytes. The slower of two
    groups that have one at once counts."""
    rows = [
        [
            [9.0, []],
            [
                1.0,
                [
                    ["gathers", 0, 8, 0.1 + early],
                    ["gathers", 0, 8, 0.2],
                    ["sums", pair, 16, 0.2 - early + 0.1 * pair],
                ],
            ],
        ]
        for pair in (0, 1)
        for early in (0.0, 0.1)
    ]
    times = times_of_sharded_steps(rows, on_gpu=False)
    assert times is not None
    assert times.collectives == pytest.approx({"gathers": 0.3, "sums": 0.2})
    assert times.nbytes == {"gathers": 16, "sums": 16}
    assert times.computing == pytest.approx((0.5, 0.5, 0.4, 0.4))
    assert times.computing_seconds == pytest.approx(0.5)
    assert times_of_sharded_steps([of_rank[:1] for of_rank in rows], on_gpu=False) is None
    on_gpu = times_of_sharded_steps(rows, on_gpu=True)
    assert on_gpu is not None
    assert (on_gpu.computing, on_gpu.computing_seconds) == ((), None)
    assert on_gpu.sentences == ["A step takes 1.0 s; beside computing or after it: gathers 300 ms, sums 200 ms."]


def test_what_cannot_be_measured_is_told_in_one_line(pool: ProcessPool) -> None:
    [lonely] = pool.run("jobs.doctor_tasks:alone", 1)
    assert "gradlab doctor measures between ranks, and there is one" in lonely
    for rank, said in enumerate(pool.run("jobs.doctor_tasks:refusals", 2)):
        assert said["equal"] == "True"
        assert "has the communication hook fp16_compress_hook already" in said["hooked"]
        assert said["bare"].startswith("gradlab.doctor: got a Linear, not in DDP; wrap it first")
        assert said["sharded"].startswith("gradlab.doctor: the model itself has a hook or a reduce-scatter of its own")
        assert "before the block has ended" in said["early"]
        assert "has the communication hook timed_hook already" in said["twice"]
        none = "gradlab.doctor: 0 steps that exchange gradients were made in the block, expected 2 or more\n"
        assert said["printed"] == none * (rank == 0) + "gradlab.doctor: KeyError ended the block, so nothing is told\n"
