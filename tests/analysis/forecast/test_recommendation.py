"""One answer for one network: a plan and the lines that train with it, 16 bits, or not to compress."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradlab.runtime
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import Family
from gradlab.analysis.forecast.decide import COMPRESS, HALF, NOTHING
from gradlab.analysis.forecast.diagnosis import link_to_json
from gradlab.analysis.forecast.endings import MAX_LOSS
from gradlab.analysis.forecast.lines_to_paste import lines_to_paste, lines_to_resume
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import NOT_MEASURED, Profile
from gradlab.analysis.forecast.networks import networks_table, turning_points, turns_text
from gradlab.analysis.forecast.plans import pays_text
from gradlab.analysis.forecast.processors import Processor
from gradlab.analysis.forecast.recommendation import BOLD, Recommendation, recommend
from gradlab.analysis.forecast.simulator import SHARDS, Node
from gradlab.analysis.forecast.speed import forecast_speed
from gradlab.analysis.report.examine import families_of
from gradlab.analysis.report.look import Look
from gradlab.artifact import Artifact
from gradlab.cli.options import MAX_LOSS_TEXT, share_of_loss
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, Wrap
from gradlab.plan.gpu_groups import in_gpu_groups
from gradlab.plan.refresh import Refresh
from gradlab.trace import Trace
from jobs.attach_tasks import WIDTH, network
from support.command_line import Command
from support.printed_lines import lines_of
from support.process_pool import ProcessPool
from support.recorded import random_gradients, record
from support.replayed import Replayed
from support.torchrun_job import run_on_nodes

LAYERS = (Layer("body.weight", (256, 256), "linear"), Layer("head.weight", (10, 256), "linear"))
PLANS = {
    "top-k": Plan.uniform(LAYERS, "topk", density=0.01),
    "int8": Plan.uniform(LAYERS, "block_scaled"),
    "16-bit floats": Plan.uniform(LAYERS, "cast"),
}
SLOW, FAST = Link(1e6, 1e-4), Link(1e12, 1e-6)
COMPUTING = Profile(0.01, "as given")


REPLAYS = {"top-k": Replayed(0.85, 4, memory=True), "int8": Replayed(0.9999), "16-bit floats": Replayed(1.0)}


@functools.cache
def recommended(
    link: Link,
    max_loss: float,
    plans: tuple[str, ...] = tuple(PLANS),
    profile: Profile = COMPUTING,
    **replays: Replayed,
) -> Recommendation:
    """Recommend one of the plans; replays: of those that are not as in REPLAYS."""
    judged: Any = {name: {**REPLAYS, **replays}[name] for name in plans}
    chosen = {name: PLANS[name] for name in plans}
    [found] = recommend(forecast_speed(chosen, judged, Network([link], (8,), profile), max_loss=max_loss))
    return found


def test_the_fastest_plan_is_taken_whose_like_ended_within_what_is_allowed() -> None:
    found = recommended(SLOW, 0.01)
    assert (found.decision, found.plan) == (COMPRESS, "int8")
    assert found.text.startswith("At 1 Mbit/s between 8 nodes take int8: ")
    assert [(one.plan, one.risk) for one in found.proposals] == [("top-k", BOLD)]
    assert "A pilot tries faster plans: top-k, " in found.text
    assert found.seconds < found.half_seconds < found.dense_seconds


@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.1, 0.5])
def test_a_pilot_tries_no_plan_whose_like_ended_far_above_dense(cosine: float) -> None:
    """No training with such a cosine ended within 1 %, and none below 0 is known."""
    found = recommended(SLOW, 0.01, **{"top-k": Replayed(cosine, 4, memory=True)})
    assert (found.proposals, "A pilot tries" in found.text) == ((), False)


def test_the_allowed_loss_and_the_break_even_are_said() -> None:
    found = recommended(SLOW, 0.01)
    assert "the fastest with at most 1 % worse loss (--max-loss)" in found.text
    assert "Compress below about " in found.text
    assert "No plan with at most 1 % worse loss (--max-loss) makes it 5 % shorter." in recommended(FAST, 0.01).text


def test_limits_of_the_recording_come_first() -> None:
    few = Replayed(0.9999, caution="only 8 steps are judged")
    first, second, *_ = recommended(SLOW, 0.01, ("int8",), int8=few).text.splitlines()
    assert first == "Preliminary: only 8 steps are judged."
    assert second.startswith("At 1 Mbit/s between 8 nodes take ")


def test_the_option_has_the_one_default() -> None:
    assert share_of_loss(MAX_LOSS_TEXT) == MAX_LOSS


def test_a_break_even_in_prose() -> None:
    assert pays_text(None) == "does not pay at any speed tried"
    assert pays_text(math.inf) == "pays at every speed tried"
    assert pays_text(3.2e9) == "pays below about 3.2 Gbit/s between nodes"
    assert pays_text(234.5e6) == "pays below about 230 Mbit/s between nodes"


def test_with_more_loss_allowed_a_faster_plan_is_taken() -> None:
    found = recommended(SLOW, 9.0, **{"top-k": Replayed(0.9, 4, memory=True)})
    assert (found.plan, found.proposals) == ("top-k", ())
    assert "Not tried on your task: gradlab pilot does." in found.text
    assert found.seconds < recommended(SLOW, 0.01).seconds


@pytest.mark.parametrize("max_loss", [0.0, 0.01])
def test_what_is_exact_is_always_allowed_and_an_error_forbids_no_smaller_one(max_loss: float) -> None:
    """Also where the allowed loss is nothing."""
    replays = [{"top-k": Replayed(cosine, 4, memory=True)} for cosine in (1.0, 0.999, 0.9, 0.5)]
    allowed = [recommended(SLOW, max_loss, ("top-k",), **one).decision == COMPRESS for one in replays]
    assert allowed == sorted(allowed, reverse=True)
    assert allowed[0]


def test_16_bits_are_the_answer_where_nothing_allowed_is_faster() -> None:
    for plans in (("16-bit floats",), ("top-k",)):
        found = recommended(SLOW, 0.01, plans)
        assert (found.decision, found.plan) == (HALF, None)
        assert found.seconds == found.half_seconds
        assert "take plain 16 bits: " in found.text


def test_where_the_link_is_fast_nothing_is_to_be_compressed() -> None:
    found = recommended(FAST, 9.0)
    assert (found.decision, found.plan, found.seconds) == (NOTHING, None, found.dense_seconds)
    assert "do not compress" in found.text


@pytest.mark.parametrize("plans", [tuple(PLANS), ("top-k",)])
def test_a_report_takes_what_is_recommended_on_every_link(plans: tuple[str, ...]) -> None:
    seen, chosen, replays = set(), {name: PLANS[name] for name in plans}, {name: REPLAYS[name] for name in plans}
    for exponent in (6, 9, 10):
        network = Network([Link(10**exponent, 1e-5)], (8,), COMPUTING)
        speed = forecast_speed(chosen, replays, network, max_loss=0.01)  # type: ignore[arg-type]
        [found] = recommend(speed)
        decision = speed.decisions[0]
        assert (decision.take, decision.plan, decision.seconds) == (found.decision, found.plan, found.seconds)
        assert decision.why in found.text
        assert decision.why in speed.brief
        assert decision.why in speed.verdict
        seen.add(found.decision)
    assert {NOTHING, HALF} <= seen


def test_no_answer_without_the_time_of_computing() -> None:
    with pytest.raises(GradlabError, match="how long a step computes, which is not known: give --compute-seconds"):
        recommended(SLOW, 0.01, profile=NOT_MEASURED)


LADDER = [Link(rate, 1e-4) for rate in (1e6, 1e9, 1e12)]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clocks of processor time tick once for each look: codecs then take as long in every process."""
    for clock in ("thread_time", "process_time"):
        looks = itertools.count()
        monkeypatch.setattr(time, clock, lambda looks=looks: 2.0**-17 * next(looks))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("node", [None, Node(4, Link(4e11), SHARDS)])
