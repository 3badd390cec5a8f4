"""What torch.compile would gain: the arithmetic of quantizers on the CPU, eager as it is and compiled, in turns.

    python benchmarks/compiled_kernels.py [--repeats 9] [--rows ROWS.jsonl]
    python benchmarks/compiled_kernels.py --rows ROWS.jsonl --table

11 million values, one thread. A kernel is what a codec does between a block's number and its codes, as small as that:

- int8: `block_scaled` divides, rounds and converts; eager, it divides and adds a number that rounds, in one operation.
- qsgd: `qsgd` divides, adds random bits that were drawn before, cuts off and converts.
- natural: `natural` adds random bits to magnitudes and takes their exponents.
- order: GradiVeQ turns a convolution of 512 x 512 x 3 x 3.

Eager kernels work in the pieces that codecs work in, compiled ones in such pieces and in one. All give the same bits,
or the benchmark fails.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rows import Row, keep, read

from gradlab.coding.bits import PIECE
from gradlab.layout import flatten

VALUES, BLOCK, DEPTH = 11 * 2**20, 512, 512
WHOLE_NUMBERS = 1.5 * 2.0**23  # the sum of it and a small number is rounded to a whole one
Kernel = Callable[..., torch.Tensor]


def int8(values: torch.Tensor, numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes of a piece, int8: (n,), (n / BLOCK,) -> (n,)."""
    return (values.view(-1, BLOCK) / numbers[:, None]).view(-1).round_().clamp_(-127.0, 127.0).to(torch.int8)


def int8_eager(values: torch.Tensor, numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The same codes in two operations, as `block_scaled` has them."""
    terms = values.new_full((BLOCK,), WHOLE_NUMBERS)
    return torch.addcdiv(terms, values.view(-1, BLOCK), numbers[:, None]).view(-1).view(torch.int32).to(torch.int8)


def qsgd(values: torch.Tensor, numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes of a piece at 4 bits, uint8: (n,), (n / BLOCK,), int16 (n,) -> (n,)."""
    places = (values.view(-1, BLOCK) / numbers[:, None]).view(-1)
    places = places.add_(bits.to(torch.float32), alpha=2.0**-16).add_(7.5 + 2.0**-17).clamp_(0.0, 14.5)
    return places.to(torch.int16).to(torch.uint8)


def natural(values: torch.Tensor, numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Exponents of a piece, uint8: (n,), int16 (n,) -> (n,)."""
    magnitudes = values.view(torch.int32).bitwise_and(0x7FFFFFFF)
    moved = torch.add(magnitudes, bits.to(torch.int32), alpha=2**7).add_(2**22 + 2**6)
    return moved.bitwise_right_shift_(23).to(torch.uint8)


KERNELS: dict[str, tuple[Kernel, Kernel]] = {  # eager, and what is compiled
    "int8": (int8_eager, int8),
    "qsgd": (qsgd, qsgd),
    "natural": (natural, natural),
}


def order(values: torch.Tensor) -> torch.Tensor:
    """A convolution's values in GradiVeQ's order: (F, D, 3, 3) -> (3, 3, D, F)."""
    return values.permute(2, 3, 1, 0).contiguous()


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        function()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken[2:])


def in_pieces(kernel: Kernel, out: torch.Tensor, given: tuple[torch.Tensor, ...], piece: int) -> torch.Tensor:
    """Run a kernel piece by piece."""
    values, numbers, bits = given
    for at in range(0, len(values), piece):
        stop = min(len(values), at + piece)
        out[at:stop] = kernel(values[at:stop], numbers[at // BLOCK : stop // BLOCK], bits[at:stop])
    return out


def measured(name: str, repeats: int) -> Row:
    """Time one kernel in its three forms."""
    eager, kernel = KERNELS[name]
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(VALUES, generator=draw)
    numbers = values.view(-1, BLOCK).abs().amax(1) / (127 if name == "int8" else 7)
    given = values, numbers, torch.randint(-(2**15), 2**15, (VALUES,), dtype=torch.int16, generator=draw)
    compiled = torch.compile(kernel, dynamic=True)
    # The kind of an output is the kernel's own.
    out = kernel(values[:PIECE], numbers[: PIECE // BLOCK], given[2][:PIECE]).new_empty(VALUES)
    began = time.perf_counter()
    compiled(*given), in_pieces(compiled, out, given, PIECE)
    row = {"kernel": name, "compiling": time.perf_counter() - began}
    expected = in_pieces(eager, out, given, PIECE).clone()
    if not torch.equal(in_pieces(compiled, out, given, PIECE), expected) or not torch.equal(compiled(*given), expected):
        raise SystemExit(f"{name}: compiled, it gives other bits")
    return row | {
        "copy": milliseconds(functools.partial(torch.empty_like(values).copy_, values), repeats),
        "eager": milliseconds(lambda: in_pieces(eager, out, given, PIECE), repeats),
        "compiled in pieces": milliseconds(lambda: in_pieces(compiled, out, given, PIECE), repeats),
        "compiled in one": milliseconds(lambda: out.copy_(compiled(*given)), repeats),
    }


def measured_order(repeats: int) -> Row:
    """Time the order of a convolution of 512 x 512 x 3 x 3."""
    values = torch.randn(DEPTH, DEPTH, 3, 3, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(order, dynamic=True)
    began = time.perf_counter()
    expected = compiled(values)
    row = {"kernel": "order", "compiling": time.perf_counter() - began}
    if not torch.equal(flatten(values, "gradiveq"), expected.view(-1)):
        raise SystemExit("order: compiled, it gives other values")
    return row | {
        "copy": milliseconds(functools.partial(torch.empty_like(values).copy_, values), repeats),
        "eager": milliseconds(lambda: flatten(values, "gradiveq"), repeats),
        "compiled in one": milliseconds(lambda: compiled(values), repeats),
    }


def table(rows: list[Row]) -> None:
    """Print the table, milliseconds."""
    forms = ("copy", "eager", "compiled in pieces", "compiled in one")
    print("| kernel | " + " | ".join(f"{form}, ms" for form in forms) + " | compiling, s |")
    print("|---" * (len(forms) + 2) + "|")
    for row in rows:
        cells = [f"{row[form]:.1f}" if form in row else "" for form in forms]
        print(f"| {row['kernel']} | " + " | ".join(cells) + f" | {row['compiling']:.1f} |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(options.rows) if options.table else []
    if not options.table:
        rows = [keep(options.rows, measured(kernel, options.repeats)) for kernel in KERNELS]
        rows.append(keep(options.rows, measured_order(options.repeats)))
    table(rows)


if __name__ == "__main__":
    main()
