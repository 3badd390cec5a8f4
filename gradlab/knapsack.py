"""Choose one setting per layer: the smallest plan whose errors add up to no more than a budget.

    minimise sum_l size(l, c_l)   subject to   sum_l error(l, c_l) <= budget

is the problem of Alimohammadi, Markov, Frantar, Alistarh, "L-GreCo: Layerwise-adaptive gradient compression for
efficient and accurate deep learning", MLSys 2024 (section 3), a multiple-choice knapsack. `allocate` solves it exactly.
The paper's Algorithm 1, which rounds errors to a grid, is in benchmarks/papers/planner.py.

The exact search goes through the layers and keeps partial plans by two rules of Pisinger ("A minimal algorithm for the
multiple-choice knapsack problem", European Journal of Operational Research 83, 1995): no other partial plan beats them
in both size and error, and the linear relaxation of the remaining layers lets them end below the best plan known. The
relaxation is a convex piecewise linear function of the remaining error, so that the bounds of a hundred thousand
partial plans are one interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradlab.errors import GradlabError

Table = npt.ArrayLike | Sequence[npt.ArrayLike]
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Partial plans kept in the first passes: narrow searches find good plans, which make the last pass short.
_WIDTHS = (64, 4096)
_COMPLETED = 4  # of the most promising partial plans, at every layer
_RELATIVE = 1e-11  # error of sums of sizes in float64


class Allocation(NamedTuple):
    """A plan.

    choice: (layers,), the index of every layer's setting.
    size: size of all layers together.
    bound: a lower bound on the size of all plans within the budget. A plan of this size is the smallest.
    """

    choice: Indices
    size: float
    bound: float

    @property
    def gap(self) -> float:
        """The share of its size that the plan may be too large by; 0 if it is proved to be the smallest."""
        return (self.size - self.bound) / self.size if self.size > self.bound else 0.0


def allocate(errors: Table, sizes: Table, budget: float, *, most_states: int = 200_000) -> Allocation:
    """Find the smallest plan within a budget of numpy's sum of the chosen errors.

    errors: (layers, settings), or one vector per layer where layers differ in their settings. Infinity marks a setting
        that a layer cannot have.
    sizes: sizes in the shape of errors, in any unit. Whole numbers are searched faster.
    most_states: partial plans kept at a time. Thousands of layers whose sizes and errors trade at one rate can need
        more. The plan may then not be the smallest, and `bound` shows by how much at most.
    """
    problem = _Problem.of(errors, sizes, budget)
    plan = problem.greedy()
    bound = min(problem.relaxed, problem.size(plan))
    for width in (*(width for width in _WIDTHS if width < most_states), most_states):
        if problem.largest_better(problem.size(plan)) < bound:
            bound = problem.size(plan)  # there is no size in between
            break
        search = _Search(problem, plan, width)
        search.run()
        plan, bound = search.plan, max(bound, search.bound)
    return problem.allocation(plan, bound)


# --- the problem ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One layer's settings by rising size and falling error; none is beaten in both.

    index: numbers of the settings in the caller's table.
    size, error: above the layer's smallest and least.
    """

    index: Indices
    size: Numbers
    error: Numbers

    def keep(self, indices: npt.NDArray[Any]) -> _Layer:
        return _Layer(self.index[indices], self.size[indices], self.error[indices])

    def hull(self) -> Indices:
        """Indices on the lower convex hull of size over error."""
        hull: list[int] = []
        for index in range(len(self.size)):
            while len(hull) > 1 and not self._bends(hull[-2], hull[-1], index):
                hull.pop()
            hull.append(index)
        return np.array(hull, dtype=np.int64)

    def _bends(self, a: int, b: int, c: int) -> bool:
        """Whether b lies below the line from a to c."""
        size, error = self.size, self.error
        return bool((size[b] - size[a]) * (error[a] - error[c]) < (size[c] - size[a]) * (error[a] - error[b]))


