"""Choose one setting per layer: the smallest plan whose errors add up to no more than a budget.

    minimise sum_l size(l, c_l)   subject to   sum_l error(l, c_l) <= budget

is the problem of Alimohammadi, Markov, Frantar, Alistarh, "L-GreCo: Layerwise-adaptive gradient compression for
efficient and accurate deep learning", MLSys 2024 (section 3), a multiple-choice knapsack. `allocate` solves it exactly;
`allocate_discretised` is the paper's Algorithm 1, which rounds errors to a grid.

The exact search goes through the layers and keeps partial plans that no other beats in both size and error, as long as
the linear relaxation of the layers that are left lets them end below the best plan known (two rules of Pisinger, "A
minimal algorithm for the multiple-choice knapsack problem", European Journal of Operational Research 83, 1995). The
relaxation is a convex piecewise linear function of the error that is left, so that the bounds of a hundred thousand
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
Places = npt.NDArray[np.int64]

# Partial plans kept, pass by pass: narrow searches find good plans, and these make the last one short.
_WIDTHS = (64, 4096)
# So many of the most promising partial plans are completed, at every layer.
_COMPLETED = 4
# What sums of sizes in float64 are trusted to.
_RELATIVE = 1e-11


class Allocation(NamedTuple):
    """A plan. choice: (layers,), the index of every layer's setting; size: of all of them together; bound: no plan
    within the budget is smaller than this, so that a plan with size == bound is proved to be the smallest."""

    choice: Places
    size: float
    bound: float

    @property
    def gap(self) -> float:
        """How much of its size the plan may be too large by: 0 if it is proved to be the smallest."""
        return (self.size - self.bound) / self.size if self.size > self.bound else 0.0


def allocate(errors: Table, sizes: Table, budget: float, *, most_states: int = 200_000) -> Allocation:
    """The smallest plan within a budget of error.

    errors, sizes: (layers, settings) each, or one vector per layer where layers differ in their settings; infinity
    stands for a setting that there is not. Sizes may have any unit; whole numbers are searched faster. budget: of the
    sum of errors, in their unit; what is held to it is numpy's sum of the chosen errors. most_states: partial plans
    kept at a time; where more are needed, as with thousands of layers whose sizes and errors trade at one rate, the
    plan may not be the smallest, and `bound` says by how much at most.

    Raises:
        GradlabError: for tables of different or no shapes, NaN, negative sizes, a layer without any setting, or a
            budget that no plan meets: it names the smallest that one does.
    """
    problem = _Problem.of(errors, sizes, budget)
    found = problem.greedy()
    bound = min(problem.relaxed, problem.size(found))
    for width in (*(width for width in _WIDTHS if width < most_states), most_states):
        if problem.largest_better(problem.size(found)) < bound:
            bound = problem.size(found)  # there is no size in between
            break
        search = _Search(problem, found, width)
        search.run()
        found, bound = search.found, max(bound, search.bound)
    return problem.allocation(found, bound)


def allocate_discretised(errors: Table, sizes: Table, budget: float, *, steps: int = 10_000) -> Allocation:
    """L-GreCo's Algorithm 1: dynamic programming over errors rounded up to multiples of budget / steps (the paper's D).

    As published, but that an error is never rounded down: the budget is kept, and a plan may be missed that just
    meets it, by up to one step per layer. `bound` is that of the linear relaxation. Errors must not be negative.

    Raises:
        GradlabError: as `allocate` does; also if no plan's rounded errors fit.
    """
    if type(steps) is not int or steps < 1:
        raise GradlabError(f"planner: steps = {steps!r}, expected a whole number from 1")
    problem = _Problem.of(errors, sizes, budget)
    if any(row.min() < 0 for row in problem.left):
        raise GradlabError("planner: negative errors, which Algorithm 1 has no steps for: use the exact search")
    step = budget / steps
    costs = np.full(steps + 1, np.inf)
    costs[0] = 0.0
    chosen: list[npt.NDArray[np.int64]] = []
    rounded = [np.ceil(errors / step) if step else np.zeros(len(errors)) for errors in problem.left]
    for layer, whole in zip(problem.layers, rounded, strict=True):
        reached, best = np.full(steps + 1, np.inf), np.zeros(steps + 1, dtype=np.int64)
        for place in np.flatnonzero(whole <= steps):
            shift = int(whole[place])
            total = costs[: steps + 1 - shift] + layer.size[place]
            better = total < reached[shift:]
            reached[shift:][better] = total[better]
            best[shift:][better] = place
        costs = reached
        chosen.append(best)
    if not np.isfinite(costs).any():
        raise GradlabError(
            f"planner: no plan fits once errors are rounded up to {steps} steps of the budget {budget:.6g}: use more "
            "steps, a larger budget, or the exact search"
        )
    return problem.allocation(_retrace(chosen, rounded, int(costs.argmin())), problem.relaxed)


def _retrace(chosen: Sequence[Places], rounded: Sequence[Numbers], place: int) -> Places:
    """The settings that led to an error of so many steps, from the last layer to the first."""
    found = np.zeros(len(chosen), dtype=np.int64)
    for layer in range(len(chosen) - 1, -1, -1):
        found[layer] = chosen[layer][place]
        place -= int(rounded[layer][found[layer]])
    return found


# --- the problem ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """What there is to choose in one layer, by rising size and falling error: nothing that is beaten in both.

    index: places in the caller's table; size, error: above the smallest and the least that the layer can have.
    """

    index: Places
    size: Numbers
    error: Numbers

    def keep(self, places: npt.NDArray[Any]) -> _Layer:
        return _Layer(self.index[places], self.size[places], self.error[places])

    def hull(self) -> Places:
        """Places on the lower convex hull of size over error."""
        found: list[int] = []
        for place in range(len(self.size)):
            while len(found) > 1 and not self._bends(found[-2], found[-1], place):
                found.pop()
            found.append(place)
        return np.array(found, dtype=np.int64)

    def _bends(self, a: int, b: int, c: int) -> bool:
        """Whether b lies below the line from a to c."""
        size, error = self.size, self.error
        return bool((size[b] - size[a]) * (error[a] - error[c]) < (size[c] - size[a]) * (error[a] - error[b]))


@dataclass(frozen=True)
class _Problem:
    """Layers with what they have at least taken off: sizes and errors start from 0, and every layer can have either.

    base_size: (layers,), what was taken off; capacity: of error above that, with room for the rounding of
    its sum; step: a whole number that all sizes are multiples of, or 0; tables: the caller's errors and sizes.
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
        """The caller's tables, checked."""
        tables = tuple(_rows(errors, "errors")), tuple(_rows(sizes, "sizes"))
        _require_tables(*tables)
        usable = [np.flatnonzero(np.isfinite(e) & np.isfinite(s)) for e, s in zip(*tables, strict=True)]
        if empty := [place for place, there in enumerate(usable) if not len(there)]:
            raise GradlabError(f"planner: layer {empty[0]} has no setting with a finite error and size")
        least = np.array([row[there].min() for row, there in zip(tables[0], usable, strict=True)])
        _require_reachable(float(least.sum()), budget)
        room = 4 * len(least) * np.finfo(float).eps * (abs(budget) + float(np.abs(least).sum()))
        capacity = budget - float(least.sum()) + (room if math.isfinite(budget) else 0.0)
        layers = [_choices(there, e, s, capacity) for e, s, there in zip(*tables, usable, strict=True)]
        base = np.array([s[layer.index[0]] for s, layer in zip(tables[1], layers, strict=True)])
        return cls(tuple(layers), base, budget, capacity, _common_step(layers), *tables)

    @property
    def left(self) -> list[Numbers]:
        """The caller's errors of what there is to choose, a row per layer."""
        return [row[layer.index] for row, layer in zip(self.errors, self.layers, strict=True)]

    @property
    def relaxation(self) -> _Relaxation:
        return _Relaxation(self.layers)

    @property
    def relaxed(self) -> float:
        """The bound of the linear relaxation, rounded up to a size that there is; above `base_size`."""
        curve = self.relaxation.after(0)
        return self.up(float(curve.size(np.array([self.capacity]))[0]))

    def up(self, size: float) -> float:
        """The smallest size that a plan can have and that is not below `size`, to rounding."""
        least = size - self.tolerance(size)
        return max(0.0, math.ceil(least / self.step) * self.step if self.step else least)

    def tolerance(self, size: float) -> float:
        return _RELATIVE * (float(self.base_size.sum()) + size)

    def largest_better(self, size: float) -> float:
        """The largest size that a plan better than one of `size` can have."""
        return size - self.step if self.step else size - 2 * self.tolerance(size)

    def size(self, chosen: Places) -> float:
        """Of a plan, above `base_size`. chosen: places in `layers`."""
        return float(sum(layer.size[place] for layer, place in zip(self.layers, chosen, strict=True)))

    def keeps_budget(self, chosen: Places) -> bool:
        """Whether the errors' sum, as numpy takes it, is within the budget."""
        return self._total(self.errors, chosen) <= self.budget

    def _total(self, table: Sequence[Numbers], chosen: Places) -> float:
        pairs = zip(table, self.layers, chosen, strict=True)
        return float(np.array([row[layer.index[place]] for row, layer, place in pairs]).sum())

    def greedy(self) -> Places:
        """The relaxation's plan with its one fraction rounded to the larger setting."""
        relaxation = self.relaxation
        curve = relaxation.after(0)
        for taken in range(curve.needed(self.capacity), len(curve.reduced)):
            found = relaxation.plan(curve, taken)
            if self.keeps_budget(found):
                return found
        return np.array([len(layer.size) - 1 for layer in self.layers])  # all errors at their least

    def reduced(self, best: float) -> list[Places]:
        """Per layer the places of settings that a plan smaller than `best` may have."""
        curve = self.relaxation.after(0)
        price = curve.price(self.capacity)
        if not math.isfinite(price):
            return [np.arange(len(layer.size)) for layer in self.layers]
        costs = [layer.size + price * layer.error for layer in self.layers]
        bound = sum(float(cost.min()) for cost in costs) - price * self.capacity
        most = self.largest_better(best) - bound + self.tolerance(best)
        return [np.flatnonzero(cost - cost.min() <= most) for cost in costs]

    def allocation(self, chosen: Places, bound: float) -> Allocation:
        """A plan in the caller's terms."""
        choice = np.array([layer.index[place] for layer, place in zip(self.layers, chosen, strict=True)])
        size = self._total(self.sizes, chosen)
        return Allocation(choice, size, size if bound >= self.size(chosen) else float(self.base_size.sum()) + bound)


