"""The plan by layer whose training step is predicted to be the shortest, with a bound on any plan's.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 4, puts a regression on measured times in place of the size: see
`gradlab.analysis.layer_plan.bucket_time`. Here `gradlab.analysis.forecast.step_time` predicts the step itself. The
regression can then be taken on as many plans as are wanted, and every plan that an objective finds is judged by its
own step. A step is no sum over layers, so a search over sums does not prove that a plan is the fastest. What is proved
is a bound on the step of any plan of the same candidates, a group per layer, with the same times of codecs: all codecs
take turns on one thread, and all messages share one link. Groups of several layers, which some codecs prefer, can be
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gradlab.analysis.forecast.dry_run import DryRuns, scan_seconds_per_byte
from gradlab.analysis.forecast.link import Link, Transfer, all_reduce, format_rate, transfers
from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.simulator import Exchange
from gradlab.analysis.forecast.step_time import Comparison, Job, compare, make_job
from gradlab.analysis.layer_plan.bucket_time import (
    above_nothing,
    bucket_of_layers,
    fit_bucket_times,
    linear_priority,
    weighted,
)
from gradlab.analysis.layer_plan.costs import candidate_exchange
from gradlab.analysis.layer_plan.problem import Problem, Rows
from gradlab.analysis.parallel import one_thread
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.knapsack import allocate
from gradlab.plan import Plan
from gradlab.progress import Progress

_LEAST_SAMPLES, _SAMPLES_PER_BUCKET = 48, 3
_ROUNDS = 3  # of regressions: over all plans, then around the best one
_MOVED = 0.3  # of the layers, from a plan to one around it
_ROUNDING = 8  # bytes per rank and message


def require_one_step(network: Network, ranks: int) -> None:
    """Refuse a network that describes more than one step."""
    for name, values in (("links", network.links), ("numbers of nodes", network.nodes)):
        if len(values) != 1:
            raise GradlabError(f"step: the network has {len(values)} {name}, expected one, as one step is minimised")
    if ranks != network.nodes[0]:
        raise GradlabError(f"step: nodes = {network.nodes[0]} in the network, expected the plan's {ranks}")
    if network.profile.codec is not None:
        raise GradlabError(
            f"step: the profile has a codec time ({network.profile.codec.source}), expected none: it is one plan's, "
            "and every candidate is timed here"
        )


@dataclass(frozen=True)
class FastestPlan(Jsonable):
    """The choice of the shortest predicted step; all times are in seconds.

    choice: (layers,), an index of the layer's candidates each.
    seconds: its step.
    bound: no choice within the budget is predicted to take less.
    uniform: the step of the uniform plan.
    dense, half: the step of plain DDP, as it is and with gradients reduced in 16 bits.
    by_objective: the step of the choice that each objective leads to.
    network: what steps are predicted for: one link, one number of nodes.
    """

    choice: np.ndarray = field(metadata={"json": False})
    seconds: float
    bound: float
    uniform: float
    dense: float
    half: float
    by_objective: dict[str, float]
    network: Network = field(metadata={"json": False})

    @property
    def link(self) -> Link:
        """The network's only link."""
        return self.network.links[0]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, in seconds; the link's speed as a text, such as "200mbit"."""
        link = asdict(self.link) | {"bits_per_second": format_rate(self.link.bits_per_second)}
        model = {
            "compute_seconds": self.network.profile.compute_seconds,
            "cores": self.network.cores,
            "bucket_cap_mb": self.network.bucket_cap_mb,
        }
        return super().to_json() | {"link": link, "model": model}


