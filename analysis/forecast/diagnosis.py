"""Turn what `gradlab doctor` measured into links, and into what a model of so many parameters would wait for them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high, median_low
from typing import Any

from gradlab.analysis.forecast.calibration import ALL_GATHER, ALL_REDUCE, Observation
from gradlab.analysis.forecast.decide import SPEED_NOISE
from gradlab.analysis.forecast.link import Link, spell_rate
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import NOT_MEASURED, Network, Profile
from gradlab.analysis.forecast.plans import forecast, traffic_text
from gradlab.analysis.forecast.processors import Processor, processor_from
from gradlab.analysis.forecast.simulator import FLAT, FSDP, HSDP, SHARDS, Node
from gradlab.analysis.forecast.step_time import Comparison
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_percent, format_seconds
from gradlab.jsonable import read_json
from gradlab.layout import Layer
from gradlab.plan import Plan

#: Plans that a model's step is forecast with, beside plain DDP and 16 bits: codec and settings.
PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "int8": ("block_scaled", {}),
    "int4": ("block_scaled", {"dtype": "int4"}),
    "top-k 1 %": ("topk", {"density": 0.01}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
}
#: What is sent in fewer bits under FSDP2: formats of gradients and of parameters.
SHARDED: Mapping[str, tuple[str, str]] = {
    "gradients in int4": ("int4", ""),
    "parameters in int8": ("", "int8"),
    "both": ("int4", "int8"),
}
LOCAL_STEPS, NATIVE = 30, "as it is"
PLAIN, HALF, LOCAL = "plain DDP", "16 bits", f"int4 every {LOCAL_STEPS} steps"
_BLOCKS, _WIDEST = 12, 4096  # of the transformer that stands for a model of so many parameters; larger ones are deeper
# Times the median of the ranks' work, or of messages, beyond which a rank or a pair is named; where ranks share cores.
_SLOW, _SLOW_ON_SHARED_CORES = 1.25, 1.6
_MOST_FASTER = 2.0  # than measured alone, a link in training, or as many times slower
_FORM = "what gradlab doctor --out writes"
_COSTS = ("bits_per_second", "latency_seconds", "collective_seconds", "gather_factor")
_MORE = ("scatter_factor",)  # which a file need not have


@dataclass(frozen=True)
class Waiting:
    """A step of a model under several plans.

    computing: seconds of it that are no exchange.
    seconds: those of a step, by plan.
    traffic: sentence on what takes how long under native HSDP; "" where nodes have one rank.
    """

    parameters: int
    computing: float
    seconds: Mapping[str, float]
    traffic: str = ""


def link_of(measured: Mapping[str, Any]) -> Link:
    """Take a link from collectives whose speed nobody knows: a byte takes as long as it took between the largest size
    and the next that took less than half as long. What the smallest waits for adds nothing to a large one.

    measured: a `gradlab.runtime.doctor.Measured`, as JSON.
    """
    latency = median(float(one["latency_seconds"]) for one in measured["messages"])
    reduced, gathered = (_slope(measured, kind) for kind in (ALL_REDUCE, ALL_GATHER))
    if not reduced > 0:
        raise GradlabError("the measured all-reduces take no longer for more bytes: measure for longer (--seconds)")
    smallest = _observations(measured, ALL_REDUCE)[0]
    fixed = max(0.0, smallest.seconds - smallest.transfer.rounds * latency - smallest.transfer.path_bytes * reduced)
    factors = {"gather_factor": max(1.0, gathered / reduced), "scatter_factor": _scatter_factor(measured, reduced)}
    link = Link(math.inf, latency, collective_seconds=fixed, **factors)
    return replace(link, bits_per_second=8 * (1 + link.header_share) / reduced)


def _observations(measured: Mapping[str, Any], kind: str) -> list[Observation]:
    """Return the collectives of a kind, by size."""
    seen = [
        Observation(int(measured["ranks"]), int(one["nbytes"]), math.inf, float(one["seconds"]), kind)
        for one in measured["timed"]
        if one["collective"] == kind
    ]
    return sorted(seen, key=lambda one: one.nbytes)


def _slope(measured: Mapping[str, Any], kind: str) -> float:
    """Return the seconds per byte on the busiest link of a kind of collective."""
    small, large = _two_of([(one.transfer.path_bytes, one.seconds) for one in _observations(measured, kind)])
    return (large[1] - small[1]) / (large[0] - small[0])


def _two_of(seen: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Choose the sizes, with their seconds, between which a byte's time is taken."""
    first, *others, large = sorted(seen)
    return max((one for one in others if 2 * one[1] < large[1]), default=first), large


