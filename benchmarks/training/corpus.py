"""A corpus: two small recordings, and what became of methods that were trained there, in one file to give away.

    python benchmarks corpus --data FOLDER --work runs/corpus [--baselines cifar-resnet] [--steps 1000]
    python benchmarks corpus --table [--rows benchmarks/results/corpus.jsonl]

FOLDER holds cifar10.npz and tinyshakespeare.txt. Two baselines on four emulated nodes: ResNet-8 on CIFAR-10 halved to
16 x 16, and nanoGPT's transformer by characters. A dense run of another seed of each is recorded from the middle of
training on, in bfloat16 and within a byte budget. Each method is replayed on that recording, which is the prediction.
Then a training is done with it, which is what is observed: it is dense for 100 iterations and compressed from there on,
at dense training's learning rate. Its loss is the mean over the last 50 iterations, and dense training's is that of the
same seed, which sees the same batches.

Every run is a line in WORK/runs.jsonl, and what is there is not done again. The recordings, the outcomes, a README and
a manifest are put together in WORK/corpus and packed beside it. The same recordings and outcomes give the same bytes.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from accuracy import resnet8
from rows import Row, add, finite, grouped, markdown, options, read
from text_chars import version

from gradlab.analysis.corpus.archive import pack
from gradlab.analysis.corpus.manifest import ROWS, Source, describe, write_manifest
from gradlab.analysis.corpus.outcome import Outcome, read_outcomes, replayed_figures, written
from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay import replay
from gradlab.cli.named_method import parse_method
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

    def load(self, folder: Path) -> Data:
        """Read the data."""
        path = str(folder / self.file) if self.file else None
        return self.task.workload.load(path, test_limit=1000)


CIFAR10 = Source(
    "CIFAR-10",
    "no licence is stated by its author; gradients of it alone are here, no image",
    "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
)
SHAKESPEARE = Source("Tiny Shakespeare", "public domain", "karpathy/char-rnn, data/tinyshakespeare/input.txt")


def baselines() -> dict[str, Baseline]:
    """All baselines by the name of their recording."""
    images = replace(
        get("cifar10").recipe, learning_rate=0.1, batch_size=16, steps=300, schedule="cosine", momentum=0.9
    )
    characters = TextChars(width=48, layers=2, heads=3)
    return {
        "cifar-resnet": Baseline(
            "ResNet-8 on CIFAR-10 halved to 16 x 16", resnet8(images, RANKS), "cifar10.npz", CIFAR10
        ),
        "nanogpt": Baseline(
            "nanoGPT by characters, 2 layers of width 48",
            emulated.Task(characters, replace(characters.recipe, steps=600), RANKS),
            "tinyshakespeare.txt",
            SHAKESPEARE,
        ),
    }


def shortened(baseline: Baseline, steps: int) -> Baseline:
    """The same baseline with so many iterations."""
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
        self,
        work: Path,
        data: Path,
        chosen: Mapping[str, Baseline],
        methods: Mapping[str, str] = METHODS,
        budget: str = BUDGET,
        warmup: int = WARMUP,
        recorded: int = RECORDED,
    ) -> None:
        self.folder, self.runs, self.data = work / "corpus", work / "runs.jsonl", data
        self.chosen, self.methods, self.budget, self.warmup, self.recorded = chosen, methods, budget, warmup, recorded

    def train(self) -> None:
        """Record every baseline, and train with every method, in order."""
        for name, baseline in self.chosen.items():
            data = baseline.load(self.data)
            self._record(name, baseline, data)
            self._train(name, DENSE, SEED, data)
            self._train(name, DENSE, OTHER_SEED, data)
            for method in self.methods:
                self._train(name, method, SEED, data)

    def _record(self, name: str, baseline: Baseline, data: Data) -> None:
        folder = self.folder / name
        if folder.exists():
            return
        unfinished = folder.with_name(f".{name}")  # of a run that is killed no recording is taken
        shutil.rmtree(unfinished, ignore_errors=True)
        emulated.record(
            baseline.task,
            data,
            unfinished,
            RECORDED_SEED,
            start=baseline.task.recipe.steps // 2,
            every=1,
            count=self.recorded,
            dtype="bfloat16",
            budget=self.budget,
            metadata={"workload": baseline.task.workload.name, "recording": name, "seed": RECORDED_SEED},
        )
        unfinished.rename(folder)

    def _train(self, name: str, method: str, seed: int, data: Data) -> None:
        key = {"recording": name, "method": method, "seed": seed, "steps": self.chosen[name].task.recipe.steps}
        if self._run(key) is not None:
            return
        task, began = self.chosen[name].task, time.process_time()
        run = emulated.train(task, self._plan(task, method), data, seed)
        row = {
            "loss": finite(run["loss"]),
            "score": finite(run["score"]),
            "metric": task.workload.metric.name,
            "payload": run["payload"],
            "processor_seconds": round(time.process_time() - began, 1),
            "version": version(),
        }
        add(self.runs, key | row)

    def _plan(self, task: emulated.Task, method: str) -> Plan:
        layers = layers_of(task.model(SEED))
        if method == DENSE:
            return Plan(tuple(layers))
        return replace(parse_method(self.methods[method]).plan_of(layers), schedule=Schedule(self.warmup))

    def _run(self, key: Row) -> Row | None:
        return next((row for row in read(self.runs) if key.items() <= row.items()), None)

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
        key = {"recording": name, "method": DENSE if of_dense else method, "steps": steps}
        run = self._run(key | {"seed": OTHER_SEED if of_dense else SEED})
        dense = self._run({"recording": name, "method": DENSE, "steps": steps, "seed": SEED})
        if run is None or dense is None:
            print(f"{name}: {method} is left out: {self.runs} has no run of {steps} iterations", file=sys.stderr)
            return None
        return Outcome(
            recording=name,
            method=method,
            words="" if of_dense else self.methods[method],
            **(self._nothing_replayed(trace) if of_dense else self._replayed(method, trace)),
            loss=run["loss"],
            dense_loss=dense["loss"],
            steps=steps,
            warmup_steps=0 if of_dense else self.warmup,
            seed=run["seed"],
        )

    def _replayed(self, method: str, trace: Trace) -> dict[str, Any]:
        done = replay(trace, parse_method(self.methods[method]).plan_of(trace.model_layers))
        return replayed_figures(done.summary(), Judged.of(done))

    @staticmethod
    def _nothing_replayed(trace: Trace) -> dict[str, Any]:
        dense = 4.0 * sum(layer.numel for layer in trace.model_layers)
        nothing = {"cosine": None, "length": None, "aggregate_error": None, "predicted": None}
        return {"memory": False, "cosines": {}, "payload_bytes": dense, "dense_payload_bytes": dense, **nothing}

    def assemble(self, outcomes: Sequence[Outcome], command: str) -> None:
        """Write the outcomes, the README and the manifest beside the recordings."""
        write_whole(self.folder / ROWS, written(outcomes))
        recordings = [
            describe(
                self.folder,
                name,
                title=one.title,
                source=one.source,
                steps=one.task.recipe.steps,
                batch_size=one.task.recipe.batch_size,
                seeds={"recorded": RECORDED_SEED, "trained": SEED},
            )
            for name, one in self.chosen.items()
        ]
        known = caveats(PAGE.read_text(encoding="utf-8"), leave_out=set(baselines()) - set(self.chosen))
        write_manifest(self.folder, recordings, command=command, caveats=known)


# --- the table --------------------------------------------------------------------------------------------------

COLUMNS = ("recording", "method", "bytes", "ratio", "vs 16 bits", "cosine", "similar methods ended", "ended")


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay out what was predicted beside what was observed, as lines of a page's table."""
    return markdown(COLUMNS, map(_cells, outcomes))


