"""A corpus: two small recordings, and what became of methods that were trained there.

    python benchmarks corpus --data FOLDER --work runs/corpus [--baselines cifar-resnet] [--steps 1000]
    python benchmarks corpus --table [--rows benchmarks/results/corpus.jsonl]

FOLDER holds cifar10.npz and tinyshakespeare.txt. Two baselines on four emulated nodes: ResNet-8 on CIFAR-10 halved to
16 x 16, and nanoGPT's transformer by characters. A dense run of another seed is recorded from the middle of training
on, in bfloat16 and within a byte budget. Each method is replayed on it, which is the prediction, and trained with,
which is what is observed: dense for 100 iterations, then compressed, at dense training's learning rate. A loss is the
mean over the last 50 iterations, beside dense training's of the same seed.

Every run is a line in WORK/runs.jsonl, and what is there is not done again. The corpus is the folder WORK/corpus; the
same recordings and outcomes give the same bytes.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import torch
from accuracy import resnet8
from rows import Row, fill, finite, grouped, markdown, options, read
from text_chars import version

from gradlab.analysis.corpus.manifest import ROWS, Source, describe, write_manifest
from gradlab.analysis.corpus.outcome import Outcome, read_outcomes, replayed_figures, written
from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay import replay
from gradlab.analysis.replay.named_method import parse_method
from gradlab.datasets import Data, TextChars, get
from gradlab.datasets.recipe import Recipe
from gradlab.files import write_whole
from gradlab.formatting import format_bytes, format_percent
from gradlab.layout import layers_of
from gradlab.plan import Plan, Schedule
from gradlab.trace import Trace

RANKS, WARMUP, RECORDED, BUDGET = 4, 100, 16, "11MB"
SEED, OTHER_SEED, RECORDED_SEED = 0, 1, 7
KNOWN = Path(__file__).parents[1] / "results" / "corpus.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
DENSE, OTHER_DENSE = "dense", "dense, another seed"
# Titles and the words of `gradlab evaluate`. Two settings and more of a kind, so that a new method has neighbours.
METHODS = {
    "16-bit floats": "cast:dtype=float16",
    "int8": "block_scaled:dtype=int8",
    "QSGD 4 bits, max norm": "QSGD, max norm:bits=4",
    "QSGD 2 bits, max norm": "QSGD, max norm:bits=2",
    "top-k 10 %, no feedback": "topk:density=0.1,error_feedback=false",
    "top-k 1 %, no feedback": "topk:density=0.01,error_feedback=false",
    "PowerSGD rank 4": "PowerSGD:rank=4",
    "PowerSGD rank 1": "PowerSGD:rank=1",
    "1-bit SGD": "1-bit SGD",
    "top-k 10 %": "topk:density=0.1",
    "top-k 1 %": "topk:density=0.01",
}


@dataclass(frozen=True)
class Baseline:
    """A training that is recorded. file: the data's, in the folder that is given."""

    title: str
    task: emulated.Task
    file: str
    source: Source


def baselines() -> dict[str, Baseline]:
    changed = {"learning_rate": 0.1, "batch_size": 16, "steps": 300, "schedule": "cosine", "momentum": 0.9}
    characters = TextChars(width=48, layers=2, heads=3)
    return {
        "cifar-resnet": Baseline(
            "ResNet-8 on CIFAR-10 halved to 16 x 16",
            resnet8(replace(get("cifar10").recipe, **changed), RANKS),
            "cifar10.npz",
            Source(
                "CIFAR-10",
                "no licence is stated by its author; gradients of it alone are here, no image",
                "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
            ),
        ),
        "nanogpt": Baseline(
            "nanoGPT by characters, 2 layers of width 48",
            emulated.Task(characters, replace(characters.recipe, steps=600), RANKS),
            "tinyshakespeare.txt",
            Source("Tiny Shakespeare", "public domain", "karpathy/char-rnn, data/tinyshakespeare/input.txt"),
        ),
    }


def shortened(baseline: Baseline, steps: int) -> Baseline:
    recipe: Recipe = baseline.task.recipe
    recipe = replace(recipe, steps=steps, warmup_steps=min(steps, recipe.warmup_steps))
    return replace(baseline, task=replace(baseline.task, recipe=recipe))


