"""Emulated nodes: what they record and how they train, against real ranks and against slow oracles."""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jobs.emulated_tasks as tasks
from gradlab.capture import EmulatedNodes
from gradlab.collectives import sum_in_rank_order
from gradlab.ddp.optimizers import OptimizerSettings, describe_optimizer
from gradlab.errors import GradlabError
from gradlab.trace import Trace, check
from gradlab.trace.schema import TIMES
from support.command_line import Command
from support.process_pool import ProcessPool

# --- against real ranks ---------------------------------------------------------------------------------------------


def difference(one: Trace, other: Trace) -> list[float]:
    """Per step, ||a - b|| / ||a|| over all ranks and layers; exactly 0 only where all bits agree."""
    differences = []
    for a, b in zip(one.iterate(), other.iterate(), strict=True):
        assert a.index == b.index
        rows = [
            (ours[name], theirs[name]) for ours, theirs in zip(a.gradients, b.gradients, strict=True) for name in ours
        ]
        square = sum(float(np.square(x - y, dtype=np.float64).sum()) for x, y in rows)
        total = sum(float(np.square(x, dtype=np.float64).sum()) for x, _ in rows)
        assert total > 0
        differences.append((square / total) ** 0.5)
    return differences


def require_same_records(one: Trace, other: Trace) -> None:
    assert one.layers == other.layers
    for rank in range(one.world_size):
        a, b = one.scalars(rank), other.scalars(rank)
        for name in a.keys() - {*TIMES}:  # emulated ranks take turns
            np.testing.assert_array_equal(a[name], b[name], err_msg=f"rank {rank}: {name}")


@pytest.mark.parametrize(
    ("ranks", "in_rank_order"), [(2, False), (3, True), pytest.param(4, True, marks=pytest.mark.thorough)]
)
def test_a_recording_is_that_of_real_ranks_bit_for_bit(
    pool: ProcessPool, tmp_path: Path, ranks: int, in_rank_order: bool
) -> None:
    """Gradients, losses, unused layers, and the model: where DDP's mean is summed in rank order, or of two numbers."""
    models = pool.run("jobs.emulated_tasks:by_ranks", ranks, trace=str(tmp_path / "real"), in_rank_order=in_rank_order)
    assert tasks.by_emulation(tmp_path / "emulated", ranks) == models[0]
    with Trace(tmp_path / "real") as real, Trace(tmp_path / "emulated") as emulated:
        assert difference(real, emulated) == [0.0] * tasks.STEPS
        require_same_records(real, emulated)
        unused = {emulated.layers[i].name for i in np.flatnonzero(emulated.scalars(1)["unused"].all(axis=0))}
        assert unused == {"extra.weight", "extra.bias", "again.bias"}
        assert emulated.metadata["emulated"]
    assert check(tmp_path / "emulated").ok


def test_with_the_backends_own_order_a_recording_is_that_of_real_ranks_to_rounding(
    pool: ProcessPool, tmp_path: Path
) -> None:
    pool.run("jobs.emulated_tasks:by_ranks", 4, trace=str(tmp_path / "real"), in_rank_order=False)
    tasks.by_emulation(tmp_path / "emulated", 4)
    with Trace(tmp_path / "real") as real, Trace(tmp_path / "emulated") as emulated:
        differences = difference(real, emulated)
    assert differences[0] == 0.0
    assert max(differences[:4]) < 1e-3  # rounding, which training then multiplies; another batch or draw differs by 1


@pytest.mark.thorough
def test_the_command_records_what_real_ranks_record(gradlab: Command, tmp_path: Path) -> None:
    """Within a budget: it is told how many steps there will be, and these few fit whole."""
    reports, budget = [], 4_000_000
    for option, name in (("--ranks", "real"), ("--emulate", "emulated")):
        words = ["train", "digits", option, 2, "--steps", 4, "--batch-size", 16, "-s", "seed=3"]
        code, out, err = gradlab(*words, "--capture", tmp_path / name, "--budget", budget, "--json")
        assert code == 0, err
        assert "2 ranks, 4 steps (every step), " in err
        assert sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file()) <= budget
        reports.append(json.loads(out))
    real, emulated = reports
    assert set(emulated) - set(real) == {"emulated"}
    assert set(real) <= set(emulated)
    with Trace(tmp_path / "real") as one, Trace(tmp_path / "emulated") as other:
        assert difference(one, other) == [0.0] * 4
        assert not one.samples
        require_same_records(one, other)
    assert (emulated["losses"], emulated["scores"]) == (real["losses"], real["scores"])


