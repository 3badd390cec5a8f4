"""Tasks for two real ranks: public reports under FSDP2, OuterStep, Accelerate, the Trainer and Lightning.

The frameworks are imported within tasks: ranks serve other tasks too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.layout import layers_of
from gradlab.plan import Plan, Wrap
from gradlab.runtime import OuterStep, compress_fsdp
from jobs.fsdp_tasks import Network, backward, mesh_of, sharded, words_of


def said(work: Callable[[], Any]) -> str:
    """The error that comes, in one line, and the warnings before it; "" if none do."""
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        try:
            work()
        except Exception as came:
            error = str(came)
    return " ".join([error, *(str(one.message) for one in caught)]).strip()


def everyone(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def agree(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether ranks have equal parameters and buffers."""
    values = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.state_dict().values()]
    first, *others = everyone([value.tolist() for value in values], group)
    return all(other == first for other in others)


def of_rank(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def topk(model: nn.Module, *wrappers: str) -> Plan:
    return Plan.uniform(layers_of(model), "topk", density=0.1, wrappers=[Wrap(one) for one in wrappers])


# --- FSDP2: two nodes of half the ranks -------------------------------------------------------------------------------


class Drops(Network):
    """Leaves a block out, each node another one, as LayerDrop with a seed per rank does."""

    def forward(self, words: torch.Tensor, blocks: int = 3, head: bool = True) -> torch.Tensor:
        values = self.embedding(words)
        for position, block in enumerate(self.blocks):
            values = values if position == self.left_out else block(values)
        return self.head(values)


def shard(model: nn.Module, group: dist.ProcessGroup) -> Any:
    mesh = mesh_of(group, 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def trained(
    model: Any, group: dist.ProcessGroup, optimizers: list[Any], steps: int = 4, plan: Plan | None = None
) -> Any:
    """Train between two nodes; the state, closed."""
    between = mesh_of(group, 2)["replicate"]
    with compress_fsdp(model, plan or topk(model), between=between, optimizer=optimizers) as state:
        for step in range(steps):
            backward(model, dist.get_rank(), step)
            for one in optimizers:
                one.step()
                one.zero_grad()
    return state


def other_blocks(group: dist.ProcessGroup, nodes: int = 2) -> str:
    """Half the ranks leave another block out than the others do: other nodes, or other ranks of one node."""
    torch.manual_seed(0)
    model, mesh = Drops(), mesh_of(group, nodes)
    model.left_out = 1 + 2 * dist.get_rank() // group.size()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    way = {"between": mesh["replicate"]} if nodes > 1 else {"within": mesh["shard"]}

    def train() -> None:
        with compress_fsdp(model, topk(model), **way):
            backward(model, dist.get_rank(), 0)

    return said(train)


def tied(group: dist.ProcessGroup) -> dict[str, Any]:
    def network() -> Network:
        torch.manual_seed(0)
        model = Network(20, 31)
        model.head.weight = model.embedding.weight
        return model

    model = shard(network(), group)
    before = model.head.weight.full_tensor().clone()
    trained(model, group, [torch.optim.SGD(model.parameters(), lr=0.1)], plan=Plan(layers_of(model)))
    after = model.head.weight.full_tensor()
    apart = network()
    fully_shard(apart.head, mesh=mesh_of(group, 2)["shard"])
    optimizer = torch.optim.SGD(apart.parameters(), lr=0.1)
    return {
        "agree": agree(model, group),
        "tied": model.head.weight is model.embedding.weight,
        "still": int((before == after).all(1).sum()),
        "apart": said(lambda: trained(shard(apart, group), group, [optimizer])),
    }


def put_off(group: dist.ProcessGroup) -> str:
    model = sharded(mesh_of(group, 2)["shard"])
    model.set_requires_all_reduce(False)
    return said(lambda: trained(model, group, [torch.optim.SGD(model.parameters(), lr=0.1)], 1))


def partly_synchronised(group: dist.ProcessGroup) -> dict[str, Any]:
    """One block put off in a pass of two: the sum of gradients beside that of plain passes."""
    mesh, gradients = mesh_of(group, 2), []
    for part in (False, True):
        model = sharded(mesh["shard"])
        with compress_fsdp(model, Plan(layers_of(model)), between=mesh["replicate"]):
            model.blocks[1].set_requires_gradient_sync(not part, recurse=False)
            backward(model, dist.get_rank(), 0)
            model.blocks[1].set_requires_gradient_sync(True, recurse=False)
            backward(model, dist.get_rank(), 1)
            gradients.append(torch.cat([one.grad.to_local().flatten() for one in model.parameters()]))
    return {"away": float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())}


def clipped(group: dist.ProcessGroup) -> float:
    """The norm that clipping finds, over that of the mean gradient on one rank."""
    mesh = mesh_of(group, 2)
    model = sharded(mesh["shard"])
    with compress_fsdp(model, Plan(layers_of(model)), between=mesh["replicate"]):
        backward(model, dist.get_rank(), 0)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        after = torch.stack([one.grad.to_local().square().sum() for one in model.parameters()]).sum().sqrt()
    torch.manual_seed(0)
    whole = Network()
    for rank in range(2):
        words = words_of(rank, 0)
        (nn.functional.cross_entropy(whole(words).flatten(0, 1), words.roll(1, 1).flatten()) / 2).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    return max(abs(float(norm / expected) - 1), abs(float(after) / 1e-3 - 1))


def optimizer_of_before(group: dist.ProcessGroup) -> dict[str, str]:
    told = {}
    for name, wrappers in {"plain": (), "rates": (Wrap("error_feedback", {"step_size_ratio": True}),)}.items():
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model, group)
        plan = Plan.uniform(layers_of(model), "topk", density=0.1, wrappers=wrappers)
        told[name] = said(partial(trained, model, group, [optimizer], 1, plan))
    return told


