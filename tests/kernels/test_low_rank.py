"""PowerSGD's kernels, run by Triton's interpreter, against the PyTorch lines that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from gradlab import codecs, kernels, wrappers
from gradlab.codec import Batch, Codec, Context, Tensors, concatenate, exchange_group, separate
from gradlab.codecs.powersgd import PowerSGD
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.layout import Layer
from gradlab.wrappers.dion import unit_rows
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.by_kernels import work_of_steps
from support.laws import law, thorough

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of NaN in the interpreter
LAYERS = [
    Layer("wide", (4, 130)),
    Layer("bias", (7,)),
    Layer("tall", (66, 5)),  # sums over its rows are made of two
    Layer("experts", (2, 4, 9), "experts"),
    Layer("convolution", (4, 2, 2, 2)),
]


@contextmanager
def by_kernels() -> Iterator[None]:
    """Run kernels on the CPU, in programs that work on few rows, as there are few here."""
    from gradlab.kernels import low_rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "DEVICES", {"cpu"})
        patch.setattr(low_rank, "_SUMMED", 64)
        yield


def gradients(step: int, rank: int) -> Tensors:
    draw = torch.Generator().manual_seed(100 * step + rank)
    apart = {layer.name: torch.randn(layer.shape, generator=draw) for layer in LAYERS}
    return apart if step else separate(concatenate(apart), apart)


def steps(codec: ErrorFeedback | PowerSGD, count: int, reuse: bool = False) -> list[list[LockstepResult]]:
    """All ranks' results, step by step."""
    states: list[Tensors] = [{}, {}]
    found = []
    for step in range(count):
        given = [Batch.of(gradients(step, rank), LAYERS) for rank in range(2)]
        runs = [
            exchange_group(codec, given[rank], states[rank], Context(rank, 2, step), reuse=reuse) for rank in range(2)
        ]
        found.append(run_lockstep(runs))
        states = [result.value.state for result in found[-1]]
    return found


@pytest.mark.parametrize(
    ("settings", "reuse"),
    [({"rank": 3}, False), thorough({"rank": 1}, True), ({"rank": 2, "alternating": True}, True)],
    ids=str,
)
def test_steps_by_kernels_are_those_of_the_lines(settings: dict[str, int], reuse: bool) -> None:
    """Means, errors and bytes of two steps, to float32's rounding of sums of up to 140 products; ranks agree."""
    expected = steps(ErrorFeedback(PowerSGD(PowerSGD.Settings(**settings))), 2)
    with by_kernels():
        found = steps(ErrorFeedback(PowerSGD(PowerSGD.Settings(**settings))), 2, reuse)
    for by_rank, lines in zip(found, expected, strict=True):
        for result, line in zip(by_rank, lines, strict=True):
            assert result.payload_bytes == line.payload_bytes
            assert {key: one.shape for key, one in result.value.state.items()} == {
                key: one.shape for key, one in line.value.state.items()
            }
            for layer in LAYERS:
                mean = result.value.mean[layer.name]
                assert torch.equal(mean, by_rank[0].value.mean[layer.name])
                torch.testing.assert_close(mean, line.value.mean[layer.name], rtol=1e-4, atol=1e-4)
                error = result.value.compression_error[layer.name]
                torch.testing.assert_close(error, line.value.compression_error[layer.name], rtol=1e-4, atol=1e-4)
                if not reuse:
                    whole = result.value.own[layer.name] + error
                    torch.testing.assert_close(whole, result.value.compressor_input[layer.name], rtol=1e-5, atol=1e-5)


@law(st.integers(1, 5), st.integers(0, 5), st.sampled_from([1.0, 1e-30, 1e30]), st.integers(0, 30), examples=8)
def test_rows_are_orthonormal_and_span(rank: int, true_rank: int, scale: float, seed: int) -> None:
    """Several matrices at once, also with zeros, dependent rows and very different ones."""
    from gradlab.kernels.low_rank import LowRank, Matrix

    draw = torch.Generator().manual_seed(seed)
    named = {str(n): torch.randn(rank, true_rank, generator=draw) for n in (rank, rank + 1, 40, 70)}
    given = {n: rows @ torch.randn(true_rank, int(n), generator=draw) for n, rows in named.items()}
    given = {n: scale * rows * 10.0 ** torch.arange(rank).neg()[:, None] for n, rows in given.items()}
    with by_kernels():
        work = LowRank([Matrix(0, int(n), 5, rank) for n in given], torch.device("cpu"))
        found = separate(work.orthonormal(concatenate(given), False), given)
    for rows, basis in zip(given.values(), found.values(), strict=True):
        wide, sound = rows.double() / scale, basis.double()
        torch.testing.assert_close(sound @ sound.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-5)
        left = wide - wide @ sound.T @ sound
        assert bool((left.norm(dim=1) <= 2e-5 * wide.norm(dim=1)).all())


