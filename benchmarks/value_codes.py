"""Selected values in 1, 2 and 4 bits each: entropy-coded quantizers of the values that LGC's autoencoder codes.

    python benchmarks/value_codes.py --trace TRACE --rows rows.jsonl [--density 0.01]
    python benchmarks/value_codes.py --rows rows.jsonl --table [--figure rates.svg]

TRACE: of all ranks' gradients, as `lgc_codes.py` or `gradlab train --capture` records it. Codes are learned on the
first 60 % of the iterations and judged on the last quarter. The best of three prices of a bit counts, for every code.
Errors are of the average over ranks, in that of sending zeros. One line of JSON per code; what is in --rows is not done
again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rows import Row, add, has, read

from gradlab.analysis.figures.lgc import plot_rates
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.selections import Selections, collect_selections
from gradlab.analysis.fit.lgc.value_codes import PRICES, RatePoint, error_at, rate_curve
from gradlab.formatting import significant
from gradlab.plan import lgc_plan
from gradlab.trace import Trace

CODES = (
    ("scalar", "none"),
    ("scalar", "layer"),
    ("scalar", "layer and leader"),
    ("trellis", "none"),
    ("trellis", "layer and leader"),
)
STEPS = {"scalar": (0.14, 0.2, 0.28, 0.7, 1.0, 1.4, 2.0, 2.8), "trellis": (0.08, 0.12, 0.18, 0.5, 0.7, 1.0, 1.4)}
SHARES = (0.5, 1.0, 1.7)  # of the usual price of a bit
BITS = (1.0, 2.0, 4.0)


def curves(quantizer: str, contexts: str, learned: Selections, held_out: Selections) -> list[list[tuple[float, float]]]:
    """Bits and error over steps, a curve for each price of a bit."""
    prices = [share * PRICES[quantizer] for share in SHARES]
    steps = STEPS[quantizer]
    found = [rate_curve(quantizer, contexts, learned, held_out, steps=steps, price=price) for price in prices]
    return [[(point.bits, point.error) for point in curve] for curve in found]


def measure(path: Path, density: float, out: Path) -> None:
    """Add the codes that are missing."""
    with Trace(path) as trace:
        selections = collect_selections(trace, lgc_plan(trace.layers, density=density, warmup_steps=0))
        ranks = trace.world_size
    ends = round(0.6 * len(selections)), round(0.75 * len(selections))
    learned, held_out = selections.part(0, ends[0]), selections.part(ends[1], len(selections))
    made = {"density": density, "ranks": ranks, "selected": selections.count}
    made |= {"learned": len(learned), "held_out": len(held_out)}
    for quantizer, contexts in CODES:
        key: Row = {"quantizer": quantizer, "contexts": contexts, **made}
        if not has(read(out), key):
            add(out, key | {"curves": curves(quantizer, contexts, learned, held_out)}, unshown=("curves",))


def name_of(row: Row) -> str:
    """Name a code by its quantizer and its tables."""
    return f"{row['quantizer']}, {'one table' if row['contexts'] == 'none' else 'tables by ' + row['contexts']}"


def points(row: Row) -> list[list[RatePoint]]:
    """The curves in a row."""
    return [[RatePoint(bits, error) for bits, error in curve] for curve in row["curves"]]


def best(row: Row, bits: float) -> float:
    """The least error at a rate over prices; NaN where no curve has that rate."""
    found = [error_at(curve, bits) for curve in points(row)]
    return min((error for error in found if not math.isnan(error)), default=math.nan)


def table(rows: Sequence[Row]) -> str:
    """Tabulate errors by code and bits, and the least error of Gaussian values that all have one variance."""
    lines = ["| | " + " | ".join(f"{bits:g} bit{'s' * (bits > 1)}" for bits in BITS) + " |"]
    lines.append("| --- |" + " ---: |" * len(BITS))
    named = {name_of(row): [best(row, bits) for bits in BITS] for row in rows}
    named["Gaussian values of one variance, at least"] = [4.0**-bits for bits in BITS]
    for name, errors in named.items():
        lines.append(f"| {name} | " + " | ".join(map(significant, errors)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Add the rows that are missing; print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.trace:
        measure(chosen.trace, chosen.density, chosen.rows)
    rows = read(chosen.rows)
    if chosen.table:
        print(table(rows))
    if chosen.figure:
        with drawing():
            plot_rates({name_of(row): points(row)[SHARES.index(1.0)] for row in rows}).savefig(chosen.figure)


if __name__ == "__main__":
    main()
