"""Loss scalers, overflows, and gradients that never become finite, on real ranks."""

from __future__ import annotations

import pytest

from support.process_pool import ProcessPool
from support.stacks import valid_stacks

STACKS = [(stack.codec, stack.wrapping) for stack in valid_stacks()]
# float16 rounds small numbers differently under another scale: its range moves, that is what a scale is for.
EXACT = [(codec, wrapping) for codec, wrapping in STACKS if codec != "cast"]


def spread(stacks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A codec of each kind of exchange with feedback, every wrapping around one codec, and Dion."""
    kinds = {"cast", "clt_k", "gradiveq", "identity", "powersgd", "qsgd", "sign", "threshold", "topk"}
    chosen = [(c, wrapping) for c, wrapping in stacks if c == "topk" or (wrapping == "feedback" and c in kinds)]
    return [*chosen, ("identity", "Dion")]


@pytest.mark.parametrize("ahead", [False, True])
def test_overflow_in_the_last_bucket_of_one_rank(pool: ProcessPool, ahead: bool) -> None:
    """Every rank skips the step and halves its scale, no state moves, and the next step is as any other."""
    stacks = spread(STACKS)[-4 * ahead :]
    stateful = {f"matrix{n}" for n, (_, wrapping) in enumerate(stacks) if wrapping not in ("none", "two-way")}
    for result in pool.run("jobs.scaler_tasks:overflow", 2, stacks=stacks, bad_rank=1, ahead=ahead):
        assert result["skipped"] == {
            "nothing but NaN": True,
            "states changed": [],
            "parameters unchanged": True,
            "scale": 512.0,
        }
        assert result["next"] == {"finite": True, "moved": True, "agree": True, "scale": 512.0, "broken": None}
        assert stateful <= set(result["with state"])


def test_an_overflow_takes_its_draws_with_it(pool: ProcessPool) -> None:
    """Draws and leaders follow the iteration's number, skipped ones included: as lockstep's, and as after a resume."""
    stacks = [(codec, "feedback") for codec in ("clt_k", "gradiveq", "lgc_ring", "qsgd", "random_k", "topk")]
    for result in pool.run("jobs.scaler_tasks:draws_after_an_overflow", 2, stacks=stacks):
        assert all(result.values()), result


def test_scale_does_not_change_what_is_applied(pool: ProcessPool) -> None:
    """Residuals are kept without the loss scale: powers of two then change no bit."""
    assert pool.run("jobs.scaler_tasks:scale_changes_nothing", 2, stacks=spread(EXACT)) == [[], []]


def test_scaler_that_never_recovers(pool: ProcessPool) -> None:
    for result in pool.run("jobs.scaler_tasks:never_finite", 4, scaled=True):
        assert result["said"][:3] == ["", "", ""]
        assert result["finite"] == [False] * 3
        assert "not finite in 4 steps in a row" in result["said"][3]
        assert "the loss scale is 128" in result["said"][3]
        assert "engine stopped earlier" in result["said"][4]
        assert result["warned"] == []


def test_nan_from_the_first_step(pool: ProcessPool) -> None:
    """Said in step 0 by rank 0, with the rank that it is about, and, at the limit, as an error, on every rank."""
    for rank, result in enumerate(pool.run("jobs.scaler_tasks:never_finite", 4, scaled=False)):
        assert len(result["warned"]) == (rank == 0)
        for warned in result["warned"]:
            assert "step 0: gradients are not finite in first" in warned
            assert "[on rank 1, of 4 ranks]" in warned
        assert "there is no loss scaler" in result["said"][3]


def test_ranks_that_resume_from_different_iterations(pool: ProcessPool) -> None:
    for message in pool.run("jobs.scaler_tasks:resumed_out_of_step", 4):
        assert "ranks disagree about the iteration: rank 1 has 0, rank 0 has 2" in message
