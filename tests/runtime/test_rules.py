"""Nothing diverges in silence: the rules on series, and in real processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.executor import rules
from gradlab.executor.lateness import LateWatch
from gradlab.executor.rules import Feedback, residual_grows, residual_limit
from gradlab.executor.sent import Sent, SentWatch
from support.process_pool import ProcessPool

norms = st.floats(1e-6, 1e6)
SPEAKING = (
    (
        "a server that does not contract",
        {"residual_grows": "the server's residual's norm is", "mean_error": "error of"},
    ),
    ("one bit without feedback", {"mean_error": "the error of the mean is"}),
    ("topk without feedback", {"never_sent": "of the gradient is sent"}),
)


@given(st.lists(norms, min_size=1, max_size=60), st.floats(0, 1))
def test_a_codec_that_never_enlarges_its_input_never_fires(gradients: list[float], share: float) -> None:
    """The worst case: gradients that all point one way, of which the same share is kept back."""
    residuals, residual = [], 0.0
    for gradient in gradients:
        residual = share * (residual + gradient)
        residuals.append(residual)
    assert residual_grows(residuals, gradients, Feedback(delta=0.0)) is None


@given(st.lists(norms, min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_contraction_never_fires_under_its_delta(gradients: list[float], delta: float) -> None:
    residuals, residual = [], 0.0
    for gradient in gradients:
        residual = math.sqrt(1 - delta) * (residual + gradient)
        residuals.append(residual)
    assert residual_grows(residuals, gradients, Feedback(delta=delta)) is None


@given(norms, st.floats(1.05, 3))
def test_a_geometric_growth_fires(gradient: float, factor: float) -> None:
    residuals = [gradient * factor**step for step in range(200)]
    for feedback in (Feedback(), Feedback(delta=0.0), Feedback(delta=0.5)):
        found = residual_grows(residuals, [gradient] * 200, feedback)
        assert found is not None
        assert found.value > found.threshold


def test_what_is_not_a_number_fires_and_momentum_is_allowed_for() -> None:
    assert residual_grows([1.0, math.nan], [1.0, 1.0]) is not None
    assert residual_grows([1.0, math.inf], [1.0, 1.0]) is not None
    assert residual_grows([30.0], [10.0], Feedback()) is not None
    assert residual_grows([30.0], [10.0], Feedback(gain=10.0)) is None
    assert residual_limit(10_000, 0.001) == pytest.approx(2 * 2 * math.sqrt(0.999) / 0.001)
    assert residual_limit(5, 0.001) == 10
    assert residual_limit(10_000, None) == 200


def test_a_residual_that_follows_a_falling_rate_does_not_fire() -> None:
    """In units of the parameters it is as large as before."""
    watch = rules.ResidualWatch("a", Feedback(delta=0.1, follows=True))
    rates = [0.5**step for step in range(40)]
    assert all(watch.add(step, step + 1, 1 / rate, 1.0, rate) is None for step, rate in enumerate(rates))
    assert watch.add(41, 42, 1e30, 1.0, 0.0) is None


@given(st.integers(0, 2**16), st.integers(1, 4), st.floats(0.05, 30))
def test_the_error_of_the_mean_is_above_1_where_the_estimate_is(seed: int, ranks: int, size: float) -> None:
    """Without the mean itself: from ||D||^2, which all ranks know, and the ranks' own <D, x_i>."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ranks, 50, generator=draw, dtype=torch.float64)
    mean, noise = inputs.mean(0), size * torch.randn(50, generator=draw, dtype=torch.float64)
    for applied in (mean + noise, noise, 0.5 * mean, mean + noise - mean * (noise @ mean) / (mean @ mean)):
        product = float((inputs @ applied).mean())
        estimate = Sent(1.0, 1.0, float(applied @ applied), product).mean_error
        error = float((applied - mean).norm() / mean.norm())
        assert estimate is not None
        assert (estimate > 1) == (error > 1)
    assert estimate == pytest.approx(error, rel=1e-6)  # of the last, whose error is orthogonal to the mean


def test_what_a_group_without_feedback_sends_is_judged_over_five_measured_steps() -> None:
    watch = SentWatch("a")
    noisy, small, good = Sent(1.0, 1.0, 9.0, 1.0), Sent(1.0, 0.1, 0.01, 0.1), Sent(1.0, 1.0, 1.0, 1.0)
    found = [watch.add(step, one) for step, one in enumerate([good, noisy, noisy, good, noisy, good, good, good])]
    assert [[one.rule for one in at] for at in found] == [[], [], [], [], ["mean_error"], ["mean_error"], [], []]
    assert found[4][0].value == pytest.approx(8**0.5)
    found = [watch.add(step, small) for step in range(5)]
    assert [[one.rule for one in at] for at in found] == [[], [], ["never_sent"], ["never_sent"], ["never_sent"]]
    assert watch.add(9, Sent(0.0, 0.0, 0.0, 0.0)) == []


