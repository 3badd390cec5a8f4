"""Under torchrun, N > 2 ranks: train stacks and save at step 4; or, in new processes, continue from there.

    resume_job.py straight FOLDER [all [NAME ...]]   at N and at 2 ranks
    resume_job.py resume FOLDER [all [NAME ...]]     the same from step 4 on, against what the straight run ended with;
                                                     and the checkpoints of N ranks on 2, and of 2 on N

With "all" every valid stack whose name ends with a NAME, and with the backend's all-reduce too, plain DDP beside it;
else a selection in deterministic mode. Rank 0 writes FOLDER/results.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.groups import Ranks
from gradlab.jsonable import plain
from gradlab.layout import layers_of
from gradlab.learning.selection import GROUP_STATE
from gradlab.runtime import CompressionState, compression_hook
from support.image_network import image_network
from support.stacks import STATEFUL, WRAPPINGS, Stack, valid_stacks

SAVED, END = 4, 8
PLAIN = Stack("plain DDP", "none")
# Where the shorter run changes the number of ranks too.
RESCALED = ("feedback, decay, int8", "two-way under feedback")


class Run:
    """One training run on the ranks of a group: a model, its optimizer, a schedule, and the compression's state."""

    def __init__(self, stack: Stack, group: dist.ProcessGroup, deterministic: bool) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        network = image_network((8, 12), hidden=20, classes=13)
        self.model = DistributedDataParallel(network, process_group=group, bucket_cap_mb=0.004)
        momentum = 0.0 if stack.applies_momentum else 0.9
        # One dense step leaves Adam's variance near zero in places, where steps of 0.05 overflow.
        rate = 0.0005 if any(wrap.name == "onebit_adam" for wrap in stack.wrappers) else 0.05
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=momentum)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.state: CompressionState | None = None
        if stack is not PLAIN:
            plan = stack.plan(layers_of(self.model), warmup_steps=1)
            self.state = CompressionState(plan, self.model, optimizer=self.optimizer, deterministic=deterministic)
            self.model.register_comm_hook(self.state, compression_hook)

    def train(self, steps: range) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(1000 * step + self.rank)
            images, labels = torch.randn(6, 1, 8, 8, generator=draw), torch.randint(13, (6,), generator=draw)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            self.schedule.step()

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "compression": self.state.state_dict() if self.state else {},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """All but the compression's state, which may come from another number of ranks."""
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])

    def end(self) -> dict[str, torch.Tensor]:
        """Everything that a run ends with, by name."""
        parameters = {f"model/{key}": value for key, value in self.model.module.state_dict().items()}
        states = self.state.state_dict()["states"] if self.state else {}
        return {key: value.clone() for key, value in (parameters | states).items()}

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


@dataclass(frozen=True)
class Case:
    """One stack at one number of ranks, with one way of taking means."""

    stack: Stack
    world_size: int
    deterministic: bool
    folder: Path

    def file(self, rank: int, what: str, world_size: int | None = None) -> Path:
        name = f"{self.stack.name}-{self.deterministic}-{world_size or self.world_size}-{rank}-{what}.pt"
        return self.folder / name.replace(" ", "_").replace("|", "")


def straight(case: Case, group: dist.ProcessGroup) -> None:
    run = Run(case.stack, group, case.deterministic)
    run.train(range(SAVED))
    torch.save(run.checkpoint(), case.file(run.rank, "saved"))
    run.train(range(SAVED, END))
    torch.save(run.end(), case.file(run.rank, "end"))
    run.close()


def resumed(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """How far from the straight run's end the resumed one is."""
    run = Run(case.stack, group, case.deterministic)
    saved = torch.load(case.file(run.rank, "saved"), weights_only=True)
    run.load(saved)
    if run.state is not None:
        run.state.load_state_dict(saved["compression"])
    run.train(range(SAVED, END))
    wanted, got = torch.load(case.file(run.rank, "end"), weights_only=True), run.end()
    run.close()
    parameters = [key for key in wanted if key.startswith("model/") and wanted[key].is_floating_point()]
    largest = max(float((got[key] - wanted[key]).abs().max() / wanted[key].abs().max()) for key in parameters)
    equal = wanted.keys() == got.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)
    return {"equal": equal, "largest": largest, "states": len(wanted) - len(run.model.module.state_dict())}


def rescaled(case: Case, group: dist.ProcessGroup, residuals: str) -> dict[str, Any]:
    """Continue the run of the other number of ranks: what is owed to the model, before and after; and some steps."""
    old = 2 if case.world_size > 2 else dist.get_world_size()
    everyone = [torch.load(case.file(rank, "saved", old), weights_only=True) for rank in range(old)]
    run = Run(case.stack, group, case.deterministic)
    run.load(everyone[0])
    assert run.state is not None
    run.state.load_state_dicts([saved["compression"] for saved in everyone], residuals=residuals)
    after = run.state.run.states
    before = [saved["compression"]["states"] for saved in everyone]
    result = {"owed": _owed(after, before, group), "shared": _shared_kept(after, before[0], case.stack, residuals)}
    run.train(range(SAVED, END))
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in run.model.parameters()])
    result["finite"] = bool(flat.isfinite().all())
    rows = [torch.empty_like(flat) for _ in range(case.world_size)]
    dist.all_gather(rows, flat, group=group)
    result["agree"] = all(torch.equal(row, flat) for row in rows)
    run.close()
    return result


