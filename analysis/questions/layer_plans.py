"""Settings by layer: L-GreCo's plan beside the uniform one, and how layers' errors go with the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradlab.analysis.figures.chart import Chart, Panel, lines, points, rule
from gradlab.analysis.figures.palette import BLUE, SKY, VERMILION, method_colors, method_markers
from gradlab.analysis.section import Table
from gradlab.formatting import format_bytes, format_count, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from gradlab.analysis.layer_plan.provenance import LgrecoProvenance

_LITTLE_GAIN = 0.02  # a plan by layer is not worth a smaller gain
_UNITS = {"payload": "payload, bytes", "wire": "bytes on the wire", "seconds": "seconds"}


def layer_plan_verdict(provenance: LgrecoProvenance) -> str:
    """Say what a plan by layer saves against the uniform one, and whether its error holds on later iterations."""
    gain = provenance.gain
    what = {"payload": "bytes", "wire": "bytes on the wire", "seconds": "seconds"}[provenance.cost]
    if gain < 1 - _LITTLE_GAIN:  # weighted costs, or a budget of its own
        first = f"By layer {format_ratio(1 / gain)} more {what} than {provenance.uniform} everywhere"
    elif gain < 1 + _LITTLE_GAIN:
        first = f"A plan by layer gains next to nothing over {provenance.uniform} everywhere ({format_ratio(gain)})"
    else:
        first = f"By layer {format_ratio(gain)} fewer {what} than {provenance.uniform} everywhere"
    said = [f"{first}; {provenance.saving.text('fewer bytes than dense')} over the whole model."]
    if alone := provenance.alone:
        best = min(alone, key=lambda name: alone[name])
        said.append(f"Of one codec alone, {best} needs {format_ratio(alone[best] / provenance.size)} as much.")
    said.append(_later_error_line(provenance))
    if provenance.gap:
        said.append(f"The search was cut short: a plan may be {format_percent(provenance.gap)} smaller.")
    return " ".join(said)


def _later_error_line(provenance: LgrecoProvenance) -> str:
    errors = provenance.relative_error
    later, uniform = errors.plan.held_out, errors.uniform.held_out
    if later is None:
        return "Nothing was held out: the error later on is not known."
    if not uniform:
        return ""
    more = later / uniform - 1
    compared = "no larger than" if more <= 0 else f"{format_percent(more)} above"
    return (
        f"On later iterations its error is {compared} the uniform plan's ({format_percent(later)} of the gradient "
        f"against {format_percent(uniform)}, without feedback)."
    )


def layer_plan_table(provenance: LgrecoProvenance) -> Table:
    """List every layer's setting, with its cost and error beside the uniform plan's."""
    cost = provenance.cost
    text = format_seconds if cost == "seconds" else format_bytes
    rows = [
        [
            layer.name,
            layer.chosen,
            format_count(layer.numel),
            text(layer.cost),
            text(layer.uniform_cost),
            format_percent(layer.relative_error),
            format_percent(layer.uniform_relative_error),
        ]
        for layer in provenance.layers
    ]
    columns = ("layer", "setting", "elements", cost, "uniform", "error", "uniform")
    return Table("plan by layer", columns, rows, text_columns=2)


def layers_chart(provenance: LgrecoProvenance) -> Chart:
    """Draw L-GreCo's Fig. 1: every layer's setting, size and relative error, in the order of communication."""
    layers = list(reversed(provenance.layers))  # backward hands over the last layers first
    at, varied = np.arange(1, len(layers) + 1), provenance.varied
    if all(layer.codec == provenance.codec and varied in layer.settings for layer in layers):
        chosen = [layer.settings[varied] for layer in layers]
        settings = [lines(at, chosen, VERMILION, "by layer", drawstyle="steps-mid")]
        settings.append(rule(provenance.reference[varied], BLUE, "uniform", linestyle="--"))
        label, look = varied, {}
    else:
        shares = [layer.cost / layer.uniform_cost if layer.uniform_cost else np.nan for layer in layers]
        codecs = list(dict.fromkeys(layer.codec for layer in layers))
        colors, markers = method_colors(codecs), method_markers(codecs)
        settings = []
        for codec in codecs:
            rows = [row for row, layer in enumerate(layers) if layer.codec == codec]
            settings.append(points(at[rows], [shares[row] for row in rows], colors[codec], codec, markers[codec]))
        settings.append(rule(1.0, BLUE, "uniform", linestyle="--"))
        label, look = f"{_UNITS[provenance.cost]} / uniform's", {"yscale": "log"}
    errors = [
        points(at, [layer.uniform_relative_error for layer in layers], BLUE, marker="_"),
        points(at, [layer.relative_error for layer in layers], VERMILION, marker="."),
    ]
    sizes = [lines(at, [layer.numel for layer in layers], SKY, drawstyle="steps-mid")]
    below = "layer, in the order of communication"
    panels = [
        Panel(settings, "", label, legend=True, look=look),
        Panel(sizes, "", "elements of the layer", look={"yscale": "log"}),
        Panel(errors, below, "relative error", look={"ylim": (0, None)}),
    ]
    return Chart(panels, height=1.9, shares={"sharex": True})
