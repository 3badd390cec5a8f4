"""Lightning, Accelerate and Hugging Face Trainer: the examples that users copy, run as users run them; refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gradlab.plan import Plan
from gradlab.trial import TrialSettings
from gradlab.trial.run import run_trial
from support.warm_python import python

# Frameworks take long to import.
pytestmark = pytest.mark.thorough
HERE = Path(__file__).parents[1]
EXAMPLES = HERE.parent / "docs" / "examples"
# Lightning's own, of its use of PyTorch, and of a run that continues into another folder.
LIGHTNING_WARNINGS = "ignore:`isinstance(treespec:FutureWarning,ignore:The dirpath has changed:UserWarning"
WARMUP, STEPS = 8, 32

INSTALLED = [name for name in ("lightning", "accelerate", "transformers") if importlib.util.find_spec(name)]
needs_lightning = pytest.mark.skipif("lightning" not in INSTALLED, reason="needs gradlab[lightning]")
needs_accelerate = pytest.mark.skipif("accelerate" not in INSTALLED, reason="needs gradlab[accelerate]")
needs_transformers = pytest.mark.skipif("transformers" not in INSTALLED, reason="needs gradlab[transformers]")
FRAMEWORKS = (
    "lightning.pytorch",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
)


def executable() -> str:
    """A Python that has the frameworks already, and where warnings are errors."""
    there = [name for name in FRAMEWORKS if name.partition(".")[0] in INSTALLED]
    return python("pytest", *there, on_warning=f"error,{LIGHTNING_WARNINGS}")


def launched(folder: Path, what: str, ranks: int) -> list[dict[str, Any]]:
    """What jobs/framework_jobs.py found, by rank."""
    command = [executable(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run([*(command if ranks > 1 else command[:1]), str(HERE / "jobs" / "framework_jobs.py"), what, str(folder)])
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(ranks)]


def run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    place = Path(sys.executable).parent
    job = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=place)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all launches. <framework>/whole and <framework>/resumed hold the examples' checkpoints."""
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def first(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, "first", 2)


@pytest.fixture(scope="module")
def lightning_whole(folder: Path) -> list[dict[str, Any]]:
    """Lightning starts the second process itself."""
    words = [str(EXAMPLES / "lightning_example.py"), "--folder", str(folder / "lightning" / "whole")]
    lines = run([executable(), *words]).replace("}{", "}\n{").splitlines()  # ranks may share a line
    return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda result: result["rank"])


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, folder: Path, first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last half of the examples' steps again, in new processes; Lightning's with torchrun, as it may be, too."""
    if "lightning" in INSTALLED:
        request.getfixturevalue("lightning_whole")
    if "transformers" in INSTALLED:
        # The Trainer looks for files beside the checkpoint: those of the second run start as a copy of the first's.
        place = folder / "transformers"
        shutil.copytree(place / "whole" / "checkpoint-16", place / "resumed" / "checkpoint-16")
    return launched(folder, "resumed", 2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    (results,) = launched(folder, "alone", 1)
    return results


@dataclass(frozen=True)
class Runs:
    """An example's 32 steps, and the last 16 of them from a checkpoint; by rank."""

    folder: Path
    whole: list[dict[str, Any]]
    resumed: list[dict[str, Any]]


def runs_of(request: pytest.FixtureRequest, name: str) -> Runs:
    first, resumed = request.getfixturevalue("first"), request.getfixturevalue("resumed")
    own = request.getfixturevalue("lightning_whole") if name == "lightning" else [ranks[name] for ranks in first]
    return Runs(request.getfixturevalue("folder") / name, own, [ranks[name] for ranks in resumed])


@pytest.fixture(scope="module")
def lightning_runs(request: pytest.FixtureRequest) -> Runs:
    return runs_of(request, "lightning")


@pytest.fixture(scope="module")
def accelerate_runs(request: pytest.FixtureRequest) -> Runs:
    return runs_of(request, "accelerate")


@pytest.fixture(scope="module")
def transformers_runs(request: pytest.FixtureRequest) -> Runs:
    return runs_of(request, "transformers")


@pytest.fixture(
    params=[
        pytest.param("lightning_runs", marks=needs_lightning),
        pytest.param("accelerate_runs", marks=needs_accelerate),
        pytest.param("transformers_runs", marks=needs_transformers),
    ]
)
def runs(request: pytest.FixtureRequest) -> Runs:
    result: Runs = request.getfixturevalue(request.param)
    return result


