"""Fit a plan by layer to a trace: the smallest that makes no larger an error than a uniform plan known to train well.

Alimohammadi, Markov, Frantar, Alistarh, "L-GreCo: Layerwise-adaptive gradient compression for efficient and accurate
deep learning", MLSys 2024. The paper's reference and ranges of settings (section 5.1), its metric (L2 error of
accumulated gradients, section 3) and its objective, the size. Beyond it: an exact search, errors of all ranks, several
codecs in one plan (named there as future work), and a check on later iterations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab import codecs
from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.layer_plan.costs import PAYLOAD, Cost, candidate_costs
from gradlab.analysis.layer_plan.grids import main_setting, paper_settings
from gradlab.analysis.layer_plan.provenance import LayerSetting, LgrecoProvenance, PlanErrors, WindowErrors
from gradlab.analysis.replay.error_tables import ErrorTable, LayerTable, measure_errors, windows_of
from gradlab.analysis.replay.sampled import require_all_layers
from gradlab.artifact import Artifact
from gradlab.codec.settings import build_settings
from gradlab.errors import GradlabError
from gradlab.knapsack import Allocation, allocate
from gradlab.plan import Plan, sent_bytes
from gradlab.plan.layer_errors import Candidate
from gradlab.plan.refresh import Accordion, Refresh
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

Rows = Sequence[np.ndarray]
Choice = Sequence[int] | np.ndarray


def total(rows: Rows, choice: Choice) -> float:
    """Sum over layers the value of each one's chosen setting."""
    return float(np.array([row[index] for row, index in zip(rows, choice, strict=True)]).sum())


@dataclass(frozen=True)
class Problem:
    """Tables that a plan by layer is chosen from.

    costs: per layer (candidates,).
    reference: (layers,), index of the uniform plan's candidate.
    """

    table: ErrorTable
    costs: tuple[np.ndarray, ...]
    reference: np.ndarray

    def errors(self, metric: str, windows: slice) -> list[np.ndarray]:
        """Compute mean errors per layer (candidates,), in units of the uniform plan's error in each window.
        A budget of alpha is then the paper's E_max times alpha, and all windows weigh the same.
        """
        units = self.table.by_window(self.reference, metric)
        return self.table.errors(metric, windows, np.where(units > 0, units, 1.0))

    def alone(self, errors: Rows, budget: float) -> dict[str, float]:
        """Compute the cost of the best plan of one codec and dense layers, by codec; empty for one codec."""
        kinds = [np.array([candidate.codec for candidate in t.candidates]) for t in self.table.layers]
        names = sorted({str(name) for row in kinds for name in row} - {"identity"})
        best: dict[str, float] = {}
        for name in names if len(names) > 1 else ():
            kept = [
                np.where((kind == name) | (kind == "identity"), row, np.inf)
                for kind, row in zip(kinds, errors, strict=True)
            ]
            with suppress(GradlabError):
                best[name] = total(self.costs, allocate(kept, self.costs, budget).choice)
        return best


# --- the fit ----------------------------------------------------------------------------------------------------------


_CHOSEN_ON = 0.5  # share of the windows that the plan is chosen on; later ones check it
_WINDOWS = 4  # that a trace is cut into by default
_REPEATS = 3  # of timed exchanges: there are many candidates
_DELAY_SHARE = 10  # a tenth of the iterations between two choices is left for making the tables


