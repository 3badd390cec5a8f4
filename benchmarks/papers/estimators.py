"""Estimators beside known values: bias, and how often a 95 % interval holds, where gradients are unlike normal values.

    python benchmarks estimators --out benchmarks/results/estimators.jsonl [--repetitions 200] [--samples 1000 10000]
                                    [--methods copula mixed]
    python benchmarks estimators --out benchmarks/results/estimators.jsonl --table

Information: pairs whose information is known in closed form, by exact sums or by quadrature (`CASES`). A copula's
interval is of the information that the correlation of normal scores stands for, a lower bound: known here from four
million pairs. A histogram has no interval. Bias is that of `mutual_information`, which may be below 0. Means over
iterations: first-order series of known autocorrelation, which take no time and are repeated 2,000 times. One line of
JSON per row. Kept rows are not made again; the table has the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from rows import Row, add, missing, options, read
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
AUTOCORRELATIONS, ITERATIONS = (0.0, 0.5, 0.8, 0.95), (24, 100, 400)
SERIES = 2000  # they take no time
MANY = 2**22  # pairs for what has no closed form
BEFORE = 400  # iterations after which a series has forgotten its start
Pairs = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Pairs (n,) of a known information in bits."""

    name: str
    draw: Callable[[int, np.random.Generator], Pairs]
    known: Callable[[], float]


def normal(samples: int, generator: np.random.Generator) -> Pairs:
    """Bivariate normal values."""
    x, e = generator.standard_normal((2, samples))
    return x, CORRELATION * x + math.sqrt(1 - CORRELATION**2) * e


def shared_zeros(samples: int, generator: np.random.Generator) -> Pairs:
    """Normal values, zero at the same places: rows of an embedding that no rank's batch has."""
    x, y = normal(samples, generator)
    zero = generator.random(samples) < ZEROS
    return np.where(zero, 0, x), np.where(zero, 0, y)


def own_zeros(samples: int, generator: np.random.Generator) -> Pairs:
    """Normal values, zero at places of their own."""
    x, y = normal(samples, generator)
    zero = generator.random((2, samples)) < ZEROS
    return np.where(zero[0], 0, x), np.where(zero[1], 0, y)


def rounded(samples: int, generator: np.random.Generator) -> Pairs:
    """Normal values, rounded to whole numbers."""
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


def student(samples: int, generator: np.random.Generator) -> Pairs:
    """Bivariate t: normal values over a common scale."""
    x, y = normal(samples, generator)
    scale = np.sqrt(generator.chisquare(FREEDOM, samples) / FREEDOM)
    return x / scale, y / scale


def student_information() -> float:
    """The normal pair's and the common scale's (Calsaverini & Vicente, EPL 88, 68003, 2009)."""
    half = FREEDOM / 2
    nats = 2 * (0.5 * math.log(half / math.pi) + betaln(0.5, half)) - (2 + FREEDOM) / FREEDOM
    nats += (1 + FREEDOM) * (digamma(half + 0.5) - digamma(half))
    return float(gaussian_information(CORRELATION) + nats / math.log(2))


def mixture(samples: int, generator: np.random.Generator) -> Pairs:
    """Two clusters that both values belong to, independent within each."""
    middle = APART * generator.choice([-1.0, 1.0], samples)
    x, y = middle + generator.standard_normal((2, samples))
    return x, y


def mixture_information() -> float:
    """By quadrature of the joint density."""
    grid = np.linspace(-9 - APART, 9 + APART, 1601)
    below, above = stats.norm.pdf(grid, -APART), stats.norm.pdf(grid, APART)
    joint, margin = (np.outer(below, below) + np.outer(above, above)) / 2, (below + above) / 2
    bits = joint * np.log2(np.maximum(joint, 1e-300) / np.maximum(np.outer(margin, margin), 1e-300))
    return float(np.trapezoid(np.trapezoid(bits, grid, axis=1), grid))


def tails(samples: int, generator: np.random.Generator) -> Pairs:
    """The largest magnitudes meet, and nothing else is common: neither signs nor sizes within them or without."""
    large = generator.random(samples) < TAIL
    sizes = generator.random((2, samples))
    chance = np.where(large, TAIL * sizes, TAIL + (1 - TAIL) * sizes)  # of a larger magnitude
    x, y = generator.choice([-1.0, 1.0], (2, samples)) * stats.norm.isf(chance / 2)
    return x, y


def binary_entropy(share: float) -> float:
    return float(stats.entropy([share, 1 - share], base=2))