@dataclass(frozen=True)
class _Problem:
    """Layers whose sizes and errors start from 0: each layer's least of both is subtracted.

    base_size: (layers,), the sizes subtracted.
    budget: the caller's.
    capacity: the budget less the errors subtracted, with room for the rounding of their sum.
    step: a whole number that all sizes are multiples of, or 0.
    errors, sizes: the caller's tables.
    """

    layers: tuple[_Layer, ...]
    base_size: Numbers
    budget: float
    capacity: float
    step: int
    errors: tuple[Numbers, ...]
    sizes: tuple[Numbers, ...]

    @classmethod
    def of(cls, errors: Table, sizes: Table, budget: float) -> _Problem:
        """Check the caller's tables and bring them into this form."""
        tables = tuple(_rows(errors, "errors")), tuple(_rows(sizes, "sizes"))
        _require_tables(*tables)
        usable = [np.flatnonzero(np.isfinite(e) & np.isfinite(s)) for e, s in zip(*tables, strict=True)]
        if empty := [layer for layer, indices in enumerate(usable) if not len(indices)]:
            raise GradlabError(f"planner: layer {empty[0]} has no setting with a finite error and size")
        least = np.array([row[indices].min() for row, indices in zip(tables[0], usable, strict=True)])
        _require_reachable(float(least.sum()), budget)
        room = 4 * len(least) * np.finfo(float).eps * (abs(budget) + float(np.abs(least).sum()))
        capacity = budget - float(least.sum()) + (room if math.isfinite(budget) else 0.0)
        layers = [_choices(indices, e, s, capacity) for e, s, indices in zip(*tables, usable, strict=True)]
        base = np.array([s[layer.index[0]] for s, layer in zip(tables[1], layers, strict=True)])
        return cls(tuple(layers), base, budget, capacity, _common_step(layers), *tables)

    @property
    def relaxation(self) -> _Relaxation:
        return _Relaxation(self.layers)

    @property
    def relaxed(self) -> float:
        """The bound of the linear relaxation above `base_size`, rounded up to a size that plans can have."""
        curve = self.relaxation.after(0)
        return self.up(float(curve.size(np.array([self.capacity]))[0]))

    def up(self, size: float) -> float:
        """Round up to the next size that a plan can have, within the error of sums."""
        least = size - self.tolerance(size)
        return max(0.0, math.ceil(least / self.step) * self.step if self.step else least)

    def tolerance(self, size: float) -> float:
        return _RELATIVE * (float(self.base_size.sum()) + size)

    def largest_better(self, size: float) -> float:
        """The largest size that a plan better than one of `size` can have."""
        return size - self.step if self.step else size - 2 * self.tolerance(size)

    def size(self, chosen: Indices) -> float:
        """Size of a plan above `base_size`. chosen: indices in `layers`."""
        return float(sum(layer.size[index] for layer, index in zip(self.layers, chosen, strict=True)))

    def keeps_budget(self, chosen: Indices) -> bool:
        """Whether numpy's sum of the errors is within the budget."""
        return self._total(self.errors, chosen) <= self.budget

    def _total(self, table: Sequence[Numbers], chosen: Indices) -> float:
        pairs = zip(table, self.layers, chosen, strict=True)
        return float(np.array([row[layer.index[index]] for row, layer, index in pairs]).sum())

    def greedy(self) -> Indices:
        """The relaxation's plan with its one fraction rounded to the larger setting."""
        relaxation = self.relaxation
        curve = relaxation.after(0)
        for taken in range(curve.needed(self.capacity), len(curve.reduced)):
            plan = relaxation.plan(curve, taken)
            if self.keeps_budget(plan):
                return plan
        return np.array([len(layer.size) - 1 for layer in self.layers])  # all errors at their least

    def reduced(self, best: float) -> list[Indices]:
        """Per layer the indices of settings that a plan smaller than `best` may have."""
        curve = self.relaxation.after(0)
        price = curve.price(self.capacity)
        if not math.isfinite(price):
            return [np.arange(len(layer.size)) for layer in self.layers]
        costs = [layer.size + price * layer.error for layer in self.layers]
        bound = sum(float(cost.min()) for cost in costs) - price * self.capacity
        most = self.largest_better(best) - bound + self.tolerance(best)
        return [np.flatnonzero(cost - cost.min() <= most) for cost in costs]

    def allocation(self, chosen: Indices, bound: float) -> Allocation:
        """Express a plan by the caller's indices and sizes."""
        choice = np.array([layer.index[index] for layer, index in zip(self.layers, chosen, strict=True)])
        size = self._total(self.sizes, chosen)
        return Allocation(choice, size, size if bound >= self.size(chosen) else float(self.base_size.sum()) + bound)


def _rows(table: Table, name: str) -> Iterator[Numbers]:
    try:
        rows = [np.asarray(row, dtype=np.float64) for row in table]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise GradlabError(
            f"planner: {name}: expected numbers of shape (layers, settings), or a row per layer"
        ) from None
    for layer, row in enumerate(rows):
        if row.ndim != 1:
            raise GradlabError(f"planner: {name}: row {layer} has shape {row.shape}, expected (settings,)")
        if np.isnan(row).any():
            raise GradlabError(f"planner: {name}: NaN in layer {layer}, setting {int(np.isnan(row).argmax())}")
    return iter(rows)


