"""Run one rank's codec with fabricated answers: its requests at N ranks, and the time of its code here.

The requests are the real ones if the answers have the right shapes: kind, root and shape of a request never depend on a
rank's data, except the lengths of varying gathers. So one coroutine stands for any number of ranks.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from gradlab.analysis.forecast.link import longer, request_bytes, weightless
from gradlab.analysis.forecast.simulator import Exchange, Turn
from gradlab.codec import Batch, Codec, Compressor, Context, Exchanged, Memory, Tensors, Training, exchange_group
from gradlab.codec.blocks import WHOLE, Blocks
from gradlab.codec.kept import running_state
from gradlab.codec.measures import is_finite
from gradlab.codec.wrapper import innermost, served, sizes_vary, wrappers_of
from gradlab.codecs.identity import Identity
from gradlab.collectives import AllToAll, Gather, Request, Ring, answer_for, as_requests
from gradlab.collectives.ring import RingCode
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from gradlab.workspace import RecyclingWorkspace

# Timed runs after the first, which starts states and caches; fewer if they last longer than this together.
REPEATS, _REPEATS_OF_PART, _LONG_SECONDS = 5, 3, 0.1
_NEAR = 0.1  # to the share of values, of a request's size: sizes of positions grow in steps
_SCANNED = 2**20
_COPIED_BYTES = 2**28
# Values of a group beyond which a part of each layer stands for it, values of that part, and to what multiples layers
# are cut.
MOST_VALUES, PART_VALUES, _CUT = 2**25, 2**22, 2**12
_LARGE = 2**32  # values of a very large model
CPU = torch.device("cpu")
Clock = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Return what tells this thread's processor time, in seconds; of another device, the time when its work is done."""

    def when_done() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return time.thread_time if device.type == "cpu" else when_done


def fabricate(request: Request, rank: int, world_size: int, now: Clock = time.thread_time) -> tuple[Any, float]:
    """Make an answer to a request, as if all ranks had sent the same; return it and the engine's copy seconds."""
    began = now()
    if isinstance(request, AllToAll):
        _pack(request.tensors)
        return _copies(request.tensors[rank], world_size, began, now)
    if isinstance(request, Ring):
        return _around(request.code, rank), now() - began
    packed = _pack([request.tensor])
    if isinstance(request, Gather) and request.lengths is not None:
        return [_of_length(request.tensor, length) for length in request.lengths], now() - began
    if isinstance(request, Gather):
        return _copies(request.tensor, world_size, began, now)
    spent = now() - began
    return packed.view(request.tensor.dtype).reshape(request.tensor.shape), spent


def _around(code: RingCode, rank: int) -> list[torch.Tensor]:
    """Do this rank's work in a ring in which every received message equals its own."""
    messages = [code.add(segment, None, code.prepare(segment)) for segment in range(code.segments)]
    for segment, message in enumerate(messages):
        if segment != rank:
            messages[segment] = code.add(segment, message, code.prepare(segment))
    return [code.finish(segment, message) for segment, message in enumerate(messages)]


