"""Frozen digests: what every recipe and every case of the contract suite computes, to the bit.

    python tests/support/digests.py            which of tests/golden/digests.json changed
    python tests/support/digests.py --write    renew it

Each runs for 5 steps of 3 ranks in lockstep, over two models. A change that is meant to change no number changes no
digest. One that changes some names them in its commit, with the oracle that says why.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gradlab.codec import Tensors, hash_tensor
from gradlab.executor.lockstep_plan import LockstepPlan, learning_rates
from gradlab.layout import Layer
from gradlab.plan import Plan, method_plan
from gradlab.plan.recipes import METHODS
from support.contract import cases, plan_for
from support.prescribed import SHAPES, layers

DIGESTS = Path(__file__).parents[1] / "golden" / "digests.json"
RANKS, STEPS = 3, 5
RATES = (0.1, 0.1, 0.05, 0.05, 0.1)
# Two models: shapes of all kinds, and layers of a size that is worth a request of its own.
MODELS: tuple[Mapping[str, tuple[int, ...]], ...] = (
    SHAPES,
    {"first.weight": (24, 3, 3, 3), "first.bias": (24,), "hidden.weight": (120, 80), "last.weight": (10, 120)},
)
# What makes torch, MKL, oneDNN and numpy compute as on a processor without wide instructions.
PLAIN_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3",
}
Digest = dict[str, str]
Digests = dict[str, Digest]


def stamp() -> dict[str, str]:
    """The torch, the processor's instructions and its arithmetic that digests hold for."""
    minor = re.match(r"\d+\.\d+", torch.__version__)
    assert minor is not None
    return {"torch": minor[0], "cpu": torch.backends.cpu.get_cpu_capability(), "arithmetic": _arithmetic()}


def _arithmetic() -> str:
    """A digest of some arithmetic: processors of equal instructions and other makers round and add in other ways."""
    generator, made = torch.Generator().manual_seed(0), hashlib.sha256()
    for rows, inner, columns in ((216, 24, 4), (120, 80, 2), (10, 120, 10), (9600, 1, 1), (64, 9600, 64)):
        left, right = torch.rand(rows, inner, generator=generator), torch.rand(inner, columns, generator=generator)
        product = left @ right
        for result in (product, torch.linalg.qr(product).Q, left.sqrt(), left.exp(), left / product.norm()):
            made.update(hash_tensor(result).encode())
    return made.hexdigest()[:16]


def computed(every: int = 1) -> Digests:
    """The digests of today's code, by "recipe NAME" or "case NAME"; `every`: of each so-many-th name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: digest_of(plans(name)) for name in names()[::every]}
    finally:
        torch.set_num_threads(threads)


def names() -> list[str]:
    return [*(f"recipe {name}" for name in sorted(METHODS)), *(f"case {name}" for name in cases())]


def plans(name: str) -> Iterator[Plan]:
    """The plan of a name for each model."""
    kind, _, what = name.partition(" ")
    for shapes in MODELS:
        if kind == "recipe":
            yield method_plan(layers(shapes), what, warmup_steps=1, seed=5)
        elif shapes is SHAPES:
            yield plan_for(what, "model", feedback=False, shapes=shapes)
        else:
            yield plan_for(what, "layer", feedback=True, shapes=shapes)


def digest_of(plans: Iterator[Plan]) -> Digest:
    hashes = {what: hashlib.sha256() for what in ("means", "states", "bytes")}
    for plan in plans:
        run = LockstepPlan(plan, RANKS, plain_sgd=True)
        for step in range(STEPS):
            grads = [gradients(plan.layers, rank, step) for rank in range(RANKS)]
            done = run.step(step, grads, learning_rates(plan, RATES[step]))
            hashes["bytes"].update(repr((done.payload, done.wire)).encode())
            for group, ranks in sorted(done.exchanged.items()):
                hashes["means"].update(_text(group, ranks[0].mean))
        for rank, states in enumerate(run.states):
            for group, state in sorted(states.items()):
                hashes["states"].update(_text(f"{rank} {group}", state))
    return {what: made.hexdigest()[:16] for what, made in hashes.items()}


def _text(name: str, tensors: Tensors) -> bytes:
    return "\n".join([name, *(f"{key} {hash_tensor(tensor)}" for key, tensor in sorted(tensors.items()))]).encode()


def gradients(layers: tuple[Layer, ...], rank: int, step: int) -> Tensors:
    """Gradients of one rank: a part that all ranks share, and noise, of the same bits on every processor.

    Sums of uniform numbers, as Gaussian ones come from functions whose last bits depend on the processor.
    """
    return {name: grad.clone() for name, grad in _drawn(layers, rank, step).items()}


@functools.cache
def _drawn(layers: tuple[Layer, ...], rank: int, step: int) -> Tensors:
    shared, own = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * (rank + 1) + step))
    return {layer.name: _peaked(layer.shape, shared) + _peaked(layer.shape, own) for layer in layers}


def _peaked(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    summed = torch.rand(shape, generator=generator) + torch.rand(shape, generator=generator) - 1
    return summed * summed.abs() * 0.1


def read() -> tuple[dict[str, str], Digests, Digests]:
    """What the file was written with, the digests, and those that depend on the processor's instructions."""
    held: dict[str, Any] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return held["written_with"], held["digests"], held["of_this_processor"]


def changed(now: Digests) -> list[str]:
    """A line for each digest of today that is not the file's, of those that hold on this processor."""
    written_with, everywhere, of_processor = read()
    if written_with == stamp():
        everywhere = everywhere | of_processor
    else:
        now = {name: digest for name, digest in now.items() if name not in of_processor}
    part = len(now) < len(names()) - len(of_processor)
    return changes({name: digest for name, digest in everywhere.items() if name in now or not part}, now)


def write(now: Digests) -> None:
    plain = subprocess.run(
        [sys.executable, __file__, "--print"], env=os.environ | PLAIN_PROCESSOR, stdout=subprocess.PIPE, check=True
    )
    elsewhere: Digests = json.loads(plain.stdout)
    everywhere = {name: digest for name, digest in now.items() if digest == elsewhere[name]}
    of_processor = {name: digest for name, digest in now.items() if name not in everywhere}
    DIGESTS.write_text(
        f'{{"written_with": {json.dumps(stamp())},\n'
        f'"digests": {_rows(everywhere)},\n"of_this_processor": {_rows(of_processor)}}}\n',
        encoding="utf-8",
    )


def _rows(digests: Digests) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(digest)}" for name, digest in digests.items()) + "\n}"


def changes(before: Digests, now: Digests) -> list[str]:
    """A line for each name whose digests differ: which of them."""
    return [
        f"{name}: {', '.join(what for what in before[name] if before[name][what] != now[name][what])}"
        if name in before and name in now
        else f"{name}: {'new' if name in now else 'gone'}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def main() -> None:
    now = computed()
    if "--print" in sys.argv[1:]:
        print(json.dumps(now))
    elif "--write" in sys.argv[1:]:
        write(now)
    else:
        print(*changed(now), sep="\n")


if __name__ == "__main__":
    main()
