"""What would make entropy-coded scalar quantization better: refinements measured one by one on recordings.

    python benchmarks/ecsq_refinements.py --recordings ResNet-8=trace1 nanoGPT=trace2 --rows refinements.jsonl
    python benchmarks/ecsq_refinements.py --rows refinements.jsonl --table

What looks at earlier iterations needs a recording of consecutive ones, and is left out for others. Each refinement
quantizes every rank's matrices at several steps, and counts the bits of the levels under running tables: frequencies of
earlier iterations, of all ranks, halved with every iteration, by layer and by what the refinement conditions on, which
all ranks know. Errors at 0.1, 0.25 and 1.2 bits per value are read off between steps. The first half of a recording
fills the tables. No feedback.

    base            one step, dead zone 0.65, centroids, tables by layer
    first half's tables   frequencies of the recording's first half, as an artifact could hold them, and no later ones
    tables sent     what ecsq does by default: the bytes of its messages, which hold their own tables
    tables running  ecsq's messages under the codes' frequencies in earlier iterations, of all ranks, by layer
    tables fitted   ecsq's messages under their frequencies in the recording's first half, by layer
    dead zone z     another dead zone: what choosing zero where a value costs more than it gives comes to
    neighbours      tables by how many steps the two values before it in its row have
    last mean       tables by the size of the last iteration's mean there, and signs relative to the mean's
    second moment   tables by the running mean square of the decoded means there, in six classes of two octaves
    both            tables by second moment and neighbours
    scales          the step by coordinate, in proportion to the fourth root of that mean square
    low rank first  the best approximation of rank 1 of every matrix subtracted beforehand, factors in 16 bits
    trellis         two quantizers in turns, and a search for the cheapest levels (`trellis.py`), at the best of several
                    prices of a bit in that search
    subtractive dither  unbiased: a random number that both sides know is added before rounding and subtracted after it
    random rounding     unbiased: to one of the two nearest levels by chance, and zero stays zero
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, add, has, read
from trellis import Trellis

from gradlab.analysis.gradients import step_gradients
from gradlab.coding.level_tables import advanced, nothing_known
from gradlab.coding.levels import decode_levels, encode_levels
from gradlab.plan import Plan
from gradlab.trace import Trace

DEAD_ZONE, FORGET, MEMORY = 0.65, 0.5, 0.9
RATES = (0.1, 0.25, 1.2)
STEPS = tuple(2.0 ** (octave / 2) for octave in range(-4, 9))  # in root mean squares of the first iteration
MOST = 64  # levels beyond it count as it and an Elias gamma code
VARIANTS = (
    "base",
    "first half's tables",
    *("tables sent", "tables running", "tables fitted"),
    *(f"dead zone {zone}" for zone in (0.5, 0.55, 0.6, 0.7, 0.8)),
    "neighbours",
    "last mean",
    "second moment",
    "both",
    "scales",
    "low rank first",
    "trellis",
    "subtractive dither",
    "random rounding",
)
FROM_EARLIER = ("last mean", "second moment", "both", "scales")


class Tables:
    """Frequencies of levels by key, of earlier iterations."""

    def __init__(self) -> None:
        self.counts: dict[Any, np.ndarray] = defaultdict(lambda: np.full(2 * MOST + 1, 0.02))
        self.new: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2 * MOST + 1))

    def bits(self, key: Any, levels: np.ndarray, contexts: np.ndarray | None) -> float:
        """Count the bits of levels, and note them for the next iteration."""
        total = 0.0
        for context in [None] if contexts is None else np.unique(contexts):
            chosen = levels if contexts is None else levels[contexts == context]
            found = np.bincount(np.clip(chosen, -MOST, MOST) + MOST, minlength=2 * MOST + 1)
            table = self.counts[key, context]
            total -= float((found * np.log2(table / table.sum())).sum())
            beyond = np.abs(chosen[np.abs(chosen) >= MOST]) - MOST + 1
            total += float((2 * np.floor(np.log2(beyond)) + 1).sum())
            self.new[key, context] += found
        return total

    def advance(self, kept: float) -> None:
        """Add an iteration's frequencies to this share of the earlier ones."""
        for key, found in self.new.items():
            self.counts[key] = self.counts[key] * kept + found
        self.new.clear()