@dataclass(frozen=True)
class LgrecoOptions:
    """How `fit_lgreco` measures, the cost that it minimises, and the ranks that the plan is for.

    Args:
        candidates: candidates by layer name, for the paper's range around the reference. The reference joins them.
        alpha: the error allowed, in the uniform plan's.
        budget: error summed over layers, mean over ranks and windows, in place of alpha.
        metric: "l2" sums norms of errors over layers, as the paper does; "squared-l2" sums their squares.
        window: steps that gradients are accumulated over; None cuts the trace from `start` on into 4 windows.
        start: position of the first recorded step to look at.
        cost: measure of size: bytes, or seconds on a link.
        world_size: ranks that the plan is for; None: the trace's.
        warmup_steps: dense steps before the first compressed one.
        refresh_every: steps of training after which the plan is chosen anew from these settings; 0 is never.
        accordion: the most and the least compressed value of the codec's main setting, with a refresh. Accordion takes
            the reference of every choice between them; see `gradlab.plan.refresh`.
        seed: seed of the plan, and of random codecs while errors are measured.
        workers: processes that measure errors.
    """

    candidates: Mapping[str, Sequence[Candidate]] | None = None
    alpha: float = 1.0
    budget: float | None = None
    metric: str = "l2"
    window: int | None = None
    start: int = 0
    cost: Cost = PAYLOAD
    world_size: int | None = None
    warmup_steps: int = 0
    refresh_every: int = 0
    accordion: tuple[float, float] | None = None
    seed: int = 0
    workers: int = 1

    def ranks(self, recorded: int) -> int:
        """The number of ranks that the plan is for; recorded: those of the trace."""
        return recorded if self.world_size is None else self.world_size

    def check(self, ranks: int) -> None:
        """Refuse options that contradict each other, by name."""
        least = 1 if self.cost.name == "payload" else 2
        if ranks < least:
            raise GradlabError(f"nodes = {ranks}, expected at least {least} for {self.cost.name}")
        if self.accordion is not None and not self.refresh_every:
            raise GradlabError("accordion: it acts where plans are chosen anew while training, which needs a refresh")
        if self.accordion is not None and not self.accordion[0] < self.accordion[1]:
            between = ":".join(f"{value:g}" for value in self.accordion)
            raise GradlabError(f"accordion {between}, expected the more compressed, smaller value first")
        if self.refresh_every and self.budget is not None:
            raise GradlabError("refresh: while training plans are chosen by payload and alpha, without a budget")
        if self.refresh_every and self.cost.name != "payload":
            raise GradlabError(f"refresh: while training plans are chosen by payload, not by {self.cost.name}")


@dataclass(frozen=True)
class LgrecoFit:
    """A plan by layer, the tables that it was chosen from, the choice with a bound, and how it was made."""

    plan: Plan
    problem: Problem
    allocation: Allocation
    provenance: LgrecoProvenance

    def artifact(self) -> Artifact:
        """Join the plan and its metadata, to be saved."""
        return Artifact(self.plan, self.provenance.to_json())