def _require_tables(errors: Sequence[Numbers], sizes: Sequence[Numbers]) -> None:
    if len(errors) != len(sizes) or not errors:
        raise GradlabError(
            f"planner: errors of {len(errors)} layers and sizes of {len(sizes)}, expected the same, from 1"
        )
    for layer, (error, size) in enumerate(zip(errors, sizes, strict=True)):
        if len(error) != len(size):
            raise GradlabError(f"planner: layer {layer} has {len(error)} errors and {len(size)} sizes")
        if len(size) and size.min() < 0:
            raise GradlabError(f"planner: layer {layer}, setting {int(size.argmin())}: size {size.min():g} is negative")
        if len(error) and error.min() == -math.inf:
            raise GradlabError(f"planner: layer {layer}, setting {int(error.argmin())}: an error of -infinity")


def _require_reachable(least: float, budget: float) -> None:
    if math.isnan(budget):
        raise GradlabError("planner: the budget is NaN, expected a number")
    if not least <= budget:
        raise GradlabError(
            f"planner: no plan has an error of {budget:.17g} or less; the smallest reachable is {least:.17g}"
        )


def _choices(usable: Indices, errors: Numbers, sizes: Numbers, capacity: float) -> _Layer:
    """Keep settings that no other beats, and that leave the other layers their least error."""
    error = errors[usable] - errors[usable].min()
    fits = error <= capacity
    usable, error, size = usable[fits], error[fits], sizes[usable[fits]]
    order = _undominated(size, error)
    return _Layer(usable[order], size[order] - size[order[0]], error[order])


def _common_step(layers: Sequence[_Layer]) -> int:
    """The greatest common divisor of all sizes; 0 if they are not whole numbers."""
    largest = sum(float(layer.size[-1]) for layer in layers)
    if largest >= 2**53 or not all(bool((layer.size == np.floor(layer.size)).all()) for layer in layers):
        return 0
    return math.gcd(*(int(value) for layer in layers for value in layer.size)) or 1


# --- its relaxation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """The relaxation of some layers: from all at their smallest size, segments of hulls, the cheapest first.

    largest_error: before the first segment.
    reduced: (segments + 1,), the error that the first 0, 1, ... segments take away.
    cost: (segments + 1,), the size with these segments.
    segments: their indices in the relaxation.
    """

    largest_error: float
    reduced: Numbers
    cost: Numbers
    segments: Indices

    def size(self, room: Numbers) -> Numbers:
        """The least size at which these layers' errors add up to at most `room` (n,); infinity where they cannot."""
        need = self.largest_error - room
        beyond = need > self.reduced[-1] * (1 + _RELATIVE) + _RELATIVE * np.abs(room)
        return np.where(beyond, np.inf, np.interp(need, self.reduced, self.cost))

    def needed(self, room: float) -> int:
        """Number of segments that bring the error within `room`."""
        return int(np.searchsorted(self.reduced, self.largest_error - room))

    def price(self, room: float) -> float:
        """Size per unit of error where the error is just within `room`."""
        taken = min(self.needed(room), len(self.segments))
        if not taken:
            return 0.0
        return float((self.cost[taken] - self.cost[taken - 1]) / (self.reduced[taken] - self.reduced[taken - 1]))


class _Relaxation:
    """Fractions of settings allowed: the segments of all layers' hulls, by the size that a unit less of error costs."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self.hulls = [layer.hull() for layer in layers]
        pairs = list(zip(layers, self.hulls, strict=True))
        owner = np.concatenate([np.full(len(hull) - 1, layer) for layer, hull in enumerate(self.hulls)])
        less = np.concatenate([-np.diff(layer.error[hull]) for layer, hull in pairs])
        cost = np.concatenate([np.diff(layer.size[hull]) for layer, hull in pairs])
        order = np.argsort(cost / less, kind="stable")
        self._owner, self._less, self._cost = owner[order], less[order], cost[order]
        self._first = np.array([(layer.error[0], layer.size[0]) for layer in layers])

    def after(self, count: int) -> _Curve:
        """The curve of all layers but the first `count`."""
        rest = np.flatnonzero(self._owner >= count)
        error, size = self._first[count:].sum(0)
        reduced = np.concatenate([[0.0], np.cumsum(self._less[rest])])
        return _Curve(float(error), reduced, np.concatenate([[0.0], np.cumsum(self._cost[rest])]) + size, rest)

    def plan(self, curve: _Curve, taken: int) -> Indices:
        """Indices of all layers' settings with the first `taken` segments of a curve; 0 for layers not in it."""
        steps = np.bincount(self._owner[curve.segments[:taken]], minlength=len(self.hulls))
        return np.array([hull[count] for hull, count in zip(self.hulls, steps, strict=True)], dtype=np.int64)


