"""A trace of ranks, read as one of nodes: the same as a trace of the nodes' means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.analysis.measure.between_ranks import BetweenRanks, measure_between_ranks
from gradlab.analysis.measure.spectrum import measure_spectrum
from gradlab.analysis.replay import replay
from gradlab.collectives import mean_of_node
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import random_gradients, record

LAYERS = (Layer("a.weight", (24, 40), "linear"), Layer("b.weight", (16, 30), "linear"), Layer("b.bias", (16,), "bias"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace of 6 ranks, and one of the means of 3 each; a gradient is infinite on one rank in one step."""
    tmp_path = tmp_path_factory.mktemp("folders")
    gradients = random_gradients(5, 12, 6, LAYERS)
    gradients[7][4]["a.weight"][3, 3] = np.inf
    nodes = [
        [
            {
                name: mean_of_node([torch.from_numpy(rank[name]) for rank in step[first : first + 3]]).numpy()
                for name in step[0]
            }
            for first in (0, 3)
        ]
        for step in gradients
    ]
    record(tmp_path / "ranks", gradients, LAYERS, loss_scale=4.0).close()
    record(tmp_path / "nodes", nodes, LAYERS, loss_scale=4.0).close()
    return tmp_path / "ranks", tmp_path / "nodes"


def test_nodes_are_the_means_of_their_ranks_bit_for_bit(folders: tuple[Path, Path]) -> None:
    with Trace(folders[0], average_ranks=3) as averaged, Trace(folders[1]) as nodes:
        assert (averaged.world_size, averaged.average_ranks) == (2, 3)
        assert "2 nodes, each the mean of 3 of 6 recorded ranks" in averaged.remarks
        for layer in LAYERS:
            for node in (0, 1):
                for columns in (None, slice(3, 11)):
                    given = averaged.read(layer.name, node, 2, 9, columns)
                    np.testing.assert_array_equal(given, nodes.read(layer.name, node, 2, 9, columns))
            np.testing.assert_array_equal(averaged.mean(layer.name), nodes.mean(layer.name))
        for ours, theirs in zip(averaged.iterate(), nodes.iterate(), strict=True):
            assert (ours.index, ours.learning_rate) == (theirs.index, theirs.learning_rate)
            np.testing.assert_allclose(ours.loss, theirs.loss)
            for name in ("loss_scale", "accumulation", "non_finite", "unused"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        for node in (0, 1):
            ours, theirs = averaged.scalars(node), nodes.scalars(node)
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                np.testing.assert_allclose(ours[name], values)


def test_what_measures_a_trace_measures_its_nodes(folders: tuple[Path, Path]) -> None:
    """In this process and in workers, which open the trace anew."""
    plan = Plan.uniform(LAYERS, "topk", density=0.1)
    results = []
    for folder, count in zip(folders, (3, 1), strict=True):
        with Trace(folder, average_ranks=count) as trace:
            replayed = replay(trace, plan).summary()
            by_parts = replay(trace, plan, workers=2).summary()
            tables = fit_lgreco(trace, "topk", {"density": 0.1})
            between = measure_between_ranks(trace, BetweenRanks())
            spectra = measure_spectrum(trace)
            results.append(
                [
                    *(replayed.cosine, by_parts.cosine, replayed.payload_bytes_per_step.mean),
                    *(tables.plan.to_json()["groups"], between.to_json(), spectra.to_json()),
                ]
            )
    assert results[0] == results[1]


def test_nodes_of_unequal_size_are_refused(folders: tuple[Path, Path]) -> None:
    for count in (4, 0, -2, 7, 1.5, True):
        with pytest.raises(GradlabError, match="expected a divisor of 6 ranks"):
            Trace(folders[0], average_ranks=count)  # type: ignore[arg-type]


def test_commands_take_ranks_together(folders: tuple[Path, Path], tmp_path: Path, gradlab: Command) -> None:
    plan = str(tmp_path / "plan.safetensors")
    ranks, nodes = map(str, folders)
    code, _, err = gradlab("fit", "uniform", ranks, "--codec", "topk", "--out", plan, "-s", "average_ranks=3")
    assert code == 0, err
    printed = []
    for words in ([ranks, plan, "--average-ranks", "3"], [nodes, plan]):
        code, out, err = gradlab("evaluate", *words, "--json")
        assert code == 0, err
        printed.append(json.loads(out)["plan"])
    assert printed[0]["world_size"] == printed[1]["world_size"] == 2
    assert printed[0]["summary"]["cosine"] == printed[1]["summary"]["cosine"]
    code, _, err = gradlab("evaluate", ranks, plan, "--average-ranks", "6")
    assert (code, "recorded on one rank" in err) == (2, True)
    code, _, err = gradlab("evaluate", ranks, plan, "--average-ranks", "4")
    assert (code, "average_ranks = 4, expected a divisor of 6 ranks" in err) == (2, True)
