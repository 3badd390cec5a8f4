"""nanoGPT's Shakespeare by characters under every codec and published method: replayed beforehand, then trained.

    python benchmarks text_chars --data tinyshakespeare.txt --work DIR [--rows ROWS.jsonl] [--modes shared own]
                                    [--methods dense "top-k 1 %"] [--seeds 0 1] [--steps 2000]
    python benchmarks text_chars --table [--rows ROWS.jsonl]

The workload `text_chars`: 804,096 parameters, 2,000 iterations of AdamW, published validation loss 1.88 (nats per
character). Four emulated nodes share nanoGPT's batch ("shared": 4 x 3 rows) or have its batch each ("own": 4 x 12).
Every method begins after 100 dense iterations, the warm-up of the learning rate, and has dense training's learning
rate. A method that brings its own momentum trains with beta_1 = 0. For each mode a dense run of another seed is
recorded, iterations 100 to 139 of all nodes, in DIR. A method is replayed on it before it is trained, and plans by
layer are fitted on it.

Rows, one line of JSON each, are added to ROWS as they finish; what is there is not done again. A run that diverges or
is refused is a row too. A row names the version that made it.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import emulated
import torch
from compared import Compared, published
from rows import Row, add, finite, grouped, missing, options, read

from gradlab import __version__
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.datasets import get
from gradlab.datasets.recipe import Recipe
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Plan, Wrap
from gradlab.plan.optimizer_rules import wrapper_that
from gradlab.trace import Trace

WORKLOAD = get("text_chars")
ROWS = Path(__file__).parents[1] / "results" / "text-chars.jsonl"
RANKS, WARMUP, PUBLISHED = 4, 100, 1.88
MODES = {"shared": 3, "own": 12}  # rows per node and step
FIRST, RECORDED, RECORDED_SEED = 100, 40, 7
BOTH_WAYS = (*FEEDBACK, Wrap("two_way"))
PCA = {"ratio": 25, "pooled": 16, "whitening": False, "sample_steps": 50, "compressed_steps": 0}
CONTROL = "dense, momentum in the plan"
# In the order of their importance, as a campaign may be ended early.
METHODS: dict[str, Compared] = {
    "dense": Compared(),
    "bfloat16": Compared("cast", {"dtype": "bfloat16"}),
    "PowerSGD rank 4": published("PowerSGD", rank=4),
    "top-k 1 %": Compared("topk", {"density": 0.01}),
    "QSGD 4 bits, max norm": published("QSGD, max norm", bits=4),
    "int8": Compared("block_scaled", {"dtype": "int8"}),
    "int4": Compared("block_scaled", {"dtype": "int4"}),
    "signs": Compared("sign"),
    "TernGrad": published("TernGrad"),
    "1-bit SGD": published("1-bit SGD"),
    "QSGD 8 bits, max norm": published("QSGD, max norm", bits=8),
    "natural": Compared("natural"),
    "random-k 1 %": Compared("random_k", {"density": 0.01}),
    "DCT top-k": Compared("dct_topk"),
    "CLT-k 1 %": Compared("clt_k", {"density": 0.01}),
    "L-GreCo, PowerSGD rank 4": Compared("powersgd", {"rank": 4}, by_layer=True),
    "L-GreCo, top-k": Compared("topk", {"density": 0.01}, by_layer=True),
    "dist-EF-blockSGDM": published("dist-EF-blockSGDM", momentum=False),
    "DGC 1 %": published("DGC", momentum=False, density=0.01),
    "signSGD": published("signSGD"),
    "signum": published("signum", momentum=False),
    "PowerSGD rank 16": published("PowerSGD", rank=16),
    "top-k 10 %": Compared("topk", {"density": 0.1}),
    "LoCo": published("LoCo"),
    "DeMo": published("DeMo", momentum=False),
    "ScaleCom 1 %": published("ScaleCom", density=0.01),
    "global top-k 1 %": published("global top-k", density=0.01),
    "signs, both ways": Compared("sign", {}, BOTH_WAYS),
    "fp8": Compared("block_scaled", {"dtype": "float8_e4m3fn"}),
    "float16": Compared("cast", {"dtype": "float16"}),
    "dist-EF-blockSGD": published("dist-EF-blockSGD"),
    "dist-EF-SGDM": published("dist-EF-SGDM", momentum=False),
    "MEM-SGD 1 %": published("MEM-SGD", density=0.01),
    "sampled threshold 1 %": Compared("sampled_threshold", {"density": 0.01}),
    "Rethink-GS 1 %": published("Rethink-GS", density=0.01),
    "QSGD 4 bits, L2 norm": published("QSGD", bits=4),
    "QSGD 2 bits, max norm": published("QSGD, max norm", bits=2),
    "GradiVeQ": Compared("gradiveq", {"roles": ("linear",)}),
    "GradiVeQ, half PCA": Compared("gradiveq", {"roles": ("linear",), "complement": 0.5, **PCA}, FEEDBACK),
    **{f"ecsq {bits:g} bits": Compared("ecsq", {"bits": bits}) for bits in (1.25, 0.5, 0.25, 0.12)},
    "ecsq 0.5 bits, both ways": Compared("ecsq", {"bits": 0.5}, BOTH_WAYS),
    "LGC 1 %": published("LGC", density=0.01),
    # The control of methods that bring their own momentum: the same, and nothing compressed.
    CONTROL: Compared("identity", {}, (Wrap("local_momentum", {"momentum": 0.9, "nesterov": True}),), momentum=False),
}


class Campaign:
    """Runs of one file of rows, with recordings in the folder `work`, on Tiny Shakespeare, of so many steps."""

    def __init__(self, rows: Path, work: Path, data: Path, steps: int) -> None:
        self.file, self.work, self.steps = rows, work, steps
        self.data = WORKLOAD.load(str(data))
        self.layers = layers_of(WORKLOAD.model(0))
        self.version = version()

    def run(self, mode: str, name: str, seed: int) -> None:
        """Replay a method, if that is not done, then train with it, if that is not done."""
        replayed, common = {"kind": "replay", "mode": mode, "method": name}, {"mode": mode, "method": name}
        for key in missing(self.file, [replayed] * (name != "dense")):
            add(self.file, key | self._done(lambda: self._replay(mode, name)))
        trained = {"kind": "training", **common, "seed": seed, "steps": self.steps}
        for key in missing(self.file, [trained]):
            add(self.file, key | self._done(lambda: self._train(mode, name, seed)), unshown=("residuals",))

    def _train(self, mode: str, name: str, seed: int) -> Row:
        plan = self._plan(mode, name, WARMUP)
        task = task_of(mode, self.steps, plan)
        run = emulated.train(task, plan, self.data, seed)
        dense = 4 * sum(layer.numel for layer in self.layers)
        return {
            "validation": finite(run["score"]),
            "loss": finite(run["loss"]),
            "residuals": [finite(norm) for norm in run["residuals"]],
            "beta1": task.recipe.momentum,
            "dense_payload": dense,
            "predicted_payload": plan.payload_bytes(RANKS),
            "payload": dense / run["compressing_ratio"],
            "payload_all_steps": run["payload"],
            "wire_all_steps": run["wire"],
            "settings": METHODS[name].codec_settings,
        }

    def _replay(self, mode: str, name: str) -> Row:
        plan = self._plan(mode, name, 0)
        with Trace(self._recording(mode)) as trace:
            summary = replay(trace, plan).summary()
        figures = ("cosine", "contribution_error", "aggregate_error", "residual_growth")
        return {
            **{figure: finite(getattr(summary, figure)) for figure in figures},
            "memory": summary.memory,
            "windows": [one.to_json() for one in summary.windows],
            "payload": summary.payload_bytes_per_step.mean,
            "wire": summary.wire_bytes_per_step.mean,
            "predicted_payload": plan.payload_bytes(RANKS),
        }

    def _plan(self, mode: str, name: str, warmup: int) -> Plan:
        method = METHODS[name]
        if not method.by_layer:
            return method.plan(self.layers, warmup)
        file = self.work / f"{mode}-{method.codec}-{warmup}.safetensors"
        if not file.exists():
            with Trace(self._recording(mode)) as trace:
                Artifact(method.fitted(trace, warmup, self.layers)).save(file)
        return Artifact.load(file).plan

    def _recording(self, mode: str) -> Path:
        folder = self.work / f"trace-{mode}"
        if not folder.exists():
            task = task_of(mode, WORKLOAD.recipe.steps, Plan(tuple(self.layers)))
            unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")  # of a run that is killed no trace is taken
            emulated.record(task, self.data, unfinished, RECORDED_SEED, start=FIRST, every=1, count=RECORDED)
            unfinished.rename(folder)
        return folder

    def _done(self, work: Callable[[], Row]) -> Row:
        """The work's row, or that of its refusal; with its processor seconds, and the version that did it."""
        spent = time.process_time()
        try:
            row = work()
        except GradlabError as reason:
            row = {"refused": str(reason)}
        return row | {"processor_seconds": round(time.process_time() - spent, 1), "version": self.version}


