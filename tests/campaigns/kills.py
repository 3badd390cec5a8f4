"""Killed at random moments: while recording, repairing, training and saving. No step may be lost that was acknowledged.

    PYTHONPATH=tests python tests/campaigns/kills.py [--recording 50] [--repairing 50] [--training 50] [--saving 50]
        [--clocks 4] [--seed N]

prints a line per kind of kill and one per trial that went wrong; the exit code is 1 if there is one. Two ranks are
forked, do their work, and are killed together with SIGKILL, as when a node loses its power.

recording   gradients of a DDP model, by the recorder: every acknowledged step is in what `check` finds, and after
            `repair` the trace holds an undisturbed recording's values
repairing   of such a trace, once or twice: the next repair leaves what one undisturbed repair leaves
training    compressed, a checkpoint every few steps: started again, the run ends as an undisturbed one, bit for bit
saving      the same with a checkpoint in every step: the last acknowledged one is whole
clocks      nobody is killed, but the time of day jumps by days, forwards and back, whenever a rank asks for it: a
            recording and a run are what they are without
"""

from __future__ import annotations

import argparse
import hashlib
import io
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from campaigns.faults import free_port
from gradlab.capture import TraceRecorder, repair
from gradlab.codec import hash_tensor
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook
from gradlab.runtime.saved import RankFiles
from gradlab.trace import Trace, check
from jobs.capture_scenarios import batches, loss_of, parallel_model
from support.prescribed import Prescribed, gradients

RANKS = 2
RECORDED = 3000  # steps of an undisturbed recording; a trial is killed long before
SHAPES = {"conv": (16, 8, 3, 3), "wide": (48, 600), "vector": (65,)}
STEPS = 60
FORK = multiprocessing.get_context("fork")
Work = Callable[..., None]