def test_the_command_speaks_to_people_and_refuses_in_one_line(gradlab: Command, tmp_path: Path) -> None:
    words = ["train", "digits", "--emulate", 3, "--steps", 2, "--batch-size", 4, "--capture", tmp_path / "t"]
    code, out, err = gradlab(*words)
    assert code == 0, err
    assert "3 emulated nodes" in out
    assert "all nodes in turn" in out
    target = tmp_path / "other"
    cases: dict[str, list[object]] = {
        "nothing is overwritten": words,
        "not both": [*words, "--ranks", 2],
        "--emulate needs --capture": words[:-2],
        "no --compress": [*words[:-1], target, "--compress", tmp_path / "none.safetensors"],
        "need --emulate 2 or more": ["train", "digits", "--emulate", 1, "--capture", target],
        "expected at least 1": ["train", "digits", "--emulate", 0, "--capture", target],
        "use a smaller batch or fewer ranks": ["train", "digits", "--emulate", 400, "--capture", target],
    }
    for expected, attempt in cases.items():
        code, out, err = gradlab(*attempt)
        assert (code, out) == (2, ""), attempt
        assert err.startswith("gradlab: "), attempt
        assert expected in err, (attempt, err)
    assert not target.exists()


# --- the mean, and what belongs to a node ---------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers; `used` says which of them a forward pass goes through."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("left", "right"):
            layer = nn.Linear(3, 2, dtype=dtype)
            nn.init.normal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor, used: str = "both") -> torch.Tensor:
        parts = [getattr(self, name)(x) for name in ("left", "right") if used in (name, "both")]
        return torch.stack(parts).square().sum()


