"""The exact search beside a general solver and L-GreCo's Algorithm 1: sizes and times, in one run.

    python benchmarks planner --rows ROWS.jsonl [--tables 200] [--traces TRACE ...]
    python benchmarks planner --rows ROWS.jsonl --table

Tables of errors and sizes: as compressors give them (densities and ranks over layers of equal and of many sizes), at
random, where size and error trade at nearly one rate, and those of recorded traces (`layer_plans --record` makes some).
The budget is the middle setting's for all layers; on traces 0.8 to 1.1 of the uniform plan's error. "milp" is
scipy.optimize.milp (HiGHS) with a relative gap of 0 and 60 seconds, "rounded" Algorithm 1 with D = 10000. Gaps are to
the optimum, in share of its size. A row is a table with a budget; one that is there is not made again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, fill, grouped, options, read
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csr_matrix

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.knapsack import allocate
from gradlab.trace import Trace

Rows = Sequence[np.ndarray] | np.ndarray  # a layer each, by setting
Drawn = tuple[np.ndarray, np.ndarray]  # errors and bytes, (layers, settings) each
_UNITS = 1e6  # of the solver's budget


def densities(rng: np.random.Generator, layers: int, settings: int, equal: bool) -> Drawn:
    """Top-k: power laws, layers of a few sizes or of many."""
    few = np.array([64 * 27, 64 * 576, 128 * 1152, 256 * 2304, 512 * 4608, 5120])
    numel = rng.choice(few, layers) if equal else rng.integers(500, 2_000_000, layers)
    density = np.geomspace(1e-3, 1e-1, settings)
    sizes = 8 * np.ceil(numel[:, None] * density)
    errors = (rng.lognormal(0, 1, layers) * numel)[:, None] * (1 - density ** rng.uniform(0.2, 0.6, layers)[:, None])
    return errors, sizes


def ranks(rng: np.random.Generator, layers: int, settings: int) -> Drawn:
    shapes = np.array([(512, 512), (512, 2048), (2048, 512)])[rng.integers(0, 3, layers)]
    rank = np.arange(16, 16 + settings)
    sizes = 4.0 * shapes.sum(1)[:, None] * rank
    return rng.lognormal(0, 0.5, layers)[:, None] * np.exp(-rank / rng.uniform(5, 60, layers)[:, None]), sizes


def noise(rng: np.random.Generator, layers: int, settings: int) -> Drawn:
    return rng.random((layers, settings)), rng.integers(1, 1000, (layers, settings)).astype(float)


def one_rate(rng: np.random.Generator, layers: int, settings: int) -> Drawn:
    sizes = np.sort(rng.integers(1, 1000, (layers, settings)), axis=1).astype(float)
    return 1000 - sizes + rng.integers(0, 10, (layers, settings)), sizes


SHAPES = ((40, 12), (160, 12), (500, 30))  # layers and settings
FEW = {(160, 12): 5, (500, 30): 2}  # tables of each kind where a table takes long
CODECS: dict[str, dict[str, Any]] = {"qsgd": {"bits": 4}, "topk": {"density": 0.01}, "powersgd": {"rank": 4}}
ALPHAS = (0.8, 0.9, 1.0, 1.1)
KINDS: dict[str, Callable[..., Drawn]] = {
    "top-k, few layer sizes": partial(densities, equal=True),
    "top-k, many layer sizes": partial(densities, equal=False),
    "PowerSGD": ranks,
    "random": noise,
    "one rate": one_rate,
}


def solver(errors: Rows, sizes: Rows, budget: float) -> np.ndarray | None:
    lengths = [len(row) for row in errors]
    one_each = block_diag([np.ones((1, length)) for length in lengths], format="csr")
    # Its tolerance is absolute, 1e-6: in small units it would let plans exceed the budget.
    error = np.concatenate(errors) / budget * _UNITS
    solution = milp(
        np.concatenate(sizes),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(csr_matrix(error[None]), -np.inf, _UNITS)],
        integrality=np.ones(sum(lengths)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    if solution.status != 0:
        return None
    return np.array([part.argmax() for part in np.split(solution.x, np.cumsum(lengths)[:-1])])


def rounded_size(errors: Rows, sizes: Rows, budget: float, steps: int = 10_000) -> float:
    """Find the size of the plan of Algorithm 1, with errors rounded up to multiples of budget / steps.

    errors, sizes: a row per layer; errors of 0 or more, infinity marks a setting that a layer cannot have.
    steps: the paper's D.

    Returns:
        The size; infinity if no plan fits once errors are rounded up.
    """
    best = np.where(np.arange(steps + 1) == 0, 0.0, np.inf)  # the least size at an error of so many steps
    for row, costs in zip(errors, sizes, strict=True):
        before, best = best, np.full(steps + 1, np.inf)
        for whole, cost in zip(np.ceil(row / (budget / steps)), costs, strict=True):
            if whole <= steps:
                np.minimum(best[int(whole) :], before[: steps + 1 - int(whole)] + cost, out=best[int(whole) :])
    return float(best.min())


def _total(values: Rows, choice: np.ndarray) -> float:
    return float(np.array([row[c] for row, c in zip(values, choice, strict=True)]).sum())


def measure(errors: Rows, sizes: Rows, budget: float) -> Row:
    """CPU seconds and sizes of all three; the exact plan's error is asserted."""
    moments = [time.process_time()]
    exact = allocate(errors, sizes, budget)
    moments.append(time.process_time())
    rounded = rounded_size(errors, sizes, budget) / exact.size - 1
    moments.append(time.process_time())
    optimum = solver(errors, sizes, budget)
    moments.append(time.process_time())
    assert _total(errors, exact.choice) <= budget
    # The solver's tolerance lets it exceed the budget a little.
    kept = optimum is not None and _total(errors, optimum) <= budget
    return {
        **{"layers": len(errors), "settings": max(map(len, errors))},
        **dict(zip(("exact", "rounded", "milp"), np.diff(moments).tolist(), strict=True)),
        "proved": exact.gap == 0,
        "to_milp": exact.size / _total(sizes, optimum) - 1 if kept and optimum is not None else None,
        "rounded_gap": rounded if math.isfinite(rounded) else None,
    }