def used_before(group: dist.ProcessGroup) -> dict[str, Any]:
    """A forward pass before the optimizer is made and compression attached; local steps after one, too."""
    models = [sharded(mesh_of(group, 2)["shard"]) for _ in range(2)]
    for model in models:
        with torch.no_grad():
            model(words_of(0, 0))
    told = said(lambda: trained(models[0], group, [torch.optim.SGD(models[0].parameters(), lr=0.1)], 1))
    outer = OuterStep(topk(models[1]), models[1], every=1, group=group, within=mesh_of(group, 2)["shard"])
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    with outer:
        for step in range(3):
            backward(models[1], dist.get_rank(), step)
            optimizer.step()
            outer.step()
    return {"told": told, "agree": agree(models[1], group)}


class Small(nn.Module):
    """Parameters of one element and of one row beside a matrix, and some that are empty or have no dimensions."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.one, self.row = nn.Linear(8, 8), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, 8))
        self.odd = nn.ParameterList([torch.tensor(1.0), torch.zeros(0), torch.zeros(0, 5)] if odd else [])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values * self.row) * self.one + sum(one.sum() for one in self.odd)


SMALL_CODECS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "block_scaled": {"dtype": "int8"},
    "qsgd": {"bits": 4},
}


def small_shards(group: dist.ProcessGroup, nodes: int) -> list[str]:
    """Shards of one element and of none, in every group: what is wrong."""
    mesh, found = mesh_of(group, nodes), []
    way = {"between": mesh["replicate"]} if nodes > 1 else {"within": mesh["shard"]}
    for codec, settings in SMALL_CODECS.items():
        model = fully_shard(Small(False), mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan.uniform(layers_of(model), codec, minimum_numel=0, minimum_dimensions=0, **settings)
        with compress_fsdp(model, plan, optimizer=optimizer, **way) as state:
            for step in range(3):
                model(of_rank(step, 4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state.load_state_dict(state.state_dict())
        found += [] if agree(model, group) else [codec]
    return [*found, said(lambda: fully_shard(Small(True), mesh=mesh["shard"]))]


def two_optimizers(group: dist.ProcessGroup) -> dict[str, Any]:
    """Rates at the end where two optimizers are given, and what is said where one is."""

    def run(given: int) -> list[float]:
        model = sharded(mesh_of(group, 2)["shard"])
        blocks = list(model.blocks.parameters())
        known = {id(one) for one in blocks}
        parts = [blocks, [one for one in model.parameters() if id(one) not in known]]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        with compress_fsdp(
            model, topk(model, "error_feedback"), between=mesh_of(group, 2)["replicate"], optimizer=optimizers[:given]
        ) as state:
            for step in range(3):
                backward(model, dist.get_rank(), step)
                for one in optimizers:
                    one.step()
                    one.zero_grad()
                optimizers[1].param_groups[0]["lr"] = 0.02
        rates = state.run.learning_rates
        return [rates["blocks.0.up.weight"], rates["head.weight"]]

    return {"rates": run(2), "one": said(lambda: run(1))}


def other_dtype(group: dist.ProcessGroup) -> list[str]:
    """What becomes of a model that is made bfloat16 while compressed."""
    model = sharded(mesh_of(group, 2)["shard"])
    with compress_fsdp(model, topk(model), between=mesh_of(group, 2)["replicate"]):
        backward(model, dist.get_rank(), 0)
        model.zero_grad()
        model.to(torch.bfloat16)
        return [said(lambda: backward(model, dist.get_rank(), 1))]


# --- OuterStep --------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """Fixed random features in a frozen layer and in buffers of several kinds, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("fourier", torch.randn(8, 8))
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(8) > 0.5)
        self.register_buffer("shared", torch.zeros(1).expand(4))  # cannot be written

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(values) @ self.fourier * self.mask)


