"""Measure the bits per value that ecsq's messages take, beside those asked for, and the time of a message.

Gradients are drawn anew in every iteration, with norms that vary by a tenth: Gaussian ones, 1 % of them, heavy tails
(Gaussian over uniform), and Gaussian ones whose scale jumps by 10^6 after the 20th iteration and returns after the
40th. Each row is a run of 50 iterations, half of the rows under error feedback.

    python benchmarks/ecsq_bits.py --rows benchmarks/results/ecsq-bits.jsonl
    python benchmarks/ecsq_bits.py --rows benchmarks/results/ecsq-bits.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradlab.codec import Codec, Context, Tensors, exchange_group
from gradlab.codecs import make
from gradlab.collectives import run_lockstep
from gradlab.wrappers.error_feedback import ErrorFeedback

KINDS = ("Gaussian", "1 %", "heavy tails", "scale jumps")
BITS = (0.1, 0.25, 1.0, 2.0, 4.0, 8.0)
ITERATIONS, JUMP, BACK = 50, 20, 40


def drawn(kind: str, numel: int, iteration: int) -> torch.Tensor:
    """Draw the gradient of an iteration, (numel,), float32, of one of `KINDS`; the same in every run."""
    generator = torch.Generator().manual_seed(iteration)
    x, y = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    x *= 1 + 0.1 * float(torch.randn((), generator=generator))
    if kind == "1 %":
        return x * (y < 0.01)
    if kind == "heavy tails":
        return x / y.clamp_min(1e-3)
    return x * 1e6 if kind == "scale jumps" and JUMP <= iteration < BACK else x


def messages(kind: str, numel: int, bits: float, feedback: bool) -> Iterator[tuple[float, float]]:
    """Yield the bits per value of each iteration's message, and its seconds: coding, and decoding once."""
    bare = make("ecsq", bits=bits)
    codec: Codec = ErrorFeedback(bare) if feedback else bare
    state: Tensors = {}
    for iteration in range(ITERATIONS):
        gradient = drawn(kind, numel, iteration)
        begin = time.perf_counter()
        (done,) = run_lockstep([exchange_group(codec, {"w": gradient}, state, Context(0, 1, iteration, "w"))])
        state = done.value.state
        yield 8 * done.payload_bytes / numel, time.perf_counter() - begin


def row(kind: str, numel: int, bits: float, feedback: bool) -> dict[str, Any]:
    """Run all iterations; return the settings, counted bits per value, and milliseconds per message."""
    counted, seconds = zip(*messages(kind, numel, bits, feedback), strict=True)
    jumps = {"6th after": counted[JUMP + 5], "6th back": counted[BACK + 5]} if kind == "scale jumps" else {}
    return {
        "values": kind,
        "numel": numel,
        "bits": bits,
        "feedback": feedback,
        "first": counted[0],
        "fifth": counted[4],
        "mean": statistics.fmean(counted),
        "most": max(counted),
        "median_ms": 1e3 * statistics.median(seconds),
        "mean_ms": 1e3 * statistics.fmean(seconds),
        **jumps,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of counted bits per value."""
    yield "| values | bits asked for | feedback | message 1 | message 5 | mean of 50 | most |"
    yield "|---|---|---|---|---|---|---|"
    for one in rows:
        counted = " | ".join(f"{one[what]:.3g}" for what in ("first", "fifth", "mean", "most"))
        yield f"| {one['values']} | {one['bits']:g} | {'yes' if one['feedback'] else 'no'} | {counted} |"


def main() -> None:
    """Measure all kinds of values and write a row of each, or print the rows that are there as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the rows that are there")
    parser.add_argument("--numel", type=int, default=200_000)
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table([json.loads(line) for line in arguments.rows.read_text().splitlines()])))
        return
    torch.set_num_threads(1)
    with arguments.rows.open("w") as file:
        for feedback in (False, True):
            for kind in KINDS:
                for bits in BITS:
                    file.write(json.dumps(row(kind, arguments.numel, bits, feedback)) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
