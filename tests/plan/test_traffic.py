"""What plans send at N ranks, and up to how many they pay."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradlab import Plan
from gradlab.collectives import ring_sends
from gradlab.layout import Layer
from gradlab.plan import Wrap, most_ranks, pays_up_to, saving_of_sent, sent_bytes
from gradlab.plan.traffic import _LOST, excess_of, remarks_on_ranks

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "many-ranks.jsonl"
LAYERS = [Layer(f"layer{n}", (256, 256)) for n in range(4)]
DENSE = 4 * 4 * 256 * 256
INT4 = Plan.uniform(LAYERS, "block_scaled", dtype="int4", wrappers=[Wrap("error_feedback")])
DEFAULT = Plan.uniform(LAYERS, "block_scaled", dtype="int4")
TWO_WAY = Plan.uniform(LAYERS, "block_scaled", dtype="int4", wrappers=[Wrap("error_feedback"), Wrap("two_way")])


def test_four_bits_with_feedback_send_more_the_more_ranks_there_are() -> None:
    shares = [sent_bytes(INT4, ranks) / (DENSE * ring_sends(ranks)) for ranks in (2, 4, 8, 16, 32)]
    assert shares == pytest.approx([0.129, 0.258, 0.516, 1.03, 2.06], rel=0.01)
    both_ways = [sent_bytes(TWO_WAY, ranks) / (DENSE * ring_sends(ranks)) for ranks in (2, 8, 32)]
    assert both_ways == pytest.approx([0.129] * 3, rel=0.01)
    default = [sent_bytes(DEFAULT, ranks) / (DENSE * ring_sends(ranks)) for ranks in (2, 4, 5, 32)]
    assert default == pytest.approx([0.129, 0.258, 0.129, 0.129], rel=0.01)
    assert saving_of_sent(INT4, 32).ratio == pytest.approx(1 / 2.06, rel=0.01)
    assert saving_of_sent(INT4, 1).ratio is None


@pytest.mark.parametrize(
    ("codec", "settings"),
    [("topk", {"density": 0.01}), ("topk", {"density": 0.2}), ("ecsq", {"bits": 1.0}), ("one_bit", {}), ("nuqsgd", {})],
)
@pytest.mark.parametrize("bits", [16, 32])
def test_a_plan_pays_up_to_the_number_of_ranks_that_a_search_through_all_finds(
    codec: str, settings: dict[str, float], bits: int
) -> None:
    plan = Plan.uniform(LAYERS, codec, wrappers=[Wrap("error_feedback")], **settings)
    slack = {16: 1.01, 32: 1.1}[bits]
    pays = [sent_bytes(plan, ranks) <= slack * ring_sends(ranks) * DENSE * bits / 32 for ranks in range(2, 400)]
    assert most_ranks(plan, bits) == (pays.index(False) + 1 if False in pays else None)


def test_plans_that_never_send_more_say_nothing_and_others_a_number() -> None:
    for codec in ("powersgd", "sign", "cast", "identity"):
        assert pays_up_to(Plan.uniform(LAYERS, codec, minimum_numel=1)) == "" or codec == "identity"
    assert "up to 7 ranks" in pays_up_to(INT4)
    assert pays_up_to(TWO_WAY) == pays_up_to(DEFAULT) == ""
    gathered = Plan.uniform(LAYERS, "topk", density=0.5, wrappers=[Wrap("error_feedback")])
    assert "between any number of ranks" in pays_up_to(gathered)
    integers = Plan.uniform(LAYERS, "intsgd")
    assert (most_ranks(integers), pays_up_to(integers)) == (127, "works between up to 127 ranks")


def test_where_rounding_means_once_more_costs_much_the_plan_says_so() -> None:
    def of(*args: str, **kwargs: Any) -> list[str]:
        return remarks_on_ranks(Plan.uniform(LAYERS, *args, **kwargs))

    assert [line[:44] for line in of("chunk_topk")] == ["means come back compressed from 5 ranks on; "]
    assert "compressed; sign lost 2.5 to 6.7 %" in of("sign", wrappers=[Wrap("error_feedback"), Wrap("two_way")])[0]
    assert of("block_scaled", dtype="int4") == of("ecsq") == of("topk", wrappers=[Wrap("error_feedback")])[1:] == []


def test_what_rounding_cost_is_what_the_rows_of_trainings_say() -> None:
    """The rows' plans whose losses are apart by more than .3 % in the mean are those that are told of, and no other."""
    losses: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {}
    for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()):
        if row["ranks"] >= 8:
            key = (row["task"], row["ranks"], row["seed"])
            losses.setdefault(row["plan"], {}).setdefault(key, {})[row["form"]] = row["loss"]
    told = {}
    for plan, runs in losses.items():
        both = [forms for forms in runs.values() if {"shards", "gather"} <= {*forms}]
        more = [100 * (forms["shards"] / forms["gather"] - 1) for forms in both]
        if sum(more) > 0.3 * len(more):
            told[{"top-k": "topk", "signs": "sign"}.get(plan, plan)] = f"{min(more):.1f} to {max(more):.1f} %"
    assert told == _LOST


def test_groups_that_send_too_much_are_named_where_they_matter() -> None:
    assert excess_of(INT4, 7) is None
    found = excess_of(INT4, 8)
    assert found is not None
    assert found.groups == tuple(layer.name for layer in LAYERS)
    assert found.to_16_bits == pytest.approx(1.03, rel=0.01)
    assert "between 8 ranks layer0 and 3 more groups would send 1.03x" in found.sentence(8)
    assert excess_of(INT4, 16, bits=32) is None  # 1.03 of plain DDP: as much, but for the scales
    assert excess_of(INT4, 32, bits=32) is not None
    assert excess_of(INT4, 1) is None
    large, small = Layer("large", (1000, 1000)), Layer("small", (40, 50))
    both = Plan.uniform([large, small], "powersgd", minimum_dimensions=1)
    assert excess_of(both, 64) is None
    tiny = Plan.uniform([Layer("tiny", (20, 20))], "topk", density=0.9, wrappers=[Wrap("error_feedback")])
    assert excess_of(tiny, 64) is None  # a message of a kilobyte costs its latency
