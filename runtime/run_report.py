"""The report of a run on one rank: typed, as JSON, as a table to print, and as numbers for a logger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gradlab import wrappers
from gradlab.codec.measures import relative
from gradlab.codec.settings import build_settings
from gradlab.ddp.optimizers import HeldLayers
from gradlab.executor import PlanRun
from gradlab.executor.rules import Finding, sentences
from gradlab.jsonable import Jsonable, plain
from gradlab.plan import Group, Plan, Wrap
from gradlab.plan.optimizer_rules import compressed_layers
from gradlab.runtime.engine.statistics import TIMES, Place, StepRecord, Summary, noise_scale, summarize_steps
from gradlab.saving import Saving

if TYPE_CHECKING:
    from gradlab.plan.replanning import Replanner

_RECENT = 50  # measured steps that the noise scale is over


@dataclass(frozen=True)
class GroupMeans(Jsonable):
    """Means of one group. Bytes and seconds are means per measured step on this rank.

    encode_seconds: up to the group's first request.
    decode_seconds: after answers came.
    relative_error: sqrt(sum ||x - c||^2 / sum ||x||^2) over the group's layers; None if it was not measured.
    residual_norm: L2 norm of the residuals of all the group's layers; None if no group keeps a residual.
    """

    payload_bytes_per_step: float
    encode_seconds: float
    decode_seconds: float
    relative_error: float | None
    residual_norm: float | None


@dataclass(frozen=True)
class GroupRow:
    """One group of a plan: its name, its codec with the wrappers, its layers, and its means if a step was measured."""

    group: str
    codec: str
    layers: tuple[str, ...]
    means: GroupMeans | None = None

    def to_json(self) -> dict[str, Any]:
        """Write the group and, beside it, its means."""
        named = {"group": self.group, "codec": self.codec, "layers": list(self.layers)}
        return {**named, **(self.means.to_json() if self.means else {})}


@dataclass(frozen=True)
class RunReport:
    """Measurements of a run on one rank.

    forecast_payload_bytes: bytes that it contributes per compressed step, by the plan.
    iteration: number of the next step, from 0.
    residuals: rule for the residuals under the optimizer; None if the plan keeps none.
    refresh: the plan's; None if it has none.
    groups: one row per compressed group that this rank carries.
    rules: findings of the rules of `gradlab.executor.rules`.
    """

    place: Place
    forecast_payload_bytes: float
    iteration: int
    residuals: str | None
    refresh: dict[str, Any] | None
    summary: Summary
    groups: tuple[GroupRow, ...]
    rules: tuple[Finding, ...] = ()

    @property
    def saving(self) -> Saving:
        """How many times fewer bytes are sent; not known before the first step, or if nothing was sent."""
        sent = self.summary.means.wire_bytes_per_step if self.summary.means else 0.0
        return self.place.saving(sent)

    def to_json(self) -> dict[str, Any]:
        """Write the report as `state.report()` returns it; numbers that are not finite become None."""
        place = self.place
        written = {
            **place.to_json(),
            "iteration": self.iteration,
            "dense_payload_bytes": place.dense_payload_bytes,
            "forecast_payload_bytes": self.forecast_payload_bytes,
            **self.saving.to_json(),
            "residuals": self.residuals,
            "rules": self.rules,
            "refresh": self.refresh,
            **self.summary.to_json(),
            "groups": self.groups,
        }
        return {name: plain(value) for name, value in written.items()}


def summarize_run(
    run: PlanRun,
    steps: Sequence[StepRecord],
    place: Place,
    residuals: str | None,
    rules: tuple[Finding, ...] = (),
) -> RunReport:
    """Make the report of a run."""
    replanner = run.replanner
    return RunReport(
        place=place,
        forecast_payload_bytes=place.forecast(run.plan),
        iteration=run.iteration,
        residuals=residuals,
        refresh=None if replanner is None else _of_refresh(replanner),
        summary=summarize_steps(steps),
        groups=group_rows([group for group in run.plan.compressed_groups if group.name in run.codecs], steps),
        rules=rules,
    )


def _of_refresh(replanner: Replanner) -> dict[str, Any]:
    """Return the last choice of a plan's refresh, and why the one after it failed, on rank 0. `critical` are the groups
    in a critical regime in the last window, on rank 0; None before any, and without Accordion."""
    critical = None if replanner.regimes is None else replanner.regimes.critical
    regimes = None if critical is None else sorted(critical)
    return {"choice": replanner.choice, "failure": replanner.failure, "critical": regimes}


def group_rows(groups: Iterable[Group], steps: Sequence[StepRecord]) -> tuple[GroupRow, ...]:
    """Make one row per group, with means over the measured steps, if there are any."""
    measured = [step for step in steps if step.group_seconds and step.finite]
    return tuple(
        GroupRow(group.name, _title(group), tuple(group.layers), _means(group, measured) if measured else None)
        for group in groups
    )


def _title(group: Group) -> str:
    return "+".join([group.codec, *(wrap.name for wrap in reversed(group.wrappers))])


def _means(group: Group, measured: Sequence[StepRecord]) -> GroupMeans:
    errors = [step.errors[layer] for step in measured for layer in group.layers if layer in step.errors]
    norms = [sum(step.residual_norms.get(layer, 0.0) ** 2 for layer in group.layers) ** 0.5 for step in measured]
    seconds = [step.group_seconds.get(group.name, (0.0, 0.0)) for step in measured]
    return GroupMeans(
        payload_bytes_per_step=fmean(step.group_payload_bytes.get(group.name, 0) for step in measured),
        encode_seconds=fmean(encode for encode, _ in seconds),
        decode_seconds=fmean(decode for _, decode in seconds),
        relative_error=relative(*map(sum, zip(*errors, strict=True))) if errors else None,
        residual_norm=fmean(norms) if any(step.residual_norms for step in measured) else None,
    )


def residual_statement(plan: Plan, held: HeldLayers) -> str | None:
    """Say in one line what holds for a plan's residuals under its optimizers; None if it keeps none."""
    stacks = {repr(group.wrappers): group.wrappers for group in plan.groups}.values()  # mostly one for all groups
    ratios = [ratio for wraps in stacks for ratio in _ratios(wraps)]
    if not ratios:
        return None
    plain = held.plain_sgd(compressed_layers(plan))
    follows = [plain if wanted is None else wanted for wanted in ratios]
    if all(follows) and plain:
        return "residuals follow the learning rate"
    if all(follows):
        return (
            f"residuals follow the learning rate as the plan says, but under {_named(held)}: the error-corrected "
            "iterate is known to follow a recurrence (the lemmas of dist-EF-SGD) for SGD without momentum alone, and "
            "residuals grow without bound as the rate falls to 0; step_size_ratio=None in the plan's wrappers (an "
            "argument of method_plan, too) keeps them as they are"
        )
    which = "some residuals are" if any(follows) else "residuals are"
    why = "as the plan says" if plain else f"under {_named(held)}"
    advice = "; there is nothing to do when the learning rate changes"
    if plain or not held.optimizers:
        follow = "step_size_ratio=None in the plan's wrappers lets them follow it"
        remedy = follow if held.optimizers else "pass optimizer=, so that they follow SGD's rate"
        advice = f": right as long as the learning rate stays the same; {remedy}"
    return f"{which} kept as they are {why}{advice}"


