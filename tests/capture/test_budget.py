"""Recording within a budget of bytes: what is sampled, how large the files get, what is said and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

import jobs.budget_tasks as tasks
from gradlab.capture import EmulatedNodes, TraceWriter
from gradlab.capture.budget import Recording, plan_recording
from gradlab.capture.settings import StepSettings
from gradlab.errors import GradlabError
from gradlab.formatting import parse_bytes
from gradlab.layout import Layer
from gradlab.trace import Trace, check
from gradlab.trace.schema import block_steps
from support.laws import law
from support.process_pool import ProcessPool

LARGE = Layer("large.weight", (1024, 256), "linear")


def files_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def plan(*layers: Layer, ranks: int = 2, **settings: object) -> Recording:
    return plan_recording(layers, ranks, StepSettings(**settings))  # type: ignore[arg-type]


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_trace_within_a_budget_holds_blocks_of_the_full_one_bit_for_bit(tmp_path: Path) -> None:
    tasks.by_emulation(tmp_path / "full")
    tasks.by_emulation(tmp_path / "part", budget=tasks.BUDGET)
    require_blocks(tmp_path / "full", tmp_path / "part")


def test_ranks_record_the_same_blocks_of_the_full_trace_bit_for_bit(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run("jobs.budget_tasks:by_ranks", tasks.RANKS, trace=str(tmp_path / "full"))
    lines = pool.run("jobs.budget_tasks:by_ranks", tasks.RANKS, trace=str(tmp_path / "part"), budget=tasks.BUDGET)
    require_blocks(tmp_path / "full", tmp_path / "part")
    assert len(set(lines)) == 1
    with Trace(tmp_path / "part") as part:
        assert f"{len(part.steps)} steps (every step)" in lines[0]
        assert part.extent in lines[0]


def require_blocks(full: Path, part: Path) -> None:
    """The samples are large layers', smaller than they, and equal to these blocks of the full trace."""
    with Trace(full) as whole, Trace(part) as sampled:
        assert set(sampled.samples) == {"wide.weight", "convolution.weight"}
        assert sampled.model_layers == whole.layers
        assert not whole.samples
        for step in whole.iterate():
            others = next(sampled.iterate(step.position, step.position + 1))
            for ours, theirs in zip(step.gradients, others.gradients, strict=True):
                for name, gradient in ours.items():
                    blocks = sampled.samples.get(name)
                    expected = torch.from_numpy(gradient)
                    expected = expected if blocks is None else blocks.take(expected)
                    assert torch.equal(torch.from_numpy(theirs[name]), expected), name
        assert check(part).ok
    assert files_bytes(part) <= tasks.BUDGET < files_bytes(full)


# --- steps or samples -------------------------------------------------------------------------------------------------


def test_without_a_budget_all_is_recorded() -> None:
    size = plan(LARGE, every=3, max_steps=5, expected_steps=1000)
    assert (size.settings.every, size.settings.max_steps, size.steps, size.samples) == (3, 5, 5, ())


def test_steps_are_left_out_evenly_before_layers_are_sampled() -> None:
    size = plan(LARGE, budget=100 * 2 * 4 * LARGE.numel + 200_000, expected_steps=1000)
    assert not size.samples
    assert size.settings.every == 10
    assert size.steps == 100


def test_layers_are_sampled_rather_than_fewer_than_64_steps_recorded() -> None:
    size = plan(LARGE, budget="64MB", expected_steps=1000)
    assert size.samples
    assert 64 <= (size.steps or 0) < 70
    last = (size.steps or 0) * size.settings.every
    assert 1000 - size.settings.every < last <= 1000 + size.settings.every


def test_steps_of_a_run_of_unknown_length_are_its_first_ones() -> None:
    size = plan(LARGE, budget="64MB", every=7)
    assert (size.settings.every, size.settings.max_steps) == (7, 64)
    assert size.settings.wants(7 * 63, 63)


def test_the_line_says_bytes_steps_and_shares() -> None:
    size = plan(LARGE, Layer("bias", (1024,), "bias"), budget="64MB", expected_steps=640)
    assert str(size).startswith("397 kB per step and rank, 2 ranks, 64 steps (every 10 steps), ")
    assert "of 1 layer (large.weight), 1 layer whole" in str(size)


