"""Nodes of several ranks, in real processes: hierarchical DDP and FSDP2, at 2 x 2, 3 x 2 and 2 x 3 nodes x ranks.

    PYTHONPATH=tests python tests/campaigns/nodes.py [--sizes 2x2,3x2,2x3] [--text WORDS]

prints one line per trial; the exit code is 1 if one went wrong. What a trial asks stands in `trials`.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jobs.fsdp_tasks import OPTIONS, UNCOMPRESSED
from jobs.lgreco_tasks import REFERENCES
from support.process_pool import ProcessPool, TaskFailed

VARYING = ("ecsq",)
ESTIMATED = 0.1  # by which messages that vary in size may differ from their forecast
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("identity", {}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "top-k": ("topk", {"density": 0.05}),
    "PowerSGD": ("powersgd", {"rank": 2}),
    "signs": ("sign", {}),
    "ecsq": ("ecsq", {"bits": 1.0}),
    "a rank for each layer": ("powersgd", {"rank": [3, 1, 2]}),
}


@dataclass(frozen=True)
class Trial:
    """A task for all ranks, and what is wrong with its results, if anything is."""

    name: str
    task: str
    wrong: Callable[[list[Any]], str]
    arguments: dict[str, Any] = field(default_factory=dict)


def trials(nodes: int, local_ranks: int, folder: Path) -> Iterator[Trial]:
    """All trials of one size."""
    for name, (codec, settings) in CODECS.items():
        arguments = {"codec": codec, "settings": settings}
        within = ESTIMATED if name in VARYING else 1e-9
        yield Trial(
            f"DDP, {name}: bytes as forecast, ranks agree",
            "jobs.node_tasks:bytes_of_steps",
            partial(_wrong_bytes, within=within),
            {**arguments, "local_ranks": local_ranks},
        )
        if name != "identity":
            yield Trial(
                f"FSDP2, {name}: bytes as forecast, nodes agree",
                "jobs.fsdp_tasks:compressed",
                partial(_wrong_agreement, within=within),
                {**arguments, "nodes": nodes},
            )
        yield Trial(
            f"FSDP2, {name}: lockstep's gradients and states, bit for bit",
            "jobs.fsdp_tasks:against_lockstep",
            _wrong_steps,
            {**arguments, "nodes": nodes, "option": "default"},
        )
    yield from _of_fitted_plans(nodes, local_ranks, folder)
    yield Trial("DDP: resumed == never stopped", "jobs.node_tasks:resumed", _all_true, {"local_ranks": local_ranks})
    for option, how in UNCOMPRESSED.items():
        if nodes > 2 and ("divide" in how.get("shard", {}) or "optimizers" in how):
            continue  # in the last bit: a mean between three, times three, and the order of sums that are taken by hand
        yield Trial(
            f"FSDP2: 200 steps of nothing compressed == native HSDP, bit for bit: {option}",
            "jobs.fsdp_tasks:against_native",
            lambda results: "" if all(one["same"] for one in results) else "differs",
            {"nodes": nodes, "steps": 200, "option": option},
        )
    for name in ("int8", "top-k", "signs"):
        for second in ("", "topk"):
            codec, settings = CODECS[name]
            levels = f"{name} in the reduce-scatter{', top-k between nodes' if second else ''}"
            yield Trial(
                f"FSDP2, {levels}: lockstep's, bit for bit",
                "jobs.fsdp_tasks:reduced",
                lambda results: _all_true([one["same"] for one in results]),
                {"nodes": nodes, "codec": codec, "settings": settings, "between": second},
            )
    for option in OPTIONS:
        arguments = {"nodes": nodes, "codec": "topk", "settings": {"density": 0.05}, "option": option}
        yield Trial(f"FSDP2, {option}", "jobs.fsdp_tasks:against_lockstep", _wrong_steps, arguments)
    for levels in (1, 2):
        yield Trial(
            f"FSDP2, {levels} level(s): resumed by torch.distributed.checkpoint == never stopped",
            "jobs.fsdp_tasks:resumed",
            lambda results: _all_true([one["same"] for one in results]),
            {"nodes": nodes, "folder": str(folder / f"{nodes}x{local_ranks}x{levels}"), "levels": levels},
        )


def _of_fitted_plans(nodes: int, local_ranks: int, folder: Path) -> Iterator[Trial]:
    """L-GreCo's plans, fitted to a recording of DDP as the nodes of this size have it."""
    fits = folder / f"fits-{nodes}x{local_ranks}"
    yield Trial(
        "L-GreCo: layers' settings differ in the plans fitted",
        "jobs.lgreco_tasks:fitted",
        lambda results: "" if all(len(set(one)) > 1 for one in results[0].values()) else f"uniform: {results[0]}",
        {"local_ranks": local_ranks, "folder": str(fits)},
    )
    for codec in REFERENCES:
        path = str(fits / f"{codec}.safetensors")
        yield Trial(
            f"L-GreCo's plan for {codec}, DDP: bytes as forecast, ranks agree",
            "jobs.lgreco_tasks:between_nodes",
            _wrong_agreement,
            {"local_ranks": local_ranks, "path": path},
        )
        arguments = {"nodes": nodes, "codec": "artifact", "settings": {"path": path}}
        yield Trial(
            f"L-GreCo's plan for {codec}, FSDP2: bytes as forecast, nodes agree",
            "jobs.fsdp_tasks:compressed",
            _wrong_agreement,
            arguments,
        )
        yield Trial(
            f"L-GreCo's plan for {codec}, FSDP2: lockstep's gradients and states, bit for bit",
            "jobs.fsdp_tasks:against_lockstep",
            _wrong_steps,
            {**arguments, "option": "default"},
        )