def _ratios(wraps: Sequence[Wrap]) -> Iterator[bool | None]:
    """Whether each residual of one group follows the learning rate; None: under SGD without momentum alone."""
    for wrap in wraps:
        wrapper = wrappers.get(wrap.name)
        settings = build_settings(wrapper, wrap.settings)
        follows = wrapper.effects.keeps_residual and hasattr(settings, "step_size_ratio")  # EF21 keeps what it sent
        if follows or (wrap.name == "two_way" and settings.error_feedback):
            yield settings.step_size_ratio


def _named(held: HeldLayers) -> str:
    settings = held.settings()
    if settings is None:
        return "an optimizer that was not given"
    kinds = [f"{one.name}{f' with {one.momentum}' if one.momentum else ''}" for one in settings.parts or (settings,)]
    return " and ".join(dict.fromkeys(kinds))


def table(report: RunReport) -> str:
    """Return a report as text: one line per group, then the step."""
    head = ("group", "codec", "payload/step", "encode", "decode", "error", "unsent norm")
    lines = [head, *map(_cells, report.groups)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    text += [*_step_lines(report), *sentences(report.rules, report.place.world_size)]
    text += [report.residuals] if report.residuals else []
    return "\n".join(text)


def _cells(row: GroupRow) -> tuple[str, ...]:
    """A group's line of the table."""
    means = row.means
    if means is None:
        return (row.group, row.codec, "-", "-", "-", "-", "-")
    return (
        row.group,
        row.codec,
        f"{means.payload_bytes_per_step:,.0f} B",
        f"{means.encode_seconds * 1e3:.3f} ms",
        f"{means.decode_seconds * 1e3:.3f} ms",
        "-" if means.relative_error is None else f"{means.relative_error:.1%}",
        "-" if means.residual_norm is None else f"{means.residual_norm:.3g}",
    )


def _step_lines(report: RunReport) -> list[str]:
    """Bytes and times of the step; empty before the first one."""
    means = report.summary.means
    if means is None:
        return []
    spent = ", ".join(f"{name.removesuffix('_seconds')} {getattr(means, name) * 1e3:.2f} ms" for name in TIMES)
    saving = f", {report.saving}" if report.saving.ratio else ""
    inside, where = "", []
    if at := report.place.topology:
        inside = f", inside the node {means.inside_wire_bytes_per_step:,.0f} B"
        where = [f"node {at.node} of {len(at.nodes)}, local rank {at.local_rank} of {at.local_ranks}"]
    if part := report.place.part:
        where.append(f"part {part[0]} of {part[1]} of the layers that tensor parallelism cuts")
    if below := report.place.relay_below:
        where.append(f"all-to-alls whose parts are below {below:,} B go in two hops")
    return [
        *where,
        f"payload {means.payload_bytes_per_step:,.0f} B, wire {means.wire_bytes_per_step:,.0f} B{saving}{inside}",
        f"{spent} per step",
    ]


def scalars(steps: Sequence[StepRecord], place: Place) -> dict[str, float]:
    """Return the last step's numbers by name, as TensorBoard's add_scalar takes them; empty before the first."""
    if not steps:
        return {}
    last = steps[-1]
    values = {
        "gradlab/payload_bytes": float(last.payload_bytes),
        "gradlab/wire_bytes": float(last.wire_bytes),
        "gradlab/inside_wire_bytes": float(last.inside_wire_bytes),
        "gradlab/finite": float(last.finite),
        "gradlab/loss_scale": last.loss_scale,
        **{f"gradlab/{name}": float(getattr(last, name)) for name in TIMES},
    }
    squares = [step.squares for step in steps if step.squares and step.finite]
    scale = noise_scale(squares[-_RECENT:], place.exchanging)
    values |= {} if scale is None else {"gradlab/noise_scale": scale}
    saving = place.saving(last.wire_bytes).to_json()
    values |= {f"gradlab/{name}": ratio for name, ratio in saving.items() if ratio is not None}
    measured = next((step for step in reversed(steps) if step.errors and step.finite), None)
    if measured is not None:
        values |= {f"gradlab/relative_error/{name}": relative(*pair) for name, pair in measured.errors.items()}
        values |= {f"gradlab/residual_norm/{name}": norm for name, norm in measured.residual_norms.items()}
    return values
