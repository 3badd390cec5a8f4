"""Compile every kernel for GPUs, on a machine without one: `make campaign NAME=kernels`.

Every codec with kernels compresses, averages and subtracts a vector of several layers, or exchanges them. What it would
launch is compiled by Triton down to the GPU's code instead, for compute capabilities 8.0 and 9.0, and not run.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradlab import codecs, kernels, wrappers
from gradlab.codec import Context, exchange_group
from gradlab.codec.abilities import for_layers
from gradlab.codecs.ecsq import ECSQ
from gradlab.collectives import run_lockstep
from gradlab.layout import Layer
from support.kernel_cases import CASES, SELECTIONS, SUMMED, TRANSFORMED

TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32",
    torch.int8: "*i8", torch.int64: "*i64", torch.bool: "*i1", torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip
CAPABILITIES = (80, 90)
SIZES = ((300, 1, 9000, 777), (1,))  # numbers that are 1 are constants of a kernel of their own
compiled: dict[Any, int] = {}


def type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32" if -(2**31) <= argument < 2**31 else "i64"


def compile_instead(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    for one in arguments:
        if isinstance(one, torch.Tensor) and one.dtype == torch.int32:
            one.zero_()  # a host may read how many there are
    names = [parameter.name for parameter in kernel.params]
    given = dict(zip(names, arguments, strict=False))
    constants = {
        name: one for name, one in given.items() if type(one) is int and one == 1
    } | constants  # as Triton does
    signature = {name: type_of(one) for name, one in given.items()} | dict.fromkeys(constants, "constexpr")
    for capability in CAPABILITIES:
        key = (
            kernel.fn.__name__,
            capability,
            *signature.items(),
            *((name, str(one)) for name, one in constants.items()),
        )
        if key not in compiled:
            source = ASTSource(kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
            compiled[key] = len(made.asm["cubin"])


def main() -> int:
    x, codec = torch.randn(9000), codecs.make("threshold", threshold=2.0)
    unequal = [codec.compress(x * factor, torch.Generator()) for factor in (1.0, 1.1, 20.0, 21.0)]
    kernels.DEVICES.add("cpu")
    kernels.start = compile_instead
    codec.average_into(torch.empty_like(x), unequal, 0.5)
    for (name, settings), sizes in product(CASES + SELECTIONS + TRANSFORMED, SIZES):
        layers = [Layer(f"layer {at}", (size,)) for at, size in enumerate(sizes)]
        x = torch.randn(sum(sizes))
        codec = for_layers(codecs.make(name, **settings), layers)
        payload = codec.compress(x, torch.Generator())
        codec.average_into(torch.empty_like(x), [payload, payload], 0.5)
        codec.add_decompressed(x.clone(), payload, -1.0)
        levels = ECSQ(ECSQ.Settings(step=1.0)).for_layers(layers)
        levels._sent_by_kernels(x, [(levels, (0, len(x)))], 0.0)
        levels.average_into(x, [(torch.zeros(99, dtype=torch.uint8),)], 0.5)
    around, matrices = wrappers.get("error_feedback"), {"wide": torch.randn(8, 99), "tall": torch.randn(1300, 70)}
    low_rank = [
        around(codecs.make("powersgd", rank=rank, alternating=turns))
        for rank, turns in product((1, 4, 32), (False, True))
    ]
    of_matrices, samples = [Layer(name, one.shape) for name, one in matrices.items()], torch.Generator().manual_seed(0)
    sampled = {name: torch.randn(4, *one.shape, generator=samples) for name, one in matrices.items()}
    sliced = [
        around(codecs.make("gradiveq", slice_size=66, ratio=8.0, complement=share).fit(of_matrices, sampled))
        for share in (0.5, 1.0)
    ]
    for codec in (*low_rank, *sliced, wrappers.get("dion")(codecs.make("identity"))):
        [done] = run_lockstep([exchange_group(codec, matrices, {}, Context(0, 1, 0))])
        run_lockstep([exchange_group(codec, matrices, done.value.state, Context(0, 1, 1))])
    for (name, settings), sizes in product(CASES, (*SIZES, (512, 96))):  # with residuals, in tiles too
        if settings.get("scale") != "one":
            grads = {f"w{at}": one for at, one in enumerate(torch.randn(sum(sizes)).split(sizes))}
            state = {f"{layer}/residual": torch.randn_like(one) for layer, one in grads.items()}
            fed = around(codecs.make(name, **settings), around.Settings(contraction="none"))
            run_lockstep([exchange_group(fed, grads, state, Context(0, 1, 1, "g"), reuse=True)])
    for (name, settings), sizes in product(SUMMED, SIZES):
        grads = {f"w{at}": torch.randn(size) for at, size in enumerate(sizes)}
        state = {f"{layer}/energy": torch.tensor(1.0) for layer in grads}
        steps = [
            exchange_group(codecs.make(name, **settings), grads, state, Context(rank, 2, 1, "g")) for rank in range(2)
        ]
        for result in run_lockstep(steps):
            dict(result.value.own)
    print(f"triton {triton.__version__}: {len(compiled)} kernels compiled for compute capabilities {CAPABILITIES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
