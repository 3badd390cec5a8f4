"""Nothing diverges in silence: the rules on series, and in real processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.executor import rules
from gradlab.executor.rules import Feedback, LateWatch, ResidualWatch, residual_limit
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap
from support.process_pool import ProcessPool

norms = st.floats(1e-6, 1e6)


def residual_grows(residuals: list[float], gradients: list[float], feedback: Feedback | None = None) -> Any:
    """The first finding of a series of norms."""
    watch = ResidualWatch("", feedback or Feedback())
    pairs = zip(residuals, gradients, strict=True)
    return next((one for at, pair in enumerate(pairs) if (one := watch.add(at, at + 1, *pair)) is not None), None)


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


@given(st.integers(200, 400), st.floats(0.5, 2).filter(lambda share: share != 1), norms)
def test_a_tenth_of_the_steps_may_wait_in_bounded_residuals(steps: int, share: float, gradient: float) -> None:
    """Beyond a tenth of the steps they come late; before the 200th they are not judged."""
    watch = LateWatch("a", 1.0)
    found = watch.add(steps, steps, share * steps / 10, gradient)
    assert (found is not None) == (share > 1)
    assert watch.add(150, 150, 100.0, gradient) is None


@given(norms, st.floats(1.001, 1.05), st.floats(5, 15))
@example(1.0, 1.05, 15.0)
def test_gradients_that_double_while_residuals_wait_fire(gradient: float, factor: float, held: float) -> None:
    """The oracle compares medians of five gradients, ten steps apart, at most 190 steps back."""
    watch, noted = LateWatch("a", 1.0), []
    for step in range(0, 199, 5):
        now = gradient * factor**step
        noted += [now] if step % 10 == 0 else []
        first, last = sorted(noted[-20:][:5]), sorted(noted[-5:])
        grown = len(noted) >= 10 and last[2] / first[2] > 2
        found = watch.add(step, step + 1, held, now)
        assert (found is not None) == (grown and held > 10)


def test_a_residual_that_follows_a_falling_rate_does_not_fire() -> None:
    """In units of the parameters it is as large as before."""
    watch = ResidualWatch("a", Feedback(delta=0.1, follows=True))
    rates = [0.5**step for step in range(40)]
    assert all(watch.add(step, step + 1, 1 / rate, 1.0, rate) is None for step, rate in enumerate(rates))
    assert watch.add(41, 42, 1e30, 1.0, 0.0) is None


def test_rates_count_where_they_matter() -> None:
    assert rules.rate_change([0.1, 0.2], [0.1, 0.2], 0.2) == 1.0
    assert rules.rate_change([0.1, 0.2], [0.01, 0.2], 0.2) == pytest.approx(10)
    assert rules.rate_change([0.001], [0.0001], 1.0) == 1.0  # the end of a schedule
    assert rules.rate_change([0.0], [0.1], 0.1) == 1.0
    assert rules.rates_change(5, 10.0, 3.0) is not None
    for factor, residual in ((1.9, 3.0), (10.0, 0.5), (10.0, None)):
        assert rules.rates_change(5, factor, residual) is None


def test_rules_and_words_that_do_not_exist_are_refused() -> None:
    assert set(rules.levels("error").values()) == {"error"}
    assert rules.levels({"bytes_sent": "ignore"})["bytes_sent"] == "ignore"
    with pytest.raises(GradlabError, match="no rule 'residuals'; there are residual_grows, "):
        rules.levels({"residuals": "error"})
    with pytest.raises(GradlabError, match="bytes_sent = 'raise', expected one of ignore, warn, error"):
        rules.levels({"bytes_sent": "raise"})


@pytest.mark.parametrize(
    ("codec", "wrappers", "lost"),
    [
        ("topk", [], True),
        ("topk", [Wrap("two_way")], True),  # servers keep their own errors alone
        ("powersgd", [Wrap("momentum")], True),
        ("topk", [Wrap("ef21")], False),
        ("topk", [Wrap("momentum_correction")], False),
        ("sign", [], True),
        ("qsgd", [], False),
        ("block_scaled", [], False),
    ],
)
def test_a_codec_made_for_feedback_without_it_is_named(codec: str, wrappers: list[Wrap], lost: bool) -> None:
    plan = Plan.uniform([Layer("a", (64, 32)), Layer("b", (64, 32))], codec, wrappers=wrappers)
    found = rules.no_feedback({group.name: plan.build(group) for group in plan.groups})
    assert (found is not None) == lost
    assert found is None or found.seen.endswith(f": later steps do not correct the error of {codec}")


def test_findings_of_ranks_are_joined() -> None:
    def one(value: float) -> rules.Finding:
        return rules.finding("residual_grows", "seen", value, 1.0, group="a", step=3)

    (joined,) = rules.merged([[], [one(2.0)], [one(5.0)]])
    assert (joined.value, joined.ranks) == (5.0, (1, 2))
    assert rules.Finding.from_json(joined.to_json()) == joined
    with pytest.raises(GradlabError, match="a finding: ranks\\[0\\] is 'x', expected a whole number"):
        rules.Finding.from_json({**joined.to_json(), "ranks": ["x"]})
    assert rules.sentence([joined], 4).startswith("step 3: a: seen [on rank 1, 2, of 4 ranks]; ")
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


def test_a_server_that_does_not_contract_is_told(pool: ProcessPool) -> None:
    for rank, result in enumerate(pool.run("jobs.rule_tasks:server_diverging", 2)):
        assert [(one["rule"], one["group"]) for one in result["rules"]] == [("residual_grows", "a")]
        assert len(result["warned"]) == (rank == 0)
        assert all("the server's residual's norm is" in message for message in result["warned"])


def test_a_state_that_one_step_has_spoiled_is_named_on_all_ranks(pool: ProcessPool) -> None:
    """At the first step that overflows, with the layer of the rank that keeps too much."""
    first, second = pool.run("jobs.rule_tasks:overflowing", 2)
    assert first["error"] == second["error"]
    assert "step 1: gradients were finite and results are not: the residual of error_feedback" in first["error"]
    assert "holds values of up to 3e+38 in a, with which" in first["error"]
    assert [one["ranks"] for one in second["rules"]] == [[0]]


def test_a_jump_of_the_rate_under_kept_residuals(pool: ProcessPool) -> None:
    for rank, results in enumerate(pool.run("jobs.rule_tasks:rates", 2)):
        assert [len(results[name]) for name in ("jump", "smooth", "followed")] == [rank == 0, 0, 0]
        assert all("learning rate changed 10 times in one step" in message for message in results["jump"])


def test_ranks_of_different_versions_are_refused(pool: ProcessPool) -> None:
    first, second = pool.run("jobs.rule_tasks:versions", 2)
    assert first == second
    assert 'ranks disagree about the versions: rank 1 has {"gradlab":"0.0.1"}, rank 0 has' in first
