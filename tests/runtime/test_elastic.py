"""Workers that come and go, on torchft: real processes, killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradlab.runtime import checkpoint
from jobs.outer_tasks import batch, network
from support.elastic_workers import MISSING, Worker, run, wait_until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def ends(workers: list[Worker]) -> list[dict[str, Any]]:
    told = [one.wait() for one in workers]
    assert all("end" in one for one in told), told
    return told


def test_a_worker_is_killed_and_comes_back() -> None:
    with run({"steps": 40, "seconds": 0.02}, 4) as (workers, start, _):
        wait_until(lambda: all(one.steps >= 4 for one in workers), "the first steps")
        workers[2].kill()
        wait_until(lambda: workers[0].steps >= workers[2].steps + 4, "steps without it")
        workers[2] = start(2)
        first, *others = ends(workers)
        assert all(one["end"] == first["end"] for one in others)
        assert 3 in workers[0].all_of("workers")
        assert workers[2].all_of("joined")[0] > 4
        said = " ".join(workers[0].all_of("warned"))
        assert "w_2 gone: 3 workers go on; the residuals of the lost are lost" in said
        assert "w_2 come: 4 workers go on" in said


def test_who_does_not_fit_is_told_and_the_others_go_on() -> None:
    """Another H, plan or version, and a worker that is there already."""
    with run({"steps": 60, "seconds": 0.1}, 2) as (workers, start, _):
        wait_until(lambda: all(one.steps >= 1 for one in workers), "the first steps")
        others: dict[str, dict[str, Any]] = {
            "every = 5, the run that it joins 4": {"every": 5},
            "this worker has gradlab's version = '9.9', the run": {"version": "9.9"},
            "this worker has the plan (sha256) = ": {"codec": "topk", "settings": {"density": 0.1}},
        }
        for said, given in others.items():
            assert said in start(7, **given).wait()["error"]
        assert start(0).wait()["error"] == (
            "GradlabError: OuterStep: worker 'w_0' is there already; give each manager a replica_id of its own"
        )
        first, other = ends(workers)
        assert first["end"] == other["end"]


def test_three_of_four_gone() -> None:
    given = {"steps": 1000, "seconds": 0.02, "least": 2, "quorum_timeout": 3, "quorum_retries": 0}
    with run(given, 4, least=2) as (workers, *_):
        wait_until(lambda: all(one.steps >= 2 for one in workers), "the first steps")
        for one in workers[1:]:
            one.kill()
        said = workers[0].wait()["error"]
        assert said.startswith("CommunicationError: OuterStep: no quorum: too few workers are left, or the lighthouse")
        assert "\n" not in said


def test_resumed_is_never_stopped(tmp_path: Path) -> None:
    """Of all workers at once, bit for bit."""
    given = {"steps": 8, "fragments": 2, "folder": str(tmp_path), "least": 2}
    with run(given, 2, least=2) as (workers, *_):
        never = ends(workers)
    with run(given | {"stop": 5}, 2, least=2) as (workers, *_):
        ends(workers)
    with run(given | {"resume": str(tmp_path)}, 2, least=2) as (workers, *_):
        for one, other in zip(ends(workers), never, strict=True):
            assert (one["end"], one["loss"]) == (other["end"], other["loss"])
    # What was saved does not fit: another plan, H, a run without a manager, damage.
    model, optimizer, saved = torch.load(tmp_path / "w_0.pt", weights_only=True)
    alone = checkpoint.sealed({key: one for key, one in saved.items() if key not in ("manager", "manager's")})
    damaged = {**saved, "local_steps": saved["local_steps"] + 1}
    misfits: list[tuple[str, Any, dict[str, Any]]] = [
        ("checkpoint: every is 4, this run has 8", saved, {"every": 8}),
        ("checkpoint: plan is ", saved, {"codec": "identity"}),
        ("checkpoint: manager's is None, this run has True", alone, {}),
        ("checkpoint: what is no tensor is damaged", damaged, {}),
    ]
    for said, state, other in misfits:
        torch.save([model, optimizer, state], tmp_path / "w_0.pt")
        with run(given | {"resume": str(tmp_path), "least": 1} | other, 1) as ((worker,), *_):
            assert said in worker.wait()["error"]


def test_every_step_and_plain_averaging_is_synchronous_sgd() -> None:
    model = network()
    for step in range(10):
        for worker in range(2):
            inputs, wanted = batch(worker, step)
            ((model(inputs) - wanted).square().mean() / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    given = {"steps": 10, "every": 1, "synchronous": True, "codec": "identity", "least": 2}
    with run(given, 2, least=2) as (workers, *_):  # both from the first step on
        for end in ends(workers):
            found = torch.tensor(end["weights"]).view(5, 18)
            torch.testing.assert_close(found, model.get_parameter("6.weight"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("inside", "codec"), [("fsdp2", "block_scaled"), ("ddp", "several")])
def test_a_worker_of_two_ranks_comes(inside: str, codec: str) -> None:
    """Its ranks hold shards, or the first one exchanges for both."""
    given = {"steps": 20, "seconds": 0.05, "ranks": 2, "inside": inside, "codec": codec}
    with run(given, 1) as ((first,), start, _):
        wait_until(lambda: first.steps >= 2, "the first steps")
        second = start(1)
        one, other = ends([first, second])
        assert one["end"] == other["end"]
        assert second.all_of("joined")[0] >= 2
        assert second.all_of("workers")[-1] == 2
