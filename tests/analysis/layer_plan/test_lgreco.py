"""Plans by layer from a trace: the paper's ranges, the budget, what is held out, and the command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.layer_plan.costs import Cost, candidate_costs
from gradlab.analysis.layer_plan.grids import (
    FAMILIES,
    candidates_of_grid,
    family_candidates,
    main_setting,
    paper_settings,
)
from gradlab.analysis.layer_plan.lgreco import LgrecoFit, LgrecoOptions, fit_lgreco, total
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.collectives import all_gather_wire_bytes, all_reduce_wire_bytes
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import record

LAYERS = (
    Layer("stem.weight", (16, 3, 3, 3), "convolution"),
    Layer("deep.weight", (32, 16, 3, 3), "convolution"),
    Layer("wide.weight", (64, 48), "linear"),
    Layer("wide.bias", (64,), "bias"),
    Layer("head.weight", (10, 64), "linear"),
)
RANKS, STEPS = 2, 24


def planted(seed: int = 0) -> list[list[dict]]:
    """Gradients of falling spectra: `deep` nearly of rank 1, `wide` of high rank and small, `head` large."""
    rng = np.random.default_rng(seed)
    scale = {"stem.weight": 1.0, "deep.weight": 1.0, "wide.weight": 0.05, "wide.bias": 1.0, "head.weight": 4.0}
    rank = {"stem.weight": 6, "deep.weight": 1, "wide.weight": 40, "wide.bias": 1, "head.weight": 3}
    factors = {x.name: rng.standard_normal((x.shape[0], rank[x.name])) for x in LAYERS}
    steps = []
    for _ in range(STEPS):
        row = []
        for _ in range(RANKS):
            one = {}
            for layer in LAYERS:
                columns = layer.numel // layer.shape[0]
                values = factors[layer.name] @ rng.standard_normal((rank[layer.name], columns))
                values = values + 0.05 * rng.standard_normal(values.shape)
                one[layer.name] = (scale[layer.name] * values).reshape(layer.shape).astype(np.float32)
            row.append(one)
        steps.append(row)
    return steps


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("lgreco") / "t", planted(), LAYERS)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Four windows of two steps, where it does not matter how many there are."""
    return record(tmp_path_factory.mktemp("short") / "t", planted()[:8], LAYERS)


@pytest.fixture(scope="module")
def fitted(trace: Trace) -> LgrecoFit:
    return fit_lgreco(trace, "powersgd", {"rank": 4}, LgrecoOptions(seed=3), warmup_steps=5)


def test_ranges_are_the_papers() -> None:
    """Section 5.1: [D/2, 2D] by ones, [D/10, 10 D] by tenths of D."""
    assert [s["rank"] for s in paper_settings("powersgd", {"rank": 4})] == [2, 3, 4, 5, 6, 7, 8]
    assert [s["rank"] for s in paper_settings("powersgd", {"rank": 32})] == list(range(16, 65))
    assert [s["bits"] for s in paper_settings("qsgd", {"bits": 4, "norm": "l2"})] == list(range(2, 9))
    assert all(s["norm"] == "l2" for s in paper_settings("qsgd", {"bits": 4, "norm": "l2"}))
    densities = [s["density"] for s in paper_settings("topk", {"density": 0.01})]
    assert len(densities) == 100
    assert (densities[0], densities[9], densities[-1]) == (0.001, 0.01, 0.1)
    assert max(s["density"] for s in paper_settings("topk", {"density": 0.3})) == 0.99
    assert main_setting("clt_k") == "density"
    assert [s["bits"] for s in paper_settings("qsgd", {"bits": 3, "norm": "l2"})] == [2, 3, 4, 5, 6]
    for codec, reference, message in (
        ("natural", {}, "codec natural has no one setting"),
        ("cast", {}, "is no number to vary; use its own grid"),
        ("powersgd", {"rank": "abc"}, "setting rank = 'abc', expected int"),
        ("powersgd", {"seed": 1}, "no setting seed"),
    ):
        with pytest.raises(GradlabError, match=message):
            paper_settings(codec, reference)


