"""Faults on purpose: 4 ranks train, one is killed, stopped or breaks, and the others have to end, with a reason.

    PYTHONPATH=tests python tests/campaigns/faults.py [--kills 20] [--stops 2] [--fsdp-kills 8] [--fsdp-stops 2]
        [--seed N]

prints one trial after the other; the exit code is 1 if one went wrong.

torch is imported once and the ranks of each trial are forked from there. They run without torchrun, which would end
the survivors before they can say anything; rank 0 holds the store, so that with it the store is gone too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codecs.topk import TopK
from gradlab.collectives import Coroutine
from gradlab.ddp.groups import part_of
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Group, Plan
from gradlab.runtime import CompressionState, Exchange, compress_fsdp, compression_hook
from jobs import fsdp_tasks
from jobs.matrix_cells import node_group
from support.prescribed import Prescribed, gradients

RANKS = 4
TIMEOUT = 6.0  # of the groups, in seconds
SLACK = 4.0  # on top of it: a busy machine, and the wait for a reason that a peer may have left
# What everybody's error has to name where a codec is at fault.
NAMED = ("the defect", "ArithmeticError", "topk", "wide", "step 5")
# What is compressed under FSDP2, and the arguments of compress_fsdp that say so.
FSDP = {
    "gathers": ("between", "parameters"),
    "between": ("between",),
    "within": ("within",),
    "both": ("between", "within", "inside"),
}
SHAPES = {"conv": (64, 32, 3, 3), "wide": (48, 600), "tall": (600, 40), "vector": (65,), "last": (60, 60)}
# In int8 a rank's shards are large enough to travel as messages between pairs.
LARGE = {"large": (1024, 1024), "second": (1100, 1000)}


@dataclass(frozen=True)
class Fault:
    """kind: "kill", "stop" or "raise"; victim: a rank; delay: seconds of training before it (for "raise": none);
    local_ranks: of a node, where nodes exchange means; fsdp: under FSDP2, what is compressed, a key of `FSDP`; large:
    whether shards travel as messages between pairs of ranks."""

    kind: str
    victim: int
    delay: float
    local_ranks: int = 1
    fsdp: str = ""
    large: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the layers that DDP trains."""
        return dict(LARGE if self.large else SHAPES)


@dataclass(frozen=True)
class Outcome:
    """ended: per surviving rank, seconds from the fault to the process's end, infinite if it had to be killed; answers:
    per rank, its JSON: error, step, threads, tracebacks of the error, seconds to it."""

    fault: Fault
    ended: dict[int, float]
    answers: dict[int, dict[str, Any]]

    def problems(self) -> list[str]:
        """What is wrong with it; empty if every survivor ended in time, with a clear error, and without a thread."""
        problems = []
        for rank, seconds in self.ended.items():
            answer = self.answers.get(rank)
            if answer is None:
                problems.append(f"rank {rank} said nothing ({seconds:.1f} s)")
                continue
            if seconds == math.inf or answer["failed"] > (TIMEOUT if self.fault.kind == "raise" else TIMEOUT + SLACK):
                problems.append(f"rank {rank} knew after {answer['failed']:.1f} s and ended after {seconds:.1f} s")
            if not self._is_clear(answer["error"]):
                problems.append(f"rank {rank}: unclear: {answer['error']!r}")
            if answer["tracebacks"] > 1 and self.fault.kind != "raise":
                problems.append(f"rank {rank}: {answer['tracebacks']} tracebacks, one of them says it all")
            if answer["threads"]:
                problems.append(f"rank {rank}: {answer['threads']} is still there")
        return problems

    def _is_clear(self, error: str) -> bool:
        """Whether an error says what happened."""
        if self.fault.kind == "raise":
            return all(word in error for word in NAMED)
        if not self.fault.fsdp:
            return "gradlab: step " in error
        ours = error.startswith("step ") and any(words in error for words in ("gone or stuck", "another rank failed"))
        ours = ours or error.startswith("the all-gather of ")
        # FSDP's own collectives, such as the all-gather of parameters as they are, raise what Gloo says.
        return ours or ("/gloo/" in error and any(words in error for words in ("peer", "Timed out")))

    def __str__(self) -> str:
        fault, errors = self.fault, [answer["error"] for answer in self.answers.values()]
        last = max(self.ended.values())
        state = "; ".join(self.problems()) or "ok"
        steps = sorted({answer["step"] for answer in self.answers.values()})
        nodes = f", nodes of {fault.local_ranks}" if fault.local_ranks > 1 else ""
        nodes += f", FSDP2 compressed {fault.fsdp}" if fault.fsdp else ""
        nodes += ", large shards" if fault.large else ""
        head = f"{fault.kind} rank {fault.victim}{nodes} after {fault.delay:.3f} s (survivors in step {steps})"
        knew = max((answer["failed"] for rank, answer in self.answers.items() if rank in self.ended), default=math.inf)
        reason = max(errors, key=lambda text: "step " in text, default="").replace("\n", " ")[:200]
        return f"{head}: all knew {knew:.1f} s later and ended {last:.1f} s later: {state}\n    {reason}"