def _scatter_factor(measured: Mapping[str, Any], reduced: float) -> float:
    """Return how many times as long a byte takes in a reduce-scatter as in an all-reduce. reduced: seconds there."""
    share = 1 - 1 / int(measured["ranks"])
    scattered = (one for one in measured["timed"] if one["collective"] == "reduce-scatter")
    small, large = _two_of([(share * int(one["nbytes"]), float(one["seconds"])) for one in scattered])
    return max(1.0, (large[1] - small[1]) / (large[0] - small[0]) / reduced)


def link_to_json(link: Link) -> dict[str, float]:
    """Write what was fitted, in bits per second and seconds."""
    return {name: getattr(link, name) for name in (*_COSTS, *_MORE)}


def written(
    checkup: Mapping[str, Any], links: Mapping[str, Link], steps: Sequence[Waiting], **others: Any
) -> dict[str, Any]:
    """Write what was found as plain JSON, which `read_link` reads. others: further entries."""
    first, *inside = map(link_to_json, links.values())
    return {
        "link": first,
        **({"inside": inside[0]} if inside else {}),
        "checkup": checkup,
        **others,
        "steps": [
            {"parameters": one.parameters, "seconds": dict(one.seconds), "traffic": one.traffic} for one in steps
        ],
    }


def read_link(path: str | os.PathLike[str]) -> Link:
    """Read the link between nodes, or inside the one that there was, from what `gradlab doctor --out` wrote."""
    written = read_json(path, _FORM)
    costs = written.get("link") if isinstance(written, dict) else None
    if not isinstance(costs, dict) or not all(isinstance(costs.get(name), (int, float)) for name in _COSTS):
        raise GradlabError(f"{path}: holds no link with {', '.join(_COSTS)}: expected {_FORM}")
    try:
        return Link(**{name: float(costs[name]) for name in (*_COSTS, *_MORE) if name in costs})
    except (GradlabError, OverflowError, TypeError, ValueError) as error:
        raise GradlabError(f"{path}: {error}") from None


def read_processor(path: str | os.PathLike[str]) -> Processor | None:
    """Read the processor that codecs will run on from what `gradlab doctor --out` wrote; None if it names none."""
    return processor_from(read_json(path, _FORM), path)


def _transformer(parameters: int) -> list[Layer]:
    """List the layers of a transformer of so many parameters."""
    width = min(_WIDEST, max(16, round((parameters / (12 * _BLOCKS)) ** 0.5 / 16) * 16))
    blocks = max(_BLOCKS, round(parameters / (12 * width**2))) if width == _WIDEST else _BLOCKS
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return [Layer(f"{n}.{name}", shape, "linear") for n in range(blocks) for name, shape in shapes.items()]


def network_of(checkup: Mapping[str, Any]) -> tuple[dict[str, Link], int, Node | None]:
    """Return the links that were measured, the first being that of forecasts; the ranks or nodes that it connects; and
    what is in a node, where it has several ranks beside others.

    checkup: a `gradlab.runtime.doctor.Checkup`, as JSON.
    """
    links = {where: link_of(checkup[where]) for where in ("between", "inside") if checkup[where] is not None}
    nodes, local = len(set(checkup["nodes"])), checkup["nodes"].count(0)
    return links, nodes if nodes > 1 else local, Node(local, links["inside"]) if nodes > 1 and local > 1 else None


