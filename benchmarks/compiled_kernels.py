"""What torch.compile would gain: the arithmetic of quantizers on the CPU, eager as it is and compiled, in turns.

    python benchmarks/compiled_kernels.py [--device cuda] [--repeats 9] [--rows ROWS.jsonl]
    python benchmarks/compiled_kernels.py --rows ROWS.jsonl --table

11 million values, one thread. A kernel is what a codec does between a block's number and its codes, as small as that:

- int8: `block_scaled` divides, rounds and converts; eager, it divides and adds a number that rounds, in one operation.
- qsgd: `qsgd` divides, adds random bits that were drawn before, cuts off and converts.
- natural: `natural` adds random bits to magnitudes and takes their exponents.
- order: GradiVeQ turns a convolution of 512 x 512 x 3 x 3.
- signs, ones: `sign` packs which values are negative, eight to a byte, and turns them into 1 and -1.

Eager kernels work in the pieces that codecs work in, compiled ones in such pieces and in one. On the CPU all give
the same bits, or the benchmark fails; on a GPU a row says what share of the codes are others.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from codec_speed import Stopwatch
from rows import Row, keep, read

from gradlab.codecs.sign import pack_signs, write_signs
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


def signs(values: torch.Tensor) -> torch.Tensor:
    """Pack which of (n,) values are negative: (n / 8,), uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=values.device)
    return ((values.view(-1, 8) < 0).to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def ones(packed: torch.Tensor) -> torch.Tensor:
    """Return 1 or -1 for each of the signs in (n,) bytes: (8 n,)."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return torch.where((packed[:, None] >> places & 1).view(-1) != 0, -1.0, 1.0)


def ones_eager(packed: torch.Tensor) -> torch.Tensor:
    """Return the same as `sign` has it."""
    return write_signs(packed.new_empty(8 * len(packed), dtype=torch.float32), packed, 1.0)


def milliseconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of a call."""
    taken, watch = [], Stopwatch(device)
    for _ in range(repeats + 2):
        began = watch.now()
        function()
        taken.append(1e3 * watch.seconds(began, watch.now()))
    return statistics.median(taken[2:])


def in_pieces(kernel: Kernel, out: torch.Tensor, given: tuple[torch.Tensor, ...], piece: int) -> torch.Tensor:
    """Run a kernel piece by piece."""
    values, numbers, bits = given
    for at in range(0, len(values), piece):
        stop = min(len(values), at + piece)
        out[at:stop] = kernel(values[at:stop], numbers[at // BLOCK : stop // BLOCK], bits[at:stop])
    return out


def measured(name: str, repeats: int, device: torch.device) -> Row:
    """Time one kernel in its three forms; on a GPU nothing is done in pieces."""
    eager, kernel = KERNELS[name]
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(VALUES, generator=draw).to(device)
    numbers = values.view(-1, BLOCK).abs().amax(1) / (127 if name == "int8" else 7)
    bits = torch.randint(-(2**15), 2**15, (VALUES,), dtype=torch.int16, generator=draw)
    given, piece = (values, numbers, bits.to(device)), PIECE if device.type == "cpu" else VALUES
    compiled = torch.compile(kernel, dynamic=True)
    # The kind of an output is the kernel's own.
    out = kernel(values[:PIECE], numbers[: PIECE // BLOCK], given[2][:PIECE]).new_empty(VALUES)
    began = time.perf_counter()
    compiled(*given), in_pieces(compiled, out, given, piece)
    row = {"kernel": name, "compiling": time.perf_counter() - began} | _on(device)
    expected = in_pieces(eager, out, given, piece).clone()
    if not torch.equal(in_pieces(compiled, out, given, piece), expected) or not torch.equal(compiled(*given), expected):
        row |= _others(name, out.ne(expected))
    return row | {
        "copy": milliseconds(functools.partial(torch.empty_like(values).copy_, values), repeats, device),
        "eager": milliseconds(lambda: in_pieces(eager, out, given, piece), repeats, device),
        "compiled in pieces": milliseconds(lambda: in_pieces(compiled, out, given, piece), repeats, device),
        "compiled in one": milliseconds(lambda: out.copy_(compiled(*given)), repeats, device),
    }


def measured_whole(name: str, repeats: int, device: torch.device) -> Row:
    """Time a kernel that is not cut into pieces."""
    eager, kernel, shape = WHOLE[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    copied = torch.empty_like(values)
    given = pack_signs(values) if name == "ones" else values
    compiled = torch.compile(kernel, dynamic=True)
    began = time.perf_counter()
    expected = compiled(given)
    row = {"kernel": name, "compiling": time.perf_counter() - began} | _on(device)
    if not torch.equal(eager(given), expected):
        row |= _others(name, eager(given).ne(expected))
    return row | {
        "copy": milliseconds(lambda: copied.copy_(values), repeats, device),
        "eager": milliseconds(lambda: eager(given), repeats, device),
        "compiled in one": milliseconds(lambda: compiled(given), repeats, device),
    }


WHOLE: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "order": (lambda values: flatten(values, "gradiveq").view(3, 3, DEPTH, DEPTH), order, (DEPTH, DEPTH, 3, 3)),
    "signs": (pack_signs, signs, (VALUES,)),
    "ones": (ones_eager, ones, (VALUES,)),
}


def _others(name: str, differ: torch.Tensor) -> Row:
    """Say how many codes are others, which they may be on a GPU, whose compilers fuse products and sums."""
    if differ.device.type == "cpu":
        raise SystemExit(f"{name}: compiled, it gives other bits")
    return {"others": float(differ.double().mean())}


def _on(device: torch.device) -> Row:
    return {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def table(rows: list[Row]) -> None:
    """Print the table, milliseconds."""
    forms = ("copy", "eager", "compiled in pieces", "compiled in one")
    print("| kernel | " + " | ".join(f"{form}, ms" for form in forms) + " | compiling, s |")
    print("|---" * (len(forms) + 2) + "|")
    for row in rows:
        digits = 3 if "device" in row else 1
        cells = [f"{row[form]:.{digits}f}" if form in row else "" for form in forms]
        print(f"| {row['kernel']} | " + " | ".join(cells) + f" | {row['compiling']:.1f} |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(options.rows) if options.table else []
    if not options.table:
        device = torch.device(options.device)
        rows = [keep(options.rows, measured(kernel, options.repeats, device)) for kernel in KERNELS]
        rows += [keep(options.rows, measured_whole(kernel, options.repeats, device)) for kernel in WHOLE]
    table(rows)


if __name__ == "__main__":
    main()