def _owed(after: dict[str, Any], before: list[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> list[list[float]]:
    """Per residual and velocity: the largest gap between the ranks' means before and now; the largest of a rank's own
    before; and the largest of what there is now."""
    rows = []
    for key in before[0]:
        name, _, entry = key.partition("::")
        if not entry.endswith(("/residual", "/velocity")):
            continue
        everyone = torch.stack([_plain(states, key) for states in before])
        was, scale = everyone.mean(0), float(everyone.abs().max())
        held = {f"{name}::{k}": v for k, v in after.get(name, {}).items()}
        now = _plain(held, key) if key in held else torch.zeros_like(was)
        dist.all_reduce(now, group=group)
        gap = now / dist.get_world_size(group) - was
        rows.append([float(gap.abs().max()), scale, float(now.abs().max())])
    return rows


def _plain(states: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """A buffer of a state as numbers; independent of the wrappers' own reading of int8 buffers."""
    held = states[key]
    if held.dtype != torch.int8:
        return held.float()
    scales = states[f"{key}_scale"].repeat_interleave(256)[: held.numel()]
    return (held.reshape(-1).float() * scales).reshape(held.shape)


def _shared_kept(after: dict[str, Any], before: dict[str, torch.Tensor], stack: Stack, residuals: str) -> bool:
    """Whether what all ranks share (warm starts, momentum after the average) is what it was; of one decoder per rank
    nothing is."""
    own = {"residual", "velocity", "residual_scale", "velocity_scale", "server_residual", "server_residual_scale"}
    own |= {"zeta", "server_zeta"}  # a rank's own, made anew
    own |= {"estimate", "estimate_scale"} | ({"aggregate"} if residuals == "drop" else set())  # of EF21
    shared = {key: tensor for key, tensor in before.items() if key.rpartition("/")[2] not in own}
    if stack.codec == "lgc_server":
        if any(key.rpartition("/")[2] in GROUP_STATE for kept in after.values() for key in kept):
            return False
        shared = {key: tensor for key, tensor in shared.items() if key.rpartition("/")[2] not in GROUP_STATE}
    return all(torch.equal(after[key.partition("::")[0]][key.partition("::")[2]], t) for key, t in shared.items())


# Codecs with a state or shared draws, which are part of the selection with feedback.
SELECTED = {*STATEFUL, "topk", "powersgd", "gradiveq", "lgc_ring", "clt_k", "qsgd", "random_k", "sign", "threshold"}


def selection(world_size: int) -> list[Stack]:
    """Those codecs, and wrappings around one codec: of several wrappers, and at 2 ranks too those that are rescaled.
    And Dion, which goes around no other codec."""
    if world_size == 2:
        return [s for s in valid_stacks() if s.codec == "topk" and s.wrapping in RESCALED]
    around = {name for name, wraps in WRAPPINGS.items() if len(wraps) > 1} | set(RESCALED)
    return [
        s
        for s in valid_stacks()
        if (s.wrapping == "feedback" and s.codec in SELECTED)
        or (s.codec == "topk" and s.wrapping in around)
        or s.wrapping == "Dion"
    ]


def cases(
    folder: Path, everything: bool, ends: tuple[str, ...], groups: dict[int, Any]
) -> Iterator[tuple[Case, dist.ProcessGroup]]:
    """This rank's cases."""
    named = [stack for stack in [PLAIN, *valid_stacks()] if stack.name.endswith(ends)]
    for world_size, group in groups.items():
        if dist.get_rank() < world_size:
            for stack in [s for s in named if s is not PLAIN] if everything else selection(world_size):
                yield Case(stack, world_size, True, folder), group
            for stack in named if everything else []:
                yield Case(stack, world_size, False, folder), group


def continued(case: Case, group: dist.ProcessGroup, everything: bool) -> dict[str, Any]:
    result = resumed(case, group)
    # They cost time: three more runs.
    if case.deterministic and case.stack.wrappers and (everything or case.stack.wrapping in RESCALED):
        result["rescaled"] = {policy: rescaled(case, group, policy) for policy in ("sum", "split", "drop")}
    return result


def main() -> None:
    mode, folder, everything, ends = sys.argv[1], Path(sys.argv[2]), "all" in sys.argv[3:], tuple(sys.argv[4:]) or ("",)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {dist.get_world_size(): dist.group.WORLD, 2: dist.new_group([0, 1])}
    results = []
    for case, group in cases(folder, everything, ends, groups):
        if mode == "straight":
            straight(case, group)
        else:
            identity = {"stack": case.stack.name, "ranks": case.world_size, "deterministic": case.deterministic}
            results.append(identity | continued(case, group, everything))
    rows = Ranks(dist.group.WORLD, torch.device("cpu")).gather(plain(results))  # a number that is not finite: None
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(rows))
    dist.destroy_process_group()
    # Gloo's threads ask for Python's lock after a collective; before Python 3.14, asking while the interpreter ends
    # aborts the process, plain DDP's too.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