def test_what_waits_too_long_is_told_and_what_settles_or_is_noise_is_not() -> None:
    """The shares of the steps' gradients that wait: 1/4 of all, those of independent ones, and 30, settled."""
    told = []
    for residual in (lambda t: t / 4, lambda t: t**0.5, lambda t: min(t, 30.0)):
        watch = LateWatch("a", {"residual": Feedback()})
        found = [watch.add(step, step + 1, [(residual(step + 1), 1.0)]) for step in range(0, 1000, 10)]
        told.append([one.step for one in found if one is not None])
    assert told[0][0] == 200
    assert len(told[0]) == 80
    assert told[1] == []
    assert told[2] == [200, 210, 220, 230, 240, 250, 260, 270, 280, 290]
    watch = LateWatch("a", {"residual": Feedback(gain=10.0)})
    assert all(watch.add(step, step + 1, [(step / 2, 1.0)]) is None for step in range(0, 1000, 10))


def test_growing_gradients_are_told_where_much_waits() -> None:
    for waits, rule in ((12.0, "sent_late"), (8.0, None)):
        watch = LateWatch("a", {"residual": Feedback(gain=10.0)})
        norms = [1.0] * 7 + [3.0] * 4
        found = [watch.add(10 * at, 1, [(3.0 * waits, norm)]) for at, norm in enumerate(norms)]
        assert [None if one is None else one.rule for one in found[-3:]] == [None, rule, rule]
        watch = LateWatch("a", {"residual": Feedback()})
        assert all(watch.add(step, 1, [(50.0, 1.0 + step)]) is None for step in range(50))  # too short a time


def test_what_waits_at_ranks_and_servers_is_late_together() -> None:
    """A sixteenth of the steps' gradients at each place: below the tenth alone, above it together."""
    places = {"residual": Feedback(), "server's residual": Feedback()}
    for watched, expected in ((["residual"], None), (["residual", "server's residual"], 200)):
        watch = LateWatch("a", {place: places[place] for place in watched})
        norms = [[((step + 1) / 16, 1.0)] * len(watched) for step in range(0, 400, 10)]
        found = [watch.add(10 * at, 10 * at + 1, of_step) for at, of_step in enumerate(norms)]
        first = next((one for one in found if one is not None), None)
        assert (None if first is None else first.step) == expected
    assert first is not None
    assert first.value == pytest.approx(2 * 201 / 16)
    assert "the residual holds 12.6 and the server's residual holds 12.6 times" in first.seen
    silent = LateWatch("a", places)  # a server without an input has nothing that could be late
    assert silent.add(300, 301, [(20.0, 1.0), (0.0, 0.0)]) is None


def test_rates_count_where_they_matter() -> None:
    assert rules.rate_change([0.1, 0.2], [0.1, 0.2], 0.2) == 1.0
    assert rules.rate_change([0.1, 0.2], [0.01, 0.2], 0.2) == pytest.approx(10)
    assert rules.rate_change([0.001], [0.0001], 1.0) == 1.0  # the end of a schedule
    assert rules.rate_change([0.0], [0.1], 0.1) == 1.0
    assert rules.rates_change(5, 10.0, 3.0) is not None
    for factor, residual in ((1.9, 3.0), (10.0, 0.5), (10.0, None)):
        assert rules.rates_change(5, factor, residual) is None


def test_versions_are_named_with_their_ranks() -> None:
    same = {"gradlab": "1", "torch": "2"}
    assert rules.different_versions([same] * 3) is None
    found = rules.different_versions([same, {**same, "torch": "3"}, same])
    assert found is not None
    assert found.seen == "ranks have different versions: torch 2 on ranks 0, 2, 3 on rank 1"


def test_rules_and_words_that_do_not_exist_are_refused() -> None:
    assert set(rules.levels("error").values()) == {"error"}
    assert rules.levels({"versions": "ignore"})["versions"] == "ignore"
    with pytest.raises(GradlabError, match="no rule 'residuals'; there are residual_grows, "):
        rules.levels({"residuals": "error"})
    with pytest.raises(GradlabError, match="versions = 'raise', expected one of ignore, warn, error"):
        rules.levels({"versions": "raise"})


