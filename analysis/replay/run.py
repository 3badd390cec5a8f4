"""Replay: run a plan over a recorded trace through the lockstep executor and measure what it does to the gradients.

The codecs are the very code that trains. Iteration numbers, and so random streams, are those of the run. States are
carried and committed as the engine does it. A replay predicts a compressed run exactly, as long as the run's gradients
are those of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradlab import codecs, wrappers
from gradlab.analysis.gradients import step_gradients
from gradlab.analysis.parallel import one_thread, share_out
from gradlab.analysis.replay.many_ranks import FEWEST, RankProducts, RankSums, joined_products
from gradlab.analysis.replay.result import JUDGED_LENGTH, Replay, ReplayStep
from gradlab.analysis.replay.sampled import for_whole_layers, layer_weights, plan_on_samples, sample_remarks
from gradlab.analysis.replay.windows import Overlap, RunningSums, WindowSums, added, joined, overlap
from gradlab.codec import Tensors
from gradlab.codec.measures import LayerErrors, add_errors, contribution_error, relative, squared_norm
from gradlab.codec.settings import build_settings
from gradlab.codec.wrapper import applies_earlier_gradients
from gradlab.collectives import sum_in_rank_order
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import GroupCost, LockstepPlan, LockstepWatch, StepResult, learning_rates
from gradlab.executor.rules import Finding
from gradlab.plan import Group, Plan, Wrap
from gradlab.plan.optimizer_rules import applied_by
from gradlab.plan.plan import ANSWER, between, check_model
from gradlab.plan.refresh import Refresh
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource
# Values, over all ranks, of groups that are replayed together; gradients, states and results are held some ten times.
_PART_VALUES = 2**21
# Values, over all steps, ranks and plans, from which on processes save more time than their start takes.
_WORTH_PROCESSES = 2**26
# A wrapper with at most so many settings is described by all of them, one with more by those that are not its defaults.
_FEW_SETTINGS = 2


def replay(
    trace: Trace,
    plan: Plan,
    *,
    start: int = 0,
    stop: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Replay:
    """Run the plan over positions start..stop of a trace.

    Layers that the plan compresses must be in the trace; layers it sends dense may be missing from it. A layer that the
    trace holds a sample of is replayed on the sample. Errors on the iterations that a plan was fitted on are no
    prediction: see `Replay.held_out`.

    >>> from gradlab.analysis import replay
    >>> with Trace("trace") as trace:
    ...     replayed = replay.replay(trace, Plan.uniform(trace.layers, "topk", density=0.1))
    >>> replayed.summary().payload_bytes_per_step, replayed.dense_payload_bytes
    (MeanAndMax(mean=948.0, max=948), 7168)

    Raises:
        GradlabError: for a plan of another model, a trace without the layers the plan compresses, positions out of
            range, a range in which nothing would be compressed, or samples of layers that a method needs whole.
    """
    result = replay_plans(trace, {"": plan}, start=start, stop=stop, workers=workers, progress=progress)[""]
    if isinstance(result, GradlabError):
        raise result
    return result


def replay_plans(
    trace: Trace,
    plans: Mapping[str, Plan],
    *,
    start: int = 0,
    stop: int | None = None,
    nodes: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Replay | GradlabError]:
    """Replay several plans as `replay` does each; workers share the parts of all plans.

    >>> from gradlab.analysis import replay_plans
    >>> with Trace("trace") as trace:
    ...     plans = {name: Plan.uniform(trace.layers, name) for name in ("cast", "qsgd")}
    ...     replays = replay_plans(trace, plans, start=30)
    >>> replays["cast"].summary().aggregate_error < replays["qsgd"].summary().aggregate_error
    True

    Args:
        trace: the recording.
        plans: plans by name.
        start, stop: positions, as `replay` takes them.
        nodes: number of ranks whose form of the plans is replayed, see `between`. None: the recorded ones.
        workers: processes, at most.
        progress: called after each part, or, for a single part in this process, after each step.

    Returns:
        By name, a replay, or the error of a plan that cannot be replayed on this trace.
    """
    stop = len(trace.steps) if stop is None else stop
    nodes = nodes or trace.world_size
    works = {name: _work_of(trace, plan, start, stop, nodes) for name, plan in plans.items()}
    jobs = [work for work in works.values() if isinstance(work, _Work)]
    calls = [(work.held, part, start, stop, work.sum_ranks) for work in jobs for part in work.parts]
    sizes = [size for work in jobs for size in work.sizes]
    if len(calls) == 1:
        with one_thread():
            done = [_attempt(trace, *calls[0], progress)]
    else:
        attempt: Callable[..., _Part | GradlabError] = partial(_attempt, trace)
        if (stop - start) * trace.world_size * sum(sizes) < _WORTH_PROCESSES:
            workers = 1
        else:
            trace.close()  # HDF5 keeps what is read of a file until nobody has it open; reading on opens it again
            attempt = partial(_replay_in_worker, trace.source)
        done = share_out(attempt, calls, workers=workers, what="replays", sizes=sizes, progress=progress)
    parts = iter(done)
    return {
        name: _replay_of(trace, work, [next(parts) for _ in work.parts]) if isinstance(work, _Work) else work
        for name, work in works.items()
    }


@dataclass(frozen=True)
class _Work:
    """A plan to replay. form: as it is between `nodes` ranks; held: of the layers as the trace holds them; parts:
    groups replayed together; sizes: values; sum_ranks: steps over which what each rank sends is summed; 0: none."""

    plan: Plan
    nodes: int
    form: Plan
    held: Plan
    parts: tuple[tuple[str, ...] | None, ...]
    sizes: tuple[int, ...]
    memory: bool
    sum_ranks: int


def _work_of(trace: Trace, plan: Plan, start: int, stop: int, nodes: int) -> _Work | GradlabError:
    try:
        check_replay(trace, plan, start, stop)
        form = between(plan, nodes)
        held = plan_on_samples(trace, form)
    except GradlabError as error:
        return error
    parts = parts_of(held, trace.world_size)
    numels = {group.name: sum(layer.numel for layer in held.members(group)) for group in held.groups}
    sizes = tuple(sum(numels[name] for name in part) for part in parts)
    # The whole plan reads the layers that it sends dense, too, where they may be unused.
    memory = any(applies_earlier_gradients(form.build(group)) for group in form.compressed_groups)
    shown = nodes != trace.world_size >= FEWEST and not any(applied_by(form)) and plan.refresh is None
    length = (JUDGED_LENGTH if memory else 1) if shown else 0
    return _Work(plan, nodes, form, held, tuple(parts) if len(parts) > 1 else (None,), sizes, memory, length)


def _replay_of(trace: Trace, work: _Work, results: Sequence[_Part | GradlabError]) -> Replay | GradlabError:
    """Join the parts of a plan; the first error of a part is the plan's."""
    parts = []
    for result in results:
        if isinstance(result, GradlabError):
            return result
        parts.append(result)
    form, held = work.form, work.held
    remarks = list(dict.fromkeys(line for part in parts for line in part.remarks))
    done = [_step(together) for together in zip(*(part.steps for part in parts), strict=True)]
    if trace.local_steps:
        remarks.append(f"Judged on {trace.local_steps}.")
    if held is not form:
        done = for_whole_layers(done, form, held, trace.world_size)
        remarks += sample_remarks(trace)
    return Replay(
        steps=tuple(done),
        world_size=trace.world_size,
        nodes=work.nodes,
        of_nodes=trace.of_nodes,
        plan_digest=work.plan.digest,
        trace_digest=trace.digest,
        methods=methods_of(work.plan.groups),
        dense_payload_bytes=form.payload_bytes(trace.world_size, compressing=False),
        forecast_payload_bytes=form.payload_bytes(trace.world_size),
        remarks=tuple(remarks),
        rules=tuple({one.key: one for part in parts for one in part.findings}.values()),
        windows=joined([part.windows for part in parts]),
        memory=work.memory,
        products=joined_products([part.products for part in parts]),
    )