def test_the_plan_is_smaller_at_the_same_error(trace: Trace, fitted: LgrecoFit) -> None:
    """Ranks follow what was planted; what is not planned stays as the uniform plan has it; the figures add up."""
    provenance = fitted.provenance
    rank = {layer.name: layer.settings["rank"] for layer in provenance.layers}
    assert rank["deep.weight"] == 2
    assert rank["wide.weight"] == 2
    assert rank["stem.weight"] >= 5
    assert provenance.gain > 1.1
    assert provenance.gap == 0
    assert provenance.size == fitted.allocation.size == fitted.allocation.bound
    errors = fitted.problem.errors("l2", slice(0, 2))
    assert total(errors, fitted.allocation.choice) <= provenance.budget == pytest.approx(1.0)
    uniform_plan = Plan.uniform(LAYERS, "powersgd", warmup_steps=5, seed=3, rank=4)
    assert [g.name for g in fitted.plan.groups] == [g.name for g in uniform_plan.groups]
    assert (fitted.plan.schedule, fitted.plan.seed) == (uniform_plan.schedule, uniform_plan.seed)
    assert all(group.wrappers == FEEDBACK for group in fitted.plan.groups)
    assert provenance.uniform_payload_bytes == uniform_plan.payload_bytes(RANKS)
    assert provenance.payload_bytes == fitted.plan.payload_bytes(RANKS)
    assert provenance.uniform_payload_bytes - provenance.payload_bytes == provenance.uniform_size - provenance.size
    assert sum(layer.cost for layer in provenance.layers) == provenance.size


def test_payload_is_what_a_replay_counts(trace: Trace, fitted: LgrecoFit) -> None:
    replayed = replay(trace, fitted.plan)
    counted = {step.payload_bytes_mean for step in replayed.compressed}
    assert counted == {fitted.provenance.payload_bytes}


def test_half_of_the_windows_are_held_out(trace: Trace, fitted: LgrecoFit) -> None:
    provenance = fitted.provenance
    assert provenance.to_json()["windows"] == [[0, 5], [6, 11], [12, 17], [18, 23]]
    assert provenance.windows_chosen_on == 2
    table = fitted.problem.table
    for which, choice in (("plan", fitted.allocation.choice), ("uniform", fitted.problem.reference)):
        errors = getattr(provenance.relative_error, which)
        assert errors.chosen_on == table.relative_error(choice, "l2", slice(0, 2))
        assert errors.held_out == table.relative_error(choice, "l2", slice(2, 4))
    alone = fit_lgreco(trace, "powersgd", {"rank": 4}, window=20).provenance
    assert len(alone.windows) == 1
    assert alone.relative_error.plan.held_out is None


@pytest.mark.parametrize(
    ("codec", "reference", "metric"), [("topk", {"density": 0.05}, "squared-l2"), ("qsgd", {"bits": 4}, "l2")]
)
def test_other_families_and_metrics(short: Trace, codec: str, reference: dict, metric: str) -> None:
    fit = fit_lgreco(short, codec, reference, metric=metric)
    errors = fit.problem.errors(metric, slice(0, 2))
    assert total(errors, fit.allocation.choice) <= total(errors, fit.problem.reference) * (1 + 1e-12)
    assert fit.provenance.size <= fit.provenance.uniform_size
    tighter = fit_lgreco(short, codec, reference, metric=metric, alpha=0.7)
    assert tighter.provenance.size >= fit.provenance.size


def test_a_budget_may_be_given_and_is_refused_where_no_plan_meets_it(short: Trace) -> None:
    short = short
    table = fit_lgreco(short, "powersgd", {"rank": 4}).problem.table
    least = sum(row.min() for row in table.errors("l2", slice(0, 2)))
    fit = fit_lgreco(short, "powersgd", {"rank": 4}, budget=2 * least)
    assert fit.provenance.alpha is None
    assert total(table.errors("l2", slice(0, 2)), fit.allocation.choice) <= 2 * least
    with pytest.raises(GradlabError, match="the smallest reachable is"):
        fit_lgreco(short, "powersgd", {"rank": 4}, budget=least / 2)
    with pytest.raises(GradlabError, match="powersgd would compress nothing"):
        fit_lgreco(record_vectors(short.path.parent / "vectors"), "powersgd", {"rank": 4})
    for options, message in (
        ({"world_size": 0}, "nodes = 0"),
        ({"world_size": 1, "cost": Cost("wire")}, "nodes = 1, expected at least 2 for wire"),
        ({"workers": 0}, "workers = 0"),
        ({"budget": 1.0, "refresh_every": 5}, "without a budget"),
    ):
        with pytest.raises(GradlabError, match=message):
            fit_lgreco(short, "powersgd", {"rank": 4}, **options)
    with pytest.raises(GradlabError, match="no setting seed"):
        fit_lgreco(short, "powersgd", {"seed": 4})
    with pytest.raises(GradlabError, match="start = 99"):
        fit_lgreco(short, "powersgd", {"rank": 4}, start=99)


def record_vectors(path: Path) -> Trace:
    layer = Layer("b", (300,), "bias")
    return record(path, [[{"b": np.ones(300, np.float32)}] * 2] * 3, [layer])