def cores_of(checkup: Mapping[str, Any]) -> float:
    """Return how many of this machine's cores each of its ranks has, at most the two that a forecast uses."""
    return min(2.0, (os.cpu_count() or 2) / checkup["hosts"].count(checkup["hosts"][0]))


def waiting(
    model: int | Sequence[Layer],
    computing: float | None,
    link: Link,
    nodes: int,
    node: Node | None,
    names: Sequence[str] = (),
    *,
    cores: float = 2.0,
    processor: Processor | None = None,
) -> Waiting:
    """Forecast a step of a model under some of `PLANS`, or all.

    model: layers, or a number of parameters, of which a transformer is made up.
    computing: seconds, None: the exchange alone.
    cores: number of cores per rank, for computing and codecs.
    processor: the one that codecs run on; None: this one.
    """
    layers = _transformer(model) if isinstance(model, int) else model
    parameters = model if isinstance(model, int) else sum(layer.numel for layer in model)
    profile = NOT_MEASURED if computing is None else Profile(computing, "as given")
    network, found = Network([link], [nodes], profile, cores, node=node, processor=processor), dict[str, float]()
    # Between nodes of several ranks 16 bits are codec `cast`'s, as `gradlab recommend` writes them.
    halved = None if node is None else forecast(Plan.uniform(layers, "cast"), network)
    for name in names or PLANS:
        codec, settings = PLANS[name]
        plan = Plan.uniform(layers, codec, **settings)
        made = forecast(plan, network)
        [(_, pair)] = made.comparisons
        found |= {
            PLAIN: pair.ways.get(FLAT, pair.dense).seconds,
            **({HSDP: pair.ways[HSDP].seconds} if pair.ways else {}),
            HALF: (halved.comparisons[0][1].compressed if halved else pair.half).seconds,
            name: pair.compressed.seconds,
        }
        if name == "int4" and computing is not None:
            [local] = forecast_local_steps(plan, network, made)
            found[LOCAL] = local.seconds(LOCAL_STEPS)
    return Waiting(parameters, profile.compute_seconds, found, "" if node is None else _traffic(layers, network, node))


def waiting_sharded(layers: Sequence[Layer], network: Network, seconds: float) -> Waiting:
    """Forecast a step under FSDP2 with what `compress_fsdp` sends in fewer bits, by `SHARDED`, on a link as fast as the
    seconds say that a step takes as it is."""
    computing, native = network.profile.compute_seconds, HSDP if network.node else FSDP
    as_it_is = _sharded(Plan(tuple(layers)), network).ways[native].seconds
    faster = min(_MOST_FASTER, max(1 / _MOST_FASTER, (as_it_is - computing) / max(seconds - computing, 1e-9)))
    link = network.links[0]
    network = replace(network, links=[replace(link, bits_per_second=faster * link.bits_per_second)])
    found = {NATIVE: seconds}
    for name, (dtype, parameters) in SHARDED.items():
        plan = Plan.uniform(layers, "block_scaled", dtype=dtype) if dtype else Plan(tuple(layers))
        found[name] = _sharded(plan, replace(network, parameters=parameters)).compressed.seconds
    return Waiting(sum(layer.numel for layer in layers), computing, found)


def _sharded(plan: Plan, network: Network) -> Comparison:
    [(_, pair)] = forecast(plan, network, uncompressed=True).comparisons
    return pair


def sharded_text(step: Waiting) -> str:
    """Say how long a step under FSDP2 takes with what `compress_fsdp` may send in fewer bits, where that is shorter."""
    least = (1 - SPEED_NOISE) * step.seconds[NATIVE]
    times = [f"{name} {format_seconds(step.seconds[name], 2)}" for name in SHARDED if step.seconds[name] < least]
    return f"Forecasts by compress_fsdp: {', '.join(times) or 'none is faster'}."


