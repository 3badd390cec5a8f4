"""One cell of the matrix codec x DDP option x number of ranks: training, against what lockstep makes of it.

Every rank computes all ranks' gradients on a copy of the model without DDP, runs the plan on them in this process,
and compares with what DDP and the engine gave: bit for bit where a cell says so, else to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from gradlab import codecs
from gradlab.codec import Compressor, Context, Tensors, exchange_group
from gradlab.codec.routes import sums_in_shards
from gradlab.codec.wrapper import innermost
from gradlab.codecs.identity import Identity
from gradlab.collectives import mean_of_node, run_lockstep
from gradlab.ddp.groups import part_of
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of, names_of_parameters
from gradlab.runtime import CompressionState, compression_hook
from support.pool_groups import SPARE
from support.stacks import Stack

STEPS = 7


class Network(nn.Module):
    """A trunk, a branch that a step may leave out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.branch = nn.Linear(128, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor, branch: bool = True) -> torch.Tensor:
        features = self.trunk(images)
        return self.head(features + torch.tanh(self.branch(features)) if branch else features)


def always(rank: int, step: int) -> bool:
    return True


def sometimes(rank: int, step: int) -> bool:
    """Left out by rank 0 in step 2, by all in steps 3 and 5."""
    return not ((rank == 0 and step == 2) or step in (3, 5))


@dataclass(frozen=True)
class Option:
    """What a cell does besides training.

    ddp: arguments for DDP; uses_branch: by rank and step; micro_batches: accumulated under no_sync; dtype: of the
    model; autocast: to this dtype; scaled: under a GradScaler whose scale changes; compiled: "inside" DDP or "around"
    it; frozen_from: the branch stops training at this step; overflow_at: rank 0's gradients are infinite in this one;
    together: models trained at once; part: of a larger world; local_ranks: of a node, where nodes exchange means;
    tolerance: largest relative difference from lockstep, 0 for bit for bit.
    """

    ddp: dict[str, Any] = field(default_factory=dict)
    uses_branch: Callable[[int, int], bool] = always
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    compiled: str = ""
    frozen_from: int = STEPS
    overflow_at: int = -1
    together: int = 1
    part: bool = False
    local_ranks: int = 1
    tolerance: float = 0.0

    def fits(self, world_size: int) -> bool:
        """Whether ranks fill several nodes."""
        return world_size % self.local_ranks == 0 and world_size > self.local_ranks