def test_a_plan_may_be_chosen_anew_while_training(trace: Trace) -> None:
    """The artifact's refresh has the table's settings; a replay follows it and says so."""
    tried = [Candidate("topk", {"density": density}) for density in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)]
    fit_topk = partial(
        fit_lgreco, trace, "topk", {"density": 0.05}, candidates={x.name: tried for x in LAYERS if len(x.shape) > 1}
    )
    fit = fit_topk(refresh_every=8)
    refresh = fit.plan.refresh
    assert refresh is not None
    assert (refresh.every, refresh.delay, refresh.alpha, refresh.metric) == (8, 1, 1.0, "l2")
    assert refresh.settings["deep.weight"][refresh.reference["deep.weight"]] == {"density": 0.05}
    replayed = replay(trace, fit.plan)
    assert "chosen anew every 8 iterations" in replayed.remarks[0]
    payload = [step.payload_bytes_mean for step in replayed.compressed]
    assert len(set(payload[:9])) == 1
    assert payload[9] != payload[8]
    with pytest.raises(GradlabError, match="by payload, not by wire"):
        fit_lgreco(trace, "topk", {"density": 0.05}, refresh_every=8, cost=Cost("wire"))
    followed = fit_topk(refresh_every=8, accordion=(0.01, 0.2))
    accordion = followed.plan.refresh.accordion  # type: ignore[union-attr]
    assert accordion is not None
    deep = refresh.settings["deep.weight"]
    densities = [deep[indices["deep.weight"]]["density"] for indices in (accordion.most, accordion.least)]
    assert densities == [0.01, 0.2]
    replayed = replay(trace, followed.plan)
    assert "within Accordion's error" in replayed.remarks[0]
    least = Plan.uniform(LAYERS, "topk", density=0.2).payload_bytes(RANKS)
    most = Plan.uniform(LAYERS, "topk", density=0.01).payload_bytes(RANKS)
    first, second = ({step.payload_bytes_mean for step in replayed.compressed[a:b]} for a, b in ((10, 17), (18, 24)))
    # Every layer is critical in the first window, none in the second: no larger than what Accordion itself would take.
    assert most < max(first) <= least
    assert max(second) <= most
    for options, message in (
        ({"accordion": (0.01, 0.2)}, "needs a refresh"),
        ({"refresh_every": 8, "accordion": (0.2, 0.01)}, "accordion 0.2:0.01, expected the more compressed"),
        (
            {"refresh_every": 8, "accordion": (0.0123, 0.2)},
            "density = 0.0123, expected one of layer stem.weight's: 0.005",
        ),
    ):
        with pytest.raises(GradlabError, match=message):
            fit_topk(**options)
    several = family_candidates(trace, ["top-k", "QSGD"])
    with pytest.raises(GradlabError, match="among one codec's settings, not among identity, powersgd, qsgd, topk"):
        fit_lgreco(trace, "powersgd", {"rank": 4}, candidates=several, refresh_every=8)


# --- several families -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_hybrid_plan_is_no_larger_than_any_family_alone(trace: Trace, tmp_path: Path) -> None:
    """At the same budget, in payload and on the wire; it is saved, loaded and replayed like any other."""
    reference = {"rank": 4}
    candidates = family_candidates(trace, samples=6, extra={"powersgd": paper_settings("powersgd", reference)})
    assert {c.codec for each in candidates.values() for c in each} == {codec for codec, _ in FAMILIES.values()} | {
        "identity"
    }
    for cost in (Cost("payload"), Cost("wire")):
        mixed = fit_lgreco(trace, "powersgd", reference, candidates=candidates, start=6, cost=cost)
        unit = mixed.problem.table.by_window(mixed.problem.reference, "l2")
        for family in FAMILIES:
            rows = {
                name: [c for c in row if c.codec in (FAMILIES[family][0], "identity")]
                for name, row in candidates.items()
            }
            kept = [
                [place for place, c in enumerate(t.candidates) if c in rows[t.layer.name] and c.codec != "powersgd"]
                if family != "PowerSGD"
                else [place for place, c in enumerate(t.candidates) if c in rows[t.layer.name]]
                for t in mixed.problem.table.layers
            ]
            errors = [row[k] for row, k in zip(mixed.problem.errors("l2", slice(0, 2)), kept, strict=True)]
            costs = [row[k] for row, k in zip(mixed.problem.costs, kept, strict=True)]
            alone = allocate(errors, costs, mixed.provenance.budget)  # dense is among them: every budget is met
            assert mixed.allocation.size <= alone.size
            if FAMILIES[family][0] != "powersgd":  # which has its uniform plan besides
                assert mixed.provenance.alone[FAMILIES[family][0]] == pytest.approx(alone.size)
        assert set(mixed.provenance.alone) == {codec for codec, _ in FAMILIES.values()}
        assert unit.shape == (4,)
    path = mixed.artifact().save(tmp_path / "hybrid.safetensors")
    again = Artifact.load(path)
    assert again.plan.digest == mixed.plan.digest
    assert replay(trace, again.plan).compressed


