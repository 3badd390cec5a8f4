"""Selected values in 1, 2 and 4 bits each: entropy-coded quantizers of the values that LGC's autoencoder codes.

    python benchmarks/value_codes.py --trace TRACE [--density 0.01] [--out rates.json] [--figure rates.svg]

TRACE: of all ranks' gradients, as `gradlab train --capture` records it. Codes are learned on the first 60 % of the
iterations and judged on the last quarter. The best of three prices of a bit counts, for every code. Errors are of the
average over ranks, in that of sending zeros.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from gradlab.analysis.figures.lgc import plot_rates
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.selections import collect_selections
from gradlab.analysis.fit.lgc.value_codes import PRICES, RatePoint, error_at, rate_curve
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


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with Trace(chosen.trace) as trace:
        selections = collect_selections(trace, lgc_plan(trace.layers, density=chosen.density, warmup_steps=0))
    ends = round(0.6 * len(selections)), round(0.75 * len(selections))
    learned, held_out = selections.part(0, ends[0]), selections.part(ends[1], len(selections))
    print(f"{selections.count} values of {trace.world_size} ranks, {len(learned)} and {len(held_out)} iterations")
    drawn: dict[str, list[RatePoint]] = {}
    results = {}
    for quantizer, contexts in CODES:
        curves = [
            rate_curve(quantizer, contexts, learned, held_out, steps=STEPS[quantizer], price=share * PRICES[quantizer])
            for share in SHARES
        ]
        name = f"{quantizer}, {'one table' if contexts == 'none' else f'tables by {contexts}'}"
        errors = [min(error for curve in curves if (error := error_at(curve, bits)) == error) for bits in BITS]
        drawn[name], results[name] = curves[1], {"errors": errors, "curves": [list(map(asdict, one)) for one in curves]}
        print(
            f"{name:36s}" + "".join(f"  {bits:g} bit {error:.5f}" for bits, error in zip(BITS, errors, strict=True)),
            flush=True,
        )
    print(f"{'Gaussian of one variance, at least':36s}" + "".join(f"  {bits:g} bit {4.0**-bits:.5f}" for bits in BITS))
    if chosen.out:
        chosen.out.write_text(json.dumps(results))
    if chosen.figure:
        with drawing():
            plot_rates(drawn).savefig(chosen.figure)


if __name__ == "__main__":
    main()
