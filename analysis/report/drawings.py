"""The figures of a report, with their titles and captions. A figure that has no data is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradlab.analysis.figures import methods as method_plots
from gradlab.analysis.figures import sign_blocks as sign_blocks_plots
from gradlab.analysis.figures import slices as slice_structure_plots
from gradlab.analysis.figures import spectra as plots
from gradlab.analysis.replay.error_series import common, observed_series, predicted_series
from gradlab.analysis.report.page import Drawing
from gradlab.formatting import format_percent
from gradlab.metric import final_score, metric_of

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Json = Mapping[str, Any]


def spectrum_drawings(spectrum: Json) -> list[Drawing]:
    """List the figures of a trace's spectrum."""
    count = len(spectrum["steps"])
    drawings = [
        Drawing(
            "slice_spectrum",
            "Spectrum of a slice of the averaged gradient",
            f"Eigenvalues of the covariance over {count} iterations of each layer's first slice (GradiVeQ's order, K "
            "elements), and the share of variance that the leading d axes hold. So many samples show at most "
            f"{count - 1} axes: these curves are in-sample and say nothing yet about later iterations.",
            partial(plots.plot_spectra, spectrum, "slice"),
        ),
        Drawing(
            "layer_spectrum",
            "Spectrum of whole layers over time",
            f"The same for all elements of a layer together, by snapshot PCA over {count} iterations.",
            partial(plots.plot_spectra, spectrum, "layer"),
        ),
        Drawing(
            "dimensions",
            "Axes that GradiVeQ's rule asks for",
            "d by eq. (6) for three loss thresholds, median over slices, beside the size of the slice. A d near the "
            "number of samples says that more samples would find more axes.",
            partial(plots.plot_dimensions, spectrum),
        ),
    ]
    if any(layer["mean_cosine"] is not None for layer in spectrum["layers"]):
        caption = (
            "Cosine between the gradients that two ranks compute in one iteration, mean over pairs; running mean. "
            "Near 0, each rank's gradient is mostly noise of its own batch, which no fit can foresee."
        )
        draw = partial(plots.plot_agreement, spectrum)
        drawings.append(Drawing("agreement", "Agreement between ranks", caption, draw))
    caption = "Euclidean norm of the gradient averaged over ranks, by layer; running mean."
    return [*drawings, Drawing("norms", "Norm of the gradient", caption, partial(plots.plot_norms, spectrum))]


def fit_drawings(measured: GradiveqMeasurement, name: str = "") -> list[Drawing]:
    """List the held-out curve of a GradiVeQ fit."""
    promised = measured.promised_loss
    rule = "" if promised is None else f" (d by eq. (6), threshold {format_percent(promised)})"
    caption = (
        f"Fitted on {len(measured.fitted_on)} iterations{rule}, tried on all later ones. (a) all fitted layers "
        "together, with the loss on the fit's own iterations and that of random bases of the same size; (b) by layer."
    )
    title = "Loss on later iterations, by age of the fit" + (f": {name}" if name else "")
    return [Drawing(f"holdout_{name}" if name else "holdout", title, caption, partial(plots.plot_holdout, measured))]


def slice_structure_drawings(structure: Json) -> list[Drawing]:
    """List the figures of slice structure, without those that no layer has data for."""
    windows = structure.get("windows") or [[0, 0]]
    held = "Later iterations: not fitted on, spread over the rest of the trace."
    captions = {
        "scatter": (
            "adjacent gradients",
            "After Fig. 4, in GradiVeQ's order, over the iterations fitted on. Left: correlation of neighbours over "
            "iterations. Right: two of three neighbours, as recorded, then centred and rotated, with the share of the "
            "three's variance on either axis.",
        ),
        "slice_sizes": (
            "slice size and the first slice's compressor",
            "After Fig. 5: the basis fitted on the first slice (d by eq. (6)) compresses the remaining ones. The paper "
            f"finds that the loss dips at multiples of F D. {held}",
        ),
        "consistency": (
            "one slice's basis on another",
            f"Loss of the slice in a column under the basis of the slice in a row. {held} Where slices share their "
            "correlation, the whole square is as dark as its diagonal.",
        ),
        "staleness": (
            "how fast a basis grows old",
            f"The first slice, bases fitted on windows of {_length(windows[0])} iterations. L_c: the age up to which "
            f"the loss stays within {format_percent(structure['tolerance'], 0)} of the youngest bin's.",
        ),
    }
    return [
        Drawing(f"gradiveq_{part}", f"What GradiVeQ would find: {title}", caption, partial(draw, structure))
        for part, draw in slice_structure_plots.PLOTS.items()
        for title, caption in [captions[part]]
        if slice_structure_plots.measured(structure, part)
    ]


def _length(window: Sequence[int]) -> int:
    return window[1] - window[0] + 1


