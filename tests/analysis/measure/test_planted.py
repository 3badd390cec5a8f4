"""One trace with everything planted (rank, drift, signal to noise): each measurement of the report finds its own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from gradlab.analysis.measure.between_ranks import BetweenRanks, measure_between_ranks
from gradlab.analysis.measure.information import gaussian_information
from gradlab.analysis.measure.noise_scale import noise_scale
from gradlab.analysis.measure.spectrum import measure_spectrum
from gradlab.layout import Layer
from gradlab.learning.slice_pca import principal_axes
from support.recorded import record_layer
from support.synthetic import GradientModel, draw, expected_cosine

LAYER = Layer("fc.weight", (40, 30), "linear")
RANK, DRIFT, STEPS = 6, 0.004, 160
# Energy 30 of signal in 60 axes, of which 0.7 is common to the nodes, and 12 of noise in 1200 values.
SIGNAL = GradientModel(LAYER.numel, (0.5,) * 60, (0.1,) * 4, shared=0.7)
TURNING = GradientModel(LAYER.numel, (5.0,) * RANK, (0.01,) * 4, shared=0.7, drift=DRIFT)


def drawn(model: GradientModel) -> np.ndarray:
    return draw(model, STEPS, np.random.default_rng(5)).values


def test_signal_between_nodes(tmp_path: Path) -> None:
    """cosine 0.7 * 30 / 42 = 0.5; signal to noise 1; a noise scale of one node's batch."""
    cosine = float(expected_cosine(SIGNAL)[0, 1])
    with record_layer(tmp_path / "t", drawn(SIGNAL), LAYER) as trace:
        spectrum = measure_spectrum(trace).layers[0]
        between = measure_between_ranks(trace, BetweenRanks(iterations=40, pairs=6)).layers[0]
    assert cosine == pytest.approx(0.5)
    assert np.nanmean(spectrum.cosine) == pytest.approx(cosine, abs=0.03)
    assert spectrum.signal_to_noise == pytest.approx(1.0, rel=0.1)
    scale = noise_scale(spectrum.inner)
    assert scale.low <= 1.0 <= scale.high
    # In one iteration the coordinates' correlation is that iteration's cosine; the shifted null has none.
    by_step = np.mean([gaussian_information(c) for c in spectrum.cosine])
    for name in ("copula", "mixed"):
        excess = between.estimators[name].excess
        assert excess.low > 0
        assert excess.bits == pytest.approx(by_step, rel=0.2)


def test_rank(tmp_path: Path) -> None:
    """The plane turns by 0.64 rad over the trace: twice its axes hold it, and no more."""
    with record_layer(tmp_path / "t", drawn(TURNING), LAYER) as trace:
        values = measure_spectrum(trace).layers[0].layer_eigenvalues
    assert values[2 * RANK - 1] > 10 * values[2 * RANK]


def test_drift() -> None:
    """Bases fitted 40 iterations apart are turned by 40 * 0.004 rad = 9.2 degrees."""
    means = torch.from_numpy(drawn(TURNING).mean(1)).double()
    windows = [means[first : first + 40] for first in range(0, STEPS, 40)]
    bases = [principal_axes(window)[1][:, :RANK].numpy() for window in windows]
    angles = np.degrees([subspace_angles(*pair) for pair in pairwise(bases)])
    assert angles.mean() == pytest.approx(np.degrees(40 * DRIFT), rel=0.1)