def local_steps(model: nn.Module, group: dist.ProcessGroup, calls: int, passes: int = 1, **options: Any) -> OuterStep:
    """So many calls of OuterStep.step, an optimizer step in every `passes`-th; closed."""
    plan = Plan.uniform(layers_of(model), "topk", density=0.1, minimum_numel=0, exchanges="pseudo-gradients")
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    with OuterStep(plan, model, every=2, group=group, **options) as outer:
        for call in range(calls):
            model(of_rank(call, 4, 8)).square().mean().backward()
            if call % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
            outer.step()
    return outer


def other_features(group: dist.ProcessGroup) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Features()
    local_steps(model, group, 4)
    parts = {name: torch.view_as_real(one) if one.is_complex() else one for name, one in model.state_dict().items()}
    first, other = everyone({name: one.tolist() for name, one in parts.items()}, group)
    wide = nn.Linear(8, 8 - 2 * rank)
    plan = Plan.uniform(layers_of(nn.Linear(8, 8)), "topk", density=0.1, minimum_numel=0)
    buffers = nn.Linear(8, 8)
    buffers.register_buffer("table", torch.zeros(3 + rank))
    return {
        "differ": [name for name in first if first[name] != other[name]],
        "other width": said(lambda: OuterStep(plan, wide, group=group)),
        "other buffers": said(lambda: OuterStep(plan, buffers, group=group)),
    }


