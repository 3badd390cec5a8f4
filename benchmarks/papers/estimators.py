"""Estimators beside known values: bias, and how often a 95 % interval holds, where gradients are unlike normal values.

    python benchmarks estimators --out ROWS.jsonl [--repetitions 200] [--samples 1000 10000] [--methods copula mixed]
    python benchmarks estimators --out ROWS.jsonl --table

Information: pairs whose information is known in closed form, by exact sums or by quadrature (`CASES`). A copula's
interval is of the information that the correlation of normal scores stands for, a lower bound, known here from four
million pairs. A histogram has no interval. Means over iterations: 2,000 first-order series of known autocorrelation. A
row is a case with an estimator, or a kind of series; one that is there is not made again, and the table has the later
of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from rows import Row, fill, grouped, options, read
from scipy import stats
from scipy.signal import lfilter
from scipy.special import betaln, digamma

from gradlab.analysis.intervals import mean_interval
from gradlab.analysis.measure.information import (
    METHODS,
    Variable,
    estimate_information,
    gaussian_information,
    mutual_information,
)

CORRELATION, ZEROS, TAIL, FREEDOM, APART = 0.6, 0.9, 0.05, 3, 2.0
SERIES = [
    {"kind": "series", "iterations": count, "autocorrelation": rho, "repetitions": 2000}
    for count, rho in product((24, 100, 400), (0.0, 0.5, 0.8, 0.95))
]
MANY = 2**22  # pairs for what has no closed form
BEFORE = 400  # iterations after which a series has forgotten its start
Pairs = tuple[np.ndarray, np.ndarray]
Generator = np.random.Generator


@dataclass(frozen=True)
class Case:
    name: str
    draw: Callable[[int, np.random.Generator], Pairs]
    known: Callable[[], float]


def normal(samples: int, generator: Generator) -> Pairs:
    x, e = generator.standard_normal((2, samples))
    return x, CORRELATION * x + math.sqrt(1 - CORRELATION**2) * e


def zeros(own: bool, samples: int, generator: Generator) -> Pairs:
    """Normal values, zero at the same places, as rows of an embedding that no rank's batch has, or at their own."""
    x, y = normal(samples, generator)
    zero = generator.random((2, samples) if own else (1, samples)) < ZEROS
    return np.where(zero[0], 0, x), np.where(zero[-1], 0, y)


def rounded(samples: int, generator: Generator) -> Pairs:
    x, y = normal(samples, generator)
    return np.round(x), np.round(y)


def rounded_information() -> float:
    """Sum over the cells of the rounded pair, whose probabilities are differences of the normal distribution."""
    edges = np.arange(-6.5, 7.0)
    corners = np.stack(np.meshgrid(edges, edges, indexing="ij"), axis=-1)
    joint = stats.multivariate_normal([0, 0], [[1, CORRELATION], [CORRELATION, 1]]).cdf(corners)
    cells = np.maximum(np.diff(np.diff(joint, axis=0), axis=1), 1e-300)
    margin = np.diff(stats.norm.cdf(edges))
    return float((cells * np.log2(cells / np.outer(margin, margin))).sum())


def student(samples: int, generator: Generator) -> Pairs:
    x, y = normal(samples, generator)
    scale = np.sqrt(generator.chisquare(FREEDOM, samples) / FREEDOM)
    return x / scale, y / scale


def student_information() -> float:
    """The normal pair's and the common scale's (Calsaverini & Vicente, EPL 88, 68003, 2009)."""
    half = FREEDOM / 2
    nats = 2 * (0.5 * math.log(half / math.pi) + betaln(0.5, half)) - (2 + FREEDOM) / FREEDOM
    nats += (1 + FREEDOM) * (digamma(half + 0.5) - digamma(half))
    return float(gaussian_information(CORRELATION) + nats / math.log(2))


def mixture(samples: int, generator: Generator) -> Pairs:
    """Two clusters that both values belong to, independent within each."""
    middle = APART * generator.choice([-1.0, 1.0], samples)
    x, y = middle + generator.standard_normal((2, samples))
    return x, y


def mixture_information() -> float:
    grid = np.linspace(-9 - APART, 9 + APART, 1601)
    below, above = stats.norm.pdf(grid, -APART), stats.norm.pdf(grid, APART)
    joint, margin = (np.outer(below, below) + np.outer(above, above)) / 2, (below + above) / 2
    bits = joint * np.log2(np.maximum(joint, 1e-300) / np.maximum(np.outer(margin, margin), 1e-300))
    return float(np.trapezoid(np.trapezoid(bits, grid, axis=1), grid))


def tails(samples: int, generator: Generator) -> Pairs:
    """The largest magnitudes meet, and nothing else is common: neither signs nor sizes within them or without."""
    large = generator.random(samples) < TAIL
    sizes = generator.random((2, samples))
    chance = np.where(large, TAIL * sizes, TAIL + (1 - TAIL) * sizes)  # of a larger magnitude
    x, y = generator.choice([-1.0, 1.0], (2, samples)) * stats.norm.isf(chance / 2)
    return x, y


