"""What Lightning's callback refuses, and what it does outside plain training; see framework_jobs.py."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

import gradlab
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.checkpoint import sealed
from gradlab.runtime.lightning import CompressionCallback, LocalStepsCallback

SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


class Model(LightningModule):
    def __init__(self, optimizers: int = 1, fails_at: int = -1) -> None:
        super().__init__()
        self.network, self.lr = nn.Linear(32, 16), 0.1
        self.optimizers_made, self.fails_at = optimizers, fails_at
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise RuntimeError("on purpose")
        loss = self.network(batch[0]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        kinds = (torch.optim.SGD, torch.optim.AdamW)
        if self.optimizers_made == 1:
            return [torch.optim.SGD(self.parameters(), lr=self.lr)]
        return [kind([p], lr=self.lr) for kind, p in zip(kinds, self.parameters(), strict=True)]


PLAN = Plan.uniform(Model(), "topk", density=0.1)
LOCAL_STEPS = Plan.uniform(Model(), "topk", density=0.1, exchanges="pseudo-gradients")


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 32, generator=torch.Generator().manual_seed(0))), batch_size=4)


def trainer(folder: Path, *callbacks: Any, strategy: Any = "ddp", **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, **quiet, **options}
    place = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    return Trainer(strategy=strategy, callbacks=list(callbacks), **{**place, **options})


def refusal(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(GradlabError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


@scenario
def no_ddp(folder: Path) -> str:
    return refusal(trainer(folder, CompressionCallback(PLAN), strategy="auto").fit, Model(), loader())


@scenario
def hook_in_the_strategy(folder: Path) -> str:
    strategy = DDPStrategy(ddp_comm_hook=allreduce_hook)
    return refusal(trainer(folder, CompressionCallback(PLAN), strategy=strategy).fit, Model(), loader())


class Hooked(Callback):
    """Registers a hook before gradlab does."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(None, allreduce_hook)


@scenario
def hook_on_the_model(folder: Path) -> str:
    return refusal(trainer(folder, Hooked(), CompressionCallback(PLAN)).fit, Model(), loader())


@scenario
def two_optimizers(folder: Path) -> int:
    fitted = trainer(folder)
    callback = gradlab.compress(fitted, PLAN)
    fitted.fit(Model(optimizers=2), loader())
    assert callback.state is not None
    return callback.state.iteration


@scenario
def no_artifact(folder: Path) -> str:
    return refusal(trainer(folder, CompressionCallback(folder / "absent.safetensors")).fit, Model(), loader())


def of_two_ranks(folder: Path) -> Path:
    """A checkpoint after four steps, as if two ranks had saved it: the second without residuals."""
    first = trainer(folder, CompressionCallback(PLAN))
    first.fit(Model(), loader())
    first.save_checkpoint(folder / "one.ckpt")
    checkpoint = torch.load(folder / "one.ckpt", weights_only=True)
    (only,) = checkpoint["gradlab"]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in only["states"].items()}
    checkpoint["gradlab"] = [
        sealed({**only, "world_size": 2, "rank": rank, "states": states})
        for rank, states in enumerate((only["states"], zeros))
    ]
    torch.save(checkpoint, folder / "two.ckpt")
    return folder / "two.ckpt"


@scenario
def another_world_size(folder: Path) -> str:
    again = trainer(folder, CompressionCallback(PLAN), max_epochs=2)
    return refusal(again.fit, Model(), loader(), ckpt_path=of_two_ranks(folder))


@scenario
def residuals_of_another_world_size(folder: Path) -> list[bool]:
    """Whether what is loaded is half the first rank's residual ("split"), and nothing ("drop")."""
    path = of_two_ranks(folder)
    old = torch.load(path, weights_only=True)["gradlab"][0]["states"]
    equal = []
    for policy, share in (("split", 0.5), ("drop", 0.0)):
        callback = CompressionCallback(PLAN, residuals=policy)
        trainer(folder, callback).fit(Model(), loader(), ckpt_path=path)  # has nothing left to train
        new = callback.state.state_dict()
        assert new["iteration"] == 4
        loaded = {name: new["states"].get(name, torch.zeros_like(old[name])) for name in old}  # dropped: not there
        equal.append(all(torch.equal(loaded[name], share * old[name]) for name in old))
    return equal


@scenario
def unknown_policy(folder: Path) -> str:
    return refusal(CompressionCallback, PLAN, residuals="keep")


@scenario
def world_size_one_warns(folder: Path) -> int:
    callback = CompressionCallback(PLAN)
    with pytest.warns(UserWarning, match="gradlab: world size 1"):
        trainer(folder, callback).fit(Model(), loader())
    return len(callback.state.statistics.steps)