def small_layers_and_another_dtype(group: dist.ProcessGroup) -> list[str]:
    """Layers without dimensions and elements, in fragments too, and a model made bfloat16 on the way: what is wrong."""
    wrong = []
    for codec, settings in {**SMALL_CODECS, "powersgd": {"rank": 2}, "ecsq": {"bits": 1.0}}.items():
        model = Small(True)
        plan = Plan.uniform(layers_of(model), codec, minimum_numel=0, minimum_dimensions=0, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with OuterStep(plan, model, every=2, fragments=1 + (codec == "topk"), group=group) as outer:
            for step in range(8):
                if step == 4:
                    model.to(torch.bfloat16)
                model(of_rank(step, 4, 8).to(model.one.dtype)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
            outer.load_state_dict(outer.state_dict())
            common = [one for part in outer.fragments for one in part.parameters.values()]
        same = everyone([one.tolist() for one in common], group)
        wrong += [codec] if same[0] != same[1] or any(one.dtype != torch.float32 for one in common) else []
    return wrong


def micro_batches(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of an optimizer step in every fourth call, and in every call."""
    return {
        "accumulated": said(lambda: local_steps(nn.Linear(8, 8), group, 16, passes=4)),
        "each": said(lambda: local_steps(nn.Linear(8, 8), group, 16)),
    }


def leaves_early(group: dist.ProcessGroup, ddp: bool) -> dict[str, Any]:
    """Rank 0 has fewer batches, and ends its run as usual: what rank 1 is told, and after how long."""
    count, began = 4 + 4 * dist.get_rank(), time.monotonic()

    def synchronous() -> None:
        model = DistributedDataParallel(nn.Linear(32, 32), process_group=group)
        with gradlab.compress(model, topk(model.module, "error_feedback")):
            for step in range(count):
                model(of_rank(step, 4, 32)).square().mean().backward()

    error = said(synchronous if ddp else lambda: local_steps(nn.Linear(8, 8), group, count))
    return {"said": error, "seconds": time.monotonic() - began}


def mixed(group: dist.ProcessGroup) -> float:
    """Streaming steps of a number that goes to 1 and 3 on two workers, from 0: how far from the formulas."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    own = 1.0 + 2.0 * dist.get_rank()
    plan = Plan(layers_of(model))
    with OuterStep(plan, model, partial(torch.optim.SGD, lr=0.5), every=2, delay=1, mixing=0.25, group=group) as outer:
        for _ in range(3):  # what is sent after 2 steps, own, lands after the third, at 1.5 of it
            with torch.no_grad():
                model.weight += own / 2
            outer.step()
    common = 0.5 * 2.0  # half way to the mean of 1 and 3
    return abs(float(model.weight) - (0.25 * 1.5 * own + 0.75 * common))


def unused_layer(group: dist.ProcessGroup) -> bool:
    """A layer without a gradient on any worker stays as it is, under momentum too."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    kept = [one.detach().clone() for one in model["unused"].parameters()]
    plan = Plan.uniform(layers_of(model), "topk", density=0.1, minimum_numel=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with OuterStep(plan, model, every=2, group=group) as outer:
        for step in range(8):
            model["used"](of_rank(step, 4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    return agree(model, group) and all(
        torch.equal(one, two) for one, two in zip(kept, model["unused"].parameters(), strict=True)
    )


# --- Accelerate, the Trainer, Lightning: the group is the whole world -------------------------------------------------


def accumulated(group: dist.ProcessGroup, each: bool) -> dict[str, Any]:
    """Ten batches an epoch, four to a step; each: synchronise every batch."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin
    from torch.utils.data import DataLoader, TensorDataset

    from gradlab.runtime.accelerate import compress

    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Linear(32, 16)
    plan, rows = topk(model), torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(rows), batch_size=2)
    )
    steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compress(accelerator, model, plan, optimizer) as state:
            for _ in range(2):
                for (batch,) in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(batch).square().mean())
                        steps += accelerator.gradient_state.sync_gradients
                        optimizer.step()
                        optimizer.zero_grad()
    rules = sorted({one.rule for one in state.findings})
    told = any("no_sync" in str(one.message) for one in caught)
    return {"iteration": state.iteration, "steps": steps, "agree": agree(model, group), "rules": rules, "told": told}


def prepared_again(group: dist.ProcessGroup, folder: str) -> list[list[str]]:
    """Twice a model under one Accelerator, freed between: the files of each checkpoint."""
    from accelerate import Accelerator

    from gradlab.runtime.accelerate import compress

    accelerator, found = Accelerator(cpu=True), []
    for number in range(2):
        model = nn.Linear(32, 16)
        plan, place = topk(model, "error_feedback"), Path(folder) / str(number)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with compress(accelerator, model, plan, optimizer):
            accelerator.backward(model(of_rank(0, 4, 32)).square().mean())
            accelerator.save_state(str(place))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(place))
        found.append(sorted(path.name for path in place.glob("gradlab*")))
        model, optimizer = accelerator.free_memory(model, optimizer)
    return found