@law(
    st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=2) | st.just([20, 30, 9]), min_size=1, max_size=4),
    st.integers(1, 12),
    st.floats(0.2, 1.2),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([2**18, 2**30]),
    examples=24,
)
def test_files_never_exceed_the_budget(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    steps: int,
    share: float,
    dtype: str,
    segment_bytes: int,
) -> None:
    layers = [Layer(f"block.{i}.weight", tuple(shape), "linear") for i, shape in enumerate(shapes)]
    assume(sum(layer.numel for layer in layers) * steps < 4_000_000)
    full = 2 * steps * sum(layer.numel for layer in layers) * (4 if dtype == "float32" else 2)
    settings = {"dtype": dtype, "segment_bytes": segment_bytes, "expected_steps": steps}
    try:
        size = plan(*layers, budget=int(share * full) + 150_000, **settings)
    except GradlabError as refusal:
        least = int(str(refusal).split("budget that works is ")[1].split(" ")[0])
        size = plan(*layers, budget=least, **settings)
    folder = tmp_path_factory.mktemp("budget") / "trace"
    with TraceWriter(
        folder, size.layers, 2, dtype=dtype, segment_bytes=segment_bytes, samples=size.samples, most_steps=size.steps
    ) as writer:
        zeros = {layer.name: torch.zeros(layer.shape) for layer in size.layers}
        for rank in range(2):
            for step in range(size.steps or 0):
                writer.append(rank, step, zeros)
    assert files_bytes(folder) <= (size.nbytes or 0) <= (parse_bytes(size.settings.budget or 0))


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(GradlabError, match="budget is 1kB, but 2 steps of the smallest samples on 2 ranks") as caught:
        plan(LARGE, budget="1kB")
    least = int(str(caught.value).split("budget that works is ")[1].split(" ")[0])
    assert plan(LARGE, budget=least).steps == 2
    with pytest.raises(GradlabError, match=f"the smallest budget that works is {least} bytes"):
        plan(LARGE, budget=least - 1)


@pytest.mark.parametrize("budget", ["", "20 apples", "-1GB", 0, 1.5, "0MB", "iB"])
def test_what_is_no_number_of_bytes_is_refused(tmp_path: Path, budget: object) -> None:
    with pytest.raises(GradlabError, match=r"budget is .*, expected bytes from 1 on, such as 20GB"):
        EmulatedNodes(nn.Linear(2, 2), tmp_path / "trace", 2, budget=budget)
    assert not (tmp_path / "trace").exists()


def test_bytes_have_decimal_and_binary_units() -> None:
    assert parse_bytes("20GB") == 20 * 10**9
    assert parse_bytes("1.5 MiB") == 3 * 2**19
    assert parse_bytes("512k") == 512_000
    assert parse_bytes(7) == parse_bytes("7") == parse_bytes("7B") == 7


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 33, 97, 100, 1000])
def test_blocks_leave_little_of_the_last_one_empty(steps: int) -> None:
    rows = block_steps(4, steps)
    assert 1 <= rows <= 16
    assert rows >= min(steps, 8)
    assert -(-steps // rows) * rows - steps <= max(1, steps // 32)


# --- short recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_a_short_recording_takes_the_bytes_of_its_steps(tmp_path: Path, known: bool) -> None:
    layer = Layer("weight", (1 << 20,), "linear")
    with TraceWriter(tmp_path / "trace", [layer], 1, most_steps=2 if known else None) as writer:
        for step in range(2):
            writer.append(0, step, {"weight": torch.zeros(layer.shape)})
    assert files_bytes(tmp_path / "trace") < 2 * 4 * layer.numel + 50_000


def test_a_step_of_a_large_model_is_written_without_waiting_for_others(tmp_path: Path) -> None:
    layer = Layer("weight", (1 << 25,), "linear")
    with TraceWriter(tmp_path / "trace", [layer], 1, dtype="bfloat16") as writer:
        writer.append(0, 0, {"weight": torch.zeros(()).expand(layer.shape)})
        assert files_bytes(tmp_path / "trace") >= 2 * layer.numel
