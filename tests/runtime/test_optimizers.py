"""Runs with several optimizers: each layer is judged by the one that holds it, and groups may be added later."""

from __future__ import annotations

from support.process_pool import ProcessPool


def test_several_optimizers_are_as_one_of_several_groups(pool: ProcessPool) -> None:
    for result in pool.run("jobs.optimizer_tasks:several_are_as_one_of_groups", 2):
        assert result["equal"]
        (statement,) = result["statements"]
        assert statement == "residuals follow the learning rate"


def test_a_layer_that_joins_an_optimizer_later_follows_sgds_recurrence_from_then_on(pool: ProcessPool) -> None:
    for result in pool.run("jobs.optimizer_tasks:a_group_added_later", 2):
        assert result["away"] < 1e-6
        assert result["owed"] > 0.1


def test_what_optimizers_and_plan_both_do_or_leave_open_is_refused(pool: ProcessPool) -> None:
    for said in pool.run("jobs.optimizer_tasks:what_is_refused", 2):
        assert said["both"].startswith(
            "the plan applies momentum (local_momentum) and the optimizer has momentum = 0.9"
        )
        assert said["both plain"] == said["added plain"] == ""
        holds = "the optimizer holds 1 of 2 parameters (not 1.weight)"
        for case, need in (
            ("one", "the plan applies momentum (local_momentum)"),
            ("rates of one", "the plan lets residuals follow SGD's learning rate"),
            ("set rates of one", "the plan follows the learning rate (step_size_ratio)"),
        ):
            refused = f"{need}, and {holds}: another optimizer (SGD) trains 1.weight; give all optimizers"
            assert said[case].startswith(refused)
        assert said["kept of one"].startswith(f"{holds}; layers that no optimizer holds count as not moving")
        assert said["made later"].startswith("SGD was not given to gradlab and trains 1.weight: give all optimizers")
        assert "a parameter group was added: the plan applies momentum" in said["added later"]