def test_several_links_are_answered_as_each_alone(node: Node | None) -> None:
    def found(links: list[Link]) -> tuple[tuple[Recommendation, ...], list[list[str]]]:
        network = Network(links, (8,), COMPUTING, node=node)
        speed = forecast_speed({"int8": PLANS["int8"]}, REPLAYS, network, max_loss=0.01)  # type: ignore[arg-type]
        return recommend(speed), [list(row) for row in networks_table(speed).rows]

    several, rows = found(LADDER)
    alone = [found([link]) for link in LADDER]
    assert list(several) == [one for (one,), _ in alone]
    assert rows == [row for _, (row,) in alone]
    assert {one.decision for one in several} == {COMPRESS, HALF, NOTHING}


@pytest.mark.usefixtures("ticking")
def test_it_turns_where_the_decision_does() -> None:
    """Asked just beside the two speeds that are said, it decides otherwise on each side."""
    speed = forecast_speed(PLANS, REPLAYS, Network([SLOW], (8,), COMPUTING), max_loss=0.01)  # type: ignore[arg-type]
    compress, half = turning_points(0, speed)
    assert 0 < compress < half < math.inf
    rates = [0.9 * compress, 1.1 * compress, 0.9 * half, 1.1 * half]
    there = forecast_speed(
        PLANS, REPLAYS, Network([Link(rate, 1e-4) for rate in rates], (8,), COMPUTING), max_loss=0.01
    )  # type: ignore[arg-type]
    assert [one.take for one in there.decisions] == [COMPRESS, HALF, HALF, NOTHING]
    assert len({one.break_even for one in there.decisions}) == 1


