"""Estimators of mutual information beside the known value: bias, interval, and how often the interval holds it.

    python benchmarks/information.py --rows benchmarks/results/information.jsonl --methods histogram copula
    python benchmarks/information.py --rows benchmarks/results/information.jsonl --methods mixed
                                     --samples 1000 10000 100000 1000000 --repetitions 200 200 20 2
    python benchmarks/information.py --rows benchmarks/results/information.jsonl --table

Bivariate normal pairs with rho = 0, 0.3, 0.6, 0.9, and a pair that is not monotone, y = x^2 + noise, whose value is
computed by quadrature. Histograms have no interval; the copula's interval is of what a copula can see, nothing in the
last pair. One line of JSON per number of samples, pair and estimator; what is there is not done again.
Nearest neighbours take so long at many samples that they are repeated less often there; of rows with more and fewer
repetitions the table has the later. `estimators.py` has pairs that are unlike normal values.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from estimators import estimated
from rows import Row, add, has, read
from scipy import integrate

from gradlab.analysis.measure.information import METHODS, gaussian_information

RHOS = (0.0, 0.3, 0.6, 0.9)
PARABOLA = "x^2"
SEED = 0
TITLES = {"histogram": "histogram", "mixed": "nearest", "copula": "copula"}


def parabola_information() -> float:
    """I(x; x^2 + e) in bits for standard normal x, e: h(y) - h(e), the density of y by quadrature."""
    grid = np.linspace(-8.0, 60.0, 40_001)
    x = np.linspace(0.0, 8.0, 4_001)
    weights = 2 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    density = np.array([np.trapezoid(weights * np.exp(-((y - x**2) ** 2) / 2), x) for y in grid]) / np.sqrt(2 * np.pi)
    entropy = -integrate.simpson(np.where(density > 0, density * np.log2(np.maximum(density, 1e-300)), 0.0), x=grid)
    return float(entropy - 0.5 * np.log2(2 * np.pi * np.e))


def draw(pair: float | str, samples: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n independent pairs."""
    x, e = generator.standard_normal((2, samples))
    return (x, x**2 + e) if isinstance(pair, str) else (x, pair * x + np.sqrt(1 - pair**2) * e)


def measured(pair: float | str, known: float, samples: int, method: str, repetitions: int) -> Row:
    """Bias, spread and interval of an estimator on the same samples as all others, in bits, and CPU seconds of one."""
    generator = np.random.default_rng([SEED, samples])
    # Normal scores of the parabola have no correlation.
    bounded = 0.0 if (method, pair) == ("copula", PARABOLA) else known
    began = time.process_time()
    row = estimated(partial(draw, pair, samples, generator), method, known, bounded, repetitions)
    return {"known": known} | row | {"seconds": (time.process_time() - began) / repetitions}


def run(path: Path, samples: Sequence[int], repetitions: Sequence[int], methods: Sequence[str]) -> None:
    """Add the rows that are missing."""
    known: dict[float | str, float] = {rho: abs(float(gaussian_information(rho))) for rho in RHOS}
    known[PARABOLA] = parabola_information()
    for size, many in zip(samples, repetitions, strict=True):
        for pair, bits in known.items():
            for method in methods:
                key = {"samples": size, "pair": pair, "method": method, "repetitions": many}
                if not has(read(path), key):
                    add(path, key | measured(pair, bits, size, method, many))


def table(rows: Sequence[Row]) -> str:
    """Lay out bias in bits, and how many intervals hold the known value, an estimator a column."""
    lines = ["      n  pair  known | " + " | ".join(_titles()).rstrip()]
    for size in sorted({row["samples"] for row in rows}):
        for pair in (*RHOS, PARABOLA):
            here = {row["method"]: row for row in rows if (row["samples"], row["pair"]) == (size, pair)}
            cells = " | ".join(_cell(here.get(method)) for method in METHODS).rstrip()
            title = pair if isinstance(pair, str) else f"{pair:g}".removeprefix("0") or "0"
            known = next((row["known"] for row in here.values()), float("nan"))
            lines.append(f"{size:>7d}  {title:<4s}  {_short(known, '-'):>5s} | {cells}")
    return "\n".join(lines)


def _titles() -> list[str]:
    return [f"{TITLES[method]:<{9 if method == 'histogram' else 15}s}" for method in METHODS]


def _cell(row: Row | None) -> str:
    """Bias and count, such as "+.054   70/200"."""
    if row is None:
        return f"{'not done':15s}"
    held = f"  {row['held']:>3d}/{row['repetitions']:<4d}" if "held" in row else ""
    return f"{_short(row['bias'], '+'):>5s}{held or '    '}"


def _short(bits: float, sign: str) -> str:
    """Three decimals without the zero before the point; without a sign where they are 0."""
    text = re.sub(r"\b0\.", ".", f"{bits:{sign}.3f}")
    return text.strip("+-") if float(text) == 0 else text


def main() -> None:
    """Add the rows that are missing; or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repetitions", type=int, nargs="+", default=[200, 200, 40, 4], help="one for each of them")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="mixed takes longest")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.rows)))
    else:
        run(options.rows, options.samples, options.repetitions, options.methods)


if __name__ == "__main__":
    main()