@contextmanager
def ranks_at(work: Work, folder: Path, *arguments: Any, timeout: float = 30.0) -> Iterator[list[Any]]:
    """Two forked processes that do something together; they are gone afterwards."""
    port = free_port()
    processes = [
        FORK.Process(target=joined, args=(work, rank, port, folder, arguments, timeout)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def with_jumping_clock(rank: int, folder: Path, work: Work, *arguments: Any) -> None:
    """Do a rank's work while the time of day jumps."""
    draw, true = random.Random(rank), time.time
    time.time = lambda: true() + draw.choice([-1e6, 0.0, 1e6])
    try:
        work(rank, folder, *arguments)
    finally:
        time.time = true


def joined(work: Work, rank: int, port: int, folder: Path, arguments: tuple[Any, ...], timeout: float) -> None:
    """Do a rank's work in a group of its own. timeout: of the group, in seconds."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(seconds=timeout), rank=rank, world_size=RANKS)
    work(rank, folder, *arguments)
    dist.destroy_process_group()


def killed(work: Work, folder: Path, delay: float, *arguments: Any) -> bool:
    """Kill both ranks so long after both have begun; whether they were still at work."""
    with ranks_at(work, folder, *arguments) as processes:
        until(lambda: all((folder / f"progress-{rank}").exists() for rank in range(RANKS)))
        time.sleep(delay)
        at_work = all(process.is_alive() for process in processes)
        for process in processes:
            process.kill()  # or it has ended, and is nobody any more
    return at_work


def finished(work: Work, folder: Path, *arguments: Any) -> None:
    """Let both ranks come to their end."""
    with ranks_at(work, folder, *arguments) as processes:
        for process in processes:
            process.join(120)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"a rank ended with {[process.exitcode for process in processes]}")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.time() + 60
    while not condition():
        if time.time() > deadline:
            raise TimeoutError("the ranks did not get there")
        time.sleep(0.002)


def acknowledged(folder: Path, rank: int) -> int:
    """The last whole line of what a rank said of itself."""
    lines = (folder / f"progress-{rank}").read_text().split("\n")[:-1]
    return int(lines[-1]) if lines else 0


# --- recording -------------------------------------------------------------------------------------------------------


def record(rank: int, folder: Path, steps: int) -> None:
    """Record steps, and say after each how many are on the disk."""
    model = parallel_model()
    recorder = TraceRecorder(model, folder / "trace", flush_seconds=0.02, segment_bytes=200_000)
    with open(folder / f"progress-{rank}", "w", encoding="utf-8") as progress:
        for batch in batches(steps):
            loss_of(model, batch).backward()
            model.zero_grad()
            progress.write(f"{recorder.steps_written}\n")
            progress.flush()
    recorder.close()


class Recorded:
    """An undisturbed recording, and traces that kills have left."""

    def __init__(self, folder: Path) -> None:
        (folder / "whole").mkdir()
        finished(record, folder / "whole", RECORDED)
        with Trace(folder / "whole" / "trace") as trace:
            self.expected = {
                layer.name: [trace.read(layer.name, rank) for rank in range(RANKS)] for layer in trace.layers
            }
        self.left: list[Path] = []
        self.kept = folder

    def differences(self, path: Path, least: list[int]) -> str:
        """What is wrong with a repaired trace. least: steps that each rank had acknowledged."""
        with Trace(path, allow_empty=True) as trace:
            if any(held < wanted for held, wanted in zip(trace.rank_steps, least, strict=True)):
                return f"ranks hold {trace.rank_steps} steps, acknowledged were {least}"
            for name, expected in self.expected.items():
                for rank in range(RANKS):
                    if not np.array_equal(trace.read(name, rank), expected[rank][trace.steps]):
                        return f"{name} of rank {rank} has other values"
        return ""

    def recording(self, folder: Path, draw: random.Random) -> str:
        if not killed(record, folder, draw.uniform(0, 0.8), RECORDED):
            return "the recording had ended before"
        least = [acknowledged(folder, rank) for rank in range(RANKS)]
        found = check(folder / "trace")
        if found.problems:
            return found.problems[0]
        if any(rank.steps < wanted for rank, wanted in zip(found.ranks, least, strict=True)):
            return f"check finds {[rank.steps for rank in found.ranks]} steps, acknowledged were {least}"
        if len(self.left) < 10:
            self.left.append(self.kept / f"left-{len(self.left)}")
            shutil.copytree(folder / "trace", self.left[-1])
        repair(folder / "trace")
        return self.differences(folder / "trace", least)

    def clocks(self, folder: Path) -> str:
        finished(with_jumping_clock, folder, record, 200)
        return self.differences(folder / "trace", [200] * RANKS)

    def repairing(self, folder: Path, draw: random.Random) -> str:
        source = draw.choice(self.left)
        shutil.copytree(source, folder / "undisturbed")
        began = time.time()
        repair(folder / "undisturbed")
        took = time.time() - began
        shutil.copytree(source, folder / "trace")
        for _ in range(draw.choice([1, 2])):
            process = FORK.Process(target=repair, args=(folder / "trace",))
            process.start()
            time.sleep(draw.uniform(0, 1.2 * took))
            process.kill()
            process.join()
        rows = repair(folder / "trace")
        if problems := [problem for row in rows for problem in row.problems]:
            return problems[0]
        if left := [path.name for path in (folder / "trace").rglob("*") if path.is_file() and is_left_over(path)]:
            return f"{left} are left"
        held = [row.steps for row in check(folder / "undisturbed").ranks]
        return self.differences(folder / "trace", held)


def is_left_over(path: Path) -> bool:
    return path.suffix not in (".h5", ".json")


# --- training --------------------------------------------------------------------------------------------------------


def train(rank: int, folder: Path, every: int) -> None:
    """Train to the end from the last checkpoint that both ranks have, and save another one every few steps."""
    model = DistributedDataParallel(Prescribed(SHAPES), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.uniform(model, "topk", density=0.05)
    with CompressionState(plan, model, optimizer=optimizer, deterministic=True) as state:
        model.register_comm_hook(state, compression_hook)
        files = RankFiles(state, model, None)
        start = last_common(rank, folder)
        if start:
            model.load_state_dict(torch.load(folder / f"checkpoint-{start}" / "model.pt", weights_only=True))
            files.load(folder / f"checkpoint-{start}", "state", "nothing to do")
        with open(folder / f"progress-{rank}", "w", encoding="utf-8") as progress:
            for step in range(start, STEPS):
                model.zero_grad()
                model(gradients(SHAPES, rank, step)).backward()
                optimizer.step()
                if (step + 1) % every == 0:
                    save(rank, folder / f"checkpoint-{step + 1}", model, files)
                    progress.write(f"{step + 1}\n")
                    progress.flush()
        tensors = {**model.state_dict(), **state.state_dict()["states"]}
        digest = hashlib.sha256("".join(hash_tensor(tensors[name]) for name in sorted(tensors)).encode()).hexdigest()
    (folder / f"end-{rank}").write_text(digest)


def save(rank: int, folder: Path, model: DistributedDataParallel, files: RankFiles) -> None:
    """The model first, as frameworks do; the folder counts once it has every rank's file."""
    if rank == 0:
        folder.mkdir(exist_ok=True)
        held = io.BytesIO()
        torch.save(model.state_dict(), held)
        write_whole(folder / "model.pt", held.getbuffer())
    files.save(folder, "state")


def last_common(rank: int, folder: Path) -> int:
    """The last checkpoint in which no rank's file is missing; the one acknowledged last is among those."""
    names = ["model.pt", *(f"state_rank_{other}.pt" for other in range(RANKS))]
    there = [path for path in folder.glob("checkpoint-*") if all((path / name).exists() for name in names)]
    return max((int(path.name.rpartition("-")[2]) for path in there), default=0)


class Trained:
    """What an undisturbed run ends with."""

    def __init__(self, folder: Path, recorded: Recorded | None = None) -> None:
        self.recorded = recorded
        (folder / "run").mkdir()
        finished(train, folder / "run", STEPS)
        self.expected = self.ends(folder / "run")

    @staticmethod
    def ends(folder: Path) -> list[str]:
        return [(folder / f"end-{rank}").read_text() for rank in range(RANKS)]

    def training(self, folder: Path, draw: random.Random) -> str:
        return self._trial(folder, draw, every=7)

    def saving(self, folder: Path, draw: random.Random) -> str:
        return self._trial(folder, draw, every=1)

    def clocks(self, folder: Path, draw: random.Random) -> str:
        finished(with_jumping_clock, folder, train, draw.choice([1, 7]))
        if self.ends(folder) != self.expected:
            return "the run ends otherwise"
        assert self.recorded is not None
        return self.recorded.clocks(made(folder / "recording"))

    def _trial(self, folder: Path, draw: random.Random, every: int) -> str:
        at_work = killed(train, folder, draw.uniform(0, 0.5), every)
        saved, found = max(acknowledged(folder, rank) for rank in range(RANKS)), last_common(0, folder)
        if found < saved:
            return f"the last whole checkpoint is of step {found}, acknowledged was {saved}"
        finished(train, folder, every)
        if self.ends(folder) != self.expected:
            return f"killed in step {saved} or later ({at_work}), it ends otherwise"
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("recording", "repairing", "training", "saving", "clocks")
    for kind in kinds:
        parser.add_argument(f"--{kind}", type=int, default=4 if kind == "clocks" else 50, help="trials")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    draw, wrong = random.Random(wanted.seed), 0
    with tempfile.TemporaryDirectory() as place:
        recorded = Recorded(made(Path(place) / "recorded"))
        trained = Trained(made(Path(place) / "trained"), recorded)
        trials = {**dict.fromkeys(kinds[:2], recorded), **dict.fromkeys(kinds[2:], trained)}
        for kind in kinds:
            count = getattr(wanted, kind)
            done = [trial(trials[kind], kind, number, Path(place), draw) for number in range(count)]
            problems = [problem for problem in done if problem]
            wrong += len(problems)
            print(f"{kind:10s} {count:4d} trials, {len(problems)} went wrong", flush=True)
            print("\n".join(f"    {problem}" for problem in problems), end="\n" if problems else "")
    print(f"{wrong} went wrong")
    return int(wrong > 0)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def trial(subject: Recorded | Trained, kind: str, number: int, place: Path, draw: random.Random) -> str:
    """One kill; what went wrong, if anything did."""
    folder = made(place / f"{kind}-{number}")
    try:
        problem: str = getattr(subject, kind)(folder, draw)
    except (GradlabError, RuntimeError, OSError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    shutil.rmtree(folder)
    return f"{kind} {number}: {problem}" if problem else ""


if __name__ == "__main__":
    sys.exit(main())