def _attempt(*call: Any) -> _Part | GradlabError:
    try:
        return _replay_part(*call)
    except GradlabError as error:
        return error


def check_replay(trace: Trace, plan: Plan, start: int, stop: int) -> None:
    """Check that a plan can be replayed over positions start..stop of a trace.

    >>> from gradlab import GradlabError
    >>> from gradlab.analysis import replay
    >>> try:
    ...     replay.check_replay(Trace("trace"), Plan.uniform([Layer("other", (64, 32))], "topk"), 0, 40)
    ... except GradlabError as error:
    ...     print(str(error).splitlines()[0])
    this plan is for another model (3 differences):

    Raises:
        GradlabError: as `replay`.
    """
    _check_layers(trace, plan)
    _check_range(trace, plan, start, stop)
    plan_on_samples(trace, plan)


def parts_of(plan: Plan, world_size: int) -> list[tuple[str, ...]]:
    """Names of the groups that are replayed together, by part.

    Only the gradients and states of one part are in memory at a time. A plan that is chosen anew has one part, because
    its groups are chosen together.

    >>> from gradlab.analysis import replay
    >>> replay.parts_of(Plan.uniform(Trace("trace").layers, "topk"), world_size=2)
    [('conv.weight', 'head.weight')]
    """
    groups = plan.compressed_groups or plan.groups
    if plan.refresh is not None:
        return [tuple(group.name for group in groups)]
    sizes = {group.name: world_size * sum(layer.numel for layer in plan.members(group)) for group in groups}
    parts: list[list[str]] = [[]]
    for name, size in sizes.items():
        if parts[-1] and sum(sizes[other] for other in parts[-1]) + size > _PART_VALUES:
            parts.append([])
        parts[-1].append(name)
    return [tuple(part) for part in parts]