def fit_lgreco(
    trace: Trace,
    codec: str,
    reference: Mapping[str, Any] | None = None,
    options: LgrecoOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> LgrecoFit:
    """Choose a setting per layer: the least cost at no more error than a uniform plan's.

    The first half of the windows is chosen on, the second checks the choice. With one window nothing is held out.

    >>> from gradlab.analysis import fit_lgreco
    >>> with Trace("trace") as trace:
    ...     fit = fit_lgreco(trace, "powersgd", {"rank": 4})
    >>> [(group.name, group.settings) for group in fit.plan.groups]
    [('conv.weight', {'rank': 2}), ('head.weight', {'rank': 6})]

    Args:
        trace: gradients of all ranks.
        codec: codec of the uniform plan that is known to train well. Its error, times alpha, is the budget.
        reference: settings of that codec.
        options: everything else.
        changes: fields of `LgrecoOptions` by name, which differ from `options`.

    Raises:
        GradlabError: for a budget that no plan meets, no layer to compress, a
            refresh from several codecs or towards another cost than payload, or what `measure_errors` refuses.
    """
    require_all_layers(trace, "L-GreCo's plan is chosen by the errors of all layers")
    options = replace(options or LgrecoOptions(), **changes)
    varied = main_setting(codec)
    # Refuses what is no setting of the codec, before it is taken for an argument of Plan.uniform.
    settings = build_settings(codecs.get(codec), dict(reference or {}))
    uniform = Candidate(codec, {varied: getattr(settings, varied), **(reference or {})})
    ranks = options.ranks(trace.world_size)
    options.check(ranks)
    warmup, seed = options.warmup_steps, options.seed
    base = Plan.uniform(trace.model_layers, codec, warmup_steps=warmup, seed=seed, group_bytes=0, **uniform.settings)
    runs = DryRuns(base, ranks, repeats=_REPEATS)
    problem = _measure(trace, base, uniform, options, runs, progress)
    errors, budget = _errors_and_budget(problem, options)
    allocation = allocate(errors, problem.costs, budget)
    plan = plan_of(base, problem.table, allocation.choice)
    if options.refresh_every:
        plan = replace(plan, refresh=_refresh(problem, options, varied))
    sizes = {"budget": budget, "alone": problem.alone(errors, budget)}
    made = _provenance(trace, base, plan, problem, options, uniform, allocation, **sizes)
    return LgrecoFit(plan, problem, allocation, made)


def _provenance(
    trace: Trace,
    base: Plan,
    plan: Plan,
    problem: Problem,
    options: LgrecoOptions,
    uniform: Candidate,
    allocation: Allocation,
    **sizes: Any,
) -> LgrecoProvenance:
    """Collect how a plan was made; sizes: the budget, and costs of plans of one codec."""
    ranks, windows = options.ranks(trace.world_size), problem.table.windows
    size, uniform_size = (total(problem.costs, choice) for choice in (allocation.choice, problem.reference))
    return LgrecoProvenance(
        method="lgreco",
        trace=trace.digest,
        size=size,
        uniform_size=uniform_size,
        gain=uniform_size / size if size else math.inf,
        gap=allocation.gap,
        payload_bytes=plan.payload_bytes(ranks),
        sent_bytes=sent_bytes(plan, ranks),
        uniform_payload_bytes=base.payload_bytes(ranks),
        dense_payload_bytes=plan.payload_bytes(ranks, compressing=False),
        relative_error=_plan_errors(problem, allocation.choice, options.metric),
        windows=windows,
        windows_chosen_on=len(windows[_halves(len(windows))[0]]),
        layers=_layer_settings(problem, allocation.choice),
        alpha=None if options.budget is not None else options.alpha,
        metric=options.metric,
        cost=options.cost.name,
        world_size=ranks,
        sample=trace.extent if trace.samples else None,
        codec=uniform.codec,
        reference=dict(uniform.settings),
        varied=main_setting(uniform.codec),
        uniform=str(uniform),
        **sizes,
    )


def _measure(
    trace: Trace, base: Plan, uniform: Candidate, options: LgrecoOptions, runs: DryRuns, progress: Progress | None
) -> Problem:
    """Errors and costs of every layer's candidates."""
    windows = _windows(trace, options.start, options.window)
    rows = _candidates(base, uniform, options.candidates)
    table = measure_errors(trace, rows, windows, seed=options.seed, workers=options.workers, progress=progress)
    layers = [(t.layer, t.candidates) for t in table.layers]
    costs = candidate_costs(layers, runs.world_size, options.cost, runs=runs, progress=progress)
    reference = np.array([_index_of(uniform, t.candidates) for t in table.layers])
    if not np.isfinite(table.by_window(reference, options.metric)).all():
        raise GradlabError(
            f"{trace.path}: the uniform plan's own error is not finite: there is no budget to take from it"
        )
    return Problem(table, tuple(costs), reference)


def _errors_and_budget(problem: Problem, options: LgrecoOptions) -> tuple[list[np.ndarray], float]:
    """Per layer (candidates,), errors on the windows that are chosen on; and the sum allowed, in their unit."""
    chosen_on, _ = _halves(len(problem.table.windows))
    if options.budget is not None:
        return problem.table.errors(options.metric, chosen_on), options.budget
    errors = problem.errors(options.metric, chosen_on)
    return errors, options.alpha * total(errors, problem.reference)


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
    base: Plan, uniform: Candidate, given: Mapping[str, Sequence[Candidate]] | None
) -> dict[str, list[Candidate]]:
    """Candidates by layer name; those given come after the uniform plan's."""
    codec, reference = uniform.codec, uniform.settings
    names = [name for group in base.compressed_groups if group.codec == codec for name in group.layers]
    if given is None and not names:
        raise GradlabError(f"no layer that {codec} would compress: there is nothing to choose")
    if given is None:
        return {name: [Candidate(codec, settings) for settings in paper_settings(codec, reference)] for name in names}
    firsts = {name: uniform if name in names else Candidate("identity") for name in given}
    return {name: [first, *(one for one in given[name] if one != first)] for name, first in firsts.items()}


