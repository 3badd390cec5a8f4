"""The exact search beside a general solver and L-GreCo's Algorithm 1: sizes and times, in one run.

    python benchmarks planner --rows benchmarks/results/planner.jsonl [--tables 200] [--traces TRACE ...]
    python benchmarks planner --rows benchmarks/results/planner.jsonl --table

Tables as compressors give them (densities and ranks over layers of equal and of many sizes), at random, and where size
and error trade at nearly one rate; then those of recorded traces, such as `layer_plans.py --record` makes. A row of a
trace bears the name of its folder. scipy.optimize.milp is HiGHS with a relative gap of 0; "rounded" is Algorithm 1 with
D = 10000. Gaps are to the optimum, in share of its size; the budget is that of the middle setting for all layers, on
traces 0.8 to 1.1 of the uniform plan's error. One line of JSON per table and budget; what is there is not done again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, add, has, options, read
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csr_matrix

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate, allocate_discretised
from gradlab.trace import Trace

Rows = Sequence[np.ndarray] | np.ndarray  # a layer each, by setting
_UNITS = 1e6  # of the solver's budget


def densities(rng: np.random.Generator, layers: int, settings: int, equal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Errors and bytes of top-k: power laws, layers of a few sizes or of many."""
    few = np.array([64 * 27, 64 * 576, 128 * 1152, 256 * 2304, 512 * 4608, 5120])
    numel = rng.choice(few, layers) if equal else rng.integers(500, 2_000_000, layers)
    density = np.geomspace(1e-3, 1e-1, settings)
    sizes = 8 * np.ceil(numel[:, None] * density)
    errors = (rng.lognormal(0, 1, layers) * numel)[:, None] * (1 - density ** rng.uniform(0.2, 0.6, layers)[:, None])
    return errors, sizes


