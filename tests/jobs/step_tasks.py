"""Tasks for real ranks: several synchronised backward passes between two optimizer steps, dropped or added up."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.capture import TraceRecorder
from gradlab.plan import Plan, Schedule, Wrap
from gradlab.runtime import compress_fsdp
from gradlab.trace import Trace
from jobs.fsdp_tasks import mesh_of, sharded
from support.pool_groups import SPARE

STEPS = 6
CODECS: dict[str, dict[str, Any]] = {"topk": {"density": 0.05}, "powersgd": {"rank": 2}, "qsgd": {"bits": 2}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Run:
    """A small model under a plan, with what its optimizer applied and what it was meant to."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: str = "topk",
        optimizer: str = "sgd",
        zeros: bool = False,
        view: bool = False,
        warmup: int = 2,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.group, self.zeros = group, zeros
        self.net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        self.model = DistributedDataParallel(
            self.net, process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=view
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        plan = Plan.uniform(self.model, codec, wrappers=[Wrap("error_feedback")], **CODECS[codec])
        self.state = gradlab.compress(
            self.model,
            replace(plan, schedule=Schedule(warmup_steps=warmup)),
            optimizer=self.optimizer,
            process_group=SPARE.get(dist.get_world_size(group)),
            **options,
        )
        self.applied, self.meant = self._none(), self._none()
        self._draw = torch.Generator().manual_seed(dist.get_rank(group))

    def _none(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.net.named_parameters()}

    def batch(self) -> torch.Tensor:
        return torch.randn(8, 16, generator=self._draw)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.zeros)

    def backward(self, inputs: torch.Tensor, meant: bool = True, between: Callable[[], None] = lambda: None) -> None:
        """A synchronised pass. meant: whether its gradient is to be applied; between: forward and backward."""
        if meant:
            names = dict(self.net.named_parameters())
            gradients = torch.autograd.grad(self.net(inputs).square().mean(), list(names.values()))
            for name, gradient in zip(names, gradients, strict=True):
                mean = gradient.double() / dist.get_world_size(self.group)
                dist.all_reduce(mean, group=self.group)
                self.meant[name] += mean
        loss = self.model(inputs).square().mean()
        between()
        loss.backward()

    def step_with_closure(self) -> None:
        """As Lightning does: the backward pass is within the step."""
        inputs = self.batch()

        def closure() -> None:
            self.clear()
            self.backward(inputs)
            self._note()

        self.optimizer.step(closure)  # type: ignore[arg-type]  # which may give no loss

    def step(self) -> None:
        self._note()
        self.optimizer.step()

    def _note(self) -> None:
        for name, parameter in self.net.named_parameters():
            assert parameter.grad is not None
            self.applied[name] += parameter.grad.double()

    def missing(self) -> float:
        """Of what was meant, the largest share that was neither applied nor is in the mean residual."""
        worst = 0.0
        held = {key.partition("::")[2]: value for key, value in self.state.state_dict()["states"].items()}
        for name, meant in self.meant.items():
            residual = held.get(f"{name}/residual", torch.zeros(meant.shape)).double() / dist.get_world_size(self.group)
            dist.all_reduce(residual, group=self.group)
            worst = max(worst, float((self.applied[name] + residual - meant).norm() / meant.norm()))
        return worst

    @property
    def iteration(self) -> int:
        """As a checkpoint has it: without an exchange that no optimizer step has followed."""
        return int(self.state.state_dict()["iteration"])

    def outcome(self) -> dict[str, torch.Tensor]:
        return {**self.net.state_dict(), **self.state.state_dict()["states"]}


def plain(run: Run, extra: bool = False) -> None:
    for _ in range(STEPS):
        run.clear()
        run.backward(run.batch())
        run.step()


def bad_batches(run: Run, extra: bool, bad: tuple[int, ...] = (1, 3, 4)) -> None:
    """In some steps a first batch is left out after its backward pass."""
    noise = torch.Generator().manual_seed(99)
    for step in range(STEPS):
        if extra and step in bad:
            run.backward(torch.randn(8, 16, generator=noise), meant=False)
            run.clear()
        run.backward(run.batch())
        run.step()
        run.clear()


def adversary(run: Run, extra: bool) -> None:
    """As a GAN's discriminator: after each step another network's loss passes through, and is dropped late."""
    noise = torch.Generator().manual_seed(99)
    for _ in range(STEPS):
        run.backward(run.batch(), between=run.clear)
        run.step()
        if extra:
            run.backward(torch.randn(8, 16, generator=noise), meant=False)
    run.clear()


LOOPS: dict[str, Callable[[Run, bool], None]] = {
    "bad batches": bad_batches,
    "bad from the start": partial(bad_batches, bad=(0, 2, 3)),
    "adversary": adversary,
}


def dropped(group: dist.ProcessGroup, loop: str, **options: Any) -> dict[str, Any]:
    """Train with passes whose gradients are dropped, and without them."""
    outcomes = []
    for extra in (True, False):
        run = Run(group, **options)
        with warnings.catch_warnings(record=True), run.state as state:
            LOOPS[loop](run, extra)
            outcomes.append((run.outcome(), run.iteration, run.missing(), [one.seen for one in state.findings]))
    (one, iteration, missing, found), (other, expected, _, without) = outcomes
    return {
        "equal": one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one),
        "iterations": (iteration, expected),
        "missing": missing,
        "found": found,
        "found without them": without,
    }


