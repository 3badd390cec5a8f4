"""Messages: what one rank sends in one request of a codec's exchange, altered on the way to the others.

Lockstep runs of every codec and wrapper: one request of one rank is damaged before it is answered. The ranks must
refuse it with an error of one line that names the codec and the rank, or agree on a result, bit for bit, from which the
next step goes on.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from campaigns.fuzzed.case import Case, Format
from gradlab import wrappers
from gradlab.codec import Tensors
from gradlab.collectives import AllToAll, Coroutine, Parts, Ring, as_requests, run_lockstep
from gradlab.collectives.lockstep import answered, sent_on
from gradlab.collectives.ring import RingCode
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun
from gradlab.plan import Group, Plan, Wrap
from support.contract import SETTINGS, cases, codec_of, learned
from support.prescribed import gradients, layers
from support.process_pool import ProcessPool

SHAPES = {"conv": (8, 4, 3, 3), "wide": (12, 60), "tall": (60, 7), "vector": (33,), "scalar": ()}
STEPS = 5  # in which codecs with phases have gone through all of them
MOST_RANKS, SECONDS = 3, 10
TASK = "jobs.message_tasks:altered"
#: Codecs that each wrapper is tried around, beside top-k.
AROUND = {
    "two_way": ("topk", "ecsq", "one_bit", "chunk_topk", "sign"),
    "hadamard": ("intsgd", "qsgd"),
    "onebit_adam": ("sign", "one_bit"),
    "dion": ("identity",),
    "weight_decay": ("sign",),
    "error_feedback": ("topk", "clt_k", "powersgd"),
}


def families() -> list[str]:
    """Every case of the codecs' contract, and every wrapper around some: "<case>" or "<wrapper> <case>"."""
    around = [f"{name} {codec}" for name in wrappers.names() for codec in AROUND.get(name, ("topk",))]
    return [*cases(), "topk, deflate", "lgc_server, deflate", *around]


def parts_of(family: str) -> tuple[str, str]:
    """The wrapper, which may be none, and the codec's case."""
    first, _, rest = family.partition(" ")
    return (first, rest) if first in wrappers.names() else ("", family)


def plan_of(family: str) -> Plan:
    """A plan of one group under this codec, from the first step on."""
    wrapper, case = parts_of(family)
    settings, members = dict(SETTINGS.get(case, {})), layers(SHAPES)
    if case.endswith(", deflate"):
        settings = {**SETTINGS[codec_of(case)], "index_coding": "deflate"}
    known = learned(case, members) if case in cases() else {}
    around = (Wrap(wrapper),) if wrapper else ()
    group = Group("model", tuple(layer.name for layer in members), codec_of(case), settings, around)
    return Plan(members, (group,), seed=3, learned={"model": known} if known else {})


# --- one message ---------------------------------------------------------------------------------------------------

SPECIAL = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e30, -1e30, 3e38, 1e-45)


def altered_content(tensor: torch.Tensor, draw: np.random.Generator) -> tuple[str, torch.Tensor]:
    """Other bits, in the tensor's shape and dtype."""
    kind = str(draw.choice(["flip", "flips", "random", "zeros", "ones", "splice", "special", "large"]))
    bent = tensor.detach().clone().contiguous()
    if not bent.numel():
        return "nothing", bent
    if kind == "special" and bent.dtype.is_floating_point:
        where = slice(None) if draw.random() < 0.5 else int(draw.integers(bent.numel()))
        bent.view(-1)[where] = SPECIAL[int(draw.integers(len(SPECIAL)))]
        return kind, bent
    if kind == "large" and bent.dtype in (torch.int32, torch.int64, torch.int8):
        bent.fill_(int(draw.choice([torch.iinfo(bent.dtype).max, torch.iinfo(bent.dtype).min, -1, 2**30 % 127])))
        return kind, bent
    content = bent.view(-1).view(torch.uint8).numpy()
    if kind in ("flip", "flips"):
        for place in draw.integers(len(content), size=1 if kind == "flip" else int(draw.integers(2, 40))):
            content[place] ^= 1 << int(draw.integers(8))
    elif kind == "splice":
        content[:] = np.roll(content, int(draw.integers(1, 9)))
    elif kind in ("zeros", "ones"):
        content[:] = 0 if kind == "zeros" else 255
    else:
        content[:] = draw.integers(0, 256, len(content), dtype=np.uint8)
    return kind, bent