def caveats(page: str, leave_out: Collection[str] = ()) -> list[str]:
    """Take what a reader must know out of the docs' page: items of a section, but those of some recordings."""
    section = page.partition("\n## What to mind\n")[2].partition("\n## ")[0]
    _, *items = re.split(r"^- ", section, flags=re.MULTILINE)
    paragraphs = [" ".join(item.split()) for item in items]
    return [one for one in paragraphs if not one.startswith(tuple(f"**{name}**" for name in leave_out))]


class Campaign:
    """Makes a corpus in the folder `work`, as far as it is not there: runs.jsonl, and a folder for each recording.

    budget: bytes of a recording at most; warmup: dense iterations before a method compresses; recorded: iterations.
    """

    def __init__(
        self, work: Path, data: Path, chosen: Mapping[str, Baseline], methods: Mapping[str, str] = METHODS, **sizes: Any
    ) -> None:
        self.folder, self.runs, self.data = work / "corpus", work / "runs.jsonl", data
        self.chosen, self.methods = chosen, methods
        known = {"budget": BUDGET, "warmup": WARMUP, "recorded": RECORDED, **sizes}
        self.budget, self.warmup, self.recorded = known.values()

    def train(self) -> None:
        for name, baseline in self.chosen.items():
            path = str(self.data / baseline.file) if baseline.file else None
            data, task = baseline.task.workload.load(path, test_limit=1000), baseline.task
            emulated.record(
                task,
                data,
                self.folder / name,
                RECORDED_SEED,
                start=task.recipe.steps // 2,
                every=1,
                count=self.recorded,
                dtype="bfloat16",
                budget=self.budget,
                metadata={"workload": task.workload.name, "recording": name, "seed": RECORDED_SEED},
            )
            for method, seed in ((DENSE, SEED), (DENSE, OTHER_SEED), *((method, SEED) for method in self.methods)):
                key = {"recording": name, "method": method, "seed": seed, "steps": task.recipe.steps}
                fill(self.runs, [key], partial(self._train, task=task, data=data))

    def _train(self, key: Row, task: emulated.Task, data: Data) -> Row:
        began, layers = time.process_time(), layers_of(task.model(SEED))
        plan = Plan(tuple(layers))
        if key["method"] != DENSE:
            plan = replace(parse_method(self.methods[key["method"]]).plan_of(layers), schedule=Schedule(self.warmup))
        run = emulated.train(task, plan, data, key["seed"])
        return {
            "loss": finite(run["loss"]),
            "score": finite(run["score"]),
            "metric": task.workload.metric.name,
            "payload": run["payload"],
            "processor_seconds": round(time.process_time() - began, 1),
            "version": version(),
        }

    def outcomes(self) -> list[Outcome]:
        """Replay every method on every recording, and put the ends of its training beside, as far as it is done."""
        found = []
        for name in self.chosen:
            with Trace(self.folder / name) as trace:
                every = [self._outcome(name, method, trace) for method in (OTHER_DENSE, *self.methods)]
            found += [one for one in every if one is not None]
        return found

    def _outcome(self, name: str, method: str, trace: Trace) -> Outcome | None:
        steps, of_dense = self.chosen[name].task.recipe.steps, method == OTHER_DENSE
        common, rows = {"recording": name, "steps": steps}, read(self.runs)
        key = common | {"method": DENSE if of_dense else method, "seed": OTHER_SEED if of_dense else SEED}
        keys = (key, common | {"method": DENSE, "seed": SEED})
        run, dense = (next((row for row in rows if one.items() <= row.items()), None) for one in keys)
        if run is None or dense is None:
            print(f"{name}: {method} is left out: {self.runs} has no run of {steps} iterations", file=sys.stderr)
            return None
        if of_dense:
            numel = 4.0 * sum(layer.numel for layer in trace.model_layers)
            replayed: Row = dict.fromkeys(("cosine", "length", "aggregate_error", "predicted"))
            replayed |= {"memory": False, "cosines": {}, "payload_bytes": numel, "dense_payload_bytes": numel}
        else:
            done = replay(trace, parse_method(self.methods[method]).plan_of(trace.model_layers))
            replayed = replayed_figures(done.summary(), Judged.of(done))
        words = {"words": "" if of_dense else self.methods[method], "warmup_steps": 0 if of_dense else self.warmup}
        ends = {"loss": run["loss"], "dense_loss": dense["loss"], "steps": steps, "seed": run["seed"]}
        return Outcome(recording=name, method=method, **words, **replayed, **ends)

    def assemble(self, outcomes: Sequence[Outcome], command: str) -> None:
        write_whole(self.folder / ROWS, written(outcomes))
        seeds = {"recorded": RECORDED_SEED, "trained": SEED}
        recordings = []
        for name, one in self.chosen.items():
            sizes = {"steps": one.task.recipe.steps, "batch_size": one.task.recipe.batch_size}
            recordings.append(describe(self.folder, name, title=one.title, source=one.source, **sizes, seeds=seeds))
        known = caveats(PAGE.read_text(encoding="utf-8"), leave_out=set(baselines()) - set(self.chosen))
        write_manifest(self.folder, recordings, command=command, caveats=known)