def sign_drawings(blocks: Json) -> list[Drawing]:
    """List the figures of signs with one scale per block."""
    window = blocks["window"]
    return [
        Drawing(
            "sign_statistics",
            "How well signs stand for gradients",
            f"After Fig. 1 of dist-EF-blockSGD, a point for {window} iterations: (a) how much magnitudes differ within "
            "tensors, standard deviation over mean, averaged; (b) the smallest δ = ‖v‖₁² / (d ‖v‖²), with what it can "
            "fall to at worst (1 / d).",
            partial(sign_blocks_plots.plot_sign_statistics, blocks),
        ),
        Drawing(
            "sign_blocks",
            "Where more scales pay",
            "Share of the gradients' energy that signs keep, over bits per value. The leftmost point is one scale per "
            "tensor; block sizes of every point are in report.json.",
            partial(sign_blocks_plots.plot_sign_blocks, blocks),
        ),
    ]


def replay_drawings(replays: Mapping[str, Json]) -> list[Drawing]:
    """List the figures of replays alone."""
    # No error is finite where every iteration holds what is not.
    lossy = {name: one for name, one in _lossy(replays).items() if method_plots.has_errors(name, replays, {})}
    if not lossy:
        return []
    return [
        Drawing(
            "replay_errors",
            "Error of each method over time",
            "‖input - decoded‖ / ‖input‖ of the compressor, over all ranks and compressed layers; the input includes "
            "the residual of error feedback. Dotted: iterations that a plan was fitted on.",
            partial(method_plots.plot_errors, lossy, {}),
        ),
        _layer_errors(lossy, {}),
    ]


def run_drawings(runs: Mapping[str, Json], replays: Mapping[str, Json]) -> list[Drawing]:
    """List the figures of training runs, with what replays predicted of them."""
    lossy = _lossy(replays)
    caption = "All runs start from the same parameters and see the same data in the same order."
    draw = partial(method_plots.plot_training, runs)
    drawings = [Drawing("training", f"Training: loss and {metric_of(runs.values()).name}", caption, draw)]
    if lossy or any(observed_series(run)[1].any() for run in runs.values()):
        caption = (
            "Predicted: the method replayed on the dense run's gradients. Observed: what training with it measured. "
            "The first compressed iteration sees the same gradients; later ones drift apart with the parameters."
        )
        draw = partial(method_plots.plot_errors, lossy, runs)
        drawings.append(Drawing("errors", "Compression error: predicted and observed", caption, draw))
    if _comparable(lossy, runs):
        caption = "1 means exact; the band is 0.8 to 1.25. Thin: each iteration; thick: running mean."
        draw = partial(method_plots.plot_error_ratio, lossy, runs)
        drawings.append(Drawing("error_ratio", "Predicted over observed error", caption, draw))
    by_layer = [_layer_errors(lossy, runs)] if lossy else []
    return [*drawings, *_cost_drawings(runs), *by_layer]


def _cost_drawings(runs: Mapping[str, Json]) -> list[Drawing]:
    drawings = []
    if placed := {name: run for name, run in runs.items() if _is_placed(run)}:
        name = metric_of(runs.values()).name
        caption = f"Payload that a rank contributes per compressed step, and the {name} at the end; one seed each."
        draw = partial(method_plots.plot_tradeoff, placed)
        drawings.append(Drawing("tradeoff", f"Bytes against {name}", caption, draw))
    if timed := {name: run for name, run in runs.items() if any((run.get("time") or {}).values())}:
        caption = (
            "Per step, as the runs measured it. Upper bar: what a step lasts, computing and then waiting for the "
            "exchange. Lower bar: the exchange itself, which runs beside computing as far as that hides it."
        )
        draw = partial(method_plots.plot_times, timed)
        drawings.append(Drawing("times", "Where a step's time goes", caption, draw))
    return drawings


def _layer_errors(replays: Mapping[str, Json], runs: Mapping[str, Json]) -> Drawing:
    caption = "Relative error of each compressed layer over the compressed iterations; predicted ones after the fit."
    return Drawing("layer_errors", "Error by layer", caption, partial(method_plots.plot_layer_errors, replays, runs))


def _is_placed(run: Json) -> bool:
    return final_score(run) is not None and bool(run.get("payload_bytes_per_step"))


def _lossy(replays: Mapping[str, Json]) -> dict[str, Json]:
    """Select the replays with a contribution error above 0."""
    return {name: replay for name, replay in replays.items() if any(replay["layer_errors"].values())}


def _comparable(replays: Mapping[str, Json], runs: Mapping[str, Json]) -> bool:
    for name in set(replays) & set(runs):
        _, predicted, observed = common(predicted_series(replays[name]), observed_series(runs[name]))
        if ((predicted > 0) & (observed > 0)).any():
            return True
    return False