def piloted(name: str) -> nn.Module:
    """The model that an example trains."""
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    if name == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    return nn.ModuleDict({"network": network}) if name == "lightning" else network


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lightning", marks=needs_lightning),
        pytest.param("accelerate", marks=needs_accelerate),
        pytest.param("transformers", marks=needs_transformers),
    ],
)
def test_a_pilot_tries_plans_on_an_example_as_it_stands(name: str, tmp_path: Path) -> None:
    """Whose own plan is another one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(EXAMPLES / f"{name}_example.py"), "--folder", str(tmp_path / "checkpoints")]
    plan = Plan.uniform(piloted(name), "qsgd", bits=4, warmup_steps=3)
    command = [executable(), *([] if name == "lightning" else torchrun), *words]
    ended = run_trial(command, tmp_path / "run", TrialSettings(plan, steps=11))
    assert ended.problem is None, ended.output
    assert list(map(len, ended.losses.by_rank)) == [11, 11]
    assert 0 < ended.losses.means[-1] < ended.losses.means[0] < 5


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nests of dicts and lists differ; tensors bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and list(one) == list(other):
        return [line for key in one for line in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{where}/{i}")
        ]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same and one.numpy().tobytes() == other.numpy().tobytes() else [where]
    return [] if type(one) is type(other) and one == other else [where]


# --- the examples ---------------------------------------------------------------------------------------------------


def test_the_hook_compresses(runs: Runs) -> None:
    assert [result["rank"] for result in runs.whole] == [0, 1]
    for result in runs.whole:
        assert result["compressing"]
        assert result["iteration"] == STEPS
        assert result["steps"] == STEPS - WARMUP
        assert result["payload_bytes_per_step"] == result["forecast_payload_bytes"]
        assert result["payload_bytes_per_step"] < result["dense_payload_bytes"] / 5
        assert all(0 < error < 1 for error in result["relative_error_by_layer"].values())


def test_ranks_agree_though_their_gradients_differ(runs: Runs) -> None:
    first, second = runs.whole
    assert first["parameters_sha256"] == second["parameters_sha256"]
    assert first["relative_error_by_layer"] != second["relative_error_by_layer"]


def test_resumed_is_never_stopped(runs: Runs) -> None:
    for whole, resumed in zip(runs.whole, runs.resumed, strict=True):
        assert resumed["iteration"] == whole["iteration"]
        assert resumed["steps"] == STEPS // 2
        assert resumed["parameters_sha256"] == whole["parameters_sha256"]


@needs_lightning
def test_a_lightning_checkpoint_holds_every_ranks_state(lightning_runs: Runs) -> None:
    """And the last ones of both runs are the same: model, optimizer and residuals."""
    whole, resumed = (
        torch.load(lightning_runs.folder / name / "epoch=3.ckpt", weights_only=True) for name in ("whole", "resumed")
    )
    for part in ("state_dict", "optimizer_states", "gradlab"):
        assert differences(whole[part], resumed[part]) == []
    assert [state["rank"] for state in whole["gradlab"]] == [0, 1]
    assert residuals_differ(*whole["gradlab"])


@needs_accelerate
def test_an_accelerate_checkpoint_holds_every_ranks_state(accelerate_runs: Runs) -> None:
    """And the last ones of both runs are the same: model, optimizer and residuals."""
    whole, resumed = (accelerate_runs.folder / name / "epoch=3" for name in ("whole", "resumed"))
    assert differences(load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")) == []
    states = []
    for name in ("gradlab_0_rank_0.pt", "gradlab_0_rank_1.pt", "optimizer.bin"):
        states.append(torch.load(whole / name, weights_only=True))
        assert differences(states[-1], torch.load(resumed / name, weights_only=True)) == []
    assert residuals_differ(states[0], states[1])


@needs_transformers
def test_a_trainers_checkpoint_holds_every_ranks_state(transformers_runs: Runs) -> None:
    """And the last ones of both runs are the same, through dropout: model, optimizer and residuals."""
    whole, resumed = (transformers_runs.folder / name / "checkpoint-32" for name in ("whole", "resumed"))
    assert differences(load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")) == []
    states = []
    for name in ("gradlab_rank_0.pt", "gradlab_rank_1.pt", "optimizer.pt"):
        one, other = (torch.load(place / name, weights_only=True) for place in (whole, resumed))
        marks, others_marks = one.pop("marks", {}), other.pop("marks", {})
        assert marks.get("global_step") == others_marks.get("global_step")
        assert not marks or marks["run"] != others_marks["run"]
        states.append(one)
        assert differences(one, other) == []
    assert residuals_differ(states[0], states[1], layers=6)


def residuals_differ(first: dict[str, Any], second: dict[str, Any], layers: int = 2) -> bool:
    """All of them; and each is there."""
    names = [name for name, tensor in first["states"].items() if tensor.is_floating_point()]
    assert len(names) == layers
    return all(not torch.equal(first["states"][name], second["states"][name]) for name in names)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning_scenarios(alone: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = alone["lightning_scenarios"]
    return found


@needs_lightning
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("no_ddp", "strategy SingleDeviceStrategy: got a Model, not in DDP; use Trainer(strategy='ddp')"),
        ("hook_in_the_strategy", "DDPStrategy has a ddp_comm_hook, and DDP takes one only"),
        ("hook_on_the_model", "has the communication hook allreduce_hook already"),
        ("no_artifact", "absent.safetensors"),
        (
            "another_world_size",
            "checkpoint: world_size is 2, this run has 1; residuals= (split, sum or drop) says",
        ),
        ("unknown_policy", "residuals = 'keep', expected None or one of"),
        ("resumed_without_the_callback", "['CompressionCallback']"),
    ],
)
def test_lightning_says(lightning_scenarios: dict[str, Any], scenario: str, expected: str) -> None:
    message = lightning_scenarios[scenario]
    assert expected in message
    assert "\n" not in message


@needs_lightning
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("world_size_one_warns", 4),
        ("two_optimizers", 4),
        ("dense_checkpoint_starts_anew", 4),
        ("learning_rate_finder_leaves_no_trace", 8),
        ("fit_twice", [4, 4]),
        ("logged", ["2", "4"]),
        ("residuals_of_another_world_size", [True, True]),
    ],
)
def test_lightning_counts_these_steps(lightning_scenarios: dict[str, Any], scenario: str, expected: Any) -> None:
    assert lightning_scenarios[scenario] == expected


@needs_lightning
def test_a_checkpoint_in_an_emergency_waits_for_nobody(lightning_scenarios: dict[str, Any]) -> None:
    saved = lightning_scenarios["saved_on_exception"]
    assert "optimizer_states" in saved
    assert "gradlab" not in saved


@needs_lightning
def test_the_trainers_loss_scaler_leaves_residuals_alone(lightning_scenarios: dict[str, Any]) -> None:
    unscaled, scaled = lightning_scenarios["residual_by_loss_scale"]
    assert scaled == pytest.approx(unscaled, rel=0.01)


@needs_accelerate
def test_accelerate_says_the_same_on_all_ranks(first: list[dict[str, Any]]) -> None:
    said, others = (ranks["accelerate_scenarios"] for ranks in first)
    assert said == others
    assert "2 process(es): got a Linear, not in DDP; prepare it first" in said["not_prepared"]
    assert "has the communication hook fp16_compress_hook already" in said["hook_of_accelerate"]
    assert "absent.safetensors" in said["no_artifact"]
    assert said["damaged"].startswith("rank 1: ")
    assert "damaged: checkpoint: damaged, or not written by torch.save" in said["damaged"]
    assert "gradlab_0_rank_1.pt: missing; to start from a checkpoint without compression" in said["missing"]
    assert said["mixed"].endswith("written over, but not by all ranks: it holds states of steps [3, 0]")
    assert said["iteration"] == 0
    assert "world_size is 1, this run has 2" in said["another_world_size"]
    assert said["another_world_size_split"] == 3
    assert "residuals = 'keep', expected None or one of" in said["unknown_policy"]
    assert said["prepared_again"] == [["gradlab_0_rank_0.pt", "gradlab_0_rank_1.pt"]] * 2
    assert said["two_optimizers"]["rates"] == {"0.weight": 0.1, "1.weight": 0.01}
    assert "another optimizer (AcceleratedOptimizer, SGD) trains 1.weight" in said["two_optimizers"]["one"]


@pytest.fixture(scope="module")
def trainer_scenarios(first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [ranks["transformers_scenarios"] for ranks in first]


@needs_transformers
def test_the_trainer_compresses_as_a_plain_loop_does(trainer_scenarios: list[dict[str, Any]]) -> None:
    """Under accumulation, clipping, AdamW with a schedule, and an evaluation in between; bit for bit."""
    assert [result["plain_loop"] for result in trainer_scenarios] == [True, True]


@needs_lightning
def test_lightning_takes_local_steps(resumed: list[dict[str, Any]]) -> None:
    """Ranks end alike, and a run that is resumed within a round ends as one that never stopped; bit for bit. A worker's
    error reaches the other."""
    *ranks, failed = zip(*(rank["lightning_local_steps"] for rank in resumed), strict=True)
    assert ranks == [(4, 4), (True, True), (True, True)]
    assert failed == ("step 1: another rank failed (rank 1: step 1: RuntimeError: on purpose)", "on purpose")


@needs_transformers
def test_the_trainer_takes_local_steps(trainer_scenarios: list[dict[str, Any]]) -> None:
    """As a plain loop does, and resumed within a round as never stopped; bit for bit."""
    assert [result["local_steps"] for result in trainer_scenarios] == [[3, True, True]] * 2


@needs_transformers
def test_the_trainer_names_what_its_optimizer_lacks(trainer_scenarios: list[dict[str, Any]]) -> None:
    """And keeps no residual of it, as it does not move."""
    for result in trainer_scenarios:
        assert "the optimizer holds 15 of 16 parameters (not transformer.wte.weight)" in result["part"]["told"]
        assert (result["part"]["agree"], result["part"]["residual"]) == (True, 0.0)


@needs_transformers
def test_one_trainer_trains_twice(trainer_scenarios: list[dict[str, Any]]) -> None:
    """From its own checkpoint to the same end, in two steps that end at the fourth."""
    assert [result["trained_twice"] for result in trainer_scenarios] == [[True, 4, 2]] * 2


@needs_transformers
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (
            "missing",
            "gradlab_rank_1.pt: missing; if the checkpoint lies elsewhere, give CompressionCallback(resume_from",
        ),
        ("damaged", "damaged/checkpoint-2: checkpoint: damaged, or not written by torch.save"),
        ("another_run", "gradlab_rank_1.pt is of another save; if the checkpoint lies elsewhere"),
        ("elsewhere", "elsewhere/checkpoint-2/gradlab_rank_0.pt: missing; if the checkpoint lies elsewhere"),
        ("another_world_size", "checkpoint: world_size is 1, this run has 2; residuals= (split, sum or drop) says"),
    ],
)
def test_the_trainer_says_the_same_on_all_ranks(
    trainer_scenarios: list[dict[str, Any]], scenario: str, expected: str
) -> None:
    first, second = (result[scenario] for result in trainer_scenarios)
    assert first == second
    assert expected in first
    assert "\n" not in first


@needs_transformers
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("moved_with_its_folder", 4),
        ("named_elsewhere", 4),
        ("folder_without_resuming", True),
        ("another_world_size_split", 4),
        ("missing_started_anew", 2),
        ("dense", [2, True]),
        ("bare", [2, True]),
        ("model_alone", []),
        ("best_and_last_kept", True),
        ("logged", [[2, 4], [2, 4], True]),
        ("recorded", [[2, 2, 2, 2], True, True, True, [4, 0]]),
    ],
)
def test_the_trainer_counts_these_steps(trainer_scenarios: list[dict[str, Any]], scenario: str, expected: Any) -> None:
    assert [result[scenario] for result in trainer_scenarios] == [expected, expected]


@needs_transformers
def test_the_trainer_in_one_process_is_told_to_launch_more(alone: dict[str, Any]) -> None:
    result = alone["transformers_scenarios"]
    came = "1 process(es): got a GPT2LMHeadModel, not in DDP"
    assert result["one_process"].startswith(f"CompressionCallback, {came}")
    assert result["one_process_recording"].startswith(f"RecordingCallback, {came}")
    assert "torchrun --nproc-per-node 2" in result["one_process"]
    assert "residuals = 'keep', expected None or one of" in result["unknown_policy"]
    assert result["several_gpus"].startswith("CompressionCallback, 1 process(es): the model is in DataParallel")