COLUMNS = ("recording", "method", "bytes", "ratio", "vs 16 bits", "cosine", "similar methods ended", "ended")


def table(outcomes: Sequence[Outcome]) -> str:
    return markdown(COLUMNS, map(_cells, outcomes))


def agreement(outcomes: Sequence[Outcome]) -> str:
    """Say, in a line per recording, how the ends that were observed agree with those predicted."""
    lines = []
    for name, some in grouped((x for x in outcomes if x.predicted is not None), lambda x: x.recording).items():
        pairs = [(one.predicted, one.excess) for one in some if one.predicted is not None]
        below, above = sum(end < like.low for like, end in pairs), sum(end > like.high for like, end in pairs)
        within = len(pairs) - below - above
        text = f"{name}: of {len(pairs)} methods {within} ended as similar methods did, {below} below, {above} above"
        if len(pairs) > 3:
            rho = rank_correlation([like.middle for like, _ in pairs], [end for _, end in pairs])
            text += f"; Spearman of the range's middle with the end: {rho}"
        lines.append(text)
    return "\n".join(lines)


def _cells(one: Outcome) -> Sequence[str]:
    cosine = "-" if one.cosine is None else f"{one.cosine:.3f}"
    like = "-" if one.predicted is None else f"{_signed(one.predicted.low)} to {_signed(one.predicted.high)}"
    end = "diverged" if math.isinf(one.excess) else _signed(one.excess)
    return one.recording, one.method, format_bytes(one.payload_bytes), *one.saving.cells, cosine, like, end


def _signed(excess: float) -> str:
    return "without end" if math.isinf(excess) else f"{'+' if excess >= 0 else '-'}{format_percent(abs(excess), 1)}"


def main() -> None:
    known = {"data": Path, "work": Path("runs/corpus"), "baselines": list(baselines()), "steps": int}
    chosen = options(__doc__, **known, table=False, rows=KNOWN)
    if chosen.table:
        outcomes = read_outcomes(chosen.rows)
        print(f"{table(outcomes)}\n\n{agreement(outcomes)}")
        return
    if chosen.data is None:
        raise SystemExit("--data: the folder with cifar10.npz and tinyshakespeare.txt is needed")
    torch.set_num_threads(1)
    taken = {name: one for name, one in baselines().items() if name in chosen.baselines}
    if chosen.steps:
        taken = {name: shortened(one, chosen.steps) for name, one in taken.items()}
    campaign = Campaign(chosen.work, chosen.data, taken)
    campaign.folder.mkdir(parents=True, exist_ok=True)
    campaign.train()
    # The command without the paths of the machine it ran on.
    words = ["python benchmarks corpus --data FOLDER", *["--baselines", *taken] * (len(taken) < len(baselines()))]
    words += ["--steps", str(chosen.steps)] * bool(chosen.steps)
    campaign.assemble(campaign.outcomes(), " ".join(words))