def _rows(table: Table, name: str) -> Iterator[Numbers]:
    try:
        rows = [np.asarray(row, dtype=np.float64) for row in table]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise GradlabError(
            f"planner: {name}: expected numbers of shape (layers, settings), or a row per layer"
        ) from None
    for place, row in enumerate(rows):
        if row.ndim != 1:
            raise GradlabError(f"planner: {name}: row {place} has shape {row.shape}, expected (settings,)")
        if np.isnan(row).any():
            raise GradlabError(f"planner: {name}: NaN in layer {place}, setting {int(np.isnan(row).argmax())}")
    return iter(rows)


def _require_tables(errors: Sequence[Numbers], sizes: Sequence[Numbers]) -> None:
    if len(errors) != len(sizes) or not errors:
        raise GradlabError(
            f"planner: errors of {len(errors)} layers and sizes of {len(sizes)}, expected the same, from 1"
        )
    for place, (error, size) in enumerate(zip(errors, sizes, strict=True)):
        if len(error) != len(size):
            raise GradlabError(f"planner: layer {place} has {len(error)} errors and {len(size)} sizes")
        if len(size) and size.min() < 0:
            raise GradlabError(f"planner: layer {place}, setting {int(size.argmin())}: size {size.min():g} is negative")
        if len(error) and error.min() == -math.inf:
            raise GradlabError(f"planner: layer {place}, setting {int(error.argmin())}: an error of -infinity")