def agreement(outcomes: Sequence[Outcome]) -> str:
    """Say, in a line per recording, how the ends that were observed agree with those predicted."""
    known = grouped((one for one in outcomes if one.predicted is not None), lambda one: one.recording)
    return "\n".join(_agreement(name, some) for name, some in known.items())


def _agreement(name: str, outcomes: Sequence[Outcome]) -> str:
    pairs = [(one.predicted, one.excess) for one in outcomes if one.predicted is not None]
    below, above = sum(end < like.low for like, end in pairs), sum(end > like.high for like, end in pairs)
    within = len(pairs) - below - above
    text = f"{name}: of {len(pairs)} methods {within} ended as similar methods did, {below} below, {above} above"
    if len(pairs) < 4:
        return text
    rho = rank_correlation([like.middle for like, _ in pairs], [end for _, end in pairs])
    return f"{text}; Spearman of the range's middle with the end: {rho}"


def _cells(one: Outcome) -> Sequence[str]:
    cosine = "-" if one.cosine is None else f"{one.cosine:.3f}"
    like = "-" if one.predicted is None else f"{_signed(one.predicted.low)} to {_signed(one.predicted.high)}"
    return one.recording, one.method, format_bytes(one.payload_bytes), *one.saving.cells, cosine, like, _end(one)


def _end(one: Outcome) -> str:
    return "diverged" if math.isinf(one.excess) else _signed(one.excess)


def _signed(excess: float) -> str:
    return "without end" if math.isinf(excess) else f"{'+' if excess >= 0 else '-'}{format_percent(abs(excess), 1)}"


def main() -> None:
    """See the module's text."""
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
    print(pack(campaign.folder, chosen.work / "gradlab-corpus.tar.gz"))


if __name__ == "__main__":
    main()
