"""Fit a plan by layer to a trace: the smallest that makes no larger an error than a uniform plan known to train well.

Alimohammadi, Markov, Frantar, Alistarh, "L-GreCo: Layerwise-adaptive gradient compression for efficient and accurate
deep learning", MLSys 2024. The paper's reference and ranges of settings (section 5.1), its metric (L2 error of
accumulated gradients, section 3), its objective (size) or one of time (section 4). Beyond it: an exact search, errors
of all ranks, several codecs in one plan (named there as future work), and a check on iterations that were not looked
at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab import codecs
from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.layer_plan.bucket_time import bucket_of_layers
from gradlab.analysis.layer_plan.costs import PAYLOAD, Cost, candidate_costs
from gradlab.analysis.layer_plan.grids import main_setting, paper_settings
from gradlab.analysis.layer_plan.planners import Choice, total
from gradlab.analysis.layer_plan.problem import Problem
from gradlab.analysis.layer_plan.step_time_search import StepModel, StepTimes, fastest_plan
from gradlab.analysis.replay.error_tables import ErrorTable, measure_errors, windows_of
from gradlab.artifact import Artifact
from gradlab.codec.settings import build_settings
from gradlab.errors import GradlabError
from gradlab.knapsack import Allocation, allocate
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.plan.refresh import Refresh
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

# Windows that the plan is chosen on, of all; later ones check it.
_CHOSEN_ON = 0.5
# So many windows a trace is cut into, if nothing else is asked for.
_WINDOWS = 4
_REPEATS = 3  # of timed exchanges: there are many candidates
_POINTS = 17  # of a frontier
_DELAY_SHARE = 10  # of the iterations between two choices, for the tables to be made in


@dataclass(frozen=True)
class LgrecoFit:
    """A plan by layer, with the tables it was chosen from and plain JSON about how it was made and how it holds up."""

    plan: Plan
    problem: Problem
    allocation: Allocation
    origin: dict[str, Any]

    def artifact(self) -> Artifact:
        """The plan with its origin, to be saved."""
        return Artifact(self.plan, self.origin)

    def frontier(self, points: int = _POINTS) -> dict[str, Any]:
        """Cost over error, in the uniform plan's, of every way to plan on the same tables, as plain JSON.

        points: budgets, evenly from the least error that there is to the most.

        Where layers differ in their settings, only planners that do not need one setting for all are there.
        """
        problem, metric = self.problem, self.origin["metric"]
        chosen_on, _ = _halves(len(problem.table.windows))
        errors = problem.errors(metric, chosen_on)
        unit = total(errors, problem.reference) or 1.0
        most = sum(float(row[np.isfinite(row)].max()) for row in errors)
        budgets = np.linspace(sum(float(row.min()) for row in errors), most, points)
        found: dict[str, list[list[float]]] = {}
        for name, planner in problem.planners().items():
            reached = []
            for budget in budgets:
                with suppress(GradlabError):  # a budget that this planner cannot meet
                    plan = planner(errors, problem.objective, float(budget))
                    reached.append([total(errors, plan.choice) / unit, total(problem.costs, plan.choice)])
            if reached:
                found[name] = reached
        # A step is no sum over layers: seconds are what the tables hold.
        cost = self.origin["cost"] if "step" not in self.origin else "seconds"
        return {"planners": found, "cost": cost, "metric": metric}


def fit_lgreco(
    trace: Trace,
    codec: str,
    reference: Mapping[str, Any] | None = None,
    *,
    candidates: Mapping[str, Sequence[Candidate]] | None = None,
    alpha: float = 1.0,
    budget: float | None = None,
    metric: str = "squared",
    window: int | None = None,
    start: int = 0,
    cost: Cost = PAYLOAD,
    weights: Mapping[str, float] | None = None,
    step: StepModel | None = None,
    world_size: int | None = None,
    warmup_steps: int = 0,
    refresh_every: int = 0,
    seed: int = 0,
    workers: int = 1,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> LgrecoFit:
    """Choose a setting per layer.

    codec, reference: the uniform plan that is known to train well, and whose error, times alpha, is the budget;
    candidates: per layer, in place of the paper's range around the reference; the reference joins them. budget: in
    place of alpha, an error summed over layers, mean over ranks and windows. metric: "squared" or "plain": what is
    summed over layers is the square of an error, or the error. window: steps that gradients are accumulated over; by
    default the trace from `start` on is cut into 4. The first half of the windows is chosen on, the second checks the
    choice; of one window nothing is held out. cost: what is minimised, at `world_size` ranks (the trace's); weights: by
    layer name, times its cost there: see `gradlab.analysis.layer_plan.bucket_time`. step: with a cost in seconds, the
    plan of the shortest predicted step in place of the least sum: see `gradlab.analysis.layer_plan.step_time_search`.
    refresh_every: iterations of training after which the plan is chosen anew from these settings, 0 for never. workers,
    cluster: see `measure_errors`.

    Raises:
        GradlabError: for a budget that no plan meets, no layer to compress, a refresh from several codecs or towards
            another cost than payload, or what `measure_errors` refuses.
    """
    varied, method = main_setting(codec), codecs.get(codec)
    reference = dict(reference or {})
    built = build_settings(method, reference)  # names the codec's settings; Plan.uniform has others of its own
    reference = {varied: getattr(built, varied), **reference}
    ranks = trace.world_size if world_size is None else world_size
    named = cost.name if step is None else "step"
    if ranks < 1 or (ranks < 2 and cost.name != "payload"):
        raise GradlabError(f"nodes = {ranks}, expected at least {1 if cost.name == 'payload' else 2} for {named}")
    if refresh_every and (weights is not None or budget is not None):
        raise GradlabError("refresh: while training plans are chosen by payload and alpha, without weights or a budget")
    if refresh_every and named != "payload":
        raise GradlabError(f"refresh: while training plans are chosen by payload, not by {named}")
    if step is not None:
        if cost.link is None or weights is not None:
            raise GradlabError("a step is predicted from seconds on a link, and weighs buckets itself")
        bucket_of_layers(trace.layers, step.bucket_cap_mb)  # refuses a cap that cannot be
    base = Plan.uniform(trace.layers, codec, warmup_steps=warmup_steps, seed=seed, group_bytes=0, **reference)
    windows = _windows(trace, start, window)
    rows = _candidates(base, codec, dict(reference), candidates)
    table = measure_errors(trace, rows, windows, seed=seed, workers=workers, cluster=cluster, progress=progress)
    runs = DryRuns(base, ranks, repeats=_REPEATS)
    layers = [(t.layer, t.candidates) for t in table.layers]
    costs = candidate_costs(layers, ranks, cost, runs=runs, progress=progress)
    at = np.array([_place_of(codec, reference, t.candidates) for t in table.layers])
    weighing = None if weights is None else np.array([weights[t.layer.name] for t in table.layers])
    problem = Problem(table, tuple(costs), at, weighing)
    if not np.isfinite(table.by_window(at, metric)).all():
        raise GradlabError(
            f"{trace.path}: the uniform plan's own error is not finite: there is no budget to take from it"
        )
    chosen_on, checked_on = _halves(len(windows))
    if budget is None:
        errors = problem.errors(metric, chosen_on)
        most = alpha * total(errors, problem.reference)
    else:
        errors, most = table.errors(metric, chosen_on), budget
    fastest = None
    if step is None or cost.link is None:
        found = allocate(errors, problem.objective, most)
    else:
        times = StepTimes(partial(plan_of, base, table), runs, cost.link, step)
        fastest = fastest_plan(problem, errors, most, times, seed=seed, progress=progress)
        found = Allocation(fastest.choice, fastest.seconds, fastest.bound)
    plan = plan_of(base, table, found.choice)
    if refresh_every:
        refresh = _refresh(table, problem.reference, refresh_every, alpha, metric)
        plan = replace(plan, refresh=refresh)
    origin = _origin(trace, base, plan, problem, found, (chosen_on, checked_on), ranks)
    about = {"codec": codec, "reference": dict(reference), "alpha": None if budget is not None else alpha}
    origin |= about | {"budget": most, "metric": metric, "cost": named, "world_size": ranks}
    if fastest is None and (alone := problem.alone(errors, most)):
        origin |= {"alone": alone}
    if fastest is not None:
        times_of_step = {"size": fastest.seconds, "uniform_size": fastest.uniform, "step": fastest.to_json()}
        origin |= times_of_step | {"gain": fastest.uniform / fastest.seconds}
    origin |= {"varied": varied, "uniform": str(Candidate(codec, reference))}
    return LgrecoFit(plan, problem, found, origin)


def _windows(trace: Trace, start: int, window: int | None) -> list[tuple[int, int]]:
    recorded = len(trace.steps)
    if not 0 <= start < recorded:
        raise GradlabError(f"start = {start}: expected one of the trace's {recorded} positions")
    return windows_of(start, recorded, max(1, (recorded - start) // _WINDOWS) if window is None else window)


def _halves(count: int) -> tuple[slice, slice]:
    """Windows to choose on, and to check on: the same one, if there is no other."""
    first = max(1, round(count * _CHOSEN_ON)) if count > 1 else 1
    return slice(0, first), slice(first, count) if first < count else slice(0, count)


def _candidates(
    base: Plan, codec: str, reference: dict[str, Any], given: Mapping[str, Sequence[Candidate]] | None
) -> dict[str, list[Candidate]]:
    names = [name for group in base.compressed_groups if group.codec == codec for name in group.layers]
    if given is None and not names:
        raise GradlabError(f"no layer that {codec} would compress: there is nothing to choose")
    if given is None:
        return {name: [Candidate(codec, settings) for settings in paper_settings(codec, reference)] for name in names}
    uniform = Candidate(codec, reference)
    dense = Candidate("identity")
    found = {}
    for name, some in given.items():
        own = uniform if name in names else dense
        found[name] = [own, *(candidate for candidate in some if candidate != own)]
    return found


def _place_of(codec: str, reference: Mapping[str, Any], candidates: Sequence[Candidate]) -> int:
    """Where the uniform plan's candidate stands; a layer that it sends dense has that one first."""
    full = codecs.get(codec).Settings
    wanted = full(**reference)
    for place, candidate in enumerate(candidates):
        if candidate.codec == codec and full(**candidate.settings) == wanted:
            return place
    return 0


def _refresh(table: ErrorTable, reference: np.ndarray, every: int, alpha: float, metric: str) -> Refresh:
    codecs_there = {candidate.codec for t in table.layers for candidate in t.candidates}
    if len(codecs_there) > 1:
        raise GradlabError(f"refresh: chooses among one codec's settings, not among {', '.join(sorted(codecs_there))}")
    settings = {t.layer.name: [dict(candidate.settings) for candidate in t.candidates] for t in table.layers}
    places = {t.layer.name: int(place) for t, place in zip(table.layers, reference, strict=True)}
    return Refresh(every, settings, places, min(every - 1, max(1, every // _DELAY_SHARE)), alpha, metric)


def plan_of(base: Plan, table: ErrorTable, choice: Choice) -> Plan:
    """The base plan with the table's layers as they were chosen; layers of the base that are not in it stay."""
    chosen = {t.layer.name: t.candidates[place] for t, place in zip(table.layers, choice, strict=True)}
    others = tuple(group for group in base.groups if not set(group.layers) & set(chosen))
    mine = [(name, candidate) for name, candidate in chosen.items() if candidate.codec != "identity"]
    learned = {name: dict(candidate.learned) for name, candidate in mine if candidate.learned}
    groups = (*(candidate.group(name) for name, candidate in mine), *others)
    return Plan(base.layers, groups, base.schedule, base.seed, learned)


def _origin(
    trace: Trace,
    base: Plan,
    plan: Plan,
    problem: Problem,
    found: Allocation,
    windows: tuple[slice, slice],
    ranks: int,
) -> dict[str, Any]:
    """Plain JSON: sizes, errors where it was chosen and later, and what every layer got."""
    table = problem.table
    chosen_on, checked_on = windows
    cost_of_uniform, size = total(problem.costs, problem.reference), total(problem.costs, found.choice)
    errors = {
        name: {
            "chosen_on": table.relative_error(choice, chosen_on),
            "held_out": table.relative_error(choice, checked_on) if checked_on != chosen_on else None,
        }
        for name, choice in (("plan", found.choice), ("uniform", problem.reference))
    }
    layers = [
        {
            "name": t.layer.name,
            "numel": t.layer.numel,
            "chosen": str(t.candidates[place]),
            "codec": t.candidates[place].codec,
            "settings": dict(t.candidates[place].settings),
            "cost": float(costs[place]),
            "uniform_cost": float(costs[at]),
            "relative_error": _relative(t, place, chosen_on),
            "uniform_relative_error": _relative(t, at, chosen_on),
        }
        for t, costs, place, at in zip(table.layers, problem.costs, found.choice, problem.reference, strict=True)
    ]
    return {
        "method": "lgreco",
        "trace": trace.digest,
        "size": size,
        "gap": found.gap,
        "uniform_size": cost_of_uniform,
        "gain": cost_of_uniform / size if size else math.inf,
        "payload_bytes": plan.payload_bytes(ranks),
        "uniform_payload_bytes": base.payload_bytes(ranks),
        "dense_payload_bytes": plan.payload_bytes(ranks, compressing=False),
        "relative_error": errors,
        "windows": [list(span) for span in table.windows],
        "windows_chosen_on": len(table.windows[chosen_on]),
        "layers": layers,
    }


def _relative(table: Any, place: int, windows: slice) -> float:
    norm = float(table.squared_norm[windows].sum())
    return float((table.squared[windows, place].sum() / norm) ** 0.5) if norm else 0.0