def _require_reachable(least: float, budget: float) -> None:
    if math.isnan(budget):
        raise GradlabError("planner: the budget is NaN, expected a number")
    if not least <= budget:
        raise GradlabError(
            f"planner: no plan has an error of {budget:.17g} or less; the smallest reachable is {least:.17g}"
        )


def _choices(usable: Places, errors: Numbers, sizes: Numbers, capacity: float) -> _Layer:
    """What no other setting beats, and what leaves the other layers their least error."""
    error = errors[usable] - errors[usable].min()
    fits = error <= capacity
    usable, error, size = usable[fits], error[fits], sizes[usable[fits]]
    order = _undominated(size, error)
    return _Layer(usable[order], size[order] - size[order[0]], error[order])


def _common_step(layers: Sequence[_Layer]) -> int:
    """The greatest common divisor of all sizes' differences, 0 if they are not whole numbers."""
    largest = sum(float(layer.size[-1]) for layer in layers)
    if largest >= 2**53 or not all(bool((layer.size == np.floor(layer.size)).all()) for layer in layers):
        return 0
    return math.gcd(*(int(value) for layer in layers for value in layer.size)) or 1


# --- its relaxation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """The relaxation of some layers: from all at their smallest size, segments of hulls, the cheapest first.

    largest_error: before the first segment; reduced, cost: (segments + 1,), the error taken away by the first 0, 1, ...
    segments, and the size with them; segments: which of the relaxation's they are.
    """

    largest_error: float
    reduced: Numbers
    cost: Numbers
    segments: Places

    def size(self, room: Numbers) -> Numbers:
        """The least size for errors (n,) that these layers may have together; infinity where they cannot."""
        need = self.largest_error - room
        beyond = need > self.reduced[-1] * (1 + _RELATIVE) + _RELATIVE * np.abs(room)
        return np.where(beyond, np.inf, np.interp(need, self.reduced, self.cost))

    def needed(self, room: float) -> int:
        """How many segments bring the error within `room`."""
        return int(np.searchsorted(self.reduced, self.largest_error - room))

    def price(self, room: float) -> float:
        """Size per unit of error, where the error is just within `room`."""
        taken = min(self.needed(room), len(self.segments))
        if not taken:
            return 0.0
        return float((self.cost[taken] - self.cost[taken - 1]) / (self.reduced[taken] - self.reduced[taken - 1]))


class _Relaxation:
    """Fractions of settings allowed: the segments of all layers' hulls, by the size that a unit less of error costs."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self.hulls = [layer.hull() for layer in layers]
        pairs = list(zip(layers, self.hulls, strict=True))
        owner = np.concatenate([np.full(len(hull) - 1, place) for place, hull in enumerate(self.hulls)])
        less = np.concatenate([-np.diff(layer.error[hull]) for layer, hull in pairs])
        cost = np.concatenate([np.diff(layer.size[hull]) for layer, hull in pairs])
        order = np.argsort(cost / less, kind="stable")
        self._owner, self._less, self._cost = owner[order], less[order], cost[order]
        self._first = np.array([(layer.error[0], layer.size[0]) for layer in layers])

    def after(self, count: int) -> _Curve:
        """The curve of all layers but the first `count`."""
        here = np.flatnonzero(self._owner >= count)
        error, size = self._first[count:].sum(0)
        reduced = np.concatenate([[0.0], np.cumsum(self._less[here])])
        return _Curve(float(error), reduced, np.concatenate([[0.0], np.cumsum(self._cost[here])]) + size, here)

    def plan(self, curve: _Curve, taken: int) -> Places:
        """Places of all layers with the first `taken` segments of a curve; of those not in it, the first."""
        steps = np.bincount(self._owner[curve.segments[:taken]], minlength=len(self.hulls))
        return np.array([hull[count] for hull, count in zip(self.hulls, steps, strict=True)], dtype=np.int64)