class Run:
    """One refinement at one step."""

    def __init__(self, variant: str, step: float, learning: int) -> None:
        self.variant, self.step, self.tables = variant, step, Tables()
        self.learning = learning  # iterations left in the recording's first half
        self.random = np.random.default_rng(0)
        self.dead_zone = float(variant.rpartition(" ")[2]) if variant.startswith("dead zone") else DEAD_ZONE
        self.known: list[np.ndarray] = []  # frequencies of codes by layer
        self.last: dict[str, np.ndarray] = {}
        self.squares: dict[str, np.ndarray] = {}

    def iteration(self, ranks: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> tuple[float, float, float]:
        """Bits, squared errors and squares of all ranks' layers."""
        bits = missed = energy = 0.0
        levels: list[list[np.ndarray]] = [[] for _ in ranks]
        for name in names:
            decoded = []
            for number, rank in enumerate(ranks):
                values = np.asarray(rank[name], np.float32)
                taken, seen = self._layer(name, values.reshape(len(values), -1), levels[number])
                bits += taken
                missed += float(np.square(values.reshape(seen.shape) - seen).sum(dtype=np.float64))
                energy += float(np.square(values).sum(dtype=np.float64))
                decoded.append(seen.reshape(-1))
            mean = np.mean(decoded, 0)
            self.last[name] = mean
            before = self.squares.get(name, np.square(mean))
            self.squares[name] = MEMORY * before + (1 - MEMORY) * np.square(mean)
        if self.variant == "tables sent":
            bits = sum(map(bits_sent, levels))
        if self.variant in ("tables running", "tables fitted"):
            bits = self._bits_under_known(levels)
        if self.variant != "first half's tables":
            self.tables.advance(FORGET)
        elif self.learning > 0:
            self.tables.advance(1.0)
        self.learning -= 1
        return bits, missed, energy

    def _bits_under_known(self, levels: Sequence[Sequence[np.ndarray]]) -> float:
        """Count the bits of all ranks' messages under the frequencies that are known, and note theirs."""
        known = self.known or nothing_known(len(levels[0]))
        seen = nothing_known(len(known))
        bits = sum(bits_sent(of_rank, known, seen) for of_rank in levels)
        if self.variant == "tables running":
            self.known = advanced(known, seen)
        elif self.learning > 0:
            self.known = [old + new for old, new in zip(known, seen, strict=True)]
        return bits

    def _layer(self, name: str, matrix: np.ndarray, noted: list[np.ndarray]) -> tuple[float, np.ndarray]:
        first, bits = np.zeros_like(matrix), 0.0
        if self.variant == "low rank first":
            u, s, v = np.linalg.svd(matrix, full_matrices=False)
            first, bits = s[0] * np.outer(u[:, 0], v[0]), 16.0 * sum(matrix.shape)
        scale = self._scale(name, matrix.shape) if self.variant == "scales" else 1.0
        if self.variant in ("subtractive dither", "random rounding"):
            return self._unbiased(name, matrix)
        scaled = np.abs(matrix - first) / (self.step * scale)
        magnitudes = np.maximum(0, np.floor(scaled - self.dead_zone) + 1)
        levels = np.copysign(magnitudes, matrix - first).astype(np.int64)
        for which in (magnitudes == 1, magnitudes == 2, magnitudes > 2):
            magnitudes[which] += (scaled - magnitudes)[which].mean() if which.any() else 0.0
        noted.append(levels.reshape(-1).astype(np.int32))
        contexts, signs = self._contexts(name, levels)
        bits += self.tables.bits(name, (levels.reshape(-1) * signs), contexts)
        return bits, first + np.copysign(magnitudes, levels) * self.step * scale

    def _unbiased(self, name: str, matrix: np.ndarray) -> tuple[float, np.ndarray]:
        drawn = self.random.random(matrix.shape, np.float32)
        levels = np.floor(matrix / self.step + drawn).astype(np.int64)
        seen = levels - drawn + 0.5 if self.variant == "subtractive dither" else levels
        return self.tables.bits(name, levels.reshape(-1), None), seen * self.step

    def _contexts(self, name: str, levels: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | int]:
        """What tables are chosen by, and what signs are relative to."""
        around = np.minimum(2, np.abs(levels))
        before = np.pad(around, ((0, 0), (2, 0)))
        neighbours = (before[:, 1:-1] + before[:, :-2]).reshape(-1)
        if self.variant == "neighbours":
            return neighbours, 1
        if name not in self.last or self.variant not in ("last mean", "second moment", "both"):
            return None, 1
        if self.variant == "last mean":
            sizes = np.digitize(np.abs(self.last[name]) / self.step, [1e-9, 0.3, 0.6, 1.2])
            return sizes, np.where(self.last[name] < 0, -1, 1)
        moments = np.digitize(np.sqrt(self.squares[name]) / self.step, 4.0 ** np.arange(-4, 1))
        return moments if self.variant == "second moment" else 8 * moments + neighbours, 1

    def _scale(self, name: str, shape: tuple[int, ...]) -> np.ndarray | float:
        if name not in self.squares:
            return 1.0
        root = np.sqrt(np.sqrt(self.squares[name])) + 1e-3 * math.sqrt(self.step)
        return (root / math.exp(float(np.log(root).mean()))).reshape(shape)


def bits_sent(
    levels: Sequence[np.ndarray],
    known: Sequence[np.ndarray] | None = None,
    seen: Sequence[np.ndarray] | None = None,
) -> float:
    """Count the bits of one rank's message, with its step and centroids. levels: by layer. known, seen: as decoded."""
    flat, sizes = np.concatenate(levels), list(map(len, levels))
    positions = np.flatnonzero(flat)
    message = encode_levels(positions, flat[positions], sizes, known)
    if seen is not None:
        decode_levels(message, sizes, known, seen)
    return 8.0 * (11 + len(message))


MULTIPLIERS = (0.1, 0.2, 0.4, 0.8)  # of bits in the trellis, in squared steps


def points(trace: Trace, variant: str, multiplier: float | None = None) -> Iterator[tuple[float, float]]:
    """Yield bits per value and the relative error, at one step after another. multiplier: of the trellis."""
    names = [name for group in Plan.uniform(trace.layers, "ecsq").compressed_groups for name in group.layers]
    numel = sum(layer.numel for layer in trace.layers if layer.name in set(names))
    everyone = [step_gradients(step) for step in trace.iterate(0, len(trace.steps), names)]
    squares = sum(float(np.square(everyone[0][0][name]).sum()) for name in names)
    for step in STEPS:
        length = step * math.sqrt(squares / numel)
        run = Run(variant, length, len(everyone) // 2) if multiplier is None else Trellis(length / 2, multiplier)
        done = [run.iteration(ranks, names) for ranks in everyone][len(everyone) // 2 :]
        bits, missed, energy = map(sum, zip(*done, strict=True))
        yield bits / (numel * len(everyone[0]) * len(done)), math.sqrt(missed / energy)


def measure(title: str, trace: Trace, out: Path, variants: Sequence[str] = VARIANTS) -> None:
    """Append the rows of one recording that the file does not have yet, one per refinement."""
    rows = read(out)
    consecutive = bool((np.diff(trace.steps) == 1).all())
    possible = variants if consecutive else [name for name in variants if name not in FROM_EARLIER]
    for variant in possible:
        key = {"recording": title, "variant": variant}
        if has(rows, key):
            continue
        ways = MULTIPLIERS if variant == "trellis" else (None,)
        lines = [sorted(points(trace, variant, way)) for way in ways]
        at = {f"{rate:g}": min(at_rate(line, rate) for line in lines) for rate in RATES}
        add(out, key | {"errors": at, "points": lines[0] if len(lines) == 1 else lines}, unshown=("points",))


def at_rate(line: Sequence[tuple[float, float]], bits: float) -> float:
    """Read an error off between steps."""
    rates, errors = zip(*line, strict=True)
    return float(np.interp(math.log(bits), np.log(rates), errors))


def table(rows: Sequence[Row]) -> str:
    """Lay out errors by variant, a column per recording and rate."""
    recordings = list(dict.fromkeys(row["recording"] for row in rows))
    heads = [f"{recording}, {rate:g} bits" for recording in recordings for rate in RATES]
    lines = [f"| refinement | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for variant in (one for one in VARIANTS if any(row["variant"] == one for row in rows)):
        cells = []
        for recording in recordings:
            mine = [row for row in rows if (row["recording"], row["variant"]) == (recording, variant)]
            cells += [f"{mine[0]['errors'][f'{rate:g}']:.3f}" if mine else "" for rate in RATES]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", nargs="+", default=[], metavar="TITLE=TRACE")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, metavar="REFINEMENT")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for title, _, path in (one.partition("=") for one in options.recordings):
        measure(title, Trace(path), options.rows, options.variants)
    if options.table:
        print(table(read(options.rows)))


if __name__ == "__main__":
    main()
