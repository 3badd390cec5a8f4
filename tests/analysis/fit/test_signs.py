"""Plans of signs from a trace: block sizes that hold on later gradients, and the command that writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.fit.signs import fit_block_sizes, with_block_sizes
from gradlab.analysis.measure.sign_blocks import candidate_sizes, kept_energy
from gradlab.artifact import Artifact
from gradlab.codecs.sign import Sign
from gradlab.datasets import get
from gradlab.ddp.optimizers import OptimizerSettings, describe_optimizer
from gradlab.errors import GradlabError
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, method_plan
from gradlab.plan.optimizer_rules import conflict_of, follower_of, wrapper_that
from gradlab.training.settings import TrainSettings
from gradlab.training.trainer import without_what_the_plan_does
from support.command_line import Command
from support.laws import law
from support.recorded import random_gradients, record

SGD = OptimizerSettings("SGD", ())
LAYERS = (Layer("mixed", (4, 64), "linear"), Layer("bias", (4,), "bias"), Layer("even", (256,)))


def planted(steps: int, ranks: int = 2) -> list[list[dict[str, np.ndarray]]]:
    """Rows of one tensor that differ tenfold each; the others are alike throughout."""
    gradients = random_gradients(0, steps, ranks, LAYERS)
    for step in gradients:
        for rank in step:
            rank["mixed"] *= np.array([[1000.0], [100.0], [10.0], [1.0]], np.float32)
    return gradients


def cut(plan: Plan) -> dict[str, list[int]]:
    """Sizes of the blocks that a plan's codec cuts each layer into."""
    blocks = {}
    for group in (group for group in plan.groups if group.codec == "sign"):
        for layer in plan.members(group):
            size = group.settings.get("block_size")
            blocks[layer.name] = (
                [len(part) for part in np.split(np.zeros(layer.numel), range(size, layer.numel, size))]
                if (size and size < layer.numel)
                else [layer.numel]
            )
    return blocks


numel_lists = st.lists(st.sampled_from([0, 1, 5, 16, 40, 64, 100, 300]), min_size=1, max_size=8)


@law(numel_lists, st.randoms(use_true_random=False))
def test_layers_are_cut_as_they_were_to_be(numels: list[int], choice: np.random.Generator) -> None:
    """Whatever sizes stand next to each other; every layer once, in order."""
    layers = [Layer(f"l{i}", (numel,)) for i, numel in enumerate(numels)]
    sizes = {layer.name: choice.choice(candidate_sizes(layer.numel)) for layer in layers}
    plan = with_block_sizes(method_plan(layers, "dist-EF-blockSGDM", block_size=7), sizes)
    signs = [group for group in plan.groups if group.codec == "sign"]
    grouped = [name for group in signs for name in group.layers]
    assert grouped == [layer.name for layer in layers if layer.numel]
    for name, blocks in cut(plan).items():
        numel = next(layer.numel for layer in layers if layer.name == name)
        assert blocks[0] == min(sizes[name], numel)
        assert sum(blocks) == numel
    for group in signs:
        codec = Sign(Sign.Settings(group.settings.get("block_size")))
        members = plan.members(group)
        wanted = sum(len(blocks) for name, blocks in cut(plan).items() if name in group.layers)
        assert codec.for_layers(members).blocks.count(sum(layer.numel for layer in members)) == wanted


def test_scales_go_to_the_rows_that_differ_and_hold_later(tmp_path: Path) -> None:
    gradients = planted(12)
    with record(tmp_path / "trace", gradients, LAYERS) as trace:
        fit = fit_block_sizes(trace, 2.0, 6)
    assert dict(fit.block_sizes) == {"mixed": 64, "bias": 4, "even": 256}
    assert fit.scales == 6
    assert fit.iterations == (0, 6, 11)

    def share(steps: range, sizes: Mapping[str, int]) -> float:
        seen = [(rank[name].reshape(-1), size) for t in steps for rank in gradients[t] for name, size in sizes.items()]
        return sum(kept_energy(v, s) for v, s in seen) / sum(float(np.square(v, dtype=float).sum()) for v, _ in seen)

    whole = {layer.name: layer.numel for layer in LAYERS}
    for shares, steps in ((fit.fitted, range(6)), (fit.held_out, range(6, 12))):
        assert shares.kept == pytest.approx(share(steps, fit.block_sizes))
        assert shares.by_tensor == pytest.approx(share(steps, whole))
        assert shares.kept > 1.5 * shares.by_tensor