def ranks(rng: np.random.Generator, layers: int, settings: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors and bytes of PowerSGD on the matrices of a transformer."""
    shapes = np.array([(512, 512), (512, 2048), (2048, 512)])[rng.integers(0, 3, layers)]
    rank = np.arange(16, 16 + settings)
    sizes = 4.0 * shapes.sum(1)[:, None] * rank
    return rng.lognormal(0, 0.5, layers)[:, None] * np.exp(-rank / rng.uniform(5, 60, layers)[:, None]), sizes


def noise(rng: np.random.Generator, layers: int, settings: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors and bytes that have nothing to do with each other."""
    return rng.random((layers, settings)), rng.integers(1, 1000, (layers, settings)).astype(float)


def one_rate(rng: np.random.Generator, layers: int, settings: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors that trade for bytes nearly one to one."""
    sizes = np.sort(rng.integers(1, 1000, (layers, settings)), axis=1).astype(float)
    return 1000 - sizes + rng.integers(0, 10, (layers, settings)), sizes


SHAPES = ((40, 12), (160, 12), (500, 30))  # layers and settings
FEW = {(160, 12): 5, (500, 30): 2}  # tables of each kind where a table takes long
CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qsgd", {"bits": 4}),
    ("topk", {"density": 0.01}),
    ("powersgd", {"rank": 4}),
)
ALPHAS = (0.8, 0.9, 1.0, 1.1)
KINDS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "top-k, few layer sizes": partial(densities, equal=True),
    "top-k, many layer sizes": partial(densities, equal=False),
    "PowerSGD": ranks,
    "random": noise,
    "one rate": one_rate,
}


def solver(errors: Rows, sizes: Rows, budget: float, seconds: float) -> tuple[float, np.ndarray] | None:
    """scipy's optimum, and its choice; None if it takes too long."""
    lengths = [len(row) for row in errors]
    one_each = block_diag([np.ones((1, length)) for length in lengths], format="csr")
    # Its tolerance is absolute, 1e-6: in small units it would let plans exceed the budget.
    error = np.concatenate(errors) / budget * _UNITS
    solution = milp(
        np.concatenate(sizes),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(csr_matrix(error[None]), -np.inf, _UNITS)],
        integrality=np.ones(sum(lengths)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if solution.status != 0:
        return None
    ends = np.cumsum(lengths)
    choice = np.array([part.argmax() for part in np.split(solution.x, ends[:-1])])
    return sum(float(row[c]) for row, c in zip(sizes, choice, strict=True)), choice


def measure(errors: Rows, sizes: Rows, budget: float, limit: float) -> Row:
    """CPU seconds and sizes of all three; what is asked of the exact plan is asserted."""
    began = time.process_time()
    exact = allocate(errors, sizes, budget)
    spent = {"exact": time.process_time() - began}
    assert np.array([row[c] for row, c in zip(errors, exact.choice, strict=True)]).sum() <= budget
    began = time.process_time()
    try:
        rounded: float | None = allocate_discretised(errors, sizes, budget).size / exact.size - 1
    except GradlabError:  # once errors are rounded up nothing fits
        rounded = None
    spent["rounded"] = time.process_time() - began
    began = time.process_time()
    optimum = solver(errors, sizes, budget, limit)
    spent["milp"] = time.process_time() - began
    gap = None
    if optimum is not None:
        kept = np.array([row[c] for row, c in zip(errors, optimum[1], strict=True)]).sum() <= budget
        gap = exact.size / optimum[0] - 1 if kept else None  # its tolerance lets it exceed the budget a little
    size = {"layers": len(errors), "settings": max(map(len, errors))}
    return {**size, **spent, "proved": exact.gap == 0, "to_milp": gap, "rounded_gap": rounded}


def random_tables(path: Path, tables: int, limit: float) -> None:
    """Add the rows that are missing of tables that are drawn."""
    for index, (kind, draw) in enumerate(KINDS.items()):
        for layers, settings in SHAPES:
            for number in range(FEW.get((layers, settings), tables // len(KINDS))):
                key = {"kind": kind, "layers": layers, "settings": settings, "number": number}
                if not has(read(path), key):
                    errors, sizes = draw(np.random.default_rng([index, layers, number]), layers, settings)
                    add(path, key | measure(errors, sizes, float(errors[:, settings // 2].sum()), limit))


def recorded_tables(path: Path, place: Path, limit: float) -> None:
    """Add the rows that are missing of a trace."""
    for codec, reference in CODECS:
        common: Row = {"kind": "recorded", "recording": place.name, "codec": codec}
        keys = [common | {"alpha": alpha} for alpha in ALPHAS]
        missing = [key for key in keys if not has(read(path), key)]
        if missing:
            with Trace(place) as trace:
                problem = fit_lgreco(trace, codec, reference, metric="squared-l2").problem
                errors = problem.errors("squared-l2", slice(0, 2))
            for key in missing:
                add(path, key | measure(errors, problem.costs, key["alpha"], limit))


def table(rows: Sequence[Row]) -> str:
    """Lay out medians of CPU seconds, from the kind with the least to that with the most; then what was proved."""
    lines = ["| tables | exact | Algorithm 1, D = 10000 | milp | Algorithm 1 above the optimum, at most |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    drawn, recorded = ([row for row in rows if (row["kind"] == "recorded") is which] for which in (False, True))
    for layers, settings in SHAPES:
        here = [row for row in drawn if (row["layers"], row["settings"]) == (layers, settings)]
        lines.append(_line(f"{layers} layers x {settings} settings", here, ["kind"]))
    if recorded:
        size = " x ".join(f"{_range([row[name] for row in recorded], 'd')} {name}" for name in ("layers", "settings"))
        lines.append(_line(f"recorded, {size}", recorded, ["recording", "codec"]))
    gaps = [row["to_milp"] for row in rows if row["to_milp"] is not None]
    counts = [
        f"{len(rows)} tables, {sum(row['proved'] for row in rows)} proved",
        f"milp: equal {sum(abs(gap) < 1e-12 for gap in gaps)}, ours smaller {sum(gap < -1e-12 for gap in gaps)}, "
        f"larger {sum(gap > 1e-12 for gap in gaps)}, over budget or time {len(rows) - len(gaps)}",
        f"Algorithm 1 has no plan in {sum(row['rounded_gap'] is None for row in rows)}",
    ]
    return "\n".join([*lines, "", *counts])


def _line(title: str, rows: Sequence[Row], by: Sequence[str]) -> str:
    """One row of the table: medians over tables that have the same values of `by`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    medians = (
        _range([statistics.median(row[name] for row in group) for group in groups.values()], "#.2g")
        for name in ("exact", "rounded", "milp")
    )
    worst = max((row["rounded_gap"] for row in rows if row["rounded_gap"] is not None), default=0.0)
    return f"| {title} | {' | '.join(medians)} | {100 * worst:.1f} % |"


def _range(values: Sequence[float], form: str) -> str:
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def main() -> None:
    """Add the rows that are missing; or print the table."""
    chosen = options(__doc__, rows=Path, tables=200, limit=60.0, traces=(Path,), table=False)
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    random_tables(chosen.rows, chosen.tables, chosen.limit)
    for place in chosen.traces:
        recorded_tables(chosen.rows, place, chosen.limit)


if __name__ == "__main__":
    main()