@dataclass
class _Sums:
    """Sums over the groups of a part in one step.

    layers: squared error and norm of contribution_error, by layer; mean: the applied with the true mean; payload, wire:
    bytes by rank.
    """

    iteration: int
    compressing: bool
    finite: bool
    layers: LayerErrors
    mean: Overlap
    energy: float
    payload: tuple[int, ...]
    wire: tuple[int, ...]
    codec_seconds: float
    codec_wall_seconds: float
    costs: Mapping[str, GroupCost]
    held: frozenset[str]


@dataclass(frozen=True)
class _Part:
    """A part of a plan: its sums by step and by window, ranks' products, remarks, and what the rules found."""

    steps: list[_Sums]
    windows: list[WindowSums]
    products: list[RankProducts]
    remarks: list[str]
    findings: tuple[Finding, ...]


def _replay_in_worker(
    source: TraceSource, plan: Plan, part: tuple[str, ...] | None, start: int, stop: int, sum_ranks: int
) -> _Part | GradlabError:
    read = None if part is None else {name for group in plan.groups if group.name in part for name in group.layers}
    try:
        with source.open(read) as trace:
            return _attempt(trace, plan, part, start, stop, sum_ranks)
    except GradlabError as error:
        return error


def _replay_part(
    trace: Trace,
    plan: Plan,
    part: tuple[str, ...] | None,
    start: int,
    stop: int,
    sum_ranks: int,
    progress: Progress | None = None,
) -> _Part:
    lockstep, weights = lockstep_of(trace, plan, part), layer_weights(trace)
    watch, steps, sums = LockstepWatch(lockstep), [], RunningSums(weights)
    of_ranks = RankSums(weights, sum_ranks)
    for done, (result, gradients) in enumerate(replay_steps(trace, lockstep, start, stop)):
        if sum_ranks and result.compressing:
            of_ranks.add(result.iteration, _of_ranks(result, gradients) if result.finite else None)
        steps.append(_sums(result, gradients, weights, sums))
        if result.finite:  # of others the recording says itself in which iterations they were
            watch.see(result, gradients)
        del result, gradients  # before the next step makes its own
        if progress:
            progress("replay", done + 1, stop - start)
    return _Part(steps, sums.windows, of_ranks.windows, list(_remarks(trace, lockstep, start, stop)), watch.findings)