def test_what_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    with record(tmp_path / "trace", planted(8), LAYERS) as trace:
        for scales, samples, message in (
            (0.5, 3, "2 scales for 3"),
            (2, 0, "samples = 0"),
            (2, 9, "= 9"),
            (math.nan, 3, "scales = nan"),
            (math.inf, 3, "scales = inf"),
        ):
            with pytest.raises(GradlabError, match=message):
                fit_block_sizes(trace, scales, samples)


def test_the_command_writes_an_artifact(tmp_path: Path, gradlab: Command) -> None:
    record(tmp_path / "trace", planted(10), LAYERS).close()
    code, out, err = gradlab("fit", "signs", tmp_path / "trace", "--scales", 2, "--out", tmp_path / "a.safetensors")
    assert (code, err) == (0, "")
    assert "6 scales, shared out" in out
    assert "held out, 5 to 9" in out
    plan = Artifact.load(tmp_path / "a.safetensors").plan
    assert cut(plan) == {"mixed": [64] * 4, "bias": [4], "even": [256]}
    assert [wrap.name for wrap in plan.groups[0].wrappers] == ["local_momentum", "error_feedback", "two_way"]
    code, out, _ = gradlab(
        "fit", "signs", tmp_path / "trace", "--method", "SIGNUM", "--out", tmp_path / "b.safetensors", "--json"
    )
    assert code == 0
    assert json.loads(out)["method"] == "signum"
    words = ("--weight-decay", 0.01, "-s", "weight_decay_form=apart", "--out", tmp_path / "apart.safetensors")
    assert gradlab("fit", "signs", tmp_path / "trace", *words)[0] == 0
    plan = Artifact.load(tmp_path / "apart.safetensors").plan
    assert plan == method_plan(plan.layers, "dist-EF-blockSGDM", weight_decay=0.01, weight_decay_form="apart")
    for words, message in (
        (("--method", "signum", "--scales", 2), "signum has none: use dist-EF-blockSGD(M)"),
        (("--method", "dist-EF"), "did you mean dist-EF-SGD"),
        (("--set", "block=3"), "fit signs: no setting block; known: "),
        (("--scales", "2", "-s", "samples=10"), "samples = 10 of a trace of 10 iterations"),
        (("-s", "momentum=1"), "momentum = 1"),
        (("--scales", 2, "--set", "block_size=64"), "-s block_size chooses them too"),
        (("--weight-decay", -1), "rate = -1"),
        (("-s", "weight_decay_form=apart"), "says how --weight-decay works, which is 0"),
        (("--weight-decay", 0.1, "-s", "weight_decay_form=beside"), "form = 'beside', expected"),
        (("-s", "server=both"), "server = 'both'"),
    ):
        code, _, err = gradlab("fit", "signs", tmp_path / "trace", *words, "--out", tmp_path / "c.safetensors")
        assert code == 2
        assert message in err
        assert "Traceback" not in err