@pytest.mark.parametrize(
    ("compress", "half", "text"),
    [
        (2e8, 4e9, "Compress below about 200 Mbit/s, take 16 bits up to about 4 Gbit/s, do not compress above."),
        (0.0, 4e9, "Take 16 bits below about 4 Gbit/s, do not compress above."),
        (4e9, 2e8, "Compress below about 4 Gbit/s, do not compress above."),
        (math.inf, math.inf, "Compress at every speed tried."),
        (2e8, math.inf, "Compress below about 200 Mbit/s, take 16 bits above."),
        (0.0, 0.0, "Do not compress at any speed tried."),
    ],
)
def test_where_it_turns_in_prose(compress: float, half: float, text: str) -> None:
    assert turns_text(compress, half) == text


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, layers = tmp_path_factory.mktemp("recommend") / "trace", layers_of(network(WIDTH))
    trained_with = {"optimizer": {"name": "SGD", "groups": [{"momentum": 0.9}]}}
    record(folder, random_gradients(0, 6, 2, layers), layers, metadata=trained_with)
    return folder


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search among two families: all of them take seconds, and are searched where searches are tested."""

    def families(trace: Trace, look: Look) -> dict[str, Family]:
        return {name: one for name, one in families_of(trace, look).items() if name in ("blocks", "16 bits")}

    monkeypatch.setattr("gradlab.analysis.report.recommended.families_of", families)


def pasted_on_nodes(printed: str, folder: Path, nodes: int, ranks: int) -> list[dict[str, Any]]:
    """What each rank ended at that trained with the lines out of what was printed."""
    (folder / "printed").write_text(printed)
    run_on_nodes("pasted_job.py", nodes, ranks, folder / "printed", folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(nodes * ranks)]


@pytest.mark.parametrize(
    ("bandwidth", "max_loss", "decision"),
    [
        ("1mbit", "1%", COMPRESS),
        pytest.param("1mbit", "0%", HALF, marks=pytest.mark.thorough),
        ("100gbit", "1%", NOTHING),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_is_printed_trains(
    gradlab: Command, trace: Path, tmp_path: Path, bandwidth: str, max_loss: str, decision: str
) -> None:
    out = tmp_path / 'a "plan".safetensors'
    words = ["recommend", trace, "--out", out, "--nodes", "2", "--bandwidth", bandwidth, "--compute-seconds", "0.2"]
    code, printed, _ = gradlab(*words, "--max-loss", max_loss, "--json")
    found = json.loads(printed)
    assert (code, found["decision"]) == (0, decision)
    assert out.exists() == (decision == COMPRESS)
    printed = gradlab(*words, "--max-loss", max_loss, "--overwrite")[1]
    assert lines_of(printed) == found["paste"]
    assert ("No artifact is written" in printed) == (decision != COMPRESS)
    if decision == NOTHING:
        assert found["paste"] == ""
        return
    for result in pasted_on_nodes(printed, tmp_path, nodes=2, ranks=1):
        assert result["finite"]
        assert (result["ratio"] or 0) > 2 or decision == HALF
    assert len([*tmp_path.glob("gradlab-*.pt")]) == (2 if decision == COMPRESS else 0)  # saved and loaded
    if decision == COMPRESS:
        assert Artifact.load(out).provenance["replay"]["judged_cosine"] > 0.9


RATES = ["1mbit", "2mbit", "100gbit"]


def answered(gradlab: Command, trace: Path, out: Path, bandwidth: str, *words: str) -> dict[str, Any]:
    asked = [
        "--nodes",
        "2",
        "--bandwidth",
        bandwidth,
        "--compute-seconds",
        "0.2",
        "--workers",
        "1",
        "--quick",
        "--json",
        *words,
    ]
    code, printed, error = gradlab("recommend", trace, "--out", out, *asked)
    assert code == 0, error
    return dict(json.loads(printed))


@pytest.mark.usefixtures("few", "ticking")
def test_one_command_answers_for_several_links_as_for_each_alone(gradlab: Command, trace: Path, tmp_path: Path) -> None:
    """The artifacts, too, each under the names of the links that take it; a second question goes beside the first."""
    several = answered(gradlab, trace, tmp_path / "plan.safetensors", ",".join(RATES))
    alone = {rate: answered(gradlab, trace, tmp_path / f"{rate}.safetensors", rate) for rate in RATES}
    for one, found in zip(several["networks"], alone.values(), strict=True):
        assert {key: one[key] for key in ("decision", "plan", "text", "warmup_steps", "proposals")} == {
            key: found[key] for key in ("decision", "plan", "text", "warmup_steps", "proposals")
        }
        for key in ("seconds", "dense_seconds", "half_seconds"):
            assert one[key] == found[key]
        if one["artifact"]:
            made, expected = (Artifact.load(path["artifact"]) for path in (one, found))
            assert made.plan == expected.plan
        assert one["paste"] == found["paste"].replace(str(found["artifact"]), str(one["artifact"]))
    first, second, third = (one["artifact"] for one in several["networks"])
    assert (Path(first).name, second, third) == ("plan.1mbit+2mbit.safetensors", first, None)
    assert [path.name for path in tmp_path.glob("plan.*")].count("plan.safetensors") == 0


@pytest.mark.usefixtures("few")
def test_a_later_question_replaces_no_earlier_answer(gradlab: Command, trace: Path, tmp_path: Path) -> None:
    out, quick = tmp_path / "plan.safetensors", "--quick"
    answered(gradlab, trace, out, "1mbit", quick)
    before = out.read_bytes()
    found = answered(gradlab, trace, out, "2mbit", quick)
    assert Path(found["artifact"]).name == "plan.2mbit.safetensors"
    words = ["recommend", trace, "--out", out, "--nodes", "2", "--compute-seconds", "0.2", quick]
    for asked in ("2mbit", "2mbit,1gbit"):
        code, printed, error = gradlab(*words, "--bandwidth", asked)
        assert (code, printed, error.count("\n")) == (2, "", 1)
        assert "plan.2mbit.safetensors exists already" in error
    code, printed, _ = gradlab(*words, "--bandwidth", "2mbit,1mbit", "--overwrite")
    assert code == 0
    assert "What to take between 2 nodes" in printed
    assert f"{tmp_path / 'plan.2mbit+1mbit.safetensors'}: int" in printed
    assert "Files of earlier answers stay: " in printed
    assert out.read_bytes() == before


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_lines_are_those_of_what_recorded(framework: str) -> None:
    """Each name that is imported is there, and the framework's checkpoints have the residuals."""
    recorded = {"attached_by": framework, "loss_scaler": True}
    lines = lines_to_paste(Path("plan.safetensors"), 2, 1, False, recorded)
    [imported] = [node for node in ast.parse(lines).body if isinstance(node, ast.ImportFrom)]
    source = (Path(gradlab.runtime.__file__).parent / f"{framework}.py").read_text()
    defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert imported.module == f"gradlab.runtime.{framework}"
    assert {one.name for one in imported.names} <= defined
    assert lines_to_resume(False, recorded).startswith("To resume bit for bit, add no line: ")
    half = lines_to_paste(None, 2, 1, False, recorded)
    ast.parse(half)
    assert "fp16_compress_hook" in half
    assert "\n\n" not in half  # a paragraph that is copied whole
    assert "ddp_model" not in half
    assert "optimizer=optimizer, scaler=scaler)" in lines_to_paste(Path("plan"), 2, 1, False, {"loss_scaler": True})