def random_keys(tables: int) -> Iterator[Row]:
    for kind, shape in product(KINDS, SHAPES):
        for number in range(FEW.get(shape, tables // len(KINDS))):
            yield {"kind": kind, "layers": shape[0], "settings": shape[1], "number": number}


def random_table(key: Row) -> Row:
    kind, layers, settings, number = key.values()
    rng = np.random.default_rng([list(KINDS).index(kind), layers, number])
    errors, sizes = KINDS[kind](rng, layers, settings)
    return measure(errors, sizes, float(errors[:, settings // 2].sum()))


def recorded_tables(path: Path, place: Path) -> None:
    for codec, reference in CODECS.items():
        with Trace(place) as trace:
            problem = fit_lgreco(trace, codec, reference, metric="squared-l2").problem
            errors = problem.errors("squared-l2", slice(0, 2))
        common: Row = {"kind": "recorded", "recording": place.name, "codec": codec}
        sizes = problem.costs
        fill(path, [common | {"alpha": one} for one in ALPHAS], lambda key: measure(errors, sizes, key["alpha"]))  # noqa: B023


def table(rows: Sequence[Row]) -> str:
    """Lay out medians of CPU seconds, from the kind with the least to that with the most; then what was proved."""
    lines = ["| tables | exact | Algorithm 1, D = 10000 | milp | Algorithm 1 above the optimum, at most |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    drawn, recorded = ([row for row in rows if (row["kind"] == "recorded") is which] for which in (False, True))
    for shape, here in grouped(drawn, lambda row: (row["layers"], row["settings"])).items():
        lines.append(_line("{} layers x {} settings".format(*shape), here, ["kind"]))
    if recorded:
        size = " x ".join(f"{_range([row[name] for row in recorded], 'd')} {name}" for name in ("layers", "settings"))
        lines.append(_line(f"recorded, {size}", recorded, ["recording", "codec"]))
    gaps = [row["to_milp"] for row in rows if row["to_milp"] is not None]
    return "\n".join(lines) + (
        f"\n\n{len(rows)} tables, {sum(row['proved'] for row in rows)} proved\n"
        f"milp: equal {sum(abs(gap) < 1e-12 for gap in gaps)}, ours smaller {sum(gap < -1e-12 for gap in gaps)}, "
        f"larger {sum(gap > 1e-12 for gap in gaps)}, over budget or time {len(rows) - len(gaps)}\n"
        f"Algorithm 1 has no plan in {sum(row['rounded_gap'] is None for row in rows)}"
    )


def _line(title: str, rows: Sequence[Row], by: Sequence[str]) -> str:
    """One row of the table: medians over tables that have the same values of `by`."""
    groups = grouped(rows, lambda row: tuple(row[name] for name in by)).values()
    medians = (
        _range([statistics.median(row[name] for row in group) for group in groups], "#.2g")
        for name in ("exact", "rounded", "milp")
    )
    worst = max((row["rounded_gap"] for row in rows if row["rounded_gap"] is not None), default=0.0)
    return f"| {title} | {' | '.join(medians)} | {100 * worst:.1f} % |"


def _range(values: Sequence[float], form: str) -> str:
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def main() -> None:
    chosen = options(__doc__, rows=Path, tables=200, traces=(Path,), table=False)
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    fill(chosen.rows, random_keys(chosen.tables), random_table)
    for place in chosen.traces:
        recorded_tables(chosen.rows, place)