def binary_entropy(share: float) -> float:
    return float(stats.entropy([share, 1 - share], base=2))


NORMAL = float(gaussian_information(CORRELATION))
CASES = {
    case.name: case
    for case in (
        Case("90 % zeros, shared", partial(zeros, False), lambda: binary_entropy(ZEROS) + (1 - ZEROS) * NORMAL),
        Case("90 % zeros, own", partial(zeros, True), lambda: (1 - ZEROS) ** 2 * NORMAL),
        Case("ties: whole numbers", rounded, rounded_information),
        Case("Student t, 3 degrees", student, student_information),
        Case("mixture of two", mixture, mixture_information),
        Case("tails alone", tails, lambda: binary_entropy(TAIL)),
    )
}


@cache
def scores_information(case: Case) -> float:
    """The information that the correlation of a case's normal scores stands for."""
    x, y = map(Variable.of, case.draw(MANY, np.random.default_rng(0)))
    return float(gaussian_information(np.corrcoef(x.scores(0), y.scores(1))[0, 1]))


def information_row(key: Row) -> Row:
    """Bias and deviation of an estimator; width of its interval, and how often it held."""
    case, samples, method = CASES[key["case"]], key["samples"], key["method"]
    known, generator = case.known(), np.random.default_rng([samples, len(case.name)])
    bounded, bits, found = scores_information(case) if method == "copula" else known, [], []
    for _ in range(key["repetitions"]):
        pair = tuple(map(Variable.of, case.draw(samples, generator)))
        bits.append(mutual_information(*pair, method))
        if method != "histogram":
            found.append(estimate_information(*pair, method))
    row: Row = {"known": known, "bounded": bounded}
    row |= {"bias": float(np.mean(bits) - known), "deviation": float(np.std(bits))}
    if found:
        row["width"] = float(np.mean([one.high - one.low for one in found]))
        row["held"] = sum(one.low <= bounded <= one.high for one in found)
    return row


def series_row(key: Row) -> Row:
    """How often the mean of a series has an interval, that holds it, and a drift that is not there."""
    iterations, rho = key["iterations"], key["autocorrelation"]
    generator = np.random.default_rng([iterations, round(100 * rho)])
    found = []
    for _ in range(key["repetitions"]):  # stationary series of mean 0 whose neighbours have a correlation of rho
        series = lfilter([1.0], [1.0, -rho], generator.standard_normal(BEFORE + iterations))
        found.append(mean_interval(np.asarray(series)[BEFORE:]))
    given = [one for one in found if one.low is not None and one.high is not None]
    held = sum(one.low <= 0 <= one.high for one in given)  # type: ignore[operator]
    return {"given": len(given), "held": held, "drifts": sum(one.drift is not None for one in found)}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "bits per value: bias, share of 95 % intervals that hold the known value, a copula's its own (in brackets)"
    ]
    titles = [f"{name:<{6 if name == 'histogram' else 15}s}" for name in METHODS]
    lines.append("    n  case                  known | " + " | ".join(titles).rstrip())
    told = grouped((row for row in rows if row["kind"] == "information"), lambda row: (row["samples"], row["case"]))
    for (size, case), here in told.items():
        by_method = {row["method"]: row for row in here}
        cells = " | ".join(_cell(by_method.get(method)) for method in METHODS).rstrip()
        lines.append(f"{size:>5d}  {case:20s}  {here[0]['known']:.3f} | {cells}")
    lines += ["", "mean over iterations: series given an interval, share of these that hold, of all that are told a"]
    lines += ["wrong one, of all that are said to drift", "    T  autocorrelation    given     hold    wrong   drift"]
    for row in (row for row in rows if row["kind"] == "series"):
        many, given, wrong = row["repetitions"], row["given"], row["given"] - row["held"]
        pairs = ((given, many), (row["held"], given), (wrong, many), (row["drifts"], many))
        shares = "  ".join(_share(*pair) for pair in pairs)
        lines.append(f"{row['iterations']:>5d}  {row['autocorrelation']:15.2f}  {shares}")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return f"{'not done':15s}"
    own = f" ({row['bounded']:.3f})" if row["method"] == "copula" else ""
    share = f"  {_share(row['held'], row['repetitions'])}" if "held" in row else "   "
    return f"{row['bias']:+.3f}{share}{own}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "      -"


def main() -> None:
    named = {"repetitions": 200, "samples": [1000, 10_000], "methods": list(METHODS), "table": False}
    chosen = options(__doc__, out=Path, **named)
    if chosen.table:
        print(table(read(chosen.out)))
        return
    keys = (
        {"kind": "information", "case": name, "samples": size, "method": method, "repetitions": chosen.repetitions}
        for size, name, method in product(chosen.samples, CASES, chosen.methods)
    )
    fill(chosen.out, keys, information_row)
    fill(chosen.out, SERIES, series_row)
