"""Time of a local step on limited links, beside steps that exchange gradients, and beside the forecast.

    python benchmarks/local_step_time.py --netbench FOLDER --rows ROWS.jsonl [--rates 20mbit 100mbit] [--ways diloco]
        [--ranks 4] [--every 30] [--turns 8] [--batch 8]
    python benchmarks/local_step_time.py --rows ROWS.jsonl --table

FOLDER holds `run.sh`, see `link_table.py`. A small transformer (5 M parameters), 4 ranks on this machine's cores, or as
many as are asked for. Ways take turns of a whole round of H steps, outer steps included, and so does the same model
without any exchange, so that a slow spell of the machine falls on all; rank 0 times a turn, and the median one counts.
A turn begins when nothing is on its way. The forecast is `forecast_local_steps`'s, of the step without exchange, and,
for ways that exchange gradients, `forecast`'s. The way "again" exchanges nothing either: what it takes more or less
than the other is the measurement's own error. Links are calibrated on all-reduces of `SIZES` that are timed at the same
number of ranks over links without a limit, as `gradlab predict --measured` would. It needs root.

Rows without "turns" are of an earlier form: each way by itself over two rounds, computing alone before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rows import Row, add, has, read
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from gradlab.analysis.forecast.calibration import Calibration

EVERY = int(os.environ.get("LOCAL_STEPS", 30))  # of the processes that `run.sh` starts
UNTIMED = 5  # steps of each way before its first turn, as `run.sh` takes them: what was sent has then been applied
STREAMING = {"fragments": 3, "delay": 5}
INT4: Mapping[str, Any] = {"codec": "block_scaled", "dtype": "int4"}
ALONE, AGAIN = "alone", "again"  # without any exchange; the second measures the measurement
WAYS: dict[str, Mapping[str, Any]] = {
    AGAIN: {},
    "diloco": {"codec": "identity"},
    "diloco_int4": INT4,
    "streaming": {"codec": "identity", **STREAMING},
    "streaming_int4": {**INT4, **STREAMING},
}
LINK = (1e9, 1e-4, 0.06)  # its rate is another one; latency and headers
SIZES = ("4", "44")  # megabytes
HOOKS = {"plain DDP": "none", "PyTorch PowerSGD 1": "powersgd_r1@1000"}
TITLES = {
    AGAIN: "computing alone, again",
    "diloco": "DiLoCo, H = 30",
    "diloco_int4": "DiLoCo, H = 30, int4",
    "streaming": "streaming, H = 30, 3 fragments, 5 steps late",
    "streaming_int4": "streaming, H = 30, 3 fragments, 5 steps late, int4",
}


def _way(name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make the function that attaches a way to a model, as link_table's do."""

    def attach(model: torch.nn.Module, group: Any) -> tuple[Any, Any]:
        outer = None if name in (ALONE, AGAIN) else _outer_step(model, group, **WAYS[name])
        fragments = outer.fragments if outer is not None else ()
        first, begins, turns = next(model.parameters()), [], []
        kept = Path(f"{os.environ['LOCAL_STEP_ROW']}.{name}")

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = optimizer.param_groups[0]["params"]
            if any(one is common for part in fragments for common in part.parameters.values() for one in parameters):
                return  # the outer optimizer's own step
            if not any(first is one for one in parameters):
                return  # another way's
            if outer is not None:
                outer.step()
            timed = len(begins) - UNTIMED
            if timed > 0 and timed % EVERY == 0 and torch.distributed.get_rank() == 0:
                began = begins[-EVERY]
                now = time.perf_counter(), time.process_time()
                turns.append([(end - start) / EVERY for start, end in zip(began, now, strict=True)])
                seconds, processor = map(statistics.median, zip(*turns, strict=True))
                kept.write_text(
                    json.dumps({"seconds": seconds, "processor": processor, "turns": len(turns)}), encoding="utf-8"
                )

        model.register_forward_pre_hook(lambda *_: begins.append((time.perf_counter(), time.process_time())))
        register_optimizer_step_post_hook(stepped)
        # DDP looks at a hook's annotations, which are words here: a lambda has none.
        return None, lambda _, bucket: _no_exchange(bucket)

    return attach


