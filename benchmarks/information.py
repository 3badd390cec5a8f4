"""Estimators of mutual information beside the known value: bias, interval, and how often the interval holds it.

Bivariate normal pairs with rho = 0, 0.3, 0.6, 0.9, and a pair that is not monotone, y = x^2 + noise, whose value is
computed by quadrature. A line per number of samples, pair and estimator.

    python benchmarks/information.py --samples 1000,10000,100000,1000000 --repetitions 200,200,40,10
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy import integrate

from gradlab.analysis.measure.information import METHODS, estimate_information, gaussian_information

RHOS = (0.0, 0.3, 0.6, 0.9)


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


def main() -> None:
    """The table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="1000,10000,100000", help="numbers of samples, with commas")
    parser.add_argument("--repetitions", default="200,200,40", help="as many, one for each")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    known = {rho: float(gaussian_information(rho)) for rho in RHOS} | {"x^2 + e": parabola_information()}
    print(f"{'n':>8} {'pair':>8} {'known':>7} {'method':>11} {'mean':>8} {'bias':>8} {'sd':>7} {'95 % width':>10} held")
    for samples, repetitions in zip(arguments.samples.split(","), arguments.repetitions.split(","), strict=True):
        for pair, true in known.items():
            for method in arguments.methods.split(","):
                generator = np.random.default_rng([arguments.seed, int(samples)])
                began, estimates = time.perf_counter(), []
                for _ in range(int(repetitions)):
                    estimates.append(estimate_information(*draw(pair, int(samples), generator), method))
                bits = np.array([one.bits for one in estimates])
                held = sum(one.low <= true <= one.high for one in estimates)
                width = np.mean([one.high - one.low for one in estimates])
                seconds = (time.perf_counter() - began) / len(estimates)
                print(
                    f"{samples:>8} {pair:>8} {true:7.4f} {method:>11} {bits.mean():8.4f} {bits.mean() - true:+8.4f} "
                    f"{bits.std():7.4f} {width:10.4f} {held}/{len(estimates)}  {seconds:.3f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