def _of_length(vector: torch.Tensor, length: int) -> torch.Tensor:
    """Return a vector, or as many zeros where lengths differ: they name the first position and the smallest value."""
    return vector if len(vector) == length else vector.new_zeros(length)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def _copies(tensor: torch.Tensor, count: int, began: float, now: Clock) -> tuple[list[torch.Tensor], float]:
    """Make `count` copies, untimed, for the network's work; beyond a limit of memory they are used again."""
    spent = now() - began
    made = max(1, min(count, _COPIED_BYTES // max(1, tensor.nbytes)))
    copies = [tensor.clone() for _ in range(made)]
    return [copies[i % made] for i in range(count)], spent


def _dry_run(codec: Codec, layers: Sequence[Layer], context: Context, repeats: int, device: torch.device) -> Exchange:
    inner = innermost(codec)
    varying = sizes_vary(codec, context.world_size)
    if varying and served(codec, context.world_size):
        layers, context = _as_server(codec, layers, context)
    grads, now = _gradients(layers, context.seed, device), clock_of(device)
    workspace = RecyclingWorkspace()  # as in the engine: fresh memory would cost more than the arithmetic
    context = replace(context, memory=Memory(workspace))
    running = {name: tensor.to(device) for name, tensor in running_state(inner, layers, context.world_size).items()}
    _, state = _once(codec, grads, running, context, now)
    runs: list[Exchange] = []
    began = time.perf_counter()
    while len(runs) < repeats and (not runs or time.perf_counter() - began < _LONG_SECONDS):
        run, state = _once(codec, grads, running if varying else state, context, now)
        runs.append(run)
        workspace.recycle()
    turns = [
        Turn(median(t.seconds for t in same), same[-1].requests, median(t.copy_seconds for t in same))
        for same in zip(*(item.turns for item in runs), strict=True)
    ]
    return replace(runs[-1], turns=tuple(turns), apply_seconds=median(item.apply_seconds for item in runs))


def dry_run(
    codec: Codec,
    layers: Sequence[Layer],
    context: Context,
    *,
    repeats: int = REPEATS,
    most: int | None = None,
    device: torch.device = CPU,
    run: Callable[[Codec, Sequence[Layer], Context, int, torch.device], Exchange] = _dry_run,
) -> Exchange:
    """Run an exchange of random gradients on a device, and take each turn's median time there, in seconds.
    If messages vary in size, every run starts from fresh states, as residuals of a repeated gradient would grow.
    A group of more than `most` values is forecast from two parts, unless its tensors were learned for it, on a line
    through the seconds of both. A compressor's messages grow with the values, others', such as PowerSGD's factors, with
    rows.

    most: None: `MOST_VALUES`, and an eighth of them for a single run, whose part is a quarter of the others'.
    run: runs whole layers, or parts; layers of unlike sizes may have equal parts, which need one run.
    """
    inner, whole, single = innermost(codec), sum(layer.numel for layer in layers), repeats == 1
    most = (MOST_VALUES // 8 if single else MOST_VALUES) if most is None else most
    if whole <= most or inner.learned:
        return run(codec, layers, context, repeats, device)
    grows = isinstance(inner, Compressor | Identity) and not codec.traits.whole_layers
    anywhere = grows and getattr(inner, "blocks", Blocks(1)).size != WHOLE
    cut = _alike if anywhere else functools.partial(_part_of, by_shape=grows)
    part = cut(layers, min(most, PART_VALUES // 4 if single else PART_VALUES))
    repeats, values = min(repeats, _REPEATS_OF_PART), sum(layer.numel for layer in part)
    done, half = run(codec, part, context, repeats, device), cut(part, values // 2)
    uncut = sum(layer.numel for layer in half) == values  # single rows, or very small layers
    if uncut or (single and grows):  # all in proportion to values; of a single run for a quick answer
        less = replace(done.scaled(0.5, 0.5), gradient_bytes=done.gradient_bytes // 2)
        return _times(done, less, whole / values, grows=True)
    return _times(done, run(codec, half, context, repeats, device), whole / values, grows)


def is_very_large(layers: Sequence[Layer]) -> bool:
    """Whether a model has so many values that groups from `PART_VALUES` on are run on parts."""
    return sum(layer.numel for layer in layers) > _LARGE


def _alike(layers: Sequence[Layer], most: int) -> Sequence[Layer]:
    """Return two layers of so many values together, or one, for a compressor that may cut their vector anywhere: groups
    of other shapes have the same part."""
    few = layers[:2]
    return [replace(layer, shape=(most // len(few),)) for layer in few]


def _part_of(layers: Sequence[Layer], most: int, by_shape: bool = False) -> Sequence[Layer]:
    """Return the first rows of each layer, if all together have more values than `most`.

    by_shape: whether only the first layer of each shape is taken where a row of every layer is more than twice as many.
    """
    share = most / max(1, sum(layer.numel for layer in layers))
    if share >= 1:
        return layers
    part = [_first_rows(layer, share) for layer in layers]
    shapes = list({layer.shape: layer for layer in reversed(layers)}.values())
    few = not by_shape or len(shapes) == len(layers) or sum(layer.numel for layer in part) <= 2 * most
    return part if few else _part_of(shapes[::-1], most)


def _first_rows(layer: Layer, share: float) -> Layer:
    """Return about a share of a layer's rows. Few are left as they are, others cut where blocks are likely to end."""
    if not layer.shape or layer.numel < _CUT:
        return layer
    rows, *others = layer.shape
    whole = next(size for size in (_CUT, 64, 1) if rows * share >= size or size == 1)
    return replace(layer, shape=(min(rows, max(1, round(rows * share / whole)) * whole), *others))


def _times(exchange: Exchange, smaller: Exchange, times: float, grows: bool) -> Exchange:
    """Return the exchange of so many times the values, on a line through its own seconds and those of fewer values.

    grows: whether all requests grow as the values do; else each does, nearly, or as a line through both sizes.
    """
    share = smaller.gradient_bytes / exchange.gradient_bytes

    def grown(request: Request, less: Request) -> Request:
        missing = max(0.0, 1 - request_bytes(less) / max(1, request_bytes(request)))
        near = grows or abs(1 - share - missing) < _NEAR
        return longer(request, times if near else 1 + (times - 1) * missing / (1 - share))

    def later(seconds: float, less: float) -> float:
        return seconds + (times - 1) * min(seconds, max(0.0, seconds - less) / (1 - share))

    turns = [
        Turn(
            later(turn.seconds, before.seconds),
            tuple(map(grown, turn.requests, before.requests)),
            later(turn.copy_seconds, before.copy_seconds),
        )
        for turn, before in zip(exchange.turns, smaller.turns, strict=True)
    ]
    size, applied = round(times * exchange.gradient_bytes), later(exchange.apply_seconds, smaller.apply_seconds)
    return replace(exchange, gradient_bytes=size, turns=tuple(turns), apply_seconds=applied)


def _as_server(codec: Codec, layers: Sequence[Layer], context: Context) -> tuple[list[Layer], Context]:
    """Return one layer whose shards have one size, and the context of a rank that serves: who stands for all ranks
    decodes one rank's message as every other's."""
    two_way = next(one for one in wrappers_of(codec) if one.effects.server_residual)
    servers = two_way.shards(layers, context.world_size, context.group).occupied  # type: ignore[attr-defined]
    numel = sum(layer.numel for layer in layers) // len(servers) * len(servers)
    return [replace(layers[0], shape=(numel,), role="other")], replace(context, rank=servers[0])


def _gradients(layers: Sequence[Layer], seed: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    drawn = {layer.name: 1e-3 * torch.randn(layer.shape, generator=generator) for layer in layers}
    return Batch.of({name: tensor.to(device) for name, tensor in drawn.items()}, layers)


@torch.no_grad()
def _once(codec: Codec, grads: Batch, state: Tensors, context: Context, now: Clock) -> tuple[Exchange, Tensors]:
    """Run the exchange once, and return it with the new state."""
    fresh = grads.like({name: grad.clone() for name, grad in grads.items()})
    coroutine, turns, copying = exchange_group(codec, fresh, state, context), list[Turn](), 0.0
    answers: Any = None
    while True:
        began = now()
        try:
            step = coroutine.send(answers)
        except StopIteration as stop:
            turns.append(Turn(now() - began, (), copying))
            size = sum(grad.nbytes for grad in grads.values())
            return Exchange(context.group, size, tuple(turns), _apply(stop.value, fresh, now)), stop.value.state
        seconds, requests = now() - began, as_requests(step)
        turns.append(Turn(seconds, tuple(weightless(request) for request in requests), copying))
        made = [fabricate(request, context.rank, context.world_size, now) for request in requests]
        answers, copying = answer_for(step, [answer for answer, _ in made]), sum(spent for _, spent in made)


def _apply(done: Exchanged, grads: Tensors, now: Clock) -> float:
    began = now()
    for name, grad in grads.items():
        grad.copy_(done.mean[name])
    return now() - began


class DryRuns:
    """Exchanges of a plan's groups at N ranks, each kind run once, as `rank` requests them.

    Groups that differ in their layers' names alone are of one kind. The iteration is late enough that every warm-up is
    over. Rank 0 leads in it.
    """

    def __init__(self, plan: Plan, world_size: int, rank: int = 0, repeats: int = REPEATS) -> None:
        self.plan = plan
        self.world_size = world_size
        self.rank = rank
        self.repeats = repeats
        self._most = PART_VALUES if is_very_large(plan.layers) else None
        self._exchanges: dict[str, Exchange] = {}

    def of(self, plan: Plan) -> DryRuns:
        """Prepare another plan's exchanges at the same number of ranks. Both share their runs."""
        runs = DryRuns(plan, self.world_size, self.rank, self.repeats)
        runs._exchanges = self._exchanges
        return runs

    def group(self, group: Group) -> Exchange:
        """Return one group's exchange."""
        run = self._exchange(group.name, lambda: self.plan.build(group), self.plan.members(group), self._kind(group))
        return replace(run, codec=group.codec)

    def _exchange(self, name: str, build: Callable[[], Codec], layers: Sequence[Layer], kind: str) -> Exchange:
        """Return the exchange of `layers` by a codec, which is built and run once for equal kinds and equal shapes."""
        key = json.dumps([kind, [layer.shape for layer in layers]])
        if key not in self._exchanges:
            run = functools.partial(self._run, kind)
            how: Any = {"repeats": self.repeats, "most": self._most, "run": run}
            self._exchanges[key] = dry_run(build(), layers, self.context(name), **how)
        return replace(self._exchanges[key], name=name)

    def _run(self, kind: str, codec: Codec, layers: Sequence[Layer], *how: Any) -> Exchange:
        """Run layers, or a part of them, once for equal kinds and equal shapes."""
        key = json.dumps([kind, [layer.shape for layer in layers], "run"])
        if key not in self._exchanges:
            self._exchanges[key] = _dry_run(codec, layers, *how)
        return self._exchanges[key]

    def dense(self, name: str, layers: Sequence[Layer]) -> Exchange:
        """Return the exchange of dense layers that travel together, the sum of one exchange per layer."""
        every = [self._exchange(name, Identity, [layer], "dense") for layer in layers]
        turns = [
            Turn(
                sum(turn.seconds for turn in same),
                tuple(request for turn in same for request in turn.requests),
                sum(turn.copy_seconds for turn in same),
            )
            for same in zip(*(exchange.turns for exchange in every), strict=True)
        ]
        size, applied = (sum(getattr(one, what) for one in every) for what in ("gradient_bytes", "apply_seconds"))
        return Exchange(name, size, tuple(turns), applied)

    def _kind(self, group: Group) -> str:
        settings = {key: value for key, value in group.to_json().items() if key not in ("name", "layers")}
        # By position, as keys bear the layers' names; learned tensors of other shapes are another codec.
        learned = [list(tensor.shape) for _, tensor in sorted(self.plan.learned.get(group.name, {}).items())]
        return json.dumps([settings, learned], sort_keys=True)

    def context(self, name: str) -> Context:
        """Make the context of a group's codec: rank, world size, a late iteration, seed and learning rates."""
        rates = {layer.name: 1.0 for layer in self.plan.layers}
        late = -(-(self.plan.schedule.warmup_steps + 10**6) // self.world_size) * self.world_size
        return Context(
            rank=self.rank,
            world_size=self.world_size,
            iteration=late,
            group=name,
            seed=self.plan.seed,
            training=Training(rates, rates, start=self.plan.schedule.warmup_steps),
        )


def scan_seconds_per_byte() -> float:
    """Measure the seconds per byte of a search for values that are not finite, on this machine."""
    buffer, times = torch.ones(_SCANNED), []
    for _ in range(5):
        began = time.thread_time()
        is_finite(buffer)
        times.append(time.thread_time() - began)
    return median(times) / buffer.nbytes