def _index_of(uniform: Candidate, candidates: Sequence[Candidate]) -> int:
    """Index of the uniform plan's candidate; a layer that it sends dense has that one first."""
    full = codecs.get(uniform.codec).Settings
    wanted = full(**uniform.settings)
    for index, candidate in enumerate(candidates):
        if candidate.codec == uniform.codec and full(**candidate.settings) == wanted:
            return index
    return 0


def _refresh(problem: Problem, options: LgrecoOptions, varied: str) -> Refresh:
    layers, every = problem.table.layers, options.refresh_every
    names = {candidate.codec for t in layers for candidate in t.candidates}
    if len(names) > 1:
        raise GradlabError(f"refresh: chooses among one codec's settings, not among {', '.join(sorted(names))}")
    settings = {t.layer.name: [dict(candidate.settings) for candidate in t.candidates] for t in layers}
    reference = {t.layer.name: int(index) for t, index in zip(layers, problem.reference, strict=True)}
    delay = min(every - 1, max(1, every // _DELAY_SHARE))
    accordion = None
    if options.accordion is not None:
        most, least = (_indices(problem, varied, value) for value in options.accordion)
        accordion = Accordion(least, most)
    return Refresh(every, settings, reference, delay, options.alpha, options.metric, accordion)


def _indices(problem: Problem, varied: str, value: float) -> dict[str, int]:
    """By layer name, the index of the candidate with a value of the setting that varies."""
    found = {}
    for table in problem.table.layers:
        values = [float(candidate.settings[varied]) for candidate in table.candidates]
        if value not in values:
            listed = ", ".join(f"{one:g}" for one in sorted(values))
            raise GradlabError(f"accordion: {varied} = {value:g}, expected one of layer {table.layer.name}'s: {listed}")
        found[table.layer.name] = values.index(value)
    return found


def plan_of(base: Plan, table: ErrorTable, choice: Choice) -> Plan:
    """Give the table's layers of a base plan their chosen candidates, indices (layers of the table,)."""
    chosen = {t.layer.name: t.candidates[index] for t, index in zip(table.layers, choice, strict=True)}
    others = tuple(group for group in base.groups if not set(group.layers) & set(chosen))
    compressed = [(name, candidate) for name, candidate in chosen.items() if candidate.codec != "identity"]
    learned = {name: dict(candidate.learned) for name, candidate in compressed if candidate.learned}
    groups = (*(candidate.group(name) for name, candidate in compressed), *others)
    return Plan(base.layers, groups, base.schedule, base.seed, learned)


def _plan_errors(problem: Problem, choice: Choice, metric: str) -> PlanErrors:
    table = problem.table
    chosen_on, checked_on = _halves(len(table.windows))

    def errors(tried: Choice) -> WindowErrors:
        held_out = table.relative_error(tried, metric, checked_on) if checked_on != chosen_on else None
        return WindowErrors(table.relative_error(tried, metric, chosen_on), held_out)

    return PlanErrors(errors(choice), errors(problem.reference))


def _layer_settings(problem: Problem, choice: Choice) -> tuple[LayerSetting, ...]:
    """Settings of every layer, beside the uniform plan's setting."""
    table = problem.table
    chosen_on, _ = _halves(len(table.windows))
    return tuple(
        LayerSetting(
            name=t.layer.name,
            numel=t.layer.numel,
            chosen=str(t.candidates[index]),
            codec=t.candidates[index].codec,
            settings=dict(t.candidates[index].settings),
            cost=float(costs[index]),
            uniform_cost=float(costs[reference]),
            relative_error=_relative(t, index, chosen_on),
            uniform_relative_error=_relative(t, reference, chosen_on),
        )
        for t, costs, index, reference in zip(table.layers, problem.costs, choice, problem.reference, strict=True)
    )


def _relative(table: LayerTable, index: int, windows: slice) -> float:
    norm = float(table.squared_norm[windows].sum())
    return float((table.squared_l2[windows, index].sum() / norm) ** 0.5) if norm else 0.0
