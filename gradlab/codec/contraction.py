"""Contraction: a factor on a compressor's input, so that feedback of its errors keeps the residual bounded.

Error feedback converges around contractions, E||C(x) - x||^2 <= (1 - delta) ||x||^2 (Stich, Cordonnier, Jaggi, NeurIPS
2018; Karimireddy et al., ICML 2019; Stich, Karimireddy, "The error-feedback framework", JMLR 2020). An unbiased C with
E||C(x)||^2 = zeta ||x||^2, zeta = 1 + omega, is none from zeta = 2 on, and each step then multiplies the residual's
square by omega. Times 1 / zeta it is one, with delta = 1 / zeta, and no other factor gives more: Beznosikov, Horvath,
Richtarik, Safaryan, "On biased compression for distributed learning", JMLR 2023, section 2 (from unbiased to biased
by scaling).

The factor alpha = 1 / zeta multiplies the input: C(alpha x) is what is sent, and x - C(alpha x) what is kept. Nothing
is added to the message, so that alpha may differ between ranks and groups. Bounds on zeta are loose (129 for QSGD of 2
bits with the largest magnitude, where gradients have 3), so zeta is measured: alpha is the factor that would have made
||x - alpha C(x)|| smallest, <x, C(x)> / ||C(x)||^2, in the last iterations. That holds for biased codecs too, as long
as C(a x) = a C(x). Before the first exchange C runs once on this rank alone, without sending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradlab.codec.batch import Batch, Tensors
from gradlab.codec.blockwise import CACHED
from gradlab.codec.context import Context, Memory, alone
from gradlab.codec.contract import Codec
from gradlab.codec.exchanged import Deferred, Exchanged
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import Wrapper, innermost, scales
from gradlab.collectives import Coroutine, run_lockstep

CONTRACTIONS = ("measured", "none")
_WEIGHT = 0.1  # of an iteration's zeta in the mean over iterations, where it is below that mean


def contraction_setting() -> Any:
    """Make the settings field that says whether a codec that does not contract is made to."""
    return setting(
        "measured",
        choices=CONTRACTIONS,
        symbol="alpha",
        help='"measured": a codec that is not known to contract gets alpha times its input, alpha = ||x||^2 / '
        '||C(x)||^2 as measured in the last iterations, so that the residual stays bounded; "none": the input as it '
        "is, and if the codec does not contract the residual grows without end",
    )


def exchange_contracting(
    wrapper: Wrapper, inputs: Batch, state: Tensors, context: Context
) -> Coroutine[tuple[Exchanged, Tensors, Tensors]]:
    """Run the wrapped codec on inputs, or on inputs / zeta if it does not contract; return its result, the compression
    errors by layer, and state entries with what was measured."""
    codec, inside, key = wrapper.codec, wrapper.inner_state(state), f"{next(iter(inputs), '')}/zeta"
    scaled, measured = inputs, scales(wrapper, inputs.table)
    if measured:
        zeta = state[key] if key in state else first_zeta(codec, inputs, context)
        scaled = inputs.like({name: scale_down(value, zeta, context) for name, value in inputs.items()})
    done = yield from codec.exchange(scaled, inside, context)
    if not measured and isinstance(done.own, Deferred) and done.own.compression_error is not None:
        return done, done.own.compression_error(), {}
    errors = {name: torch.sub(value, done.own[name], out=context.memory.like(value)) for name, value in inputs.items()}
    return done, errors, {key: next_zeta(zeta, inputs.values(), done.own.values())} if measured else {}


def scale_down(value: torch.Tensor, zeta: torch.Tensor, context: Context) -> torch.Tensor:
    """Return value / zeta."""
    return torch.div(value, zeta.to(value.dtype), out=context.memory.like(value))


def first_zeta(codec: Codec, inputs: Batch, context: Context) -> torch.Tensor:
    """Measure zeta of inputs by one exchange on this rank alone, of which nothing is sent or kept, ()."""
    group = f"{context.group}/contraction"
    by_itself = replace(context, rank=0, world_size=1, group=group, memory=Memory(), once=alone)
    [result] = run_lockstep([innermost(codec).exchange(inputs, {}, by_itself)])
    one = torch.ones((), device=next(iter(inputs.values())).device)
    return next_zeta(one, inputs.values(), result.value.own.values())


def next_zeta(zeta: torch.Tensor, inputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the zeta, (), to use in the next iteration, from x and C layer by layer.

    The best one now would have been zeta ||C||^2 / <x, C>, with C = C(x / zeta). A larger one counts at once, because
    feedback diverges where zeta is less than half of its right value. A smaller one is averaged over iterations. If
    that is no number, as for x = 0, zeta stays.
    """
    pairs = list(zip(inputs, own, strict=True))
    energy = torch.stack([inner_product(sent, sent) for _, sent in pairs]).sum()
    product = torch.stack([inner_product(value, sent) for value, sent in pairs]).sum()
    best = (zeta.double() * energy / product).clamp_min(1.0)
    usable = best.isfinite() & (product > 0)
    change = torch.where(usable, best - zeta, 0.0)
    return (zeta + torch.where(change > 0, change, _WEIGHT * change)).to(zeta.dtype)


def inner_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute <a, b> of two tensors of one shape, (), float64. On the CPU the order of its sum follows from the number
    of elements alone."""
    if a.device.type != "cpu":
        return (a.double() * b.double()).sum()
    left, right = a.detach().reshape(-1).numpy(), b.detach().reshape(-1).numpy()
    scratch, total = np.empty(min(CACHED, len(left))), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(left), CACHED):
            stop = min(start + CACHED, len(left))
            part = np.multiply(left[start:stop], right[start:stop], out=scratch[: stop - start], dtype=np.float64)
            total += float(part.sum())
    return torch.tensor(total, dtype=torch.float64)