class Breaking(TopK):
    """A codec with a defect on one rank, from some step on."""

    victim = 0

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if dist.get_rank() == self.victim and context.iteration == 5:
            raise ArithmeticError("the defect")
        return (yield from super().exchange(grads, state, context))


def rank_main(rank: int, port: int, folder: Path, fault: Fault) -> None:
    """A rank: train until something goes wrong, say what, and leave through the interpreter's ordinary end."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(seconds=TIMEOUT), rank=rank, world_size=RANKS)
    state, backward = _under_fsdp(rank, fault) if fault.fsdp else _under_ddp(rank, fault)
    step, failed = 0, 0.0
    try:
        with state:
            while True:
                backward(step)
                step += 1
                if step == 2:
                    (folder / f"ready-{rank}").touch()
    except Exception as error:
        failed, text = time.time(), str(error)
        tracebacks = "".join(traceback.format_exception(error)).count("Traceback (most recent call last)")
    threads = [thread.name for thread in threading.enumerate() if thread.name == "gradlab-engine"]
    answer = {"error": text, "step": step, "threads": threads, "failed": failed, "tracebacks": tracebacks}
    (folder / "writing").with_suffix(f".{rank}").write_text(json.dumps(answer))
    (folder / "writing").with_suffix(f".{rank}").rename(folder / f"said-{rank}")


def _under_ddp(rank: int, fault: Fault) -> tuple[Exchange, Callable[[int], None]]:
    """What a rank holds under DDP, and its pass of one step."""
    model = DistributedDataParallel(Prescribed(fault.shapes), bucket_cap_mb=0.05)
    plan = Plan.uniform(model, "block_scaled") if fault.large else _plan(model)
    state = CompressionState(plan, model, within=node_group(dist.group.WORLD, fault.local_ranks))
    if fault.kind == "raise" and "wide" in state.run.codecs:
        Breaking.victim = fault.victim
        state.run.codecs["wide"] = Breaking()
    model.register_comm_hook(state, compression_hook)

    def backward(step: int) -> None:
        model.zero_grad()
        model(gradients(fault.shapes, rank, step)).backward()

    return state, backward


def _under_fsdp(rank: int, fault: Fault) -> tuple[Exchange, Callable[[int], None]]:
    """The same under FSDP2, of two nodes of two ranks, or of one."""
    world = dist.group.WORLD
    grid, names = torch.arange(RANKS).view(2 if "between" in FSDP[fault.fsdp] else 1, -1), ("replicate", "shard")
    node, local_rank = divmod(rank, grid.shape[1])
    mine = (grid[:, local_rank].tolist(), grid[node].tolist())
    # A mesh that makes its own groups gives them torch's timeout of 30 minutes.
    groups = [part_of((world,), ranks, timedelta(seconds=TIMEOUT), torch.device("cpu")) for ranks in mine]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=names)
    model = fsdp_tasks.sharded(mesh["shard"])
    between = fsdp_tasks.plan_of(model, "powersgd", {"rank": 2})
    inside = fsdp_tasks.plan_of(model, "block_scaled", {"dtype": "int8"})
    options: dict[str, Any] = {
        "between": mesh["replicate"],
        "within": mesh["shard"],
        "inside": inside,
        "parameters": "int8",
    }
    chosen = {name: options[name] for name in FSDP[fault.fsdp]}
    state = compress_fsdp(model, between if "between" in chosen else inside, **chosen)

    def backward(step: int) -> None:
        model.zero_grad()
        fsdp_tasks.backward(model, rank, step)

    return state, backward


def _plan(model: nn.Module) -> Plan:
    def group(name: str, codec: str, **settings: Any) -> Group:
        return Group(name, (name,), codec, settings, FEEDBACK)

    groups = (group("conv", "powersgd", rank=2), group("wide", "topk"), group("tall", "powersgd"))
    return Plan(layers_of(model), groups)


def trial(fault: Fault) -> Outcome:
    """Run one trial; every process has ended afterwards."""
    folder, port, parent = Path(tempfile.mkdtemp()), free_port(), os.getpid()
    sys.stdout.flush()
    processes = {rank: _fork(rank, port, folder, fault) for rank in range(RANKS)}
    began, late = time.time(), 0.0
    try:
        _await(lambda: all((folder / f"ready-{rank}").exists() for rank in range(RANKS)), 300)
        time.sleep(fault.delay)
        began = _strike(processes[fault.victim], fault, folder)
        watched = [rank for rank in processes if rank != fault.victim or fault.kind == "raise"]
        ended = {rank: _ended(processes[rank], began) - began for rank in watched}
        if fault.kind == "stop":
            os.kill(processes[fault.victim], signal.SIGCONT)
            woken = time.time()
            late = _ended(processes[fault.victim], woken) - woken
    finally:
        if os.getpid() == parent:
            for process in processes.values():
                _end(process)
    answers = {rank: json.loads((folder / f"said-{rank}").read_text()) for rank in ended if _answered(folder, rank)}
    shutil.rmtree(folder)
    if late == math.inf:
        ended[fault.victim] = late
    return Outcome(fault, ended, {rank: line | {"failed": line["failed"] - began} for rank, line in answers.items()})


def _answered(folder: Path, rank: int) -> bool:
    return (folder / f"said-{rank}").exists()


def _fork(rank: int, port: int, folder: Path, fault: Fault) -> int:
    if process := os.fork():
        return process
    code = 1
    try:
        rank_main(rank, port, folder, fault)
        code = 0
    finally:
        raise _Leave(code)  # the interpreter's ordinary end, but nothing of what the parent was about to do


class _Leave(BaseException):
    """Thrown in a forked rank, caught at the top of the script alone."""


def _strike(process: int, fault: Fault, folder: Path) -> float:
    """Make it happen; the time at which it did."""
    if fault.kind == "raise":
        _await(lambda: _answered(folder, fault.victim), 60)
        return float(json.loads((folder / f"said-{fault.victim}").read_text())["failed"])
    began = time.time()
    os.kill(process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    return began


def _await(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.time() + seconds
    while not condition():
        if time.time() > deadline:
            raise TimeoutError("the ranks did not get there")
        time.sleep(0.01)


def _ended(process: int, began: float) -> float:
    """When a process ended; infinity if it did not."""
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.time() > began + 4 * TIMEOUT:
            return math.inf
        time.sleep(0.01)
    return time.time()


def _end(process: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def under_ddp(kills: int, stops: int, draw: random.Random) -> Iterator[Fault]:
    """The trials: kills at random moments, ranks that stop, and a defect on one rank; of ranks, of nodes, and of ranks
    that exchange large shards in turn.

    Between nodes the codec with the defect is that of ranks 0 and 2.
    """
    for trial_number in range(kills):
        nodes = 1 + (trial_number % 3 == 1)
        yield Fault("kill", draw.randrange(RANKS), draw.uniform(0, 0.5), nodes, large=trial_number % 3 == 2)
    for victim in (2, 0)[:stops]:
        yield Fault("stop", victim, draw.uniform(0, 0.2), 1 + victim // 2, large=victim == 0)
        yield Fault("raise", victim, 0.0, 1 + victim // 2)


def under_fsdp(kills: int, stops: int, draw: random.Random) -> Iterator[Fault]:
    """Kills at random moments and ranks that stop, at what FSDP2 compresses in turn."""
    for number, kind in enumerate(["kill"] * kills + ["stop"] * stops):
        compressed = list(FSDP)[-1 - number % len(FSDP)]
        yield Fault(kind, draw.randrange(RANKS), draw.uniform(0, 0.5 if kind == "kill" else 0.2), fsdp=compressed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--fsdp-kills", type=int, default=8)
    parser.add_argument("--fsdp-stops", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of torch, about the model's output
    warnings.filterwarnings("ignore", "gradlab: the model is sharded over ranks")
    gc.collect()
    gc.freeze()  # or each rank's end looks through all that was imported, and copies it
    wrong = 0
    draw = random.Random(wanted.seed)
    chosen = [*under_ddp(wanted.kills, wanted.stops, draw), *under_fsdp(wanted.fsdp_kills, wanted.fsdp_stops, draw)]
    for fault in chosen:
        outcome = trial(fault)
        wrong += bool(outcome.problems())
        print(outcome, flush=True)
    print(f"{wrong} went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except _Leave as leave:
        sys.exit(leave.args[0])