def _outer_step(model: torch.nn.Module, group: Any, codec: str, **settings: Any) -> Any:
    from gradlab.plan import Plan
    from gradlab.runtime import OuterStep

    numbers = {name: settings.pop(name) for name in STREAMING if name in settings}
    return OuterStep(Plan.uniform(model, codec, **settings), model, every=EVERY, group=group, **numbers)


def _no_exchange(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


globals().update({name: _way(name) for name in (ALONE, *WAYS)})


def run(
    folder: Path,
    rate: str,
    ranks: int,
    hooks: list[str],
    steps: int,
    environment: Mapping[str, str],
    also: Sequence[str] = (),
) -> list[Row]:
    """Run some ways over a link of this rate. also: more options of `run.sh`."""
    command = ["bash", str(folder / "run.sh"), "--ranks", str(ranks), "--rate", rate, "--model", "transformer"]
    command += ["--steps", str(steps), "--timeout", "900", *also]
    for hook in hooks:
        command += ["--hook" if ":" not in hook else "--hook-from", hook]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def measured(options: argparse.Namespace) -> None:
    """Measure every way at every rate, and keep the rows."""
    ranks = options.ranks
    for size in SIZES:
        key = {"ranks": ranks, "rate": "unlimited", "raw_mb": float(size)}
        if not has(read(options.rows), key):
            [row] = run(options.netbench, "unlimited", ranks, [], 8, {}, ["--raw", size])
            add(options.rows, key | {"all_reduce_s": row["all_reduce_s"]})
    calibration = calibrated(read(options.rows), ranks)
    for rate in options.rates:
        place = {"rate": rate, "ranks": ranks, "batch": options.batch}
        if not has(read(options.rows), {**place, "way": next(iter(HOOKS))}):
            also = ["--batch", str(options.batch)]
            plain = run(options.netbench, rate, ranks, [",".join(HOOKS.values())], 3, {}, also)
            for title, row in zip(HOOKS, plain, strict=True):
                told = {"seconds": row["step_s"], "alone": row["compute_s"], "sent": row["tx_bytes"]}
                expected = predicted(rate, ranks, told["alone"], calibration)[title]
                add(options.rows, {**place, "way": title, **told, "forecast": expected})
        steps = in_turns(options, rate)
        alone = steps[ALONE]
        for way in options.ways:
            told = steps[way] | {"alone": alone["seconds"], "processor alone": alone["processor"]}
            expected = predicted(rate, ranks, alone["seconds"], calibration, options.every)[way]
            add(options.rows, {**place, "way": way, "every": options.every, **told, "forecast": expected})


def in_turns(options: argparse.Namespace, rate: str) -> dict[str, dict[str, float]]:
    """Run all ways over a link of this rate, in turns with computing alone: their seconds and bytes, by name."""
    names, kept = [ALONE, *options.ways], options.rows.resolve().with_suffix(".part")
    hooks = {f"{Path(__file__).stem}:{name}": name for name in names}
    told_to = {"LOCAL_STEP_ROW": str(kept), "LOCAL_STEPS": str(options.every)}
    # The hook without an exchange comes first: between turns its model computes.
    also = ["--rounds", str(options.turns), "--batch", str(options.batch)]
    rows = run(options.netbench, rate, options.ranks, ["noop", *hooks], options.every, told_to, also)
    found = {}
    for row in rows:
        if "error" in row:
            raise SystemExit(f"{row['hook']}: {row['error']}")
        if row["hook"] in hooks:
            part = Path(f"{kept}.{hooks[row['hook']]}")
            found[hooks[row["hook"]]] = {**json.loads(part.read_text(encoding="utf-8")), "sent": row["tx_bytes"]}
            part.unlink()
    return found


def calibrated(rows: list[Row], ranks: int) -> Calibration:
    """Fit the costs of links to the all-reduces that were timed."""
    from gradlab.analysis.forecast.calibration import Observation, calibrate_link
    from gradlab.analysis.forecast.link import Link

    timed = [row for row in rows if "raw_mb" in row and row["ranks"] == ranks]
    seen = [Observation(ranks, int(1e6 * row["raw_mb"]), float("inf"), row["all_reduce_s"]) for row in timed]
    return calibrate_link(Link(*LINK), seen)


def predicted(rate: str, ranks: int, alone: float, calibration: Calibration, every: int = EVERY) -> dict[str, float]:
    """The forecast time of every way's step, in seconds."""
    from gradlab.analysis.forecast import Network, forecast
    from gradlab.analysis.forecast.link import Link, parse_bandwidth
    from gradlab.analysis.forecast.local_steps import forecast_local_steps
    from gradlab.analysis.forecast.profile import Profile
    from gradlab.layout import layers_of
    from gradlab.plan import Plan

    layers = layers_of(_transformer())
    link = Link(parse_bandwidth(rate), *LINK[1:])
    network = Network([link], (ranks,), Profile(alone, "measured"), cores=2 / ranks)
    plan = Plan.uniform(layers, **INT4)
    [local] = forecast_local_steps(plan, network, forecast(plan, network, calibration=calibration), calibration)
    expected = {"plain DDP": local.dense, AGAIN: alone}
    for suffix, dense in (("", True), ("_int4", False)):
        expected[f"diloco{suffix}"] = local.seconds(every, dense=dense)
        expected[f"streaming{suffix}"] = local.seconds(every, streaming=True, dense=dense, **STREAMING)
    [power] = forecast(Plan.uniform(layers, "powersgd", rank=1), network, calibration=calibration).comparisons
    return {**expected, "PyTorch PowerSGD 1": power[1].compressed.seconds}


def _transformer() -> torch.nn.Module:
    """The layers of `run.sh`'s transformer."""
    width, words, length = 256, 4096, 64
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Module()
    model.embed, model.pos = torch.nn.Embedding(words, width), torch.nn.Parameter(torch.zeros(length, width))
    model.body, model.head = torch.nn.TransformerEncoder(block, 4), torch.nn.Linear(width, words)
    return model


def table(rows: list[Row]) -> None:
    """Print a table for each rate, number of ranks and batch: times over computing alone, and the forecast."""

    def place(row: Row) -> tuple[str, int, int]:
        return row["rate"], row.get("ranks", 4), row.get("batch", 8)

    rows = [row for row in rows if "way" in row]
    for rate, ranks, batch in dict.fromkeys(map(place, rows)):
        here = [row for row in rows if place(row) == (rate, ranks, batch)]
        titles = (
            f"{rate}, {ranks} ranks" + (f", batch {batch}" if batch != 8 else ""),
            "a step, s",
            "over computing alone",
            "forecast, s",
            "forecast over measured",
            "MB a step",
        )
        print(f"\n| {' | '.join(titles)} |")
        print("|---" * len(titles) + "|")
        for row in here:
            title = TITLES.get(row["way"], row["way"]).replace("H = 30", f"H = {row.get('every', 30)}")
            title += ", in turns" if "turns" in row else ""
            cells = [f"{row['seconds']:.3f}", f"{row['seconds'] / row['alone']:.2f}"]
            cells += [f"{row['forecast']:.3f}", f"{row['forecast'] / row['seconds']:.2f}"]
            print(f"| {title} | " + " | ".join([*cells, f"{row['sent'] / 1e6:.2f}"]) + " |")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netbench", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=EVERY, help="local steps, H")
    parser.add_argument("--turns", type=int, default=8, help="of each way")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank's step")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        if options.netbench is None or not (options.netbench / "run.sh").exists():
            raise SystemExit(f"--netbench {options.netbench}: expected a folder with run.sh")
        options.netbench = options.netbench.resolve()
        measured(options)
    table(read(options.rows))


if __name__ == "__main__":
    main()