def test_the_command_makes_a_plan_that_trains_under_the_recorded_optimizer(tmp_path: Path, gradlab: Command) -> None:
    """AdamW keeps its momentum: the plan has none, or is refused before the replay. SGD's can be set to 0."""
    optimizers = {
        "adamw": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]),
        "sgd": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], momentum=0.9, weight_decay=5e-4),
    }
    for name, optimizer in optimizers.items():
        settings = describe_optimizer(optimizer)
        assert settings is not None
        record(tmp_path / name, planted(10), LAYERS, metadata={"optimizer": settings.to_json()}).close()

    def fit(name: str, *words: object) -> tuple[int, str, str]:
        return gradlab("fit", "signs", tmp_path / name, *words, "--out", tmp_path / "a.safetensors", "--overwrite")

    code, out, err = fit("adamw")
    assert (code, err) == (0, "")
    assert "method dist-EF-blockSGD, without momentum in the plan: AdamW has momentum of its own (betas = (0.9" in out
    artifact = Artifact.load(tmp_path / "a.safetensors")
    assert conflict_of(artifact.plan, describe_optimizer(optimizers["adamw"]) or SGD) is None
    assert follower_of(artifact.plan) is None
    assert artifact.provenance["optimizer"]["name"] == "AdamW"
    for words, remedy in (
        (("--method", "dist-EF-blockSGDM"), "use --method dist-EF-blockSGD, or -s trained_with=SGD"),
        (("--weight-decay", 0.1), "use --weight-decay 0, or -s trained_with=SGD"),
    ):
        code, out, err = fit("adamw", *words)
        assert (code, out) == (2, "")
        assert "it would be applied twice" in err
        assert remedy in err
    code, out, _ = fit("adamw", "-s", "trained_with=SGD")
    assert code == 0
    assert wrapper_that(Artifact.load(tmp_path / "a.safetensors").plan, "applies_momentum") == "local_momentum"
    code, out, _ = fit("sgd")
    assert code == 0
    said = " ".join(out.split())
    assert "to train with it, set the optimizer's to 0: the plan applies momentum (local_momentum)" in said
    assert "--weight-decay 0.0005 puts it into the plan" in said


def test_a_uniform_plan_with_momentum_is_refused_under_adamw(tmp_path: Path, gradlab: Command) -> None:
    settings = describe_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    assert settings is not None
    record(tmp_path / "trace", planted(3), LAYERS, metadata={"optimizer": settings.to_json()}).close()
    words = ("--codec", "topk", "--out", tmp_path / "a.safetensors")
    code, out, err = gradlab("fit", "uniform", tmp_path / "trace", *words, "--wrap", "momentum_correction")
    assert (code, out) == (2, "")
    assert "leave such wrappers out of --wrap" in err
    code, _, err = gradlab("fit", "lgc", tmp_path / "trace", "-s", "momentum=0.9", "--out", tmp_path / "a.safetensors")
    assert code == 2
    assert "leave momentum out" in err


def test_a_workload_of_adamw_keeps_its_momentum(tmp_path: Path, gradlab: Command) -> None:
    """The trainer used to set beta_1 to 0, another optimizer in all but name."""
    recipe = get("text_bytes").recipe
    plan = method_plan(layers_of(get("text_bytes").model(0)), "dist-EF-blockSGDM")
    path = Artifact(plan).save(tmp_path / "a.safetensors")
    assert without_what_the_plan_does(recipe, str(path)) == recipe
    (tmp_path / "book.txt").write_text("not read")
    code, out, err = gradlab("train", "text_bytes", "--data", tmp_path / "book.txt", "--compress", path)
    assert (code, out) == (2, "")
    assert "train with a plan without momentum: AdamW keeps its own" in err


def test_the_trainer_leaves_to_the_plan_what_it_does(tmp_path: Path) -> None:
    plan = method_plan(LAYERS, "dist-EF-blockSGDM", weight_decay=1e-4)
    Artifact(plan).save(tmp_path / "a.safetensors")
    recipe = TrainSettings("digits", momentum=0.5).applied_to(get("digits").recipe)
    assert recipe.momentum == 0.5
    done = without_what_the_plan_does(recipe, str(tmp_path / "a.safetensors"))
    assert (done.momentum, done.weight_decay, done.nesterov) == (0, 0, False)
    assert without_what_the_plan_does(recipe, str(tmp_path / "none.safetensors")) == recipe
    for momentum in (1.0, -0.1):
        with pytest.raises(GradlabError, match="momentum = "):
            TrainSettings("digits", momentum=momentum).check()