# --- the exact search -------------------------------------------------------------------------------------------------


class _Search:
    """One pass through the layers of a problem, for plans smaller than the best known.

    width: partial plans kept, those with the lowest bounds. If none is dropped, `plan` ends as the smallest.
    plan: the best plan, after `run`; `best` is its size, above `base_size`.
    bound: lower bound of all plans, above `base_size`, after `run`.
    """

    def __init__(self, problem: _Problem, plan: Indices, width: int) -> None:
        self.problem, self.width = problem, width
        self.plan, self.best = plan, problem.size(plan)
        self.bound = math.inf  # of the partial plans dropped
        kept = problem.reduced(self.best)
        self._hopeless = any(not len(indices) for indices in kept)
        layers = [layer.keep(indices) for layer, indices in zip(problem.layers, kept, strict=True)]
        # Layers of large steps first: the small steps of the others can then fill what remains.
        self._order = sorted(range(len(layers)), key=lambda layer: -float(np.ptp(layers[layer].size)))
        self._kept = [kept[layer] for layer in self._order]
        self._layers = [layers[layer] for layer in self._order]
        self._parents: list[Indices] = []
        self._settings: list[Indices] = []

    def run(self) -> None:
        """Go through the layers; `plan`, `best` and `bound` are then as good as this width makes them."""
        if not self._hopeless:
            self._run(_Relaxation(self._layers))
        self.bound = min(self.best, self.problem.up(self.bound)) if self.bound < math.inf else self.best

    def _run(self, relaxation: _Relaxation) -> None:
        size, error = np.zeros(1), np.zeros(1)
        for depth, layer in enumerate(self._layers):
            curve = relaxation.after(depth + 1)
            size, error = ((a[:, None] + b).ravel() for a, b in ((size, layer.size), (error, layer.error)))
            bounds = size + curve.size(self.problem.capacity - error)
            alive = np.flatnonzero(bounds <= self._limit)
            alive = alive[_undominated(size[alive], error[alive])]
            self._parents.append(alive // len(layer.size))
            self._settings.append(alive % len(layer.size))
            size, error, bounds = size[alive], error[alive], bounds[alive]
            self._complete(relaxation, curve, depth, (size, error, bounds))
            alive = self._narrowed(bounds)
            self._parents[-1], self._settings[-1] = self._parents[-1][alive], self._settings[-1][alive]
            size, error = size[alive], error[alive]
            if not len(alive):
                return

    @property
    def _limit(self) -> float:
        """The largest bound of a better plan."""
        return self.problem.largest_better(self.best) + self.problem.tolerance(self.best)

    def _narrowed(self, bounds: Numbers) -> Indices:
        """Indices of the partial plans that may still lead to a better one, `width` of them at most."""
        alive = np.flatnonzero(bounds <= self._limit)
        if len(alive) <= self.width:
            return alive
        order = np.argsort(bounds[alive], kind="stable")
        self.bound = min(self.bound, float(bounds[alive[order[self.width]]]))
        return np.sort(alive[order[: self.width]])

    def _complete(self, relaxation: _Relaxation, curve: _Curve, depth: int, partial: Sequence[Numbers]) -> None:
        """Round the relaxed completion of the most promising partial plans up to whole settings."""
        size, error, bounds = partial
        last = depth + 1 == len(self._layers)
        for state in np.argsort(bounds, kind="stable")[: None if last else _COMPLETED]:
            taken = curve.needed(self.problem.capacity - error[state])
            if taken < len(curve.reduced) and size[state] + curve.cost[taken] < self.best:
                self._consider(self._retraced(relaxation.plan(curve, taken), depth, int(state)))

    def _consider(self, plan: Indices) -> None:
        size = self.problem.size(plan)
        if size < self.best and self.problem.keeps_budget(plan):
            self.plan, self.best = plan, size

    def _retraced(self, plan: Indices, depth: int, state: int) -> Indices:
        """A plan in the problem's indices: up to a depth those that led to a state, then the relaxation's."""
        for level in range(depth, -1, -1):
            plan[level] = self._settings[level][state]
            state = int(self._parents[level][state])
        retraced = np.empty_like(plan)
        retraced[self._order] = [indices[chosen] for indices, chosen in zip(self._kept, plan, strict=True)]
        return retraced


def _undominated(size: Numbers, error: Numbers) -> Indices:
    """Indices by rising size and falling error: none that is as small or smaller has as little error."""
    order = np.lexsort((error, size))
    falls = np.ones(len(order), dtype=bool)
    falls[1:] = error[order][1:] < np.minimum.accumulate(error[order])[:-1]
    return order[falls]
