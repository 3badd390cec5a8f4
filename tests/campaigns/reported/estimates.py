"""Reports of estimators: information, axes, order."""

from __future__ import annotations

import numpy as np

from campaigns.reported import Workplace, report
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.measure.information import METHODS, estimate_information, mutual_information, plug_in


@report("scikit-learn/scikit-learn#30772", "a constant shares more information with a rare label than the label has")
def constant_and_rare(work: Workplace) -> str:
    """A constant beside a label that 100 of 20,000 samples have, by all estimators; then the label beside itself."""
    constant, rare = np.ones(20_000), (np.arange(20_000) < 100).astype(float)
    for method in METHODS:
        assert mutual_information(constant, rare, method) == 0.0, method
    assert estimate_information(constant, rare, "mixed").high == 0.0
    bits, most = mutual_information(rare, rare, "mixed"), plug_in(rare, rare, 2).entropy_x
    assert abs(bits - most) < 0.002, (bits, most)
    return f"held: 0 bits, and {bits:.4f} of the label in itself, whose entropy is {most:.4f}"


@report("scikit-learn/scikit-learn#16355", "information of few samples is negative, though the manual excludes it")
def never_negative(work: Workplace) -> str:
    """60 estimates from 128 samples of pairs that share nothing, with ties and without."""
    draw, least = np.random.default_rng(0), np.inf
    for number in range(30):
        x, y = draw.standard_normal((2, 128))
        for method in ("mixed", "copula"):
            found = estimate_information(np.round(x) if number % 2 else x, y, method)
            assert 0 <= found.low <= found.bits <= found.high
            least = min(least, found.bits)
    return f"held: at least {least:g} bits, each inside its interval"


@report("scikit-learn/scikit-learn#23720", "information of a label and a number depends on which comes first")
def symmetric(work: Workplace) -> str:
    """A label of ten values and a normal number, both ways, for all estimators."""
    draw = np.random.default_rng(0)
    label = draw.integers(0, 10, 2000)
    number, far = label + draw.standard_normal(2000), 0.0
    for method in METHODS:
        ways = mutual_information(label, number, method), mutual_information(number, label, method)
        far = max(far, abs(ways[0] - ways[1]))
    assert far < 0.03, far
    return f"held: the two ways differ by {far:.4f} bits at most"


@report("scikit-learn/scikit-learn#26696", "integers are rounded after scaling, and their information is lost")
def integers(work: Workplace) -> str:
    """0 to 99 and 1,000, as integers of five types and as floats, beside a noisy copy."""
    values = np.array([*range(100), 1000] * 5)
    noisy = values + np.random.default_rng(0).standard_normal(len(values))
    for method in METHODS:
        wanted = mutual_information(values.astype(float), noisy, method)
        for kind in ("i2", "i4", "i8", "u4", "f4"):
            assert mutual_information(values.astype(kind), noisy, method) == wanted, (method, kind)
    return f"held: the same of every type, {wanted:.2f} bits by {method}"


@report("scikit-learn/scikit-learn#19433", "bins of equal share are empty where most values are the same")
def mostly_zero(work: Workplace) -> str:
    """90 % zeros, the rest one and two, in itself: the entropy, by every estimator that is exact for it."""
    values = np.repeat([0.0, 1.0, 2.0], [1800, 100, 100])
    most = -sum(p * np.log2(p) for p in (0.9, 0.05, 0.05))
    found = {method: mutual_information(values, values, method) for method in ("histogram", "mixed")}
    assert all(abs(bits - most) < 0.01 for bits in found.values()), (found, most)
    return f"held: {found['mixed']:.3f} bits of {most:.3f}"


@report("pola-rs/polars#29315", "a constant column has a rank correlation of 0.85 with another")
def constant_order(work: Workplace) -> str:
    """Rank correlation of 245 zeros with 0 to 244, with each other, and of nearly equal values."""
    zeros, rising = np.zeros(245), np.arange(245.0)
    assert rank_correlation(zeros, rising).rho == 0.0
    assert rank_correlation(zeros, zeros).rho == 1.0
    nearly = 1.0 + rising * 2.0**-50
    assert rank_correlation(nearly, rising).rho == 1.0
    return "held: 0 without an interval, and 1 where values differ in the last bits"