@pytest.mark.usefixtures("few")
def test_a_recording_of_a_gpu_is_answered_in_its_groups_and_with_its_times(gradlab: Command, tmp_path: Path) -> None:
    layers, folder = layers_of(network(WIDTH)), tmp_path / "trace"
    assert record(folder, random_gradients(0, 6, 2, layers), layers, metadata={"device": "cuda"}).on_gpu
    plan, link = tmp_path / "plan.safetensors", tmp_path / "link.json"
    words = ["recommend", folder, "--out", plan, "--compute-seconds", "0.2s", "--quick", "--json", "--nodes", "2"]
    answers = []
    for processor in (None, Processor("H", True, 1e12, {"block_scaled": (1e-4, 1e-4)})):
        link.write_text(json.dumps(plain({"link": link_to_json(SLOW), "processor": processor})))
        answers.append(json.loads(gradlab(*words, "--bandwidth", link, "--overwrite")[1]))
        made = Artifact.load(plan).plan
        assert in_gpu_groups(made) == made
        assert len(made.compressed_groups) < len([layer for layer in layers if len(layer.shape) > 1])
    told = [[one for one in answer["remarks"] if "gradlab doctor" in one] for answer in answers]
    assert (len(told[0]), told[1]) == (1, [])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("blocks", "width", "hidden"), [(2, 64, 96), pytest.param(320, 8192, 12800, marks=pytest.mark.thorough)]
)
def test_a_recording_of_some_layers_is_answered_for_the_whole_model(
    gradlab: Command, tmp_path: Path, blocks: int, width: int, hidden: int
) -> None:
    """Step times and the plan are the whole model's, of 1,281 layers and 70 billion parameters at the full size."""
    sizes = {"up": (hidden, width), "down": (width, hidden), "key": (width // 8, width), "norm": (width,)}
    model = [Layer(f"{block}.{name}", shape, "linear") for block in range(blocks) for name, shape in sizes.items()]
    few, words = [Layer("adapter", (32, 64), "linear"), model[3]], "layers were not recorded"
    with record(tmp_path / "trace", random_gradients(0, 8, 2, few), few, model_layers=[*model, few[0]]):
        pass
    command = ["recommend", tmp_path / "trace", "--out", tmp_path / "plan.safetensors", "--compute-seconds", "1ms"]
    found = json.loads(gradlab(*command, "--bandwidth", "1mbit", "--max-loss", "900%", "--quick", "--json")[1])
    [line] = [line for line in found["remarks"] if words in line and "plans, bytes and step times" in line]
    assert line.startswith(f"{4 * blocks - 1} of the model's {4 * blocks + 1} {words}")
    made = Artifact.load(Path(found["artifact"])).plan
    assert made.layers == (*model, few[0])
    dense = 2 * 7 / 8 * 4 * sum(layer.numel for layer in made.layers) / 125_000
    assert found["dense_seconds"] == pytest.approx(dense, rel=0.2)
    assert found["seconds"] > dense / 16


@pytest.mark.usefixtures("few")
def test_a_plan_that_does_not_go_with_the_optimizer_is_left_out_with_the_reason(
    gradlab: Command, trace: Path, tmp_path: Path
) -> None:
    plan = Plan.uniform(layers_of(network(WIDTH)), "topk", density=0.01, wrappers=[Wrap("momentum_correction")])
    given = Artifact(plan).save(tmp_path / "mine.safetensors")
    words = ["recommend", trace, "--out", tmp_path / "plan.safetensors", "--bandwidth", "1mbit", "--plan", given]
    code, printed, _ = gradlab(*words, "--compute-seconds", "0.2", "--max-loss", "900%", "--quick", "--json")
    found = json.loads(printed)
    assert (code, found["decision"]) == (0, COMPRESS)
    assert found["plan"] != "mine"
    [remark] = [one for one in found["remarks"] if one.startswith("mine was left out: ")]
    assert "momentum" in remark


@pytest.mark.filterwarnings("always:--compute-seconds")
def test_seconds_that_may_be_milliseconds_are_asked_about(gradlab: Command, tmp_path: Path) -> None:
    for text, warned in (("50", True), ("50s", False), ("50ms", False), ("0.2", False)):
        code, _, error = gradlab("predict", tmp_path / "none.safetensors", "--compute-seconds", text)
        assert (code, "is 50 seconds a step" in error) == (2, warned)


def test_words_that_mean_nothing_are_refused_by_name(gradlab: Command, trace: Path, tmp_path: Path) -> None:
    words = ["recommend", trace, "--out", tmp_path / "plan.safetensors", "--compute-seconds", "0.2"]
    code, _, error = gradlab(*words[:-2])
    assert (code, "give --compute-seconds" in error) == (2, True)
    for wrong, said in (
        (["--fsdp"], "FSDP2: parameters are sharded among a node's ranks; name them, such as --nodes 8x8"),
        (["--bandwidth", "1gbit,,2gbit"], "--bandwidth '1gbit,,2gbit': an item is empty, expected link speeds"),
        (["--bandwidth", "1gbit,1000mbit"], "--bandwidth '1gbit,1000mbit': 1 Gbit/s is named twice"),
        (["--bandwidth", ",".join(f"{n}mbit" for n in range(1, 14))], "13 link speeds, expected at most 12"),
        *((["--nodes", nodes], f"--nodes {nodes!r}: expected ") for nodes in ("8by8", "4,8", "4x", "8x8x8", "")),
        (["--max-loss", "lots"], "--max-loss lots: expected a share of the loss such as 1% or 0.01"),
    ):
        code, printed, error = gradlab(*words, *wrong)
        assert (code, printed, error.count("\n")) == (2, "", 1)
        assert said in error


# --- several ranks per node -----------------------------------------------------------------------------------------

BETWEEN_NODES = ["--nodes", "2x2", "--bandwidth", "1mbit", "--compute-seconds", "0.2", "--quick"]
NODES = [{"node": rank // 2, "nodes": 2, "local_rank": rank % 2, "local_ranks": 2} for rank in range(4)]
# A plan, and the 16 bits: PyTorch's hook would reduce over all ranks of all nodes, and FSDP2 has none for it.
DECISIONS = [("1%", COMPRESS), ("0%", HALF)]


def printed_for(gradlab: Command, trace: Path, out: Path, *words: str) -> str:
    """What is printed for two nodes of two ranks, after it was seen to name an artifact."""
    code, printed, _ = gradlab("recommend", trace, "--out", out, *BETWEEN_NODES, *words)
    assert (code, printed.splitlines()[-1]) == (0, str(out))
    assert "400 Gbit/s for each of a node's 2 ranks is assumed (--inside); 2 recorded ranks are judged" in printed
    return printed


def check_trained(results: list[dict[str, Any]], decision: str) -> None:
    """Hold what the ranks ended at to nodes that were found, bytes that were saved, and one model on all."""
    assert [result["nodes"] for result in results] == NODES
    assert all(result["finite"] and result["ratio"] > (2 if decision == COMPRESS else 1.5) for result in results)
    assert len({result["sum"] for result in results}) == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("max_loss", "decision"), DECISIONS)
def test_what_is_printed_for_several_ranks_per_node_trains(
    gradlab: Command, trace: Path, tmp_path: Path, max_loss: str, decision: str
) -> None:
    """On two nodes, each started by a torchrun of its own."""
    printed = printed_for(gradlab, trace, tmp_path / "a plan", "--max-loss", max_loss)
    assert (decision == HALF) == ({g.codec for g in Artifact.load(tmp_path / "a plan").plan.groups} == {"cast"})
    check_trained(pasted_on_nodes(printed, tmp_path, nodes=2, ranks=2), decision)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("max_loss", "decision"), [DECISIONS[0], pytest.param(*DECISIONS[1], marks=pytest.mark.thorough)]
)
def test_what_is_printed_for_fsdp2_trains(
    gradlab: Command, pool: ProcessPool, trace: Path, tmp_path: Path, max_loss: str, decision: str
) -> None:
    printed = printed_for(gradlab, trace, tmp_path / "a plan", "--max-loss", max_loss, "--fsdp")
    assert (decision == HALF) == ({g.codec for g in Artifact.load(tmp_path / "a plan").plan.groups} == {"cast"})
    assert " nodes: gathers of parameters inside nodes (32 bits) " in printed
    check_trained(pool.run("jobs.attach_tasks:pasted", 4, lines=lines_of(printed), fsdp=True), decision)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("words", "why"), [([], "measures all groups on every rank"), (["--fsdp"], "of whole layers")])
def test_a_plan_that_cannot_run_there_is_left_out_with_the_reason(
    gradlab: Command, trace: Path, tmp_path: Path, words: list[str], why: str
) -> None:
    """It would be the fastest, and the lines that train with it would be refused."""
    plan = Plan.uniform(layers_of(network(WIDTH)), "topk", density=0.001)
    settings = {group.name: [dict(group.settings)] for group in plan.compressed_groups}
    plan = replace(plan, refresh=Refresh(4, settings, dict.fromkeys(settings, 0)))
    given = ["--plan", Artifact(plan).save(tmp_path / "anew.safetensors"), "--max-loss", "900%", "--json"]
    code, printed, _ = gradlab("recommend", trace, "--out", tmp_path / "plan", *BETWEEN_NODES, *given, *words)
    found = json.loads(printed)
    assert (code, found["decision"]) == (0, COMPRESS)
    assert found["plan"] != "anew"
    [remark] = [one for one in found["remarks"] if one.startswith("anew was left out: the plan has a refresh, ")]
    assert why in remark
