"""Costs of candidates: bytes that are counted, bytes on the wire, or seconds on a link.

Sizes include indices, scales, padding and the cost of each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.forecast.link import Link, Transfer, transfers
from gradlab.analysis.forecast.simulator import Exchange
from gradlab.analysis.parallel import one_thread
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.progress import Progress

NAMES = ("payload", "wire", "seconds")


@dataclass(frozen=True)
class Cost:
    """The measure by which a layer's candidates are compared.

    name: "payload" is bytes that a rank contributes, the papers' size. "wire" is bytes that a rank sends at N ranks.
        "seconds" is time on a link with its latencies, as if nothing were hidden or fused.
    codec_time: whether the codec's time, measured here, is part of "seconds".
    local_ranks: ranks of a node that share out the layers, L: as many codecs run at once, and each counts 1/L. The link
        is then the node's. Averaging inside the node takes the same time for every candidate.
    """

    name: str = "payload"
    link: Link | None = None
    codec_time: bool = True
    local_ranks: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise GradlabError(f"cost {self.name!r}, expected one of {', '.join(NAMES)}")
        if (self.name == "seconds") != (self.link is not None):
            raise GradlabError("cost: a link is for seconds, and seconds need one")
        if self.local_ranks < 1:
            raise GradlabError(f"local ranks = {self.local_ranks}, expected at least 1")


PAYLOAD = Cost()


def candidate_costs(
    rows: Sequence[tuple[Layer, Sequence[Candidate]]],
    world_size: int,
    cost: Cost = PAYLOAD,
    *,
    runs: DryRuns | None = None,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Compute costs per layer, (candidates,). Layers of one shape, role and candidates are computed once."""
    known: dict[tuple[object, ...], np.ndarray] = {}
    costs = []
    runs = runs or DryRuns(Plan(()), world_size)
    with one_thread():
        for done, (layer, candidates) in enumerate(rows):
            key = (layer.shape, layer.role, tuple(map(str, candidates)))
            if key not in known or any(candidate.learned for candidate in candidates):
                known[key] = np.array([_cost(layer, one, runs, cost) for one in candidates], dtype=float)
            costs.append(known[key])
            if progress and cost.name != "payload":
                progress("costs", done + 1, len(rows))
    return costs


def candidate_exchange(layer: Layer, candidate: Candidate, runs: DryRuns) -> Exchange:
    """Look up the collectives that a layer's candidate asks for, with the codec's time on this machine."""
    plan = _alone(layer, candidate)
    return runs.of(plan).group(plan.groups[0])


def _cost(layer: Layer, candidate: Candidate, runs: DryRuns, cost: Cost) -> float:
    if cost.name == "payload":
        plan = _alone(layer, candidate)
        return plan.build(plan.groups[0]).forecast([layer], runs.world_size).payload
    exchange = candidate_exchange(layer, candidate, runs)
    below = cost.link.relay_below(runs.world_size) if cost.link else 0
    moved: list[Transfer] = [t for turn in exchange.turns for t in transfers(turn.requests, 0, runs.world_size, below)]
    if cost.link is None:
        return float(sum(transfer.path_bytes for transfer in moved))
    network = sum(cost.link.busy_seconds(t) + cost.link.delay_seconds(t) for t in moved)
    return network + (exchange.codec_seconds / cost.local_ranks if cost.codec_time else 0.0)


def _alone(layer: Layer, candidate: Candidate) -> Plan:
    learned = {layer.name: dict(candidate.learned)} if candidate.learned else {}
    return Plan((layer,), (candidate.group(layer.name),), learned=learned)
