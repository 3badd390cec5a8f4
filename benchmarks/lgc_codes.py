"""LGC's autoencoders on one recording, beside codes without learning of the same values: error and bytes.

    python benchmarks/lgc_codes.py --data cifar10.npz --trace TRACE --rows rows.jsonl
    python benchmarks/lgc_codes.py --rows rows.jsonl --table

The task of `lgc.py cifar10`: ResNet-8 on images halved to 16 x 16, 4 emulated nodes of 16 images, SGD without momentum.
Its iterations 200 to 299, the first that LGC would learn from, are recorded in TRACE, if that is not there yet. Each
of `FITS` is what `gradlab fit lgc TRACE --density 0.01` does: it learns on the first 60 % of the iterations, stops by
the next 15 %, and is judged on the rest. One line of JSON per fit; what is in --rows is not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulated
import torch
from lgc import DENSITY, load, tasks
from rows import Row, add, has, read

from gradlab.analysis.fit.lgc.fit import fit_lgc
from gradlab.formatting import format_bytes, format_percent
from gradlab.trace import Trace

TASK, RECORDED, SEED = "cifar10", 100, 0
FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "by position": ("ring", {}),
    "by leader's value, layers normalised": ("ring", {"order": "value", "normalise": "layer"}),
    "each rank's own positions": ("server", {}),
    "shared positions, layers normalised": ("server", {"positions": "shared", "normalise": "layer"}),
}


def record(path: str, folder: Path) -> None:
    """Train densely, and record iterations from the one on where LGC would begin to learn."""
    setting = tasks()[TASK]
    data = load(TASK, setting, path)
    emulated.record(setting.task, data, folder, SEED, start=setting.dense, every=1, count=RECORDED)


def fitted(trace: Trace, name: str) -> Row:
    """The autoencoder's error and bytes, and those of the codes beside it."""
    pattern, settings = FITS[name]
    measured = fit_lgc(trace, pattern, settings={"density": DENSITY, **settings}).measured
    codes = [code.to_json() for code in measured.codes]
    steps = [int(trace.steps[0]), int(trace.steps[-1])]
    made = {"selected": measured.selected, "ranks": measured.world_size, "steps": steps, "epochs": len(measured.curve)}
    better = measured.better
    return {"pattern": pattern, **made, "codes": codes, "better": better.name if better else None}


def table(rows: Sequence[Row]) -> str:
    """Lay out a pattern's fits beside each other: a code per line, its error, payload and wire bytes."""
    lines = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        fits = [row for row in rows if row["pattern"] == pattern]
        heads = (f"error, {row['fit']} | payload | wire at {row['ranks']}" for row in fits)
        steps, epochs = fits[0]["steps"], ", ".join(str(row["epochs"]) for row in fits)
        lines += [f"{pattern}: {fits[0]['selected']} values, iterations {steps[0]} to {steps[1]}; epochs: {epochs}", ""]
        lines += ["| sent as | " + " | ".join(heads) + " |", "| --- |" + " ---: | ---: | ---: |" * len(fits)]
        for codes in zip(*(row["codes"] for row in fits), strict=True):
            name = ", or ".join(dict.fromkeys(code["name"] for code in codes))
            lines.append(f"| {name} | " + " | ".join(map(_cells, codes)) + " |")
        lines.append("")
    return "\n".join(lines)


def _cells(code: Row) -> str:
    sizes = format_bytes(code["payload_bytes"]), format_bytes(code["wire_bytes"])
    return " | ".join((format_percent(code["error"]), *sizes))


def main() -> None:
    """Add the fits that are missing; or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data and chosen.trace and not chosen.trace.exists():
        record(chosen.data, chosen.trace)
    if chosen.trace:
        with Trace(chosen.trace) as trace:
            for name in FITS:
                if not has(read(chosen.rows), {"fit": name}):
                    add(chosen.rows, {"fit": name} | fitted(trace, name), unshown=("codes",))
    if chosen.table:
        print(table(read(chosen.rows)))


if __name__ == "__main__":
    main()