def lockstep_of(trace: Trace, plan: Plan, only: tuple[str, ...] | None = None) -> LockstepPlan:
    """The plan under the optimizer and the DDP options that a recording names. only: see `LockstepPlan`.

    >>> from gradlab.analysis import replay
    >>> trace = Trace("trace")
    >>> replay.lockstep_of(trace, Plan.uniform(trace.layers, "topk", density=0.1)).partial
    False
    """
    return LockstepPlan(
        plan,
        trace.world_size,
        plain_sgd=trace.metadata.get("plain_sgd") is True,
        only=only,
        hold_unused=holds_unused(trace),
    )


def holds_unused(trace: Trace) -> bool:
    """Whether a run like the recorded one holds layers without a gradient on any rank.

    It does if DDP was told that there may be such layers, or, in recordings that do not say, if there were any.

    >>> from gradlab.analysis import replay
    >>> replay.holds_unused(Trace("trace"))
    False
    """
    if any(trace.metadata.get(option) is True for option in ("find_unused_parameters", "static_graph")):
        return True
    unused = [trace.scalars(rank)["unused"] for rank in range(trace.world_size)]
    return bool(np.logical_and.reduce(unused).any())


def replay_steps(
    trace: Trace, lockstep: LockstepPlan, start: int, stop: int
) -> Iterator[tuple[StepResult, list[Tensors]]]:
    """Drive `lockstep` over positions start..stop, and yield each result with the gradients it was made from.

    For a part of a plan only the part's layers are read. Whether the others are finite is known from the recorder's
    count.

    >>> from gradlab.analysis import replay
    >>> trace = Trace("trace")
    >>> lockstep = replay.lockstep_of(trace, Plan.uniform(trace.layers, "topk", density=0.1))
    >>> [result.compressing for result, gradients in replay.replay_steps(trace, lockstep, 0, 3)]
    [True, True, True]
    """
    here = [layer.name for layer in trace.layers]
    if lockstep.partial:
        here = [name for name in here if name in lockstep.layers]
    for step in trace.iterate(start, stop, here):
        # Copies: products of rows that lie unaligned in a block differ in the last bit from those of aligned ones.
        gradients = [
            {name: torch.from_numpy(value).clone() for name, value in rank.items()} for rank in step_gradients(step)
        ]
        now = learning_rates(lockstep.plan, step.learning_rate)
        finite = not lockstep.partial or not step.non_finite.any()
        index, scale = step.index, float(step.loss_scale[0])
        del step  # before the codecs need memory of their own
        yield lockstep.step(index, gradients, now, scale, finite=finite), gradients
        del gradients


def _sums(result: StepResult, gradients: list[Tensors], weights: Mapping[str, float], windows: RunningSums) -> _Sums:
    layers: LayerErrors = {}
    mean, energy = Overlap(), 0.0
    if result.compressing and result.finite:
        for done in (done for ranks in result.exchanged.values() for done in ranks):
            errors = contribution_error(done)
            add_errors(layers, {x: (e * weights.get(x, 1.0), n * weights.get(x, 1.0)) for x, (e, n) in errors.items()})
        applied, true = _means(result, gradients)
        mean, energy = overlap(applied, true, weights), _energy(gradients, layers, weights)
        windows.add(result.iteration, applied, true)
    elif result.compressing:
        windows.add(result.iteration, None, None)
    return _Sums(
        result.iteration,
        result.compressing,
        result.finite,
        layers,
        mean,
        energy,
        result.payload,
        result.wire,
        result.codec_seconds,
        result.codec_wall_seconds,
        result.costs if result.compressing else {},
        result.held,
    )


