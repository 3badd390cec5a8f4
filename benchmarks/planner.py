"""The exact search beside a general solver and L-GreCo's Algorithm 1: sizes and times, in one run.

    python benchmarks/planner.py [--tables 200] [--traces TRACE ...]

Tables as compressors give them (densities and ranks over layers of equal and of many sizes), at random, and where size
and error trade at nearly one rate; then those of recorded traces. scipy.optimize.milp is HiGHS with a relative
gap of 0; "rounded" is Algorithm 1 with D = 10000. Gaps are to the optimum, in share of its size; the budget is that of
the middle setting for all layers, on traces 0.8 to 1.1 of the uniform plan's error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csr_matrix

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate, allocate_discretised
from gradlab.trace import Trace

Rows = Sequence[np.ndarray]
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


KINDS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "top-k, few layer sizes": lambda *a: densities(*a, True),
    "top-k, many layer sizes": lambda *a: densities(*a, False),
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


def measure(errors: Rows, sizes: Rows, budget: float, limit: float) -> dict[str, Any]:
    """Times and sizes of all three; what is asked of the exact plan is asserted."""
    began = time.perf_counter()
    exact = allocate(errors, sizes, budget)
    spent = {"exact": time.perf_counter() - began}
    assert np.array([row[c] for row, c in zip(errors, exact.choice, strict=True)]).sum() <= budget
    began = time.perf_counter()
    try:
        rounded = allocate_discretised(errors, sizes, budget).size / exact.size - 1
    except GradlabError:  # once errors are rounded up nothing fits
        rounded = np.inf
    spent["rounded"] = time.perf_counter() - began
    began = time.perf_counter()
    optimum = solver(errors, sizes, budget, limit)
    spent["milp"] = time.perf_counter() - began
    gap = None
    if optimum is not None:
        kept = np.array([row[c] for row, c in zip(errors, optimum[1], strict=True)]).sum() <= budget
        gap = exact.size / optimum[0] - 1 if kept else None  # its tolerance lets it exceed the budget a little
    return {**spent, "proved": exact.gap == 0, "to_milp": gap, "rounded_gap": rounded, "solved": optimum is not None}


def report(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line for tables of a kind."""
    gaps = [row["to_milp"] for row in rows if row["to_milp"] is not None]
    rounded = [row["rounded_gap"] for row in rows if np.isfinite(row["rounded_gap"])]
    seconds = {key: statistics.median(row[key] for row in rows) for key in ("exact", "rounded", "milp")}
    counts = (
        sum(row["proved"] for row in rows),
        sum(abs(gap) < 1e-12 for gap in gaps),
        sum(gap < -1e-12 for gap in gaps),
        sum(gap > 1e-12 for gap in gaps),
        len(rows) - len(gaps),
    )
    beside = "proved {:3d}  milp: equal {:3d}, we smaller {:2d}, larger {:2d}, over budget or time {:2d}".format(
        *counts
    )
    worst = f"rounded +{100 * max(rounded, default=0):.3f} % at most, none {len(rows) - len(rounded)} times"
    times = ", ".join(f"{key} {value:.3f}" for key, value in seconds.items())
    print(f"{title:36s} {len(rows):3d}  {beside}  {worst}  s: {times}", flush=True)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=200, help="random ones, over all kinds")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the general solver")
    parser.add_argument("--traces", nargs="*", default=[])
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    for kind, draw in KINDS.items():
        for layers, settings, count in ((40, 12, chosen.tables // len(KINDS)), (160, 12, 5), (500, 30, 2)):
            rows = []
            for _ in range(count):
                errors, sizes = draw(rng, layers, settings)
                rows.append(measure(errors, sizes, float(errors[:, settings // 2].sum()), chosen.limit))
            report(f"{kind}, {layers} x {settings}", rows)
    for path in chosen.traces:
        with Trace(path) as trace:
            for codec, reference in (("qsgd", {"bits": 4}), ("topk", {"density": 0.01}), ("powersgd", {"rank": 4})):
                problem = fit_lgreco(trace, codec, reference, metric="squared-l2").problem
                errors = problem.errors("squared-l2", slice(0, 2))
                rows = [measure(errors, problem.costs, alpha, chosen.limit) for alpha in (0.8, 0.9, 1.0, 1.1)]
                report(f"{path}: {codec}", rows)


if __name__ == "__main__":
    main()