def synchronised(group: dist.ProcessGroup, **options: Any) -> dict[str, Any]:
    """Three synchronised passes for each optimizer step, and then a step of one."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(group, **options)
        with run.state as state:
            for _ in range(STEPS):
                run.clear()
                for _ in range(3):
                    run.backward(run.batch())
                run.step()
            plain(run)
            found = [(one.rule, one.value, one.seen, one.remedy) for one in state.findings]
            result = {"iteration": state.iteration, "missing": run.missing(), "found": found}
    told = [str(one.message) for one in caught if "several_backwards" in str(one.message)]
    return {**result, "told": told, "rank": dist.get_rank(group)}


def skipped(group: dist.ProcessGroup) -> dict[str, Any]:
    """A loss scaler skips the first steps, which the plan leaves dense, and one that it compresses."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with warnings.catch_warnings(record=True):
        run = Run(group, scaler=scaler)
        with run.state as state:
            for step in range(6):
                run.clear()
                inputs = run.batch()
                if step in (0, 1, 4):
                    inputs[0, 0] = torch.inf
                scaler.scale(run.model(inputs).square().mean()).backward()
                scaler.step(run.optimizer)
                scaler.update()
            found = [one.seen for one in state.findings if one.rule == "several_backwards"]
            return {"iteration": state.iteration, "found": found}


def closures(group: dist.ProcessGroup) -> dict[str, Any]:
    """Optimizers whose closure has the backward pass, after each of which another network's loss passes through."""
    with warnings.catch_warnings(record=True):
        run = Run(group)
        with run.state as state:
            for _ in range(STEPS):
                run.step_with_closure()
                iteration, missing = state.iteration, run.missing()
                run.backward(run.batch(), meant=False)
            return {"iteration": iteration, "saved": run.iteration, "exact": missing < 1e-6}


def joined(group: dist.ProcessGroup) -> list[int]:
    """Rank 1 has fewer batches. Its iterations, and the other's."""
    with warnings.catch_warnings(record=True):
        run = Run(group)
        with run.state as state:
            with run.model.join():
                for _ in range(6 - 3 * dist.get_rank(group)):
                    run.clear()
                    run.model(run.batch()).square().mean().backward()
                    run.optimizer.step()
            return [state.iteration, run.iteration]


def hooks(group: dist.ProcessGroup) -> dict[str, Any]:
    """What is left on an optimizer: copies of it, and the hooks after closing a state."""
    with warnings.catch_warnings(record=True):
        run = Run(group)
        copied = copy.deepcopy(run.optimizer)
        torch.save(run.optimizer, io.BytesIO())
        plain(run)
        alike = len(copied.param_groups[0]["params"]) == len(run.optimizer.param_groups[0]["params"])
        held = run.optimizer._optimizer_step_pre_hooks, run.optimizer._optimizer_step_post_hooks
        attached = [len(one) for one in held]
        run.state.close()
        return {"alike": alike, "attached": attached, "closed": [len(one) for one in held]}


def recorded(group: dist.ProcessGroup, folder: str, passes: int, every: int = 1) -> dict[str, Any]:
    """A recording with some synchronised passes for each optimizer step."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(16, 8), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with TraceRecorder(model, folder, optimizer=optimizer, every=every):
            for _ in range(4):
                optimizer.zero_grad()
                for _ in range(passes):
                    model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
    dist.barrier(group=group)
    with Trace(folder) as trace:
        found = trace.scalars(0)["optimizer_step"].tolist(), [step.optimizer_step for step in trace.iterate()]
        remarks = list(trace.remarks)
    told = [str(one.message) for one in caught if "backward passes" in str(one.message)]
    return {"steps": found, "remarks": remarks, "told": told}


def under_fsdp(group: dist.ProcessGroup) -> dict[str, Any]:
    """Shards' exchanges: with dropped passes and without them; then two passes for a step."""
    mesh = mesh_of(group, 2)
    outcomes, found = [], []
    for extra in (True, False):
        model = sharded(mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        words = torch.Generator().manual_seed(dist.get_rank(group))
        plan = Plan.uniform(model, "topk", density=0.05)
        inside = {"within": mesh["shard"], "inside": plan}

        def backward(seed: torch.Generator, model: Any = model) -> None:
            model(torch.randint(30, (4, 5), generator=seed)).square().mean().backward()

        with (
            warnings.catch_warnings(record=True),
            compress_fsdp(model, plan, between=mesh["replicate"], optimizer=optimizer, **inside) as state,
        ):
            for step in range(4):
                if extra and step in (1, 2):
                    backward(torch.Generator().manual_seed(99))
                    optimizer.zero_grad()
                backward(words)
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append([*(p.to_local() for p in model.parameters()), *state.state_dict()["states"].values()])
            iterations = [state.iteration]
            backward(words)
            backward(words)
            optimizer.step()
            iterations.append(state.iteration)
            found.append([one.seen for one in state.findings])
    equal = all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    return {"equal": equal, "iterations": iterations, "found": found}