class StepTimes:
    """Predicted steps of choices; each choice is predicted once.

    plan_of: makes a choice's plan.
    runs: exchanges at N ranks that are known already; new ones are added.
    network: what steps are predicted for: one link, and N as its only number of nodes.
    """

    def __init__(self, plan_of: Callable[[np.ndarray], Plan], runs: DryRuns, network: Network) -> None:
        require_one_step(network, runs.world_size)
        self.runs, self.network, self.link = runs, network, network.links[0]
        self.plan_of = plan_of
        with one_thread():
            self._scan = scan_seconds_per_byte()
        self._known: dict[bytes, float] = {}

    def job(self, choice: np.ndarray) -> Job:
        """Prepare a choice's step before the link is known; codecs that share a core take longer."""
        plan, network = self.plan_of(choice), self.network
        job = make_job(
            plan,
            self.runs.of(plan),
            network.profile.compute_seconds,
            scan_seconds=self._scan,
            bucket_cap_mb=network.bucket_cap_mb,
        )
        return job.scaled(network.crowding, network.crowding)

    def compare(self, choice: np.ndarray) -> Comparison:
        """Predict a choice's step and plain DDP's."""
        return compare(self.job(choice), self.link, speed=self.network.speed, node=self.network.node)

    def seconds(self, choice: np.ndarray) -> float:
        """Predict the seconds of a choice's step."""
        key = np.asarray(choice, dtype=np.int64).tobytes()
        if key not in self._known:
            self._known[key] = self.compare(choice).compressed.seconds
        return self._known[key]