@scenario
def dense_checkpoint_starts_anew(folder: Path) -> int:
    first = trainer(folder)
    first.fit(Model(), loader())
    first.save_checkpoint(folder / "dense.ckpt")
    callback = CompressionCallback(PLAN)
    with pytest.warns(UserWarning, match="no compression states, they start anew"):
        trainer(folder, callback, max_epochs=2).fit(Model(), loader(), ckpt_path=folder / "dense.ckpt")
    return callback.state.iteration


@scenario
def resumed_without_the_callback(folder: Path) -> str:
    first = trainer(folder, CompressionCallback(PLAN))
    first.fit(Model(), loader())
    first.save_checkpoint(folder / "compressed.ckpt")
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint") as caught:
        trainer(folder, max_epochs=2).fit(Model(), loader(), ckpt_path=folder / "compressed.ckpt")
    return next(str(w.message) for w in caught if "callbacks used" in str(w.message))


@scenario
def saved_on_exception(folder: Path) -> list[str]:
    callback = CompressionCallback(PLAN)
    saver = ModelCheckpoint(folder, save_on_exception=True)
    failing = trainer(folder, callback, saver, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="without the ranks' states"), pytest.raises(RuntimeError):
        failing.fit(Model(fails_at=2), loader())
    (path,) = folder.glob("*.ckpt")
    return sorted(torch.load(path, weights_only=True))


class FindEveryEpoch(LearningRateFinder):
    """As Lightning's documentation has it: search again while training."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lr_find(trainer, pl_module)


@scenario
def learning_rate_finder_leaves_no_trace(folder: Path) -> int:
    callback = CompressionCallback(PLAN)
    finder = FindEveryEpoch(num_training_steps=3, update_attr=False)
    trainer(folder, callback, finder, max_epochs=2).fit(Model(), loader())
    return callback.state.iteration


@scenario
def fit_twice(folder: Path) -> list[int]:
    callback = CompressionCallback(PLAN)
    iterations = []
    for _ in range(2):
        trainer(folder, callback).fit(Model(), loader())
        iterations.append(callback.state.iteration)
    return iterations


@scenario
def logged(folder: Path) -> list[str]:
    callback = CompressionCallback(PLAN, log=True)
    logger = CSVLogger(folder, name="run", version=0)
    trainer(folder, callback, logger=logger, log_every_n_steps=2, max_epochs=1).fit(Model(), loader())
    with open(folder / "run" / "version_0" / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[-1]) == {"step", *callback.state.scalars()}
    return [row["step"] for row in rows]


@scenario
def residual_by_loss_scale(folder: Path) -> list[float]:
    """The largest residual after training under a loss scaler of 1, and of 1024."""
    largest = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        callback = CompressionCallback(PLAN)
        torch.manual_seed(0)
        precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer(folder, callback, plugins=[precision]).fit(Model(), loader())
        states = callback.state.state_dict()["states"].values()
        largest.append(max(float(t.abs().max()) for t in states if t.is_floating_point()))
    return largest


def local_steps(folder: Path) -> list[Any]:
    """On two ranks: outer steps after every third of 12 batches' optimizer steps; whether ranks end with the same
    parameters; whether a run that is resumed within a round ends as one that never stopped, bit for bit; and what each
    rank's error says when the training of the second one fails."""

    def run(name: str, epochs: int, resume: Path | None = None) -> tuple[LocalStepsCallback, Model]:
        torch.manual_seed(0)
        model, callback = Model(), LocalStepsCallback(LOCAL_STEPS, every=3, deterministic=True)
        kept = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
        options = {"devices": 2, "enable_checkpointing": True, "max_epochs": epochs}
        trainer(folder, callback, kept, **options).fit(model, loader(), ckpt_path=resume)
        return callback, model

    callback, whole = run("whole", 6)  # 2 batches of each rank in an epoch
    _, resumed = run("resumed", 6, folder / "whole" / "epoch=1.ckpt")
    flat = torch.cat([one.detach().reshape(-1) for one in whole.parameters()])
    of_ranks = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(of_ranks, flat)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    return [
        callback.state.outer.outer_steps,
        torch.equal(of_ranks[0], of_ranks[1]),
        all(torch.equal(one, other) for one, other in pairs),
        lost_worker(folder),
    ]


def lost_worker(folder: Path) -> str:
    model = Model(fails_at=1 if torch.distributed.get_rank() == 1 else -1)
    with pytest.raises((RuntimeError, GradlabError)) as failed:
        trainer(folder, LocalStepsCallback(LOCAL_STEPS, every=1, delay=0), devices=2, max_epochs=3).fit(model, loader())
    return str(failed.value)


def alone(folder: Path) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "gradlab: world size 1")
    return {name: run(folder / name) for name, run in SCENARIOS.items()}