def task_of(mode: str, steps: int, plan: Plan) -> emulated.Task:
    """The workload on four nodes, without momentum and weight decay that the plan applies itself."""
    recipe: Recipe = replace(
        WORKLOAD.recipe, batch_size=MODES[mode], steps=steps, warmup_steps=min(steps, WORKLOAD.recipe.warmup_steps)
    )
    if wrapper_that(plan, "applies_momentum"):
        recipe = replace(recipe, momentum=0.0)
    return emulated.Task(WORKLOAD, recipe, RANKS)


def version() -> str:
    """The checkout's, as git describes it; the package's outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return said.stdout.strip() or __version__


# --- tables -----------------------------------------------------------------------------------------------------

COLUMNS = ("method", "predicted kB", "replayed kB", "sent kB", "ratio", "cosine", "error mean", "loss", "to dense")
WIDTHS = (12, 11, 7, 6, 6, 10, 16, 8)


def table(rows: Sequence[Row], steps: int) -> str:
    """Lay out all modes: methods by validation loss, with the replay's prediction; then how well it predicted."""
    lines: list[str] = []
    for mode, batch in MODES.items():
        trained = [row for row in rows if row["kind"] == "training" and row["mode"] == mode and row["steps"] == steps]
        replayed = {row["method"]: row for row in rows if row["kind"] == "replay" and row["mode"] == mode}
        if trained:
            lines += [f"{mode}: {RANKS} nodes with {batch} rows each", *_lines_of_mode(trained, replayed)]
            lines.append("")
    return "\n".join(lines[:-1])