def fastest_plan(
    problem: Problem,
    errors: Rows,
    budget: float,
    times: StepTimes,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> FastestPlan:
    """Take the shortest step of the plans that several objectives lead to: bytes, seconds as if nothing were hidden,
    the linear priority of appendix A, and regressions of predicted steps on the buckets' seconds.
    """
    table = problem.table.layers
    layers, cap = times.plan_of(problem.reference).layers, times.network.bucket_cap_mb
    numbers, priority = bucket_of_layers(layers, cap), linear_priority(layers, cap)
    of_bucket = np.array([numbers[t.layer.name] for t in table])
    with one_thread():
        sent, worked = _floors(problem, times)
        objectives = {
            "bytes sent": sent,
            "seconds, nothing hidden": list(problem.costs),
            "seconds, linear priority": weighted([t.layer.name for t in table], problem.costs, priority),
        }
        choices = {"uniform": np.asarray(problem.reference)}
        choices |= {name: allocate(errors, rows, budget).choice for name, rows in objectives.items()}
        generator = np.random.default_rng(seed)
        count = max(_LEAST_SAMPLES, _SAMPLES_PER_BUCKET * (int(of_bucket.max()) + 1))
        for turn in range(_ROUNDS):
            best = min(choices.values(), key=times.seconds)
            samples = [_drawn(problem.costs, of_bucket, best if turn else None, generator) for _ in range(count)]
            steps = []
            for done, sample in enumerate(samples):
                steps.append(times.seconds(sample))
                if progress:
                    progress("predicted steps", turn * count + done + 1, _ROUNDS * count)
            shares = exposed_shares(problem.costs, of_bucket, samples, np.array(steps))
            rows = [row * shares[bucket] for row, bucket in zip(problem.costs, of_bucket, strict=True)]
            choices[f"seconds that show, regression {turn + 1}"] = allocate(errors, rows, budget).choice
        seconds = {name: times.seconds(choice) for name, choice in choices.items()}
        name = min(choices, key=lambda name: seconds[name])
        rest = _rest_seconds(problem, times, numbers)
        bound = step_bound(
            errors, (sent, worked), (rest, 0 * rest), budget, of_bucket, times.job(choices[name]), times.network.speed
        )
        uncompressed = times.compare(choices[name])
        return FastestPlan(
            choices[name],
            seconds[name],
            bound,
            seconds["uniform"],
            uncompressed.dense.seconds,
            uncompressed.half.seconds,
            seconds,
            times.network,
        )


def exposed_shares(busy: Rows, of_bucket: np.ndarray, samples: Sequence[np.ndarray], seconds: np.ndarray) -> np.ndarray:
    """Estimate section 4's T(b), (buckets,): the share of a bucket's seconds that the step grows by, always above 0."""
    buckets = int(of_bucket.max()) + 1
    spent = np.zeros((len(samples), buckets))
    for row, sample in zip(spent, samples, strict=True):
        np.add.at(row, of_bucket, [values[index] for values, index in zip(busy, sample, strict=True)])
    shares = fit_bucket_times(spent, seconds).coefficients
    return above_nothing(shares) if shares.any() else np.ones(buckets)


def _drawn(busy: Rows, of_bucket: np.ndarray, around: np.ndarray | None, generator: np.random.Generator) -> np.ndarray:
    """Draw a choice: each layer near a random level of its bucket. With `around`, only some of its layers change."""
    levels = generator.random(int(of_bucket.max()) + 1)[of_bucket] + 0.2 * generator.standard_normal(len(of_bucket))
    drawn = []
    for row, level in zip(busy, levels.clip(0, 1), strict=True):
        order = np.argsort(row, kind="stable")
        drawn.append(order[round(level * (len(row) - 1))])
    if around is None:
        return np.array(drawn)
    return np.where(generator.random(len(drawn)) < _MOVED, drawn, around)


def step_bound(
    errors: Rows,
    floors: Sequence[Rows],
    rest: Sequence[np.ndarray],
    budget: float,
    of_bucket: np.ndarray,
    job: Job,
    speed: float = 1.0,
) -> float:
    """Bound the predicted step of every choice within the budget from below, in seconds.
    A step lasts until bucket b is ready and everything from b on has passed the link, or the codecs' thread. For each b
    an exact allocation finds the least of it. Codecs slow computing down by 1 / speed - 1 (`simulator.Clock`).
    """
    least = job.compute_seconds
    if speed < 1:
        least += (1 / speed - 1) * allocate(errors, floors[1], budget).bound
    for number, bucket in enumerate(job.buckets):
        for rows, other in zip(floors, rest, strict=True):
            later = of_bucket >= number
            sizes = [np.asarray(row, dtype=float) * bool(kept) for row, kept in zip(rows, later, strict=True)]
            passed = allocate(errors, sizes, budget).bound if later.any() else 0.0
            least = max(least, bucket.ready_seconds + passed + float(other[number:].sum()))
    return least


def _rest_seconds(problem: Problem, times: StepTimes, numbers: Mapping[str, int]) -> np.ndarray:
    """Seconds on the link of layers that no plan compresses, (buckets,)."""
    plan, ranks = times.plan_of(problem.reference), times.runs.world_size
    planned = {name for group in plan.compressed_groups for name in group.layers}
    planned |= {t.layer.name for t in problem.table.layers}
    seconds = np.zeros(max(numbers.values(), default=0) + 1)
    for layer in plan.layers:
        if layer.name not in planned:
            seconds[numbers[layer.name]] += _least_seconds(all_reduce(4 * layer.numel, ranks), times)
    return seconds


def _floors(problem: Problem, times: StepTimes) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute seconds of the bytes that a rank sends alone, and of the codec, each per layer (candidates,)."""
    crowding = times.network.crowding
    sent, worked = [], []
    for t in problem.table.layers:
        exchanges = [candidate_exchange(t.layer, candidate, times.runs) for candidate in t.candidates]
        sent.append(np.array([_sent_seconds(exchange, times) for exchange in exchanges]))
        # A bucket that is all dense is averaged where it lies.
        coded = [c.codec != "identity" for c in t.candidates]
        worked.append(np.array([crowding * e.codec_seconds * works for e, works in zip(exchanges, coded, strict=True)]))
    return sent, worked


def _sent_seconds(exchange: Exchange, times: StepTimes) -> float:
    moved = [t for turn in exchange.turns for t in transfers(turn.requests, times.runs.rank, times.runs.world_size)]
    return sum(_least_seconds(transfer, times) for transfer in moved)


def _least_seconds(transfer: Transfer, times: StepTimes) -> float:
    """Least seconds of the bytes that a rank sends. Messages that travel together save only a ring's rounding."""
    link, sent = times.link, max(0, transfer.wire_bytes - _ROUNDING * times.runs.world_size)
    return sent * link.seconds_per_byte