def _step(parts: Sequence[_Sums]) -> ReplayStep:
    """One step from the sums of its parts."""
    first, finite = parts[0], all(part.finite for part in parts)
    layers: LayerErrors = {}
    for part in parts:
        add_errors(layers, part.layers if finite else {})
    contribution = aggregate = cosine = unsent = None
    if first.compressing and finite:
        squared = sum(e for e, _ in layers.values())
        contribution = relative(squared, sum(n for _, n in layers.values()))
        unsent = relative(squared, sum(part.energy for part in parts))
        mean = added([part.mean for part in parts])
        aggregate, cosine = mean.relative_error, mean.cosine
    payload, wire = (
        [sum(ranks) for ranks in zip(*(getattr(part, name) for part in parts), strict=True)]
        for name in ("payload", "wire")
    )
    return ReplayStep(
        iteration=first.iteration,
        compressing=first.compressing,
        finite=finite,
        contribution_error=contribution,
        aggregate_error=aggregate,
        cosine=cosine,
        payload_bytes_mean=sum(payload) / len(payload),
        payload_bytes_max=max(payload),
        wire_bytes_mean=sum(wire) / len(wire),
        wire_bytes_max=max(wire),
        codec_seconds=sum(part.codec_seconds for part in parts),
        codec_wall_seconds=sum(part.codec_wall_seconds for part in parts),
        unsent=unsent,
        layers=layers,
        costs={name: cost for part in parts for name, cost in part.costs.items()},
        held=frozenset().union(*(part.held for part in parts)),
    )


def _energy(gradients: list[Tensors], layers: LayerErrors, weights: Mapping[str, float]) -> float:
    """Squared norm of all ranks' gradients of these layers."""
    return sum(weights.get(name, 1.0) * squared_norm(rank[name]) for rank in gradients for name in layers)


def _means(result: StepResult, gradients: list[Tensors]) -> tuple[Tensors, Tensors]:
    """The applied and the true mean of a step, by layer, over the layers of groups."""
    applied = {name: mean for ranks in result.exchanged.values() for name, mean in ranks[0].mean.items()}
    return applied, {name: sum_in_rank_order([rank[name] for rank in gradients]) for name in applied}


def _of_ranks(result: StepResult, gradients: list[Tensors]) -> list[Tensors]:
    """Return ranks' contributions, their gradients, and the applied mean, by layer, over the layers of groups."""
    applied, _ = _means(result, gradients)
    exchanged = zip(*result.exchanged.values(), strict=True)
    sent = [
        {name: applied[name] if name in result.held else one for done in of_rank for name, one in done.own.items()}
        for of_rank in exchanged
    ]
    return [*sent, *({name: rank[name] for name in applied} for rank in gradients), applied]


def methods_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """The methods of groups in a few words each: "powersgd(rank=4) + feedback".

    The first of a codec's settings is shown, and those that differ from its defaults. Groups that differ in their
    codec's settings alone are one method: "sign(block_size=16 to 4096)".

    >>> from gradlab.analysis import replay
    >>> replay.methods_of(Plan.uniform(Trace("trace").layers, "topk", density=0.1).groups)
    ('topk(density=0.1) + two way from 5 ranks + feedback',)
    """
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for group in {repr((one.codec, one.settings, one.wrappers)): one for one in groups}.values():  # thousands alike
        suffix = " + ".join(["", *(_describe_wrap(wrap) for wrap in reversed(group.wrappers))])
        alike.setdefault((group.codec, suffix), []).append(group.settings)
    return tuple(sorted({f"{_describe_codec(codec, chosen)}{suffix}" for (codec, suffix), chosen in alike.items()}))


@dataclass(frozen=True)
class _Shown:
    """A setting that the description of a method shows."""

    name: str
    value: Any


def _describe_codec(codec: str, settings: Sequence[Mapping[str, Any]]) -> str:
    built = [build_settings(codecs.get(codec), values) for values in settings]
    values: dict[str, set[Any]] = {}
    for setting in (setting for chosen in built for setting in _shown(chosen, main=1)):
        values.setdefault(setting.name, set()).add(setting.value)
    return _with_settings(codec, [f"{name}={_range(list(different))}" for name, different in values.items()])


def _describe_wrap(wrap: Wrap) -> str:
    name = "feedback" if wrap.name == "error_feedback" else wrap.name.replace("_", " ")
    shown = _shown(build_settings(wrappers.get(wrap.name), wrap.settings))
    if "from_ranks" in wrap.settings:  # as plans have it by default
        name = f"{name} from {wrap.settings['from_ranks']} ranks"
        shown = [one for one in shown if one.name != "from_ranks" and one != _Shown("answer", ANSWER)]
    return _with_settings(name, [f"{setting.name}={_spelled(setting.value)}" for setting in shown])


