"""What rounding the mean once more costs: errors of the applied mean by gather and in shards, on recorded gradients.

    python benchmarks/aggregation.py --trace TRACE --rows ROWS.jsonl [--ranks 3 4 8]
    python benchmarks/aggregation.py --table --rows ROWS.jsonl

A quantizer's uniform plan is replayed over the recorded steps of the first N ranks, in both forms of `aggregation`. The
error is ||applied mean - true mean|| / ||true mean||, the median over steps; bytes are those that a rank's interface
sends in a step.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rows import Row, add, read

from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.plan import Plan
from gradlab.trace import Trace

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("block_scaled", {}),
    "float8 e4m3": ("block_scaled", {"dtype": "float8_e4m3fn"}),
    "int4": ("block_scaled", {"dtype": "int4"}),
    "int4, stochastic": ("block_scaled", {"dtype": "int4", "stochastic": True}),
    "QSGD 8 bits": ("qsgd", {"bits": 8}),
    "QSGD 4 bits": ("qsgd", {"bits": 4}),
    "QSGD 3 bits": ("qsgd", {"bits": 3}),
    "natural": ("natural", {}),
}
FORMS = ("gather", "shards")


def measured(trace: Trace, title: str, ranks: int, form: str) -> Row:
    """Replay one plan over all recorded steps, without residuals."""
    codec, settings = CODECS[title]
    plan = Plan.uniform(trace.layers, codec, aggregation=form, error_feedback=False, **settings)
    run, errors, sent = LockstepPlan(plan, ranks), [], 0
    for position, step in enumerate(trace.iterate()):
        gradients = [{name: torch.from_numpy(rows) for name, rows in own.items()} for own in step.gradients[:ranks]]
        done = run.step(position, gradients)
        errors.append(_error(done.exchanged, gradients))
        sent = max(done.wire)
    return {"codec": title, "ranks": ranks, "form": form, "error": statistics.median(errors), "wire_bytes": sent}


def _error(exchanged: Any, gradients: list[dict[str, torch.Tensor]]) -> float:
    wrong = norm = 0.0
    for group in exchanged.values():
        for layer, mean in group[0].mean.items():
            true = torch.stack([own[layer] for own in gradients]).double().mean(0)
            wrong += float((mean.double() - true).square().sum())
            norm += float(true.square().sum())
    return float((wrong / norm) ** 0.5)


def table(rows: list[Row]) -> None:
    """Print errors, and wire bytes over those of the gather."""
    kept = {(row["codec"], row["ranks"], row["form"]): row for row in rows}
    ranks = sorted({row["ranks"] for row in rows})
    heads = [f"N = {count}: gather | shards | bytes" for count in ranks]
    print("| | " + " | ".join(heads) + " |")
    print("|---" * (1 + 3 * len(ranks)) + "|")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        cells = []
        for count in ranks:
            gather, shards = (kept[codec, count, form] for form in FORMS)
            cells += [f"{gather['error']:.4f}", f"{shards['error']:.4f}"]
            cells.append(f"{shards['wire_bytes'] / gather['wire_bytes']:.2f}")
        print(f"| {codec} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        with Trace(options.trace) as trace:
            for title in CODECS:
                for ranks in options.ranks:
                    for form in FORMS:
                        add(options.rows, measured(trace, title, ranks, form))
    table(read(options.rows))


if __name__ == "__main__":
    main()