def altered_length(tensor: torch.Tensor, draw: np.random.Generator, lockstep: bool) -> tuple[str, torch.Tensor]:
    """A vector of another length, or of another kind of number."""
    kind = str(draw.choice(["cut", "doubled", "empty", "huge", "random length", "dtype"][: 6 if lockstep else 5]))
    flat = tensor.detach().clone().reshape(-1)
    if kind == "cut":
        return kind, flat[: int(draw.integers(max(1, len(flat))))]
    if kind == "doubled":
        return kind, torch.cat([flat, flat])
    if kind == "huge" and lockstep:  # without the memory
        return kind, flat.new_zeros(1).expand(2 ** int(draw.integers(24, 40)))
    if kind == "huge":
        return kind, flat.new_zeros(2**23)
    if kind == "random length":
        content = draw.integers(0, 256, int(draw.integers(1, 200)) * flat.element_size(), dtype=np.uint8)
        return kind, torch.from_numpy(content).view(flat.dtype)
    if kind == "dtype":
        return kind, flat.to(torch.float64 if flat.dtype != torch.float64 else torch.int16).view(tensor.shape)
    return kind, flat[:0]


def altered(tensor: torch.Tensor, draw: np.random.Generator, lockstep: bool, varying: bool) -> tuple[str, torch.Tensor]:
    """Other bits, or another length where the network carries it: Gloo ends a process that is sent more than agreed."""
    if draw.random() < 0.25 and (lockstep or varying):
        return altered_length(tensor, draw, lockstep)
    return altered_content(tensor, draw)


