"""The network between ranks goes away at random moments, and comes back or does not.

    PYTHONPATH=tests python tests/campaigns/outages.py [--short 10] [--long 4] [--seed N]

prints a line per trial; the exit code is 1 if one went wrong. It runs in a network namespace of its own, which takes
the rights to make one (Linux, root): there the loopback device is taken down and up again.

short   less than the group's timeout: the run ends as an undisturbed one, bit for bit
long    for good: every rank ends with a line that says so, within the group's timeout and a few seconds
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from campaigns.kills import RANKS, STEPS, Trained, made, ranks_at, train, until

INSIDE = "GRADLAB_OUTAGES"  # set in the namespace
TIMEOUT, SLACK = 6.0, 6.0  # of the groups, in seconds; and on top of it
DOWN = (0.2, 2.0)  # seconds of a short outage


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def strike(folder: Path, delay: float) -> None:
    """Take the network away so long after both ranks have begun."""
    until(lambda: all((folder / f"progress-{rank}").exists() for rank in range(RANKS)))
    time.sleep(delay)
    link("down")


def short(folder: Path, trained: Trained, draw: random.Random) -> tuple[str, str]:
    """What happened, and what is wrong with it."""
    delay, down = draw.uniform(0, 0.3), draw.uniform(*DOWN)
    with ranks_at(train, folder, STEPS, timeout=30.0) as processes:
        strike(folder, delay)
        time.sleep(down)
        link("up")
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
    told = f"down for {down:.1f} s after {delay:.3f} s"
    if codes != [0] * RANKS:
        return told, f"ranks ended with {codes}"
    return told, "" if trained.ends(folder) == trained.expected else "it ends otherwise"


def told_of_failure(rank: int, folder: Path) -> None:
    """Train, and keep the error."""
    try:
        train(rank, folder, STEPS)
    except Exception as error:
        (folder / f"error-{rank}").write_text(f"{time.time()}\n{error}")
        raise SystemExit(3) from None


def long(folder: Path, draw: random.Random) -> tuple[str, str]:
    """What happened, and what is wrong with it."""
    delay = draw.uniform(0, 0.3)
    with ranks_at(told_of_failure, folder, timeout=TIMEOUT) as processes:
        strike(folder, delay)
        began = time.time()
        for process in processes:
            process.join(TIMEOUT + SLACK + 30)
        codes = [process.exitcode for process in processes]
    link("up")
    told = f"down for good after {delay:.3f} s"
    if None in codes or 0 in codes:
        return told, f"ranks ended with {codes}"
    said = [(folder / f"error-{rank}").read_text().split("\n", 1) for rank in range(RANKS)]
    late = [float(when) - began for when, _ in said]
    if max(late) > TIMEOUT + SLACK:
        return told, f"ranks knew after {late} s"
    unclear = [text for _, text in said if "gradlab: step " not in text]
    return f"{told}, known after {max(late):.1f} s: {said[0][1].splitlines()[0][:160]}", "".join(unclear)[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=10)
    parser.add_argument("--long", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    if INSIDE not in os.environ:
        command = ["unshare", "--net", sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    link("up")
    torch.set_num_threads(1)
    draw, wrong = random.Random(wanted.seed), 0
    with tempfile.TemporaryDirectory() as place:
        trained = Trained(made(Path(place) / "trained"))
        for number in range(wanted.short + wanted.long):
            folder = made(Path(place) / f"trial-{number}")
            told, problem = short(folder, trained, draw) if number < wanted.short else long(folder, draw)
            wrong += bool(problem)
            print(f"{told}: {problem or 'ok'}", flush=True)
    print(f"{wrong} went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