def _traffic(layers: Sequence[Layer], network: Network, node: Node) -> str:
    """Say how long each kind of traffic takes under FSDP2, uncompressed."""
    sharded = replace(network, node=replace(node, plans=SHARDS))
    return traffic_text(forecast(Plan(tuple(layers)), sharded, uncompressed=True).nodes[0], sharded)


def slow_ranks(work_seconds: Sequence[float], slow: float = _SLOW) -> dict[int, float]:
    """Return the ranks that take much longer than the median for the same work, with how many times as long."""
    usual = median_low(work_seconds)  # of two ranks, the faster one's
    return {rank: took / usual for rank, took in enumerate(work_seconds) if took > slow * usual}


def slow_messages(messages: Sequence[Mapping[str, Any]], slow: float = _SLOW) -> list[str]:
    """Name the pairs of ranks whose messages are much slower than the median's."""
    usual = median_high(float(one["bits_per_second"]) for one in messages)
    return [
        f"ranks {one['ranks'][0]} and {one['ranks'][1]}: {spell_rate(_round(float(one['bits_per_second'])))}, where "
        f"{spell_rate(_round(usual))} is usual"
        for one in messages
        if float(one["bits_per_second"]) * slow < usual
    ]


def sentences(checkup: Mapping[str, Any], links: Mapping[str, Link], of_steps: Sequence[str]) -> list[str]:
    """Say what was found: the links, what was said of steps, and who is slow.

    checkup: a `gradlab.runtime.doctor.Checkup`, as JSON.
    links: those "between" nodes and "inside" them.
    """
    ranks, nodes = len(checkup["nodes"]), len(set(checkup["nodes"]))
    slow = _SLOW if cores_of(checkup) >= 1 else _SLOW_ON_SHARED_CORES
    said = [f"{format_counted(ranks, 'rank')} on {format_counted(nodes, 'node')}."]
    for where, link in links.items():
        rate, late = spell_rate(_round(link.bits_per_second)), format_seconds(link.latency_seconds, 2)
        nominal = checkup["interface_bits_per_second"] if where == "between" else 0
        of = f" of the {spell_rate(nominal)} of {checkup['interface']}" if nominal else ""
        said.append(f"{'Between nodes' if where == 'between' else 'Inside a node'}: {rate}{of}, {late} one way.")
    said += of_steps
    for rank, times in slow_ranks(checkup["work_seconds"], slow).items():
        host = checkup["hosts"][rank]
        said.append(f"Rank {rank} ({host}) takes {times:.2g} times as long as the others for the same work.")
    said += [
        f"Messages are slow between {line}."
        for where in links
        for line in slow_messages(checkup[where]["messages"], slow)
    ]
    return said


def step_texts(steps: Sequence[Waiting]) -> list[str]:
    """Say how long steps take, and what takes how long under native HSDP where nodes have several ranks."""
    return [*map(_step_text, steps), *(f"Under {HSDP}, {one.traffic}." for one in steps[-1:] if one.traffic)]


def _step_text(step: Waiting) -> str:
    """Say how long a step takes plainly, in 16 bits, by the fastest plan that sends gradients, and by local steps."""
    plain, model = step.seconds[PLAIN], f"A model of {_spelled(step.parameters)} parameters"
    if step.computing == NOT_MEASURED.compute_seconds:
        text = f"{model} takes {format_seconds(plain, 2)} for the exchange of a step"
    else:
        waits = format_percent(1 - step.computing / plain, 0)
        computes = format_seconds(step.computing, 2)
        text = f"{model} that computes {computes} takes {format_seconds(plain, 2)} a step, {waits} of it waiting"
    best = min((name for name in PLANS if name in step.seconds), key=lambda name: step.seconds[name])
    others = [name for name in (HALF, best, LOCAL) if step.seconds.get(name, plain) < plain]
    return "; ".join([text, *(f"{name} {format_seconds(step.seconds[name], 2)}" for name in others)]) + "."


def _spelled(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def _round(rate: float) -> float:
    """Round a rate to two digits, which is what was measured of it."""
    digits = 10 ** (math.floor(math.log10(rate)) - 1)
    return round(rate / digits) * digits