class BentRing(RingCode):
    """A ring's code of which one message is altered."""

    def __init__(self, code: RingCode, draw: np.random.Generator) -> None:
        self.segments, self._code, self._draw = code.segments, code, draw
        self._which = int(draw.integers(code.segments))

    def nbytes(self, segment: int) -> int:
        return self._code.nbytes(segment)

    def prepare(self, segment: int) -> torch.Tensor:
        return self._code.prepare(segment)

    def add(self, segment: int, received: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        message = self._code.add(segment, received, own)
        return altered_content(message, self._draw)[1] if segment == self._which else message

    def finish(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        return self._code.finish(segment, message)


def altered_request(request: Any, draw: np.random.Generator, lockstep: bool = True) -> tuple[str, Any]:
    """One rank's request with another tensor in it. lockstep: whether no process group serves it."""
    varying = getattr(request, "varying", False)
    if isinstance(request, Ring):
        return "ring", Ring(BentRing(request.code, draw))
    if isinstance(request, AllToAll) and isinstance(request.tensors, Parts):
        kind, whole = altered_content(request.tensors.whole, draw)
        return kind, replace(request, tensors=Parts(whole, request.tensors.lengths))
    if isinstance(request, AllToAll):
        tensors = list(request.tensors)
        served = sorted(request.served or range(len(tensors)))  # a rank refuses to send others anything itself
        at = served[int(draw.integers(len(served)))]
        kind, tensors[at] = altered(tensors[at], draw, lockstep, varying)
        return kind, replace(request, tensors=tensors)
    kind, tensor = altered(request.tensor, draw, lockstep, varying)
    return kind, replace(request, tensor=tensor)


class Bent:
    """Alters the n-th request of a coroutine, counted anew if there are fewer.

    Attributes:
        kind: what was done, once it was.
    """

    def __init__(self, number: int, draw: np.random.Generator) -> None:
        self.kind = ""
        self._left, self._draw = number, draw

    def of(self, coroutine: Coroutine[Any]) -> Coroutine[Any]:
        """Run a coroutine whose request is altered on its way."""
        answer: Any = None
        while True:
            try:
                step = sent_on(coroutine, answer)
            except StopIteration as stop:
                return stop.value
            requests = list(as_requests(step))
            if not self.kind and self._left < len(requests):
                self.kind, requests[self._left] = altered_request(requests[self._left], self._draw)
                self.kind = f"{type(requests[self._left]).__name__} {self.kind}"
            self._left -= len(requests)
            step = tuple(requests) if isinstance(step, tuple) else requests[0]
            answer = yield from answered(step)


# --- one step ------------------------------------------------------------------------------------------------------


class Run:
    """An honest run of a plan on all ranks, taken as far as somebody asks.

    Args:
        plan: of the run.
        world_size: number of ranks.
    """

    def __init__(self, plan: Plan, world_size: int) -> None:
        self.ranks = [PlanRun(plan, rank, world_size) for rank in range(world_size)]
        self._before: list[list[dict[str, Tensors]]] = [[{} for _ in self.ranks]]

    def go_to(self, step: int) -> None:
        """Give every rank the state that it has before a step."""
        while len(self._before) <= step:
            self.go_to(len(self._before) - 1)
            taken(self.ranks, len(self._before) - 1, lambda rank, coroutine: coroutine)
            self._before.append([dict(one.states) for one in self.ranks])
        for one, states in zip(self.ranks, self._before[step], strict=True):
            one.states = dict(states)


@functools.cache
def honest(family: str, world_size: int) -> Run:
    return Run(plan_of(family), world_size)


def taken(
    ranks: Sequence[PlanRun], number: int, sent: Callable[[int, Coroutine[Any]], Coroutine[Any]]
) -> list[list[torch.Tensor]]:
    """Take one step on all ranks: every rank's means. sent: returns a rank's coroutine as the others see it."""
    means: list[list[torch.Tensor]] = [[] for _ in ranks]
    for run in ranks:
        run.iteration = number
    rates = dict.fromkeys(SHAPES, 0.1)
    parameters = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    steps = [run.begin(rates, 1.0, parameters) for run in ranks]
    for rank, step in enumerate(steps):
        step.add(gradients(SHAPES, rank, number))
    for group in ranks[0].groups:
        if group in steps[0].active:
            found = run_lockstep([sent(rank, step.exchange(group)) for rank, step in enumerate(steps)])
            for mean, result in zip(means, found, strict=True):
                mean.extend(result.value.mean.values())
    run_lockstep([step.agree() for step in steps])
    for run, step, mean in zip(ranks, steps, means, strict=True):
        run.end(step, mean)
    return means


def alike(means: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all ranks hold the same bits."""
    packed = [[one.contiguous().reshape(-1).view(torch.uint8) for one in of_rank] for of_rank in means]
    return all(torch.equal(*pair) for of_rank in packed[1:] for pair in zip(packed[0], of_rank, strict=True))


def outcome(number: int, family: str, world_size: int, step: int, rank: int, request: int) -> str:
    """Run one case in lockstep, and return what was altered and how that ended."""
    run, bent = honest(family, world_size), Bent(request, np.random.default_rng([number]))
    run.go_to(step)
    try:
        first = taken(run.ranks, step, lambda at, coroutine: bent.of(coroutine) if at == rank else coroutine)
    except GradlabError as error:
        if bent.kind and names_both(family, str(error)):
            raise
        raise AssertionError(f"an error without codec or rank: {error}") from error
    assert alike(first), f"{bent.kind}: ranks have different results"
    assert alike(taken(run.ranks, step + 1, lambda _, coroutine: coroutine)), f"{bent.kind}: different in the next step"
    return bent.kind


def names_both(family: str, error: str) -> bool:
    """Whether an error says under which codec, and of which rank."""
    return f"codec {codec_name(family)}" in error and re.search(r"\brank \d", error) is not None


def codec_name(family: str) -> str:
    """The codec's name of a case, without its wrapper."""
    return codec_of(parts_of(family)[1])


def drawn_case(draw: np.random.Generator, families: Sequence[str], most_ranks: int) -> dict[str, Any]:
    """Choose a request: of which codec, each as often as any other, step and rank."""
    codec = str(draw.choice(sorted({codec_name(family) for family in families})))
    world_size = int(draw.integers(2, most_ranks + 1))
    return {
        "number": int(draw.integers(2**31)),
        "family": str(draw.choice([family for family in families if codec_name(family) == codec])),
        "world_size": world_size,
        "step": int(draw.integers(STEPS)),
        "rank": int(draw.integers(world_size)),
        "request": int(draw.integers(4)),
    }


class Messages(Format):
    """One request of one rank, altered, in lockstep. names: of the cases; by default all."""

    file_name = "message.json"

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._families = families() if names is None else list(names)

    def case(self, draw: np.random.Generator) -> Case:
        case = drawn_case(draw, self._families, MOST_RANKS)
        return Case(codec_name(case["family"]), json.dumps(case).encode(), True, None, read)


def read(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(**json.loads(path.read_text(encoding="utf-8")))


class Network(Format):
    """The same between two processes: what one of them hands to Gloo. They are started with the first case."""

    file_name = "message.json"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pair = ProcessPool(2, Path(self._folder.name) / "torchrun.log")

    def close(self) -> None:
        self._pair.stop()
        self._folder.cleanup()

    def case(self, draw: np.random.Generator) -> Case:
        case = drawn_case(draw, families(), 2)
        return Case(codec_name(case["family"]), json.dumps(case).encode(), True, None, self._read)

    def _read(self, path: Path) -> str:
        case = json.loads(path.read_text(encoding="utf-8"))
        return judged(case["family"], self._pair.run(TASK, ranks=case.pop("world_size"), **case))


def judged(family: str, ranks: Sequence[dict[str, Any]]) -> str:
    """Return what was altered, if all ranks have the same means, or raise the error that all of them raised."""
    errors = [one["error"] for one in ranks]
    kind, seconds = "".join(one["kind"] for one in ranks), max(one["seconds"] for one in ranks)
    assert seconds < SECONDS, f"{kind}: {seconds:.1f} seconds"
    if not any(errors):
        assert all(one["means"] == ranks[0]["means"] for one in ranks), f"{kind}: ranks have different results"
        return kind
    assert all(errors), f"{kind}: only some ranks raised an error: {errors}"
    assert all(names_both(family, error) for error in errors), f"{kind}: an error without codec or rank: {errors}"
    raise GradlabError(max(errors, key=len))
