"""nanoGPT's Shakespeare by characters under every codec and published method: replayed beforehand, then trained.

    python benchmarks text_chars --data tinyshakespeare.txt --work DIR [--rows ROWS.jsonl] [--modes shared own]
                                    [--methods dense "top-k 1 %"] [--seeds 0 1] [--steps 2000]
    python benchmarks text_chars --table [--rows ROWS.jsonl] [--steps 2000]

The workload `text_chars`: 804,096 parameters, AdamW. Four emulated nodes share nanoGPT's batch ("shared": 4 x 3 rows)
or have its batch each ("own": 4 x 12). Methods begin after 100 dense iterations and have dense training's learning
rate. A method that brings its own momentum trains with beta_1 = 0. For each mode a dense run of another seed is
recorded in DIR, iterations 100 to 139. A method is replayed on it before it is trained, and plans by layer are fitted
on it. A row is a replay or a run, also one that diverged or was refused; what is there is not done again.
"""

from __future__ import annotations

import math
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
from rows import Row, fill, finite, grouped, options, read

from gradlab import __version__
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.datasets import get
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Plan, Wrap
from gradlab.plan.optimizer_rules import wrapper_that
from gradlab.trace import Trace

WORKLOAD = get("text_chars")
ROWS = Path(__file__).parents[1] / "results" / "text-chars.jsonl"
RANKS, WARMUP = 4, 100
MODES = {"shared": 3, "own": 12}  # rows per node and step
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
        common = {"mode": mode, "method": name}
        if name != "dense":
            fill(self.file, [{"kind": "replay", **common}], lambda _: self._done(self._replay, mode, name))
        trained = {"kind": "training", **common, "seed": seed, "steps": self.steps}
        fill(self.file, [trained], lambda _: self._done(self._train, mode, name, seed))

    def _train(self, mode: str, name: str, seed: int) -> Row:
        plan = self._plan(mode, name, WARMUP)
        task = self._task(mode, plan)
        run = emulated.train(task, plan, self.data, seed)
        dense = 4 * sum(layer.numel for layer in self.layers)
        return {
            "validation": finite(run["score"]),
            "loss": finite(run["loss"]),
            "beta1": task.recipe.momentum,
            "dense_payload": dense,
            "predicted_payload": plan.payload_bytes(RANKS),
            "payload": dense / run["compressing_ratio"],
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
        emulated.record(self._task(mode, None), self.data, folder, 7, start=100, every=1, count=40)
        return folder

    def _task(self, mode: str, plan: Plan | None) -> emulated.Task:
        """The workload on four nodes, without momentum that the plan applies itself. None: that of a recording."""
        recipe = replace(WORKLOAD.recipe, batch_size=MODES[mode])
        if plan:
            recipe = replace(recipe, steps=self.steps, warmup_steps=min(self.steps, recipe.warmup_steps))
        if plan and wrapper_that(plan, "applies_momentum"):
            recipe = replace(recipe, momentum=0.0)
        return emulated.Task(WORKLOAD, recipe, RANKS)

    def _done(self, work: Callable[..., Row], *arguments: str | int) -> Row:
        """The work's row, or that of its refusal; with its processor seconds, and the version that did it."""
        spent = time.process_time()
        try:
            row = work(*arguments)
        except GradlabError as reason:
            row = {"refused": str(reason)}
        return row | {"processor_seconds": round(time.process_time() - spent, 1), "version": self.version}


def version() -> str:
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return said.stdout.strip() or __version__


COLUMNS = ("method", "predicted kB", "replayed kB", "sent kB", "ratio", "cosine", "error mean", "loss", "to dense")
WIDTHS = (12, 11, 7, 6, 6, 10, 16, 8)


def table(rows: Sequence[Row], steps: int) -> str:
    """Lay out all modes: methods by validation loss, with the replay's prediction; then how well it predicted.

    Bytes are per rank and step while compressing: as the plan says beforehand, as replayed, as sent.
    """
    parts = []
    for mode, batch in MODES.items():
        here = [row for row in rows if row["mode"] == mode]
        trained = grouped((r for r in here if r["kind"] == "training" and r["steps"] == steps), lambda r: r["method"])
        replayed = {row["method"]: row for row in here if row["kind"] == "replay"}
        if trained:
            lines = _lines_of_mode({name: trained[name] for name in METHODS if name in trained}, replayed)
            parts.append("\n".join([f"{mode}: {RANKS} nodes with {batch} rows each", *lines]))
    return "\n\n".join(parts)


def _lines_of_mode(trained: Mapping[str, Sequence[Row]], replayed: Mapping[str, Row]) -> list[str]:
    lines = [_line(COLUMNS)]
    for name, runs in sorted(trained.items(), key=lambda item: outcome(item[1])):
        before, run = replayed.get(name, {}), next((run for run in runs if "payload" in run), {})
        sizes = (run.get("predicted_payload"), before.get("payload"), run.get("payload"))
        cells = [_figure(size and size / 1e3, 1) for size in sizes]
        cells.append(_figure(run["dense_payload"] / run["payload"], 1) if run else "-")
        cells += [_figure(before.get(key), 3) for key in ("cosine", "aggregate_error")]
        # A method with momentum of its own is another optimizer, and has its own control.
        dense = {row["seed"]: row for row in trained.get("dense" if METHODS[name].momentum else CONTROL, [])}
        pairs = [(run.get("validation"), dense.get(run["seed"], {}).get("validation")) for run in runs]
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        cells.append(
            ", ".join("refused" if "refused" in run else _figure(run["validation"], 3, "diverged") for run in runs)
        )
        lines.append(_line([name, *cells, f"{statistics.fmean(differences):+.3f}" if differences else "-"]))
    known = [name for name in trained if METHODS[name].momentum and replayed.get(name, {}).get("cosine") is not None]
    for key, sign in (("cosine", -1), ("aggregate_error", 1), ("contribution_error", 1)):
        pairs = [(sign * replayed[name][key], outcome(trained[name])) for name in known if replayed[name].get(key)]
        if len(pairs) > 3:
            rho = rank_correlation(*(list(column) for column in zip(*pairs, strict=True)))
            lines.append(f"Spearman of {key} with the validation loss ({len(pairs)} methods): {rho}")
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:27s}" + "".join(f"  {cell:>{width}s}" for cell, width in zip(cells[1:], WIDTHS, strict=True))


def outcome(runs: Sequence[Row]) -> float:
    """The mean validation loss; infinite if a run diverged or was refused."""
    return statistics.fmean(math.inf if run.get("validation") is None else run["validation"] for run in runs)


def _figure(value: float | None, digits: int, without: str = "-") -> str:
    return without if value is None else f"{value:.{digits}f}"


def main() -> None:
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
