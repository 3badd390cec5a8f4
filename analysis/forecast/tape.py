"""A plan's steps written down, so that they can be forecast where there is no Python, as in a report's page.

A forecast computes from a `Job`: buckets, and the exchanges that they start with the times of their code and the bytes
of their requests. A tape holds it as plain JSON, from which `analysis/report/scripts/forecast.js` computes steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from gradlab.analysis.forecast.network import NOT_MEASURED, Network
from gradlab.analysis.forecast.plans import Forecast, jobs
from gradlab.analysis.forecast.simulator import BETWEEN, Bucket, Exchange
from gradlab.analysis.forecast.step_time import Job
from gradlab.collectives import AllToAll, Broadcast, Gather, Request, Ring
from gradlab.executor.ticks import SEGMENT_BYTES
from gradlab.jsonable import plain
from gradlab.plan import Plan
from gradlab.progress import Progress

NODES = (2, 4, 8, 16, 32, 64)
_LONG_SECONDS = 2.0  # of one plan's dry run, after which no larger number of nodes is tried
_DIGITS = 7
_FASTEST = 1e15  # bits per second, in place of infinity, which JSON does not have


def request_tape(request: Request) -> list[Any]:
    """Write a request as its kind and bytes; for parts, pairs of a size and how many parts in a row have it."""
    if isinstance(request, Ring | AllToAll):
        kind = "ring" if isinstance(request, Ring) else "varying parts" if request.varying else "parts"
        return [kind, _in_a_row(request.sizes)]
    if isinstance(request, Gather) and not request.varying and request.lengths is not None:
        return ["parts", _in_a_row([length * request.tensor.element_size() for length in request.lengths]), "gather"]
    if isinstance(request, Gather):
        return ["varying" if request.varying else "gather", request.tensor.nbytes]
    if isinstance(request, Broadcast):
        return [f"broadcast:{request.root}", request.tensor.nbytes]
    dtype = str(request.tensor.dtype).removeprefix("torch.")
    return [f"{type(request).__name__.lower()}:{dtype}", request.tensor.nbytes]


def _in_a_row(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(size, len(list(parts))) for size, parts in groupby(sizes)]


def exchange_tape(exchange: Exchange) -> dict[str, Any]:
    """Write an exchange down: seconds of its turns and of the engine's copies before them, and their requests."""
    turns = [
        [_short(turn.seconds), _short(turn.copy_seconds), [request_tape(request) for request in turn.requests]]
        for turn in exchange.turns
    ]
    return {"bytes": exchange.gradient_bytes, "apply": _short(exchange.apply_seconds), "turns": turns}


def buckets_tape(buckets: Sequence[Bucket], compute_seconds: float) -> list[dict[str, Any]]:
    """Write buckets down. compute_seconds: of the step; a bucket keeps the share of it that is done before."""
    return [
        {
            "share": bucket.ready_seconds / compute_seconds if compute_seconds else 1.0,
            "in_place": bucket.in_place_bytes,
            "scan": _short(bucket.scan_seconds),
            "exchanges": [exchange_tape(exchange) for exchange in bucket.exchanges],
        }
        for bucket in buckets
    ]


def _short(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def job_tape(job: Job) -> dict[str, Any]:
    """Write a plan's step down, without its exchanges on ranks that are not taken together."""
    return {
        "buckets": buckets_tape(job.buckets, job.compute_seconds),
        "dense": buckets_tape(job.dense_buckets, job.compute_seconds),
    }


def forecast_tapes(
    plans: Mapping[str, Plan], forecasts: Mapping[str, Forecast], progress: Progress | None = None
) -> dict[str, Any] | None:
    """Write down the steps of plans at the forecasts' numbers of nodes and `NODES`; None if no plan runs between
    nodes.
    """
    network = next(iter(forecasts.values())).network
    if network.node is not None and network.node.plans != BETWEEN:
        return None
    profile, tapes = network.profile, {}
    for done, (name, known) in enumerate(forecasts.items()):
        by_nodes = {node.job.world_size: job_tape(node.job) for node in known.nodes}
        tapes[name] = dict(sorted({**by_nodes, **_others(plans[name], known.network, by_nodes)}.items()))
        if progress:
            progress("plans at other numbers of nodes", done + 1, len(forecasts))
    link = {key: value for key, value in dict(plain(network.links[0])).items() if key != "bits_per_second"}
    node = network.node
    if node is not None and math.isinf(node.inside.bits_per_second):
        node = replace(node, inside=replace(node.inside, bits_per_second=_FASTEST))
    return {
        "compute_seconds": None if replace(profile, codec=None) == NOT_MEASURED else profile.compute_seconds,
        "link": link,
        "cores": network.cores,
        "node": plain(node),
        "segment_bytes": SEGMENT_BYTES,
        "plans": tapes,
    }


def _others(plan: Plan, network: Network, known: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Tapes at numbers of nodes that nobody asked for."""
    made = {}
    for nodes in (count for count in NODES if count not in known):
        began = time.perf_counter()
        [job] = jobs(plan, replace(network, nodes=(nodes,)), repeats=1)
        made[nodes] = job_tape(job)
        if time.perf_counter() - began > _LONG_SECONDS:
            break
    return made
