"""The artifact that tests/golden keeps: a fixed plan whose tensors follow from arithmetic alone."""

from __future__ import annotations

from pathlib import Path

import torch

from gradlab.artifact import Artifact
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Group, Plan, Schedule, Wrap
from gradlab.plan.refresh import Accordion, Refresh

GOLDEN = Path(__file__).parents[1] / "golden" / "artifact.safetensors"


def golden_artifact() -> Artifact:
    """Three codecs, wrappers, a warm-up, a seed and a basis, over four layers; two groups are chosen anew."""
    layers = (
        Layer("stem.weight", (4, 3, 2, 2), "convolution"),
        Layer("body.weight", (6, 8), "linear"),
        Layer("head.weight", (5, 6), "linear"),
        Layer("head.bias", (5,), "bias"),
    )
    around = (Wrap("momentum_correction", {"momentum": 0.5}), Wrap("sparsity_warmup", {"steps": 8, "stages": 2}))
    fitted = {"loss_threshold": 0.25, "slice_size": 12, "compressed_steps": 0}
    groups = (
        Group("stem", ("stem.weight",), "gradiveq", fitted),
        Group("body.weight", ("body.weight",), "powersgd", {"rank": 2}, wrappers=FEEDBACK),
        Group("head", ("head.weight",), "topk", {"density": 0.125}, wrappers=around),
    )
    basis = torch.eye(12)[None, :, :3].clone()
    mean = torch.arange(48.0).reshape(4, 12) / 64
    learned = {"stem": {"stem.weight/basis": basis, "stem.weight/mean": mean}}
    settings = {"body.weight": [{"rank": 1}, {"rank": 2}], "head": [{"density": 0.125}, {"density": 0.25}]}
    accordion = Accordion({"body.weight": 1, "head": 1}, {"body.weight": 0, "head": 0}, 0.25)
    first = {"body.weight": 1, "head": 0}
    refresh = Refresh(100, settings, first, delay=7, alpha=1.5, metric="l2", accordion=accordion)
    plan = Plan(layers, groups, Schedule(10), seed=5, learned=learned, refresh=refresh)
    return Artifact(plan, {"method": "gradiveq", "held_out_error": {"1": 0.125, "10": 0.5}, "steps": [0, 100]})


if __name__ == "__main__":
    golden_artifact().save(GOLDEN, overwrite=True)