UNUSED = {"find_unused_parameters": True}
OPTIONS: dict[str, Option] = {
    "default": Option(),
    "find_unused_parameters": Option(ddp=UNUSED, uses_branch=sometimes),
    "find_unused, no_sync": Option(ddp=UNUSED, uses_branch=sometimes, micro_batches=2),
    "find_unused, bucket view": Option(ddp=UNUSED | {"gradient_as_bucket_view": True}, uses_branch=sometimes),
    "static_graph": Option(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Option(ddp={"gradient_as_bucket_view": True}),
    "no_sync": Option(micro_batches=3),
    "part of the world": Option(part=True),
    "two models": Option(together=2),
    "compiled inside": Option(compiled="inside", tolerance=1e-5),
    "compiled around": Option(compiled="around", tolerance=1e-5),
    "frozen mid-run": Option(ddp=UNUSED, frozen_from=3),
    "bf16 model": Option(dtype=torch.bfloat16),
    "fp16 model": Option(dtype=torch.float16),
    "autocast bf16": Option(autocast=torch.bfloat16),
    "autocast fp16, GradScaler": Option(autocast=torch.float16, scaled=True, tolerance=0.02),
    "GradScaler": Option(scaled=True),
    "GradScaler, overflow": Option(scaled=True, overflow_at=3),
    "find_unused, overflow": Option(ddp=UNUSED, uses_branch=sometimes, scaled=True, overflow_at=3),
    "nodes of 2": Option(local_ranks=2),
    "nodes of 2, find_unused": Option(local_ranks=2, ddp=UNUSED, uses_branch=sometimes),
    "nodes of 2, bf16 model": Option(local_ranks=2, dtype=torch.bfloat16),
    "nodes of 2, overflow": Option(local_ranks=2, scaled=True, overflow_at=3),
    "nodes of 2, bucket view": Option(local_ranks=2, ddp=UNUSED | {"gradient_as_bucket_view": True}),
    "nodes of 2, no_sync": Option(local_ranks=2, micro_batches=3),
    "nodes of 2, part of the world": Option(local_ranks=2, part=True),
    "nodes of 3": Option(local_ranks=3),
    "mixed_precision": Option(ddp={"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16)}),
}


def rows() -> dict[str, Stack]:
    """The matrix's other axis: every codec with feedback, and the other kinds of wrappers once."""
    stacks = {f"{codec} + feedback": Stack(codec, "feedback") for codec in codecs.names()}
    quantizers = [codec for codec in codecs.names() if hasattr(codecs.make(codec).settings, "aggregation")]
    gathered = {f"{codec} gathered + feedback": Stack(codec, "feedback", gathered=True) for codec in quantizers}
    return (
        stacks
        | gathered
        | {
            "topk + correction": Stack("topk", "correction"),
            "qsgd + two-way": Stack("qsgd", "two-way under feedback"),
        }
    )


def run_cell(group: dist.ProcessGroup, row: str, option: str) -> str:
    """ "passed", "passed, 3e-06 off", or "refused: why"; anything else is what went wrong."""
    try:
        with small_first_bucket() if OPTIONS[option].compiled else nullcontext():
            worst = Cell(group, rows()[row], OPTIONS[option]).run()
    except GradlabError as error:
        return f"refused: {error}"
    allowed = OPTIONS[option].tolerance
    if worst > allowed:
        return f"FAILED: {worst:.1e} off lockstep"
    return "passed" if worst == 0 else f"passed, {worst:.0e} off"


@contextmanager
def small_first_bucket() -> Iterator[None]:
    """torch.compile splits the graph where DDP's buckets end, and asserts that the first is no larger than others."""
    torch._dynamo.reset()
    usual = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = usual
        torch._dynamo.reset()


def in_parallel(
    module: nn.Module, mixed_precision: _MixedPrecision | None, settings: dict[str, Any]
) -> DistributedDataParallel:
    """The module in DDP."""
    try:
        return DistributedDataParallel(module, mixed_precision=mixed_precision, **settings)
    except RuntimeError:
        # For mixed precision DDP takes a stream, which PyTorch's CUDA build has not got without a driver. The state
        # has to refuse it there, too.
        if mixed_precision is None or torch.version.cuda is None or torch.cuda.is_available():
            raise
        ddp = DistributedDataParallel(module, **settings)
        ddp.mixed_precision = mixed_precision
        return ddp


def node_group(group: dist.ProcessGroup, local_ranks: int) -> dist.ProcessGroup | None:
    """The group of this rank's node, if nodes have several ranks."""
    ranks = dist.get_process_group_ranks(group)
    first = dist.get_rank(group) // local_ranks * local_ranks
    return part_of((group,), ranks[first : first + local_ranks], None, torch.device("cpu")) if local_ranks > 1 else None


class Cell:
    """The training runs of one cell."""

    def __init__(self, group: dist.ProcessGroup, stack: Stack, option: Option) -> None:
        self.group, self.option = group, option
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.stack = stack
        self.nodes, self.node = self.world_size // option.local_ranks, self.rank // option.local_ranks
        self.within = node_group(group, option.local_ranks)

    def node_means(self, by_rank: list[Tensors]) -> list[Tensors]:
        """What the nodes exchange."""
        count = self.option.local_ranks
        nodes = [by_rank[first : first + count] for first in range(0, len(by_rank), count)]
        return [{name: mean_of_node([grads[name] for grads in ranks]) for name in ranks[0]} for ranks in nodes]

    def run(self) -> float:
        """The largest relative difference of an applied gradient from lockstep's."""
        runs = [_Training(self, seed) for seed in range(self.option.together)]
        try:
            worst = max(run.step(step) for step in range(STEPS) for run in runs)
            for run in runs:
                run.check_nothing_is_lost()
            return worst
        finally:
            for run in runs:
                run.state.close()


class _Training:
    """One model under DDP with its shadow."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.option, self.seed = cell, cell.option, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.shadow = Network().to(self.option.dtype)
        self.model, self.ddp = self._wrapped(deepcopy(self.shadow))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=self.option.scaled)
        self.plan = cell.stack.plan(layers_of(self.ddp))
        self.state = CompressionState(
            self.plan,
            self.ddp,
            optimizer=self.optimizer,
            scaler=self.scaler if self.option.scaled else None,
            deterministic=True,
            measure_every=1,
            process_group=SPARE.get(cell.world_size),
            within=cell.within,
        )
        self.ddp.register_comm_hook(self.state, compression_hook)
        self.lockstep = LockstepPlan(
            self.plan,
            cell.nodes,
            plain_sgd=True,
            hold_unused=self.ddp.find_unused_parameters or self.ddp.static_graph,
        )
        compressed = [name for group in self.plan.compressed_groups for name in group.layers]
        self.given = {name: torch.zeros(()) for name in compressed}
        self.applied = {name: torch.zeros(()) for name in compressed}

    def _wrapped(self, module: nn.Module) -> tuple[nn.Module, DistributedDataParallel]:
        """What is called, and the DDP in it."""
        inner = torch.compile(module, backend="aot_eager") if self.option.compiled == "inside" else module
        settings = {"process_group": self.cell.group, "bucket_cap_mb": 0.004, **self.option.ddp}
        ddp = in_parallel(inner, settings.pop("mixed_precision", None), settings)
        return (torch.compile(ddp, backend="aot_eager") if self.option.compiled == "around" else ddp), ddp

    def step(self, step: int) -> float:
        """Train a step; the largest relative difference from what lockstep gives."""
        if step == self.option.frozen_from:
            for module in (self.ddp.module, self.shadow):
                module.branch.requires_grad_(False)
        scale = self.scaler.get_scale() if self.option.scaled else 1.0
        expected = self._expected(step, scale)
        self.optimizer.zero_grad()
        last = self.option.micro_batches - 1
        for part in range(last + 1):
            with nullcontext() if part == last else self.ddp.no_sync():
                self._backward(self.model, self.cell.rank, step, part)
        worst = max(self._compare(expected, scale), self._compare_states())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._copy_parameters()
        return worst

    def _backward(self, model: nn.Module, rank: int, step: int, part: int) -> None:
        draw = torch.Generator().manual_seed(100_000 * self.seed + 1000 * step + 10 * rank + part)
        images = torch.randn(6, 1, 8, 8, generator=draw).to(self.option.dtype)
        labels = torch.randint(10, (6,), generator=draw)
        kind = self.option.autocast
        with torch.autocast("cpu", dtype=kind) if kind else nullcontext():
            scores = model(images, self.option.uses_branch(rank, step))
        loss = self.scaler.scale(nn.functional.cross_entropy(scores.float(), labels))
        (loss * torch.inf if step == self.option.overflow_at and rank == 0 else loss).backward()

    def _local(self, rank: int, step: int, scale: float) -> tuple[Tensors, set[str]]:
        """A rank's gradients, zero where it has none, without the loss scale; and which it has."""
        self.shadow.zero_grad()
        for part in range(self.option.micro_batches):
            self._backward(self.shadow, rank, step, part)
        local = {name: p.grad for name, p in self.shadow.named_parameters()}
        grads = {
            name: torch.zeros_like(p) if local[name] is None else local[name] / scale
            for name, p in self.shadow.named_parameters()
        }
        return grads, {name for name, grad in local.items() if grad is not None}

    def _expected(self, step: int, scale: float) -> dict[str, torch.Tensor | None]:
        """What every rank should apply in this step, by layer; None where no rank has a gradient."""
        everyone = [self._local(rank, step, scale) for rank in range(self.cell.world_size)]
        used = set().union(*(one[1] for one in everyone))
        gradients = self.cell.node_means([one[0] for one in everyone])
        rates = {layer.name: self.optimizer.param_groups[0]["lr"] for layer in self.plan.layers}
        done = self.lockstep.step(step, gradients, rates, loss_scale=scale)
        exchanged = {name: mean for ranks in done.exchanged.values() for name, mean in ranks[0].mean.items()}
        dense = {name: [grads[name] for grads in gradients] for name in gradients[0] if name not in exchanged}
        expected: dict[str, torch.Tensor | None] = dict(exchanged)
        for name, tensors in dense.items():
            lone = [exchange_group(Identity(), {name: t}, {}, Context(0, len(tensors), step)) for t in tensors]
            expected[name] = run_lockstep(lone)[0].value.mean[name]
        for name in set(expected) - used:  # DDP drops it: what was due must still be there in the next step
            expected[name] = None
        self.finite = done.finite
        for name in self.given if done.finite else ():
            self.given[name] = self.given[name] + torch.stack([grads[name].double() for grads in gradients]).mean(0)
        return expected

    def _compare(self, expected: dict[str, torch.Tensor | None], scale: float) -> float:
        worst = 0.0
        if not self.finite:
            assert all(p.grad is None or p.grad.isnan().all() for p in self.ddp.parameters()), "one rank's infinity"
            return worst
        names = names_of_parameters(self.ddp)
        for full, parameter in self.ddp.named_parameters():
            wanted = expected[name := names[id(parameter)]]
            if wanted is None:
                assert parameter.grad is None or not parameter.grad.any(), f"{full} got a gradient from nowhere"
                continue
            got = parameter.grad / scale
            if name in self.applied:
                self.applied[name] = self.applied[name] + got.double()
            assert got.isfinite().all(), f"{full}: not finite"
            if not torch.equal(got, wanted):
                worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
        return worst

    def _compare_states(self) -> float:
        """The largest relative difference of a state, or of a learning rate that residuals are kept in."""
        theirs, ours = self.lockstep.runs[self.cell.node], self.state.run
        own = [layer for group in ours.groups.values() for layer in group.layers]
        assert all(ours.learning_rates.get(layer) == theirs.learning_rates.get(layer) for layer in own)
        worst = 0.0
        for group in ours.groups.keys() & theirs.states.keys():
            expected = theirs.states[group]
            assert ours.states[group].keys() == expected.keys()
            for key, wanted in expected.items():
                if not torch.equal(ours.states[group][key], wanted):
                    gap = (ours.states[group][key].double() - wanted.double()).abs().max()
                    worst = max(worst, float(gap / wanted.double().abs().max()))
        return worst

    def check_nothing_is_lost(self) -> None:
        """What the ranks' gradients were, summed over steps, is what was applied and what is still due."""
        if self.cell.stack.wrapping != "feedback":
            return
        for group in self.plan.compressed_groups:
            codec = innermost(self.plan.build(group))
            if isinstance(codec, Compressor) and sums_in_shards(codec, self.cell.nodes):
                continue  # the mean is quantized once more, which nobody's residual holds
            for name in group.layers:
                own = self.state.run.states.get(group.name, {}).get(f"{name}/residual")
                due = torch.zeros_like(self.given[name]) if own is None else own.double()
                dist.all_reduce(due, group=self.cell.group)
                left = self.given[name] - self.applied[name] - due / self.cell.nodes
                share = float(left.norm() / (self.given[name].norm() + self.applied[name].norm() + due.norm()))
                assert share < self._rounding(), f"{name}: {share:.1e} of the gradient is lost"

    def _rounding(self) -> float:
        """What 16 bits lose of a mean, which no rank's residual knows; else float32's rounding."""
        narrow = self.option.dtype != torch.float32 or self.cell.stack.codec == "cast"
        return 1e-2 if narrow else 1e-5

    def _copy_parameters(self) -> None:
        """The shadow follows the model; and the ranks' models are the same."""
        flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in self.ddp.parameters()])
        rows = [torch.empty_like(flat) for _ in range(self.cell.world_size)]
        dist.all_gather(rows, flat, group=self.cell.group)
        assert all(torch.equal(row, flat) for row in rows), "ranks disagree"
        with torch.no_grad():
            for ours, theirs in zip(self.shadow.parameters(), self.ddp.parameters(), strict=True):
                ours.copy_(theirs)
