"""What candidates cost: bytes that are counted, bytes on the wire, or seconds on a link.

Sizes are real ones: indices, scales, padding and what every message costs are in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.analysis.forecast.dry_run import DryRuns, one_thread
from gradlab.analysis.forecast.link import Link, Transfer, transfers
from gradlab.analysis.forecast.simulator import Exchange
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.progress import Progress

NAMES = ("payload", "wire", "seconds")


@dataclass(frozen=True)
class Cost:
    """name: "payload", bytes that a rank contributes, the papers' size; "wire", bytes that it sends at N ranks; or
    "seconds" on a link, its latencies and the codec's own time here included, as if nothing were hidden or fused.
    link: for "seconds"; codec_time: whether the codec's time counts there."""

    name: str = "payload"
    link: Link | None = None
    codec_time: bool = True

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise GradlabError(f"cost {self.name!r}, expected one of {', '.join(NAMES)}")
        if (self.name == "seconds") != (self.link is not None):
            raise GradlabError("cost: a link is for seconds, and seconds need one")


PAYLOAD = Cost()


def candidate_costs(
    rows: Sequence[tuple[Layer, Sequence[Candidate]]],
    world_size: int,
    cost: Cost = PAYLOAD,
    *,
    runs: DryRuns | None = None,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Per layer (candidates,). Layers of one shape, role and candidates are looked at once. runs: what is known of
    exchanges already, and is added to."""
    known: dict[tuple[object, ...], np.ndarray] = {}
    found = []
    runs = runs or DryRuns(Plan(()), world_size)
    with one_thread():
        for done, (layer, candidates) in enumerate(rows):
            key = (layer.shape, layer.role, tuple(map(str, candidates)))
            if key not in known or any(candidate.learned for candidate in candidates):
                known[key] = np.array([_cost(layer, one, runs, cost) for one in candidates], dtype=float)
            found.append(known[key])
            if progress and cost.name != "payload":
                progress("costs", done + 1, len(rows))
    return found


def candidate_exchange(layer: Layer, candidate: Candidate, runs: DryRuns) -> Exchange:
    """What a candidate asks for on its own, with its times here."""
    plan = _alone(layer, candidate)
    return runs.of(plan).group(plan.groups[0])


def _cost(layer: Layer, candidate: Candidate, runs: DryRuns, cost: Cost) -> float:
    if cost.name == "payload":
        plan = _alone(layer, candidate)
        return plan.build(plan.groups[0]).payload_bytes([layer], runs.world_size)
    exchange = candidate_exchange(layer, candidate, runs)
    moved: list[Transfer] = [t for turn in exchange.turns for t in transfers(turn.requests, 0, runs.world_size)]
    if cost.link is None:
        return float(sum(transfer.path_bytes for transfer in moved))
    network = sum(cost.link.busy_seconds(t) + cost.link.delay_seconds(t) for t in moved)
    return network + (exchange.codec_seconds if cost.codec_time else 0.0)


def _alone(layer: Layer, candidate: Candidate) -> Plan:
    learned = {layer.name: dict(candidate.learned)} if candidate.learned else {}
    return Plan((layer,), (candidate.group(layer.name),), learned=learned)