CASES = (
    Case(
        "90 % zeros, shared",
        shared_zeros,
        lambda: binary_entropy(ZEROS) + (1 - ZEROS) * float(gaussian_information(CORRELATION)),
    ),
    Case("90 % zeros, own", own_zeros, lambda: (1 - ZEROS) ** 2 * float(gaussian_information(CORRELATION))),
    Case("ties: whole numbers", rounded, rounded_information),
    Case("Student t, 3 degrees", student, student_information),
    Case("mixture of two", mixture, mixture_information),
    Case("tails alone", tails, lambda: binary_entropy(TAIL)),
)


def first_order(rho: float, iterations: int, generator: np.random.Generator) -> np.ndarray:
    """A stationary series of mean 0 whose neighbours have a correlation of rho, (T,)."""
    return np.asarray(lfilter([1.0], [1.0, -rho], generator.standard_normal(BEFORE + iterations)))[BEFORE:]


@cache
def scores_information(case: Case) -> float:
    """The information that the correlation of a case's normal scores stands for."""
    x, y = map(Variable.of, case.draw(MANY, np.random.default_rng(0)))
    return float(gaussian_information(np.corrcoef(x.scores(0), y.scores(1))[0, 1]))


def information_row(case: Case, samples: int, method: str, repetitions: int) -> Row:
    """Bias and interval of an estimator."""
    true = case.known()
    bounded = scores_information(case) if method == "copula" else true
    generator = np.random.default_rng([samples, len(case.name)])
    return {"known": true, "bounded": bounded} | estimated(
        partial(case.draw, samples, generator), method, true, bounded, repetitions
    )


def estimated(draw: Callable[[], Pairs], method: str, known: float, bounded: float, repetitions: int) -> Row:
    """Bias, spread and, but for histograms, intervals: of the known information, or of the bound a copula gives."""
    bits, found = [], []
    for _ in range(repetitions):
        pair = tuple(map(Variable.of, draw()))
        bits.append(mutual_information(*pair, method))
        if method != "histogram":
            found.append(estimate_information(*pair, method))
    row: Row = {"bias": float(np.mean(bits) - known), "deviation": float(np.std(bits))}
    if found:
        row["width"] = float(np.mean([one.high - one.low for one in found]))
        row["held"] = sum(one.low <= bounded <= one.high for one in found)
    return row


def series_row(rho: float, iterations: int, repetitions: int) -> Row:
    """How often the mean of a series has an interval, that holds it, and a drift that is not there."""
    generator = np.random.default_rng([iterations, round(100 * rho)])
    found = [mean_interval(first_order(rho, iterations, generator)) for _ in range(repetitions)]
    given = [one for one in found if one.low is not None and one.high is not None]
    held = sum(one.low <= 0 <= one.high for one in given)  # type: ignore[operator]
    return {"given": len(given), "held": held, "drifts": sum(one.drift is not None for one in found)}


def run(out: Path, repetitions: int, samples: Sequence[int], methods: Sequence[str]) -> None:
    """Add the rows that are missing."""
    cases = {case.name: case for case in CASES}
    keys: Iterator[Row] = (
        {"kind": "information", "case": name, "samples": size, "method": method, "repetitions": repetitions}
        for size, name, method in product(samples, cases, methods)
    )
    for key in missing(out, keys):
        add(out, key | information_row(cases[key["case"]], key["samples"], key["method"], repetitions))
    pairs = product(ITERATIONS, AUTOCORRELATIONS)
    keys = ({"kind": "series", "iterations": n, "autocorrelation": rho, "repetitions": SERIES} for n, rho in pairs)
    for key in missing(out, keys):
        add(out, key | series_row(key["autocorrelation"], key["iterations"], SERIES))


def table(rows: Sequence[Row]) -> str:
    """Lay out all rows: bias in bits and share of intervals that hold, an estimator a column."""
    lines = [
        "bits per value: bias, share of 95 % intervals that hold the known value, a copula's its own (in brackets)"
    ]
    titles = [f"{name:<{6 if name == 'histogram' else 15}s}" for name in METHODS]
    lines.append("    n  case                  known | " + " | ".join(titles).rstrip())
    told = [row for row in rows if row["kind"] == "information"]
    for size, case in dict.fromkeys((row["samples"], row["case"]) for row in told):
        here = {row["method"]: row for row in told if (row["samples"], row["case"]) == (size, case)}
        cells = " | ".join(_cell(here.get(method)) for method in METHODS).rstrip()
        lines.append(f"{size:>5d}  {case:20s}  {next(iter(here.values()))['known']:.3f} | {cells}")
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
    """Add the rows that are missing; or print the table."""
    named = {"repetitions": 200, "samples": [1000, 10_000], "methods": list(METHODS), "table": False}
    chosen = options(__doc__, out=Path, **named)
    if chosen.table:
        print(table(read(chosen.out)))
    else:
        run(chosen.out, chosen.repetitions, chosen.samples, chosen.methods)


if __name__ == "__main__":
    main()