def _lines_of_mode(trained: Sequence[Row], replayed: Mapping[str, Row]) -> list[str]:
    known = grouped(trained, lambda row: row["method"])
    by_method = {name: known[name] for name in METHODS if name in known}
    dense = _by_seed(by_method, "dense")
    control = _by_seed(by_method, CONTROL)  # of methods with momentum of their own, which is another optimizer
    lines = [_line(COLUMNS)]
    for name, runs in sorted(by_method.items(), key=lambda item: outcome(item[1])):
        row = replayed.get(name)
        figures = [
            _figure(row, "cosine"),
            _figure(row, "aggregate_error"),
            *_outcome(runs, dense if METHODS[name].momentum else control),
        ]
        lines.append(_line([name, *_bytes(runs, row), *figures]))
    comparable = {name: runs for name, runs in by_method.items() if METHODS[name].momentum}
    return [*lines, *_predictions(comparable, replayed)]


def _by_seed(by_method: Mapping[str, Sequence[Row]], name: str) -> dict[int, float | None]:
    return {row["seed"]: row.get("validation") for row in by_method.get(name, [])}


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:27s}" + "".join(f"  {cell:>{width}s}" for cell, width in zip(cells[1:], WIDTHS, strict=True))


def outcome(runs: Sequence[Row]) -> float:
    """The mean validation loss; infinite if a run diverged or was refused."""
    return statistics.fmean(math.inf if run.get("validation") is None else run["validation"] for run in runs)


def _bytes(runs: Sequence[Row], replayed: Row | None) -> list[str]:
    """Bytes per rank and step while compressing: as the plan says beforehand, as replayed, as sent; the ratio."""
    run = next((run for run in runs if "payload" in run), {})
    sizes = [run.get("predicted_payload"), (replayed or {}).get("payload"), run.get("payload")]
    ratio = f"{run['dense_payload'] / run['payload']:.1f}" if run else "-"
    return [*("-" if size is None else f"{size / 1e3:.1f}" for size in sizes), ratio]


def _figure(row: Row | None, key: str) -> str:
    return "-" if row is None or row.get(key) is None else f"{row[key]:.3f}"


def _outcome(runs: Sequence[Row], dense: Mapping[int, float | None]) -> list[str]:
    """The validation loss of each seed, and the mean difference to dense training of the same seed, or its control."""
    pairs = [
        run["validation"] - dense[run["seed"]]
        for run in runs
        if run.get("validation") is not None and dense.get(run["seed"]) is not None
    ]
    return [", ".join(_reached(run) for run in runs), f"{statistics.fmean(pairs):+.3f}" if pairs else "-"]


def _reached(run: Row) -> str:
    if "refused" in run:
        return "refused"
    return "diverged" if run["validation"] is None else f"{run['validation']:.3f}"


def _predictions(by_method: Mapping[str, Sequence[Row]], replayed: Mapping[str, Row]) -> list[str]:
    """How the replay's figures agree with the outcome."""
    names = [name for name in by_method if replayed.get(name, {}).get("cosine") is not None]
    lines = []
    for key, sign in (("cosine", -1), ("aggregate_error", 1), ("contribution_error", 1)):
        pairs = [(sign * replayed[name][key], outcome(by_method[name])) for name in names if replayed[name].get(key)]
        if len(pairs) > 3:
            rho = rank_correlation(*(list(column) for column in zip(*pairs, strict=True)))
            lines.append(f"Spearman of {key} with the validation loss ({len(pairs)} methods): {rho}")
    return lines


def main() -> None:
    """Do the runs that are missing, one after another; or print the tables."""
    named = {"modes": list(MODES), "methods": list(METHODS), "seeds": [0, 1], "steps": WORKLOAD.recipe.steps}
    chosen = options(__doc__, data=Path, work=Path("runs/compare-text"), rows=ROWS, **named, table=False)
    if chosen.table:
        print(table(read(chosen.rows), chosen.steps))
        return
    if chosen.data is None:
        raise SystemExit("--data: the file of Tiny Shakespeare is needed")
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(chosen.rows, chosen.work, chosen.data, chosen.steps)
    # Dense training in all modes first.
    for seed, dense in product(chosen.seeds, (True, False)):
        for mode, name in product(chosen.modes, chosen.methods):
            if (name == "dense") is dense:
                campaign.run(mode, name, seed)


if __name__ == "__main__":
    main()