def test_findings_of_ranks_are_joined() -> None:
    def one(value: float) -> rules.Finding:
        return rules.finding("residual_grows", "seen", value, 1.0, group="a", step=3)

    (joined,) = rules.merged([[], [one(2.0)], [one(5.0)]])
    assert (joined.value, joined.ranks) == (5.0, (1, 2))
    assert rules.Finding.from_json(joined.to_json()) == joined
    with pytest.raises(GradlabError, match="a finding: ranks\\[0\\] is 'x', expected a whole number"):
        rules.Finding.from_json({**joined.to_json(), "ranks": ["x"]})
    assert rules.sentence([joined], 4).startswith("step 3: a: seen [on rank 1, 2 of 4]; ")
    assert "[on" not in rules.sentence(rules.merged([[one(2.0)]] * 4), 4)


# --- in real processes ----------------------------------------------------------------------------------------------


def test_feedback_that_diverges_is_told_once(pool: ProcessPool) -> None:
    first, second = pool.run("jobs.rule_tasks:diverging", 2)
    (message,) = first["warned"]
    assert "the residual's norm is" in message
    assert "(rule residual_grows)" in message
    assert second["warned"] == []
    assert first["rules"] == second["rules"]
    assert {one["rule"] for one in first["rules"]} >= {"residual_grows"}
    assert all(one["value"] > one["threshold"] and one["ranks"] for one in first["rules"])
    assert "(rule residual_grows)" in first["table"]


def test_an_error_is_raised_by_all_ranks_after_the_same_step(pool: ProcessPool) -> None:
    first, second = pool.run("jobs.rule_tasks:diverging", 2, rules={"residual_grows": "error"})
    assert first["error"] == second["error"]
    assert "(rule residual_grows)" in first["error"]
    assert first["steps"] == second["steps"]
    assert first["warned"] == second["warned"] == []


def test_what_is_ignored_is_not_told(pool: ProcessPool) -> None:
    for result in pool.run("jobs.rule_tasks:diverging", 2, rules="ignore"):
        assert (result["warned"], result["rules"], result["error"]) == ([], [], "")


def test_healthy_runs_are_silent(pool: ProcessPool) -> None:
    for results in pool.run("jobs.rule_tasks:healthy", 2):
        assert all(ratio > 0 for ratio in results["ratios"].values())
        assert results["ratios"]["topk"] > 5
        assert results["warned"] == []
        assert results["rules"] == {name: [] for name in results["ratios"]}


@pytest.mark.parametrize(("case", "seen"), SPEAKING)
def test_each_of_these_is_told_by_its_rule(pool: ProcessPool, case: str, seen: dict[str, str]) -> None:
    for rank, result in enumerate(pool.run("jobs.rule_tasks:speaking", 2, case=case)):
        assert {(one["rule"], one["group"]) for one in result["rules"]} == {(rule, "a") for rule in seen}
        assert len(result["warned"]) == (len(seen) if rank == 0 else 0)
        assert all(any(what in message for message in result["warned"]) for what in seen.values() if rank == 0)


def test_what_one_rank_suspects_of_the_mean_is_asked_of_all(pool: ProcessPool) -> None:
    """And asked again after twice as many steps alone: not at once."""
    first, second = pool.run("jobs.rule_tasks:unlike", 2)
    assert (first["rules"], second["rules"], first["warned"], second["warned"]) == ([], [], [], [])
    assert (first["asked"], second["asked"]) == ([], [9])


def test_a_state_that_one_step_has_spoiled_ends_the_run_on_all_ranks(pool: ProcessPool) -> None:
    """At the third step that overflows, with the layer of the rank that keeps too much."""
    first, second = pool.run("jobs.rule_tasks:overflowing", 2)
    assert first["error"] == second["error"]
    assert "step 3: gradients were finite in 3 steps in a row" in first["error"]
    assert "the residual of error_feedback holds values of up to 3e+38 in a, with which" in first["error"]
    assert [one["ranks"] for one in second["rules"] if one["rule"] == "state_overflows"] == [[0]]


def test_a_jump_of_the_rate_under_kept_residuals(pool: ProcessPool) -> None:
    for rank, results in enumerate(pool.run("jobs.rule_tasks:rates", 2)):
        assert [len(results[name]) for name in ("jump", "smooth", "followed")] == [rank == 0, 0, 0]
        assert all("learning rate changed 10 times in one step" in message for message in results["jump"])


def test_ranks_of_different_versions(pool: ProcessPool) -> None:
    for rank, result in enumerate(pool.run("jobs.rule_tasks:versions", 2)):
        assert len(result["warned"]) == (rank == 0)
        assert all(", 0.0.1 on rank 1" in message for message in result["warned"])
        assert [one["rule"] for one in result["rules"]] == ["versions"]
        assert "0.0.1 on rank 1" in result["error"]
