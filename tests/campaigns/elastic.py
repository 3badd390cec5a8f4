"""Workers that come and go: killed, slowed, and without a lighthouse for a while.

    make elastic && PYTHONPATH=tests:build/torchft python tests/campaigns/elastic.py [--kills 20] [--back 5,60]
        [--steps 300] [--only kills,slow,lighthouse] [--seed N]

prints a line per trial; the exit code is 1 if one went wrong. Four workers take outer steps of four local ones by
torchft, with error feedback, warm factors and running tables.

kills       one worker after another is killed with SIGKILL at a random moment, and started again after some seconds
slow        one worker takes ten times as long as the others, who wait for it for one second
lighthouse  torchft's lighthouse is killed, and started again after five seconds

After every outer step those that took it are alike bit for bit, and none ends early. The loss is told beside that of
workers who were left alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.elastic_workers import Worker, run, wait_until

LONG = 900.0  # seconds


def until(told: Path, workers: Sequence[Worker], steps: int) -> list[dict[str, Any]]:
    """Let workers take so many steps, and some more if they have; return what each told last."""
    wait_until(lambda: all(one.steps >= 0 for one in workers), "all are there", LONG)
    told.write_text(str(max(steps, max(one.steps for one in workers) + 10)), encoding="utf-8")
    return [one.wait(LONG) for one in workers]


def judged(name: str, ends: Sequence[dict[str, Any]], workers: Sequence[Worker], **numbers: Any) -> bool:
    """Print what came of a trial; return whether all workers were alike after every outer step that they told of."""
    after: dict[int, set[str]] = {}
    for one in [told for worker in workers for told in worker.told if "step" in told]:
        after.setdefault(one["step"], set()).add(one["common"])
    sound = all("end" in one for one in ends) and all(len(one) == 1 for one in after.values())
    pauses = [b - a for one in workers for a, b in itertools.pairwise(one.at("step"))]
    losses = sorted({round(one.get("loss", float("nan")), 4) for one in ends})
    told = {
        "steps": max(one.steps for one in workers),
        "longest pause": f"{max(pauses):.1f} s",
        "loss": losses,
        **numbers,
    }
    errors = sorted({one["error"] for one in ends if "error" in one})
    print(f"{name}: {'alike' if sound else 'NOT ALIKE'}, {told}{errors or ''}", flush=True)
    return sound


def killed(given: dict[str, Any], told: Path, args: argparse.Namespace) -> bool:
    drawn, back = random.Random(args.seed), [float(one) for one in args.back.split(",")]
    with run(given, 4) as (workers, start, _):
        wait_until(lambda: all(one.steps >= 2 for one in workers), "the first steps", LONG)
        gone: dict[int, float] = {}
        everyone, kills, following = list(workers), 0, 0.0
        while kills < args.kills or gone:
            now = time.monotonic()
            for number in [number for number, returns in gone.items() if returns <= now]:
                del gone[number]
                workers[number] = start(number)
                everyone.append(workers[number])
            alive = [number for number in range(4) if number not in gone and workers[number].steps >= 0]
            if kills < args.kills and len(alive) > 2 and now >= following:
                number = drawn.choice(alive)
                workers[number].kill()
                gone[number] = time.monotonic() + drawn.uniform(*back)
                kills, following = kills + 1, time.monotonic() + drawn.uniform(0, sum(back) / 3)
            time.sleep(0.05)
        ends = until(told, workers, args.steps)
        again = sum(len(one.all_of("joined")) for one in everyone) - 4
        return judged("kills", ends, everyone, kills=kills, joined=again)


def slowed(given: dict[str, Any], told: Path, args: argparse.Namespace) -> bool:
    with run(given, 3, join_seconds=1.0) as (workers, start, _):
        slow = start(3, seconds=10 * given["seconds"])
        wait_until(lambda: slow.steps >= 0, "the slow one", LONG)
        ends = until(told, workers, args.steps)
        alone = sum(count == 3 for count in workers[0].all_of("workers"))
        return judged("slow", ends, [*workers, slow], without_it=alone)


def without_lighthouse(given: dict[str, Any], told: Path, args: argparse.Namespace) -> bool:
    with run(given, 4) as (workers, _, light):
        wait_until(lambda: all(one.steps >= 10 for one in workers), "the first steps", LONG)
        light.stop()
        time.sleep(5)
        light.start()
        return judged("lighthouse", until(told, workers, args.steps), workers)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--back", default="5,60")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="kills,slow,lighthouse")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trials = {"kills": killed, "slow": slowed, "lighthouse": without_lighthouse}
    sound = []
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "steps"
            given = {"until": str(told), "seconds": args.seconds, "timeout": 20, "quorum_timeout": 120, "momentum": 0.3}
            sound.append(trials[name](given, told, args))
    with tempfile.TemporaryDirectory() as folder, run({"steps": args.steps, "momentum": 0.3}, 4) as (workers, *_):
        sound.append(judged("left alone", [one.wait(LONG) for one in workers], workers))
    return not all(sound)


if __name__ == "__main__":
    sys.exit(main())
