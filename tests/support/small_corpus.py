"""A corpus of one small recording, made by the functions that make the real one: digits, two methods and dense runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gradlab.analysis.corpus.manifest import Source
from gradlab.datasets import get
from support.benchmark_modules import benchmark_modules

NAME = "digits"
METHODS = {
    "16-bit floats": "cast:dtype=float16",
    "QSGD 4 bits": "qsgd:bits=4",
    "top-k 10 %": "topk:density=0.1",
    "top-k 1 %": "topk:density=0.01",
}
SOURCE = Source("digits", "CC BY 4.0", "Alpaydin and Kaynak, UCI, 1998")


def make_corpus(work: Path) -> Path:
    """Record, train, replay and put together; the corpus's folder."""
    with benchmark_modules("corpus") as modules:
        corpus = modules["corpus"]
        recipe = replace(get(NAME).recipe, batch_size=8, steps=16, warmup_steps=2)
        task = corpus.emulated.Task(get(NAME), recipe, ranks=2)
        baseline = corpus.Baseline("ResNet-10 on digits", task, "", SOURCE)
        campaign = corpus.Campaign(work, Path(), {NAME: baseline}, METHODS, budget="4MB", warmup=2, recorded=8)
        campaign.folder.mkdir(parents=True)
        campaign.train()
        campaign.assemble(campaign.outcomes(), "python benchmarks corpus")
        folder: Path = campaign.folder
    return folder