def _misforecast(pairs: list[tuple[float, float]], within: float = 1e-9) -> str:
    """What is wrong with (bytes counted, bytes forecast) of all ranks. within: the share by which means may differ.

    Shards of whole blocks are not equal, so that ranks of one place on different nodes send different numbers of bytes;
    the forecast, which is the same for them, is the mean.
    """
    for forecast in {forecast for _, forecast in pairs}:
        counted = [count for count, expected in pairs if expected == forecast]
        if not math.isclose(sum(counted) / len(counted), forecast, rel_tol=within, abs_tol=0):
            return f"counted {counted}, forecast {forecast}"
    return ""


def _wrong_bytes(results: list[Any], within: float = 1e-9) -> str:
    if misforecast := _misforecast([(one["payload"], one["forecast"]) for one in results], within):
        return misforecast
    if any(one["gradients"] != results[0]["gradients"] for one in results):
        return "ranks disagree"
    return "" if results[0]["groups"] or max(one["farthest"] for one in results) < 4e-7 else "far from plain DDP"


def _wrong_agreement(results: list[Any], within: float = 1e-9) -> str:
    if misforecast := _misforecast([(one["counted"], one["forecast"]) for one in results], within):
        return misforecast
    return "" if all(one["agree"] and one["finite"] for one in results) else "nodes disagree"


def _wrong_steps(results: list[Any]) -> str:
    same = all(all(one["same"]) and all(one["states"]) for one in results)
    return "" if same else f"differs: {results[0]}"


def _all_true(results: list[Any]) -> str:
    return "" if all(all(one) for one in results) else f"differs: {results}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2x2,3x2,2x3", help="nodes x ranks of a node, comma-separated")
    parser.add_argument("--text", default="", help="run the trials whose name has these words")
    wanted = parser.parse_args()
    failed = count = 0
    for size in wanted.sizes.split(","):
        nodes, local_ranks = map(int, size.split("x"))
        folder = Path(tempfile.mkdtemp())
        with ProcessPool(nodes * local_ranks, folder / "pool.log") as pool:
            for trial in trials(nodes, local_ranks, folder):
                if wanted.text not in trial.name:
                    continue
                began = time.monotonic()
                try:
                    wrong = trial.wrong(pool.run(trial.task, nodes * local_ranks, **trial.arguments))
                except TaskFailed as error:
                    wrong = str(error)
                count, failed = count + 1, failed + bool(wrong)
                verdict = f"WRONG: {wrong}" if wrong else "ok"
                print(f"{size}, {trial.name}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
        shutil.rmtree(folder)
    print(f"{count} trials, {failed} went wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