def test_unknown_families_and_grids_are_named(trace: Trace) -> None:
    with pytest.raises(GradlabError, match="no family 'wavelets'; there are: PCA"):
        family_candidates(trace, ["wavelets"])
    with pytest.raises(GradlabError, match="grid 'huge'"):
        candidates_of_grid(trace, "topk", {}, grid="huge")
    rows, start = candidates_of_grid(trace, "topk", {"density": 0.03}, grid="own", start=2)
    assert start == 2
    assert rows is not None
    densities = [c.settings["density"] for c in rows["deep.weight"]]
    assert densities == sorted(densities)
    assert 0.03 in densities


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_are_bytes_or_seconds() -> None:
    layer = Layer("w", (64, 64), "linear")
    dense, kept = Candidate("identity"), Candidate("topk", {"density": 0.1}, wrappers=())
    rows = [(layer, [dense, kept])]
    [payload] = candidate_costs(rows, 8)
    assert payload.tolist() == [4 * 4096, kept.build().forecast([layer], 8).payload]
    [wire] = candidate_costs(rows, 8, Cost("wire"))
    parts = 410 * 4, payload[1] - 410 * 4  # values and their positions travel in messages of their own
    assert wire[0] == all_reduce_wire_bytes(4 * 4096, 8)
    assert wire[1] == sum(all_gather_wire_bytes(int(part), 8) for part in parts)
    link = Link(1e9, latency_seconds=1e-3, header_share=0.0)
    [seconds] = candidate_costs(rows, 8, Cost("seconds", link, codec_time=False))
    assert seconds[0] == pytest.approx(8 * wire[0] / 1e9 + 14e-3)
    assert seconds[1] > 7e-3
    runs = DryRuns(Plan(()), 8)
    [alone], [shared] = (
        candidate_costs(rows, 8, Cost("seconds", link, local_ranks=ranks), runs=runs) for ranks in (1, 4)
    )
    assert shared - seconds == pytest.approx((alone - seconds) / 4)
    with pytest.raises(GradlabError, match="local ranks = 0"):
        Cost(local_ranks=0)
    for bad in (("speed", None), ("seconds", None), ("payload", link)):
        with pytest.raises(GradlabError, match="cost"):
            Cost(*bad)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_fits_draws_and_prints(gradlab: Command, short: Trace, tmp_path: Path) -> None:
    out, layers = tmp_path / "plan.safetensors", tmp_path / "layers.svg"
    words = ["fit", "lgreco", short.path, "--codec", "topk", "--set", "density=0.05", "--out", out]
    code, text, err = gradlab(*words, "--figure", layers)
    assert code == 0, err
    assert text.startswith("By layer ")
    assert "fewer bytes than topk(density=0.05) everywhere" in text
    assert "On later iterations its error is" in text
    assert "deep.weight" in text
    assert layers.read_text().startswith("<?xml")
    plan = Artifact.load(out)
    assert plan.provenance["method"] == "lgreco"
    code, text, err = gradlab("fit", "lgreco", short.path, "-s", "family=top-k,qsgd", "--cost", "seconds",
                              "--set", "rank=4", "--out", tmp_path / "hybrid.safetensors", "--json")  # fmt: skip
    assert code == 0, err
    assert json.loads(text)["cost"] == "seconds"
    for wrong, expected in (
        (["--alpha", 0.0], "smallest reachable"),
        (["-s", "family=wavelets"], "no family 'wavelets'"),
        (["-s", "metric=loud"], "metric 'loud'"),
        (["--cost", "tears"], "cost 'tears'"),
        (["--set", "rank=x"], "rank"),
        (["-s", "window=1000"], "window = 1000"),
        (["-s", "accordion=2:8"], "needs a refresh"),
        (["-s", "accordion=two"], "accordion 'two', expected two values, as 2:8"),
        (["--out", out], "exists already"),
    ):
        target = [] if "--out" in wrong else ["--out", tmp_path / "other.safetensors"]
        code, text, err = gradlab("fit", "lgreco", short.path, *target, *wrong)
        assert (code, text) == (2, ""), wrong
        assert expected in err, (wrong, err)
        assert err.count("\n") == 1, err
