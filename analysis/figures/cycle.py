"""GradiVeQ's Fig. 6 and Fig. 7a: what iterations are under a plan, and the loss over time with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gradlab.analysis.figures.spectra import short
from gradlab.analysis.figures.style import BLUE, GREY, SKY, VERMILION, method_colors, panels
from gradlab.analysis.replay.cycle import COMPRESSED, DENSE, SAMPLED, LayerCycle, LossOverTime, TrainingCycle

_MOST_LAYERS, _MOST_SLICES = 6, 16
_KINDS = {"dense": GREY, "sampled": SKY, "sampled, a basis is fitted on it": BLUE, "compressed": VERMILION}
_SMOOTHED = 100  # a point of the loss averages a hundredth of the iterations


def plot_cycle(cycle: TrainingCycle) -> Figure:
    """Draw Fig. 6: the iterations of each slice, a panel per layer, for at most 6 layers and 16 slices of each."""
    names = list(cycle.layers)
    chosen = [names[int(i)] for i in np.unique(np.linspace(0, len(names) - 1, min(_MOST_LAYERS, len(names))).round())]
    figure, axes = panels(len(chosen), 1, height=1.5, sharex=True)
    for panel, name in zip(axes, chosen, strict=True):
        layer = cycle.layers[name]
        rows = _kinds(layer)
        edges = [*cycle.iterations, cycle.iterations[-1] + 1]
        panel.pcolormesh(
            edges, range(len(rows) + 1), rows, cmap=ListedColormap(list(_KINDS.values())), vmin=-0.5, vmax=3.5
        )
        for fit in layer.fitted_after:
            panel.axvline(fit + 1, color="black", linewidth=1)
        more = f", the first {len(rows)}" if len(rows) < layer.slices else ""
        panel.set(title=f"{short(name)}: {layer.slices} slices{more}", ylabel="slice")
        ends = [1, len(rows)] if len(rows) > 1 else [1]
        panel.set_yticks([end - 0.5 for end in ends], [str(end) for end in ends])
        panel.invert_yaxis()
        panel.grid(False)
    axes[-1].set_xlabel("iteration; lines: bases are fitted")
    handles = [Patch(color=color, label=label) for label, color in _KINDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _kinds(layer: LayerCycle) -> np.ndarray:
    """(slices, T): the place in `_KINDS` of what each slice is in each iteration."""
    count = min(layer.slices, _MOST_SLICES)
    fitted = {m for run in layer.fitted_slices for m in run}
    places = {DENSE: (0, 0), SAMPLED: (1, 2), COMPRESSED: (3, 3)}
    return np.array([[places[phase][m in fitted] for phase in layer.phases] for m in range(count)])


def plot_loss_over_time(curves: Mapping[str, LossOverTime]) -> Figure:
    """Draw Fig. 7a: training loss over wall-clock time, a line per plan."""
    figure, (axes,) = panels(1, 1, height=2.8)
    colors = method_colors(curves)
    for name, curve in curves.items():
        width = max(1, len(curve.loss) // _SMOOTHED)
        kept = len(curve.loss) // width * width
        seconds, loss = (np.array(values[:kept]).reshape(-1, width) for values in (curve.seconds, curve.loss))
        axes.plot(seconds[:, -1], loss.mean(1), color=colors[name], label=name)
    axes.set(xlabel="time, s", ylabel="training loss")
    axes.legend(fontsize=7)
    return figure
