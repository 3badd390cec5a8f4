"""A run's statistics as plain JSON, as a table to print, and as numbers for a logger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from gradlab import wrappers
from gradlab.codec.measures import relative
from gradlab.codec.settings import build_settings
from gradlab.ddp.optimizers import is_plain_sgd, own_momentum
from gradlab.plan import Plan, Wrap
from gradlab.runtime.engine.statistics import TIMES, Statistics, StepRecord

_GROWN = 1.3  # times: a residual that has not settled


def layer_rows(plan: Plan, steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return one row per group, as plain JSON.

    A row has the group's name, codec and layers. Over the measured steps, if there are any, it has the payload bytes
    and the seconds per step; the relative error and the L2 norm of the residuals, both over all of its layers; and
    `residual_growth` of that norm.
    """
    measured = [step for step in steps if step.group_seconds and step.finite]
    return [_group_row(group.name, _title(group), group.layers, measured) for group in plan.compressed_groups]


def _title(group: Any) -> str:
    return "+".join([group.codec, *(wrap.name for wrap in reversed(group.wrappers))])


def _group_row(name: str, codec: str, layers: Sequence[str], measured: Sequence[StepRecord]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": name, "codec": codec, "layers": list(layers)}
    if not measured:
        return row
    errors = [step.errors[layer] for step in measured for layer in layers if layer in step.errors]
    norms = [sum(step.residual_norms.get(layer, 0.0) ** 2 for layer in layers) ** 0.5 for step in measured]
    return row | {
        "payload_bytes_per_step": fmean(step.group_payload_bytes.get(name, 0) for step in measured),
        "encode_seconds": fmean(step.group_seconds.get(name, (0.0, 0.0))[0] for step in measured),
        "decode_seconds": fmean(step.group_seconds.get(name, (0.0, 0.0))[1] for step in measured),
        "relative_error": relative(*map(sum, zip(*errors, strict=True))) if errors else None,
        "residual_norm": fmean(norms) if any(step.residual_norms for step in measured) else None,
        "residual_growth": residual_growth(norms),
    }


def residual_growth(norms: Sequence[float]) -> float | None:
    """Return the mean norm of the last quarter of steps over that of the second.

    None for fewer than 8 steps, for a norm that is not finite, and for one that does not rise from the second to the
    third quarter and on to the last.

    A residual that is sent in time settles; one that lies where the codec's decoder never comes, as an autoencoder's
    does, grows as long as training goes on.
    """
    quarter = len(norms) // 4
    if quarter < 2 or not all(map(math.isfinite, norms)):
        return None
    second, third, last = (fmean(norms[at * quarter : (at + 1) * quarter]) for at in (1, 2, 3))
    return last / second if 0 < second < third < last else None


def codec_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the rows of `layer_rows` by codec."""
    totals: dict[str, dict[str, Any]] = {}
    for row in rows:
        total = totals.setdefault(row["codec"], {"codec": row["codec"], "groups": 0})
        total["groups"] += 1
        for key in ("payload_bytes_per_step", "encode_seconds", "decode_seconds"):
            total[key] = total.get(key, 0.0) + row.get(key, 0.0)
    return list(totals.values())


def residual_statement(plan: Plan, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Say what holds for a plan's residuals under the optimizer that it trains with; None if it keeps none."""
    stacks = {repr(group.wrappers): group.wrappers for group in plan.groups}.values()  # mostly one for all groups
    kept = [row for wraps in stacks if (row := _residuals(wraps))]
    ratios = [values["step_size_ratio"] for row in kept for values in row.values()]
    if not ratios:
        return None
    plain = is_plain_sgd(optimizer)
    follows = [plain if wanted is None else wanted for wanted in ratios]
    if not all(follows):
        which = "some residuals are" if any(follows) else "residuals are"
        why = "as the plan says" if plain else f"under {_named(optimizer)}"
        return f"{which} kept as they are {why}: right as long as the learning rate stays the same"
    if not plain:
        return (
            f"residuals follow the learning rate as the plan says, but under {_named(optimizer)}: the error-corrected "
            "iterate is known to follow a recurrence (the lemmas of dist-EF-SGD) for SGD without momentum alone"
        )
    if not all(_lossless(row) for row in kept):
        return "residuals follow the learning rate"
    momentum = any(wrap.name == "local_momentum" for wraps in stacks for wrap in wraps)
    law = "Nesterov's SGD (Lemma 3 of dist-EF-SGD)" if momentum else "SGD (Lemma 1 of dist-EF-SGD)"
    return f"residuals follow the learning rate: the error-corrected iterate follows the recurrence of {law}"


def _residuals(wraps: Sequence[Wrap]) -> dict[str, dict[str, Any]]:
    """Settings of the wrappers that keep a residual, by name."""
    by_name = {}
    for wrap in wraps:
        wrapper = wrappers.get(wrap.name)
        values = asdict(build_settings(wrapper, wrap.settings))
        if wrapper.keeps_residual or (wrap.name == "two_way" and values["error_feedback"]):
            by_name[wrap.name] = values
    return by_name


def _lossless(row: dict[str, dict[str, Any]]) -> bool:
    """Whether compression errors are kept to rounding, at the ranks too."""
    exact = all(values["buffer"] == "float32" and not values.get("decay") for values in row.values())
    return exact and "error_feedback" in row


def _named(optimizer: torch.optim.Optimizer | None) -> str:
    if optimizer is None:
        return "an optimizer that was not given"
    momentum = own_momentum(optimizer)
    return type(optimizer).__name__ + (f" with {momentum}" if momentum else "")


def table(report: dict[str, Any]) -> str:
    """Return a report as text: one line per group, then the step."""
    head = ("group", "codec", "payload/step", "encode", "decode", "error", "unsent norm")
    lines = [head]
    for row in report["groups"]:
        if "payload_bytes_per_step" not in row:
            lines.append((row["group"], row["codec"], "-", "-", "-", "-", "-"))
            continue
        error, norm = row["relative_error"], row["residual_norm"]
        times = (f"{row[key] * 1e3:.3f} ms" for key in ("encode_seconds", "decode_seconds"))
        known = ("-" if error is None else f"{error:.1%}", "-" if norm is None else f"{norm:.3g}")
        lines.append((row["group"], row["codec"], f"{row['payload_bytes_per_step']:,.0f} B", *times, *known))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    if report["steps"]:
        spent = ", ".join(f"{name.removesuffix('_seconds')} {report[name] * 1e3:.2f} ms" for name in TIMES)
        ratio = f", {report['compression_ratio']:.1f}x" if report["compression_ratio"] else ""
        text += [
            f"payload {report['payload_bytes_per_step']:,.0f} B, wire {report['wire_bytes_per_step']:,.0f} B{ratio}",
            f"{spent} per step",
        ]
    for row in report["groups"]:
        if (row.get("residual_growth") or 0.0) > _GROWN:
            text.append(
                f"{row['group']}: the residual norm grew {row['residual_growth']:.1f} times in the second half of the "
                "measured steps; if that goes on, the codec never sends a part of the gradient"
            )
    text += [report["residuals"]] if report["residuals"] else []
    return "\n".join(text)


def scalars(statistics: Statistics) -> dict[str, float]:
    """Return the last step's numbers by name, as TensorBoard's add_scalar takes them; empty before the first."""
    if not statistics.steps:
        return {}
    last = statistics.steps[-1]
    values = {
        "gradlab/payload_bytes": float(last.payload_bytes),
        "gradlab/wire_bytes": float(last.wire_bytes),
        "gradlab/finite": float(last.finite),
        "gradlab/loss_scale": last.loss_scale,
        **{f"gradlab/{name}": float(getattr(last, name)) for name in TIMES},
    }
    measured = next((step for step in reversed(statistics.steps) if step.errors and step.finite), None)
    if measured is not None:
        values |= {f"gradlab/relative_error/{name}": relative(*pair) for name, pair in measured.errors.items()}
        values |= {f"gradlab/residual_norm/{name}": norm for name, norm in measured.residual_norms.items()}
    return values
