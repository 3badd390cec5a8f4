"""Charts of compression errors: predicted by replay and observed in training, over time and by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines, points, rule
from gradlab.analysis.figures.palette import GREY, method_colors, method_markers, running_mean, short, smoothing_window
from gradlab.analysis.section import Drawing

Json = Mapping[str, Any]
_ERROR = "relative error\n‖input - decoded‖ / ‖input‖"


def lossy_replays(replays: Mapping[str, Json]) -> dict[str, Json]:
    """Select the replays with a contribution error above 0."""
    return {name: replay for name, replay in replays.items() if any(replay["layer_errors"].values())}


def has_errors(name: str, replays: Mapping[str, Json], runs: Mapping[str, Json]) -> bool:
    """Say whether there is an error over time to draw of a method."""
    predicted = predicted_series(replays[name])[1] if name in replays else np.zeros(0)
    observed = observed_series(runs[name])[1] if name in runs else np.zeros(0)
    return bool(predicted.any() or observed.any())


def errors_chart(replays: Mapping[str, Json], runs: Mapping[str, Json]) -> Chart:
    """Draw the contribution error per step, predicted by replay and observed in training, one panel per method."""
    colors, panels = method_colors({**runs, **replays}), list[Panel]()
    for name in (name for name in {**replays, **runs} if has_errors(name, replays, runs)):
        marks = []
        if name in runs and len(observed_series(runs[name])[0]):
            marks.append(points(*observed_series(runs[name]), GREY, "observed in training", ".", ms=2.5))
        if name in replays:
            marks.append(lines(*predicted_series(replays[name]), colors[name], "predicted by replay", lw=1.2))
            seen = in_sample_series(replays[name])
            marks += [lines(*seen, colors[name], "iterations fitted on", ls=":")] if len(seen[0]) else []
        panels.append(Panel(marks, "iteration", "" if len(panels) % 3 else _ERROR, name, look={"ylim": (0, None)}))
    return Chart(panels, columns=3, height=2.1, shares={"sharey": True})


def error_ratio_chart(replays: Mapping[str, Json], runs: Mapping[str, Json]) -> Chart | None:
    """Draw the predicted error over the observed one, with a band from 0.8 to 1.25; None: no step has both."""
    colors, marks = method_colors({**runs, **replays}), list[Mark]()
    for name in (name for name in replays if name in runs):
        steps, predicted, observed = common(predicted_series(replays[name]), observed_series(runs[name]))
        usable = (observed > 0) & (predicted > 0)
        if usable.any():
            ratio, at = predicted[usable] / observed[usable], steps[usable]
            smooth = running_mean(ratio, smoothing_window(len(ratio)))
            marks.append(lines(at, ratio, colors[name], lw=0.7, alpha=0.35))
            marks.append(lines(at, smooth, colors[name], name))
    if not marks:
        return None
    band = [Mark("band", y=(0.8, 1.25), color="#efefef"), rule(1)]
    panel = Panel(
        [*band, *marks], "iteration", "predicted / observed error", y_text="{:g}".format, look={"yscale": "log"}
    )
    return Chart([panel])


def layer_errors_drawing(replays: Mapping[str, Json], runs: Mapping[str, Json]) -> Drawing:
    """Draw the contribution error by layer, predicted (hollow) and observed (filled), one colour per method."""
    rows = {
        layer: row for row, layer in enumerate(dict.fromkeys(x for r in replays.values() for x in r["layer_errors"]))
    }
    colors, markers, marks = method_colors({**runs, **replays}), method_markers({**runs, **replays}), []
    apart = min(0.24, 0.8 / len(replays))  # methods that err by as much: each has its own line within the layer's row
    for position, (name, replay) in enumerate(replays.items()):
        seen = {n: e for n, e in (runs.get(name, {}).get("layer_errors") or {}).items() if n in rows}
        shift, mark = apart * (position - (len(replays) - 1) / 2), markers[name]
        for errors, what, filled in ((replay["layer_errors"], "predicted", "none"), (seen, "observed", "full")):
            if any(errors.values()):
                at = [rows[layer] + shift for layer in errors]
                marks.append(
                    points([*errors.values()], at, colors[name], f"{name}, {what}", mark, fillstyle=filled, ms=5)
                )
    label = "relative error ‖input - decoded‖ / ‖input‖"
    panel = Panel(marks, label, rows=[short(name) for name in rows], look={"xlim": (0, None)})
    caption = "Relative error of each compressed layer over the compressed iterations; predicted ones after the fit."
    return Drawing("layer_errors", "Error by layer", caption, Chart([panel], height=max(1.5, 0.26 * len(rows) + 0.8)))


# --- series of errors on the same iterations --------------------------------------------------------------------------


# Iterations (n,) and contribution errors (n,).
Series = tuple[np.ndarray, np.ndarray]


def predicted_series(replay: Mapping[str, Any]) -> Series:
    """Contribution errors in a replay's JSON after the last iteration that its plan was fitted on."""
    last = max(replay["fitted_on"], default=-1)
    return _series((s["iteration"], s["contribution_error"]) for s in replay["steps"] if s["iteration"] > last)


def in_sample_series(replay: Mapping[str, Any]) -> Series:
    """Return iterations and contribution errors, two arrays, of the steps in a replay's JSON that its plan was fitted
    on. A step without an error is left out."""
    fitted = set(replay["fitted_on"])
    return _series((s["iteration"], s["contribution_error"]) for s in replay["steps"] if s["iteration"] in fitted)


def observed_series(run: Mapping[str, Any]) -> Series:
    """Errors in a run's JSON report; empty where it measured none."""
    errors = run.get("errors") or {"steps": [], "relative": []}
    return _series(zip(errors["steps"], errors["relative"], strict=True))


def median_or_none(values: np.ndarray) -> float | None:
    """The median; None for no value."""
    return float(np.median(values)) if len(values) else None


def common(predicted: Series, observed: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Iterations that both series have, predicted errors and observed errors there: (n,) each."""
    steps, first, second = np.intersect1d(predicted[0], observed[0], return_indices=True)
    return steps, predicted[1][first], observed[1][second]


def _series(pairs: Iterable[tuple[int, float | None]]) -> Series:
    kept = np.array([(step, value) for step, value in pairs if value is not None], dtype=float).reshape(-1, 2)
    return kept[:, 0].astype(int), kept[:, 1]