def two_optimizers_of_accelerate(group: dist.ProcessGroup) -> dict[str, Any]:
    from accelerate import Accelerator

    from gradlab.runtime.accelerate import compress

    def run(given: int) -> Any:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False))
        plan = topk(model, "error_feedback")
        made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        model, *optimizers = accelerator.prepare(model, *made)
        with compress(accelerator, model, plan, optimizers[:given]) as state:
            for step in range(4):
                accelerator.backward(model(of_rank(step, 4, 32)).square().mean())
                for one in optimizers:
                    one.step()
                    one.zero_grad()
                optimizers[1].param_groups[0]["lr"] = 0.01
        return state.run.learning_rates

    return {"rates": run(2), "one": said(lambda: run(1))}


def trains_again(group: dist.ProcessGroup, folder: str) -> dict[str, str]:
    """What is said where a Trainer whose training ended with an error trains once more."""
    from transformers import Trainer, TrainerCallback

    from gradlab.capture.transformers import RecordingCallback
    from gradlab.runtime.transformers import CompressionCallback, LocalStepsCallback
    from jobs.transformers_scenarios import arguments, gpt2, plan, rows

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 2:
                raise ValueError("on purpose")

    def again(kind: str) -> str:
        model = gpt2()
        trainer = Trainer(model, arguments(Path(folder) / kind), train_dataset=rows())
        makes: dict[str, Callable[[], TrainerCallback]] = {
            "compress": lambda: CompressionCallback(plan(model), trainer=trainer),
            "local steps": lambda: LocalStepsCallback(plan(model), trainer=trainer, every=2),
            "record": lambda: RecordingCallback(Path(folder) / "trace", trainer=trainer),
        }
        trainer.add_callback(makes[kind]())
        trainer.add_callback(Stops())
        assert said(trainer.train).startswith("on purpose")
        return said(trainer.train)

    return {kind: again(kind) for kind in ("compress", "local steps", "record")}


def optimizer_of_a_part(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """A Trainer's optimizer that leaves the embedding out."""
    from transformers import Trainer

    from gradlab.runtime.transformers import CompressionCallback
    from jobs.transformers_scenarios import arguments, gpt2, plan, rows

    model = gpt2()
    optimizer = torch.optim.SGD([one for name, one in model.named_parameters() if "wte" not in name], lr=0.1)
    both = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    trainer = Trainer(model, arguments(Path(folder)), train_dataset=rows(), optimizers=both)
    callback = CompressionCallback(plan(model), trainer=trainer)
    trainer.add_callback(callback)
    told = said(trainer.train)
    norms = callback.state.statistics.steps[-1].residual_norms
    return {"told": told, "agree": agree(model, group), "residual": norms.get("transformer.wte.weight", 0.0)}


def manual(group: dist.ProcessGroup, folder: str, raw: bool, static: bool) -> dict[str, Any]:
    """Lightning's manual optimization. raw: loss.backward() in place of self.manual_backward(loss)."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from gradlab.runtime.lightning import CompressionCallback

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network, self.automatic_optimization = nn.Linear(32, 16), False

        def training_step(self, batch: list[torch.Tensor], index: int) -> None:
            loss = self.network(batch[0]).square().mean()
            loss.backward() if raw else self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = TensorDataset(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    model = Model()
    callback = CompressionCallback(topk(model))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder}
    trainer = Trainer(
        **{"strategy": DDPStrategy(static_graph=static), "callbacks": [callback], "max_epochs": 1, **quiet},
        accelerator="cpu",
        devices=2,
    )
    told = said(lambda: trainer.fit(model, DataLoader(rows, batch_size=4)))
    return {"told": told, "iteration": callback.state.iteration, "agree": agree(model, group)}