def inputs(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def alone(model: nn.Module, x: torch.Tensor, **keywords: Any) -> dict[str, torch.Tensor | None]:
    """Gradients of one micro-batch, on a copy."""
    other = copy.deepcopy(model)
    other.zero_grad()
    other(x, **keywords).backward()
    return {name: parameter.grad for name, parameter in other.named_parameters()}


def passes(nodes: EmulatedNodes, model: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32) -> None:
    for rank in range(nodes.world_size):
        with nodes.node(rank):
            model(inputs(step, rank, dtype)).backward()


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (2, torch.float64),
        (3, torch.float32),
        (7, torch.bfloat16),
        pytest.param(33, torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_the_mean_is_that_of_rank_order_and_the_trace_holds_each_gradient(
    tmp_path: Path, number: int, dtype: torch.dtype
) -> None:
    model = Two(dtype)
    apart = []
    with EmulatedNodes(model, tmp_path / "t", number) as nodes:
        for step in range(2):
            apart.append([alone(model, inputs(step, rank, dtype)) for rank in range(number)])
            passes(nodes, model, step, dtype)
            nodes.average()
            for name, parameter in model.named_parameters():
                expected = sum_in_rank_order([gradients[name] for gradients in apart[-1]])
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
    assert check(tmp_path / "t").ok
    with Trace(tmp_path / "t") as trace:
        for position, step in enumerate(trace.iterate()):
            for rank in range(number):
                for name, gradient in apart[position][rank].items():
                    assert np.array_equal(step.gradients[rank][name], gradient.to(torch.float32).numpy())


def test_a_layer_without_a_gradient_is_marked_and_counts_as_zero(tmp_path: Path) -> None:
    """As under DDP; where no node used it, .grad stays what it was."""
    model = Two()
    for before in (None, torch.zeros(2, 3)):
        folder = tmp_path / ("none" if before is None else "zeros")
        with EmulatedNodes(model, folder, 2) as nodes:
            model.zero_grad()
            model.left.weight.grad = before
            for rank in range(2):
                with nodes.node(rank):
                    model(inputs(0, rank), used="right").backward()
            nodes.average()
            assert model.left.weight.grad is before
            model.zero_grad()
            gradients = []
            for rank, used in enumerate(("both", "right")):
                gradients.append(alone(model, inputs(1, rank), used=used))
                with nodes.node(rank):
                    model(inputs(1, rank), used=used).backward()
            nodes.average()
            assert gradients[0]["left.weight"] is not None
            assert gradients[1]["left.weight"] is None
            assert torch.equal(model.left.weight.grad, gradients[0]["left.weight"] / 2)
            model.zero_grad()
        with Trace(folder) as trace:
            names = [layer.name for layer in trace.layers]
            left, right = names.index("left.weight"), names.index("right.weight")
            for rank, expected in enumerate(([True, False], [True, True])):
                unused = trace.scalars(rank)["unused"]
                assert unused[:, left].tolist() == expected
                assert not unused[:, right].any()
            assert not trace.read("left.weight", 1).any()


def test_buffers_are_those_of_node_0(tmp_path: Path) -> None:
    """Every node begins with what node 0 began with; the next step begins with what node 0 left."""
    norm = nn.BatchNorm1d(3)
    of_node_0, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with EmulatedNodes(norm, tmp_path / "t", 3) as nodes:
        for step in range(3):
            of_node_0.load_state_dict(reference.state_dict())
            for rank in range(3):
                with nodes.node(rank):
                    assert all(map(torch.equal, norm.buffers(), of_node_0.buffers()))
                    norm(inputs(step, rank)).square().sum().backward()
            nodes.average()
            reference(inputs(step, 0))
            assert all(map(torch.equal, norm.buffers(), reference.buffers()))
            assert norm.num_batches_tracked == step + 1
            norm.zero_grad()


def test_every_node_draws_from_its_own_stream_and_nobody_else_notices(tmp_path: Path) -> None:
    seed, ranks = 11, 3
    model, drawn = Two(), [[] for _ in range(ranks)]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with EmulatedNodes(model, tmp_path / "t", ranks, seed=seed) as nodes:
        for step in range(2):
            for rank in range(ranks):
                with nodes.node(rank):
                    drawn[rank].append(torch.rand(4))
                    model(inputs(step, rank)).backward()
            nodes.average()
            model.zero_grad()
    assert torch.equal(before, torch.get_rng_state())
    for rank in range(ranks):
        torch.manual_seed(seed + rank)
        assert torch.equal(torch.stack(drawn[rank]), torch.stack([torch.rand(4), torch.rand(4)]))


def test_a_node_that_failed_can_be_repeated_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Whichever node fails, before or after its backward pass: all bits as in a run without failures."""

    def fail(nodes: EmulatedNodes, rank: int, model: nn.Module, batch: Any) -> None:
        with nodes.node(rank):
            tasks.loss_of(model, batch, 0).backward()
            raise MemoryError

    def run(folder: Path, failing: int | None) -> tuple[str, Path]:
        model = tasks.everything()
        optimizer = tasks.optimizer_of(model)
        with EmulatedNodes(model, folder, 3, seed=tasks.SEED) as nodes:
            for _, *batches in zip(range(3), *map(tasks.micro_batches, range(3)), strict=False):
                optimizer.zero_grad(set_to_none=False)
                for rank, batch in enumerate(batches):
                    if rank == failing:
                        with pytest.raises(MemoryError):
                            fail(nodes, rank, model, batch)
                    with nodes.node(rank):
                        tasks.loss_of(model, batch, rank).backward()
                nodes.average()
                optimizer.step()
        return tasks.digest(model), folder

    expected, sound = run(tmp_path / "sound", None)
    for failing in range(3):
        result, folder = run(tmp_path / str(failing), failing)
        assert result == expected
        with Trace(sound) as one, Trace(folder) as other:
            assert difference(one, other) == [0.0] * 3
            require_same_records(one, other)


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_each_step_carries_its_values(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    settings: dict[str, Any] = {"metadata": {"note": "x"}, "dtype": "bfloat16"}
    with EmulatedNodes(model, tmp_path / "t", 2, optimizer=optimizer, scaler=scaler, **settings) as nodes:
        for step in range(3):
            for rank in range(2):
                with nodes.node(rank):
                    model(inputs(step, rank)).backward()
                    loss = model(inputs(step, rank))
                    (loss * (float("nan") if (step, rank) == (1, 1) else 1.0)).backward()
                    nodes.annotate(loss=10 * step + rank, **({"learning_rate": 0.5} if step == 2 else {}))
            nodes.average()
            model.zero_grad()
        report = nodes.close()
        assert nodes.close() == report
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert (report.steps_written, report.steps_lost, report.bytes_written) == (3, 0, 3 * 2 * elements * 2)
    with Trace(tmp_path / "t") as trace:
        for rank in range(2):
            scalars = trace.scalars(rank)
            assert scalars["index"].tolist() == [0, 1, 2]
            assert scalars["loss"].tolist() == [rank, 10 + rank, 20 + rank]
            assert scalars["learning_rate"].tolist() == [0.25, 0.25, 0.5]
            assert scalars["loss_scale"].tolist() == [128.0] * 3
            assert scalars["accumulation"].tolist() == [2] * 3
            assert scalars["non_finite"].tolist() == [0, elements * rank, 0]
        assert np.isnan(trace.read("left.weight", 1)).all(axis=1).tolist() == [False, True, False]
        assert (trace.dtype, trace.metadata["note"], trace.metadata["model"]) == ("bfloat16", "x", "Two")
        assert trace.metadata["plain_sgd"] is True
        assert OptimizerSettings.from_metadata(trace.metadata) == describe_optimizer(optimizer)


def test_steps_and_layers_can_be_chosen_and_all_are_averaged(tmp_path: Path) -> None:
    model = Two()
    model.right.bias.requires_grad_(False)
    model.right.weight = model.left.weight
    with EmulatedNodes(model, tmp_path / "t", 2, layers="*.weight", every=3, start=1, max_steps=2) as nodes:
        for step in range(10):
            expected = [alone(model, inputs(step, rank)) for rank in range(2)]
            passes(nodes, model, step)
            nodes.average()
            for name in ("left.weight", "left.bias"):
                mean = sum_in_rank_order([gradients[name] for gradients in expected])
                assert torch.equal(model.get_parameter(name).grad, mean)
            assert model.right.bias.grad is None
            model.zero_grad()
    with Trace(tmp_path / "t") as trace:
        assert trace.steps.tolist() == [1, 4]
        assert [layer.name for layer in trace.layers] == ["left.weight"]
        assert [layer.name for layer in trace.model_layers] == ["left.weight", "left.bias"]
        assert trace.unrecorded == trace.model_layers[1:]
        assert trace.remarks == ("1 of the model's 2 layers were not recorded, 25.0 % of its values",)


def test_sparse_gradients_are_recorded_dense(tmp_path: Path) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    rows = [torch.tensor([0, 0, 3]), torch.tensor([3, 5])]
    with EmulatedNodes(model, tmp_path / "t", 2) as nodes:
        for rank in range(2):
            with nodes.node(rank):
                model(rows[rank]).sum().backward()
        nodes.average()
    counts = torch.stack([torch.bincount(row, minlength=6) for row in rows]).float()
    assert model.weight.grad.is_sparse
    assert torch.equal(model.weight.grad.to_dense(), counts.mean(0)[:, None].expand(6, 2))
    with Trace(tmp_path / "t") as trace:
        for rank in range(2):
            assert np.array_equal(trace.read("weight", rank)[0].reshape(6, 2)[:, 0], counts[rank])


def test_a_step_that_was_not_averaged_is_lost_and_said_so(tmp_path: Path) -> None:
    model = Two()
    nodes = EmulatedNodes(model, tmp_path / "t", 3)
    for step in range(18):
        passes(nodes, model, step)
        nodes.average()
        model.zero_grad()
    with nodes.node(0):
        model(inputs(18, 0)).backward()
    report = nodes.close()
    assert (report.steps_written, report.steps_lost) == (18, 1)
    assert check(tmp_path / "t").ok
    with Trace(tmp_path / "t") as trace:
        assert trace.steps.tolist() == list(range(18))
        assert trace.rank_steps == (19, 18, 18)


def test_after_closing_the_model_is_as_free_as_before(tmp_path: Path) -> None:
    model = Two()
    with EmulatedNodes(model, tmp_path / "t", 2) as nodes:
        taken = copy.deepcopy(model)
        taken(inputs(0, 0)).backward()  # a copy is not being recorded
        with torch.no_grad():
            model(inputs(0, 0))
        model.eval()(inputs(0, 0)).backward()
        model.zero_grad()
        model.train()
        passes(nodes, model)
        nodes.average()
        model.zero_grad()
    model(inputs(0, 0)).backward()
    with pytest.raises(GradlabError, match="closed"), nodes.node(0):
        pass


# --- refusals -------------------------------------------------------------------------------------------------------


def test_nodes_come_in_order_and_all_of_them(tmp_path: Path) -> None:
    model = Two()

    def visit(rank: Any) -> Callable[[], None]:
        def attempt() -> None:
            with nodes.node(rank):
                model(inputs(0, rank)).backward()

        return attempt

    def require(expected: str, attempt: Callable[[], Any]) -> None:
        with pytest.raises(GradlabError) as error:
            attempt()
        assert expected in str(error.value)
        assert "\n" not in str(error.value)

    with EmulatedNodes(model, tmp_path / "t", 3) as nodes:
        require("0 of 3 nodes have made their pass in step 0", nodes.average)
        require("node 1: node 0 is next in step 0; none may be skipped", visit(1))
        require("node -1: expected a node from 0 to 2", visit(-1))
        require("node True: expected a node", visit(True))
        require("outside of a node", lambda: nodes.annotate(loss=1.0))
        require("training forward pass outside of a node", lambda: model(inputs(0, 0)))
        visit(0)()
        require("node 0: it has made its pass in step 0; node 1 is next", visit(0))
        require("node 2: node 1 is next", visit(2))
        require("1 of 3 nodes", nodes.average)
        with nodes.node(1):
            require("node 1 is still at work", visit(2))
            require("1 of 3 nodes", nodes.average)
            model(inputs(0, 1)).backward()
        visit(2)()
        require("node 0: all 3 nodes have made their pass; call average()", visit(0))
        require("node 3: expected a node from 0 to 2", visit(3))
        nodes.average()
        require("left.weight: a gradient is left over", visit(0))
        model.zero_grad(set_to_none=False)
        visit(0)()
    with Trace(tmp_path / "t") as trace:
        assert trace.steps.tolist() == [0]


def test_a_step_is_taken_after_the_mean_only(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with EmulatedNodes(model, tmp_path / "first", 2) as nodes:
        with nodes.node(0):
            model(inputs(0, 0)).backward()
            optimizer.step()
        with pytest.raises(GradlabError, match=r"left\.weight has changed .* after average"), nodes.node(1):
            pass
    optimizer.zero_grad()
    with EmulatedNodes(model, tmp_path / "last", 2) as nodes:
        passes(nodes, model)
        model.left.bias.data = model.left.bias.data  # the same values: no change
        with torch.no_grad():
            model.left.bias += 1
        with pytest.raises(GradlabError, match=r"left\.bias has changed"):
            nodes.average()


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_layers_that_come_later_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    with EmulatedNodes(model, tmp_path / "trace", world_size=2) as nodes:
        for rank in range(2):
            with nodes.node(rank):
                model(torch.ones(1, 4)).sum().backward()
        nodes.average()
        model[0].requires_grad_(True)
        with pytest.raises(GradlabError, match=r"0\.weight was replaced, added or unfrozen"), nodes.node(0):
            pass
        model[0].requires_grad_(False)
        model[1] = nn.Linear(3, 2)
        with pytest.raises(GradlabError, match=r"1\.weight was replaced"), nodes.node(0):
            pass


def test_refusals_come_before_anything_is_written(pool: ProcessPool, tmp_path: Path) -> None:
    path, model = tmp_path / "t", Two()
    lazy, synchronised = nn.LazyLinear(2), nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    huge = nn.Linear(10**6, 10**6, device="meta")
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("got a str", lambda: EmulatedNodes("model", path, 2)),  # type: ignore[arg-type]
        ("lazy module", lambda: EmulatedNodes(lazy, path, 2)),
        ("SyncBatchNorm", lambda: EmulatedNodes(synchronised, path, 2)),
        ("world_size is 0", lambda: EmulatedNodes(model, path, 0)),
        ("world_size is 2.0", lambda: EmulatedNodes(model, path, 2.0)),  # type: ignore[arg-type]
        ("seed is -1", lambda: EmulatedNodes(model, path, 2, seed=-1)),
        ("every is 0", lambda: EmulatedNodes(model, path, 2, every=0)),
        ("dtype is 'int8'", lambda: EmulatedNodes(model, path, 2, dtype="int8")),
        ("metadata is a list", lambda: EmulatedNodes(model, path, 2, metadata=[])),  # type: ignore[arg-type]
        ("matches no trainable layer", lambda: EmulatedNodes(model, path, 2, layers="lost.*")),
        ("none of the model's trainable", lambda: EmulatedNodes(nn.ReLU(), path, 2)),
        ("record fewer layers", lambda: EmulatedNodes(huge, path, 2)),
    ]
    for expected, attempt in attempts:
        with pytest.raises(GradlabError) as error:
            attempt()
        assert expected in str(error.value)
        assert "\n" not in str(error.value)
    with open_files(150), pytest.raises(GradlabError, match="ulimit -n 164"):
        EmulatedNodes(model, path, 50)
    messages = pool.run("jobs.emulated_tasks:refused_in_ddp", 1, trace=str(path))[0]
    assert len(messages) == 2
    assert all("in DistributedDataParallel" in line for line in messages)
    assert not path.exists()
    (path / "precious").mkdir(parents=True)
    with pytest.raises(GradlabError, match="nothing is overwritten"):
        EmulatedNodes(model, path, 2)


def test_one_node_alone_is_recorded_with_a_warning(tmp_path: Path) -> None:
    model = Two()
    with pytest.warns(UserWarning, match="one node alone"):
        nodes = EmulatedNodes(model, tmp_path / "t", 1)
    expected = alone(model, inputs(0, 0))["left.weight"]
    with nodes:
        passes(nodes, model)
        nodes.average()
    assert torch.equal(model.left.weight.grad, expected)