# --- the exact search -------------------------------------------------------------------------------------------------


class _Search:
    """One pass through the layers of a problem, for plans smaller than `found`.

    width: partial plans kept, those with the lowest bounds; if none is left out, `found` ends as the smallest plan.
    bound: on all plans, above `base_size`, once `run` is through.
    """

    def __init__(self, problem: _Problem, found: Places, width: int) -> None:
        self.problem, self.width = problem, width
        self.found, self.best = found, problem.size(found)
        self.bound = math.inf  # of what was left out
        kept = problem.reduced(self.best)
        self._hopeless = any(not len(places) for places in kept)
        layers = [layer.keep(places) for layer, places in zip(problem.layers, kept, strict=True)]
        # Large steps first: the small ones of the layers left can then fill what remains.
        self._order = sorted(range(len(layers)), key=lambda place: -float(np.ptp(layers[place].size)))
        self._kept = [kept[place] for place in self._order]
        self._layers = [layers[place] for place in self._order]
        self._parents: list[Places] = []
        self._settings: list[Places] = []

    def run(self) -> None:
        """Go through the layers; `found`, `best` and `bound` are then as good as this width makes them."""
        if not self._hopeless:
            self._run(_Relaxation(self._layers))
        self.bound = min(self.best, self.problem.up(self.bound)) if self.bound < math.inf else self.best

    def _run(self, relaxation: _Relaxation) -> None:
        size, error = np.zeros(1), np.zeros(1)
        for depth, layer in enumerate(self._layers):
            curve = relaxation.after(depth + 1)
            size, error = ((some[:, None] + more).ravel() for some, more in ((size, layer.size), (error, layer.error)))
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
        """What a better plan's bound is at most."""
        return self.problem.largest_better(self.best) + self.problem.tolerance(self.best)

    def _narrowed(self, bounds: Numbers) -> Places:
        """States that may still lead to a better plan, `width` of them at most."""
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

    def _consider(self, plan: Places) -> None:
        size = self.problem.size(plan)
        if size < self.best and self.problem.keeps_budget(plan):
            self.found, self.best = plan, size

    def _retraced(self, plan: Places, depth: int, state: int) -> Places:
        """A plan in the problem's places, from what the relaxation chose and, up to a depth, what led to a state."""
        for level in range(depth, -1, -1):
            plan[level] = self._settings[level][state]
            state = int(self._parents[level][state])
        found = np.empty_like(plan)
        found[self._order] = [places[chosen] for places, chosen in zip(self._kept, plan, strict=True)]
        return found


def _undominated(size: Numbers, error: Numbers) -> Places:
    """Places by rising size and falling error: of those as large or larger, none has less error."""
    order = np.lexsort((error, size))
    falls = np.ones(len(order), dtype=bool)
    falls[1:] = error[order][1:] < np.minimum.accumulate(error[order])[:-1]
    return order[falls]