def _with_settings(name: str, texts: Sequence[str]) -> str:
    return f"{name}({', '.join(texts)})" if texts else name


def _shown(chosen: Any, main: int | None = None) -> list[_Shown]:
    """List the settings that are shown, in the order of the fields: `main` leading ones, and non-defaults."""
    rows = [(_Shown(field.name, getattr(chosen, field.name)), field.default) for field in fields(chosen)]
    main = (len(rows) if len(rows) <= _FEW_SETTINGS else 0) if main is None else main
    return [
        setting
        for place, (setting, default) in enumerate(rows)
        if setting.value is not None and (setting.value != default or (place < main and setting.value is not False))
    ]


def _range(values: Sequence[Any]) -> str:
    if len(values) > 1 and all(type(value) in (int, float) for value in values):
        return f"{_spelled(min(values))} to {_spelled(max(values))}"
    return " or ".join(sorted(map(_spelled, values)))


def _spelled(value: Any) -> str:
    """A setting's value; numbers with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def refresh_remark(refresh: Refresh) -> str:
    """The remark on forecasts of a plan that is chosen anew."""
    after = "" if refresh.accordion is None else " within Accordion's error"
    return (
        f"The plan is chosen anew every {refresh.every} iterations{after}: forecasts are of the settings that it "
        "starts with."
    )


def _check_layers(trace: Trace, plan: Plan) -> None:
    """Refuse a trace with layers or shapes that the plan lacks, or without a layer that the plan compresses."""
    expected = {layer.name: layer.shape for layer in plan.layers}
    recorded = {layer.name for layer in trace.layers}
    whole = trace.unrecorded or len(recorded) == len(expected)
    if whole or any(expected.get(layer.name) != layer.shape for layer in trace.model_layers):
        check_model(plan, trace.model_layers)
        return
    compressed = {name for group in plan.compressed_groups for name in group.layers}
    if missing := sorted(compressed - recorded):
        raise GradlabError(
            f"{trace.path}: records {len(recorded)} of the model's {len(expected)} layers; the plan compresses "
            f"{missing[0]} and {len(missing) - 1} more that it lacks: record them, or plan without them"
        )


def _check_range(trace: Trace, plan: Plan, start: int, stop: int) -> None:
    if not 0 <= start < stop <= len(trace.steps):
        raise GradlabError(f"{trace.path}: nothing to replay in positions {start}..{stop} of {len(trace.steps)} steps")
    last, first = int(trace.steps[stop - 1]), plan.schedule.warmup_steps
    if not plan.schedule.compresses(last):
        raise GradlabError(
            f"{trace.path}: ends at iteration {last}, the plan is dense until iteration {first}: nothing to replay; "
            f"make the plan with fewer --warmup-steps, or record more than {first} steps"
        )


def _remarks(trace: Trace, lockstep: LockstepPlan, start: int, stop: int) -> Iterator[str]:
    if (refresh := lockstep.plan.refresh) is not None:
        yield f"{refresh_remark(refresh)} A run's own choices differ once its gradients do."
    yield from lockstep.remarks
    if not lockstep.stateful:
        return
    steps = np.asarray(trace.steps)[start:stop]
    steps = steps[steps >= lockstep.plan.schedule.warmup_steps]
    if gaps := int((np.diff(steps) > 1).sum()):
        yield (
            f"The plan carries memory from step to step, but the trace lacks iterations in {gaps} places: the replay "
            "takes recorded steps as neighbours, so its errors are an approximation."
        )
    if steps[0] > lockstep.plan.schedule.warmup_steps:
        yield (
            "The plan remembers what earlier steps left unsent. Training would have filled that memory from iteration "
            f"{lockstep.plan.schedule.warmup_steps} on; this replay begins at iteration {int(steps[0])} with an empty "
            "one. Its errors may therefore be smaller than those of your run, which itself is not affected. For closer "
            "figures replay more steps (--quick replays few), or record from the first compressed step on."
        )
