"""Runs with several optimizers: each layer is judged by the one that holds it, and groups may be added later."""

from __future__ import annotations

from support.process_pool import ProcessPool


def test_several_optimizers_are_as_one_of_several_groups(pool: ProcessPool) -> None:
    for result in pool.run("jobs.optimizer_tasks:several_are_as_one_of_groups", 2):
        assert result["equal"]
        (statement,) = result["statements"]
        assert statement == "residuals follow the learning rate"


def test_muon_for_matrices_and_adamw_for_the_rest(pool: ProcessPool) -> None:
    """Bit for bit as plain DDP, resumed as never stopped, and under a loss scale as without."""
    for result in pool.run("jobs.optimizer_tasks:muon_in_ddp", 2):
        told = result.pop("told")
        assert result == dict.fromkeys(("plain DDP", "resumed", "scaled", "compressed differs"), True)
        assert told.startswith(
            "residuals are kept as they are under Muon with momentum = 0.95 and AdamW with betas = (0.9, 0.999)"
        )


def test_a_residual_follows_the_rate_of_the_optimizer_that_holds_its_layer(pool: ProcessPool) -> None:
    for factors in pool.run("jobs.optimizer_tasks:ratio_of_its_own_rate", 2):
        assert factors == {"0.weight": 2.0, "1.weight": 4.0}


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
        assert said["twice"] == "SGD and AdamW both hold 1.weight: give each parameter to one optimizer"