@pytest.mark.parametrize("bad", [torch.nan, thorough(torch.inf)])
def test_what_is_not_finite_shows_in_its_layer_alone(bad: float) -> None:
    given = gradients(0, 0)
    given["tall"][65, 3] = bad
    with by_kernels():
        [done] = run_lockstep([exchange_group(PowerSGD(), Batch.of(given, LAYERS), {}, Context(0, 1, 0))])
    assert [name for name, mean in done.value.mean.items() if not mean.isfinite().all()] == ["tall"]


def test_zeros_do_not_blind_the_next_step() -> None:
    zeros = {layer.name: torch.zeros(layer.shape) for layer in LAYERS}
    codec, state = PowerSGD(PowerSGD.Settings(rank=2)), Tensors()
    with by_kernels():
        for step, given in enumerate((zeros, gradients(0, 0))):
            runs = [exchange_group(codec, Batch.of(given, LAYERS), state, Context(0, 1, step))]
            [done] = run_lockstep(runs)
            state = done.value.state
            assert all(bool(value.isfinite().all()) for value in state.values())
            assert all(bool(mean.any()) == (given is not zeros) for mean in done.value.mean.values())


@pytest.mark.parametrize(
    "codec",
    [
        *(ErrorFeedback(PowerSGD(PowerSGD.Settings(rank=2, alternating=turns))) for turns in (False, True)),
        wrappers.get("dion")(codecs.make("identity")),
    ],
    ids=str,
)
def test_operations_do_not_grow_with_layers(codec: Codec) -> None:
    """At most 10 for each group with its feedback, and no wait. Kernels are counted, not run."""
    few, many = (work_of_steps(lambda: codec, layers, 3) for layers in (2, 40))
    assert few == many
    assert few.total() <= 10


@pytest.mark.parametrize("bad", [thorough(None), torch.nan, thorough(torch.inf)])
def test_dion_by_kernels_is_that_of_the_lines(bad: float | None) -> None:
    """Updates and momenta of three steps; rows of zeros and rounding errors keep their Q; what is not finite shows."""
    layers = [
        Layer("wide", (6, 40)),
        Layer("bias", (7,)),
        Layer("experts", (2, 8, 11), "experts"),
        Layer("low", (8, 9)),
    ]

    def run() -> tuple[list[Tensors], Tensors]:
        codec, state, updates = wrappers.get("dion")(codecs.make("identity")), Tensors(), []
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            given = {layer.name: torch.randn(layer.shape, generator=draw) for layer in layers}
            given["low"] = torch.outer(torch.ones(8), torch.arange(9.0))
            if bad is not None and step == 2:
                given["experts"][1, 2, 3] = bad
            [done] = run_lockstep([exchange_group(codec, Batch.of(given, layers), state, Context(0, 1, step))])
            state = done.value.state
            updates.append(done.value.mean)
        return updates, state

    expected, kept = run()
    with by_kernels():
        found, also = run()
    for mine, line in zip([*found, also], [*expected, kept], strict=True):
        assert mine.keys() == line.keys()
        for name, value in mine.items():
            if name.endswith("/q"):  # a row and its negative are as good
                value *= (value * line[name]).sum(-1, keepdim=True).sign()
            torch.testing.assert_close(value, line[name], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_unit_rows_of_many_rows() -> None:
    """Dion's factors have more rows than PowerSGD's kernels take."""
    from gradlab.kernels.low_rank import LowRank, Matrix

    rows, spares = torch.randn(40, 45), torch.ones(40, 45)
    rows[3] *= 1e-9
    with by_kernels():
        work = LowRank([Matrix(0, 50, 45, 40)], torch.device("cpu"))
        units, kept = work.unit_rows(rows.view(-1), spares.view(-1), 64 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(units.view(40, 45), unit_rows(rows))
    assert torch.equal(kept.view(40, 45)[3], spares[3])
