"""One framework under torchrun: does a GPT-2 and a BERT train there as in a loop without DDP?

    framework_cells.py FRAMEWORK FOLDER [resumed | rescaled]     DDP, Accelerate, Lightning or Trainer

Rank 0 writes FOLDER/<framework>.json: for every model what holds, "passed" or why not. With "resumed" only the
checkpoints that the first call has left are continued, in these new processes; with "rescaled" by another number of
them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradlab.capture.accelerate
import gradlab.capture.lightning
import gradlab.capture.transformers
import gradlab.runtime.accelerate
import gradlab.runtime.lightning
from gradlab.capture import TraceRecorder
from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, Exchange, compression_hook
from gradlab.trace import Trace
from gradlab.trace.checking import check

STEPS, SAVED, BATCH, LENGTH, TOKENS = 4, 2, 2, 8, 32
BACKEND = os.environ.get("BACKEND", "aot_eager")
Batch = dict[str, torch.Tensor]
Model = Any


def gpt2() -> Model:
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, **drops))


def bert() -> Model:
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**size, max_position_embeddings=LENGTH, vocab_size=TOKENS, **drops))


MODELS: dict[str, Callable[[], Model]] = {"GPT-2": gpt2, "BERT": bert}


@dataclass(frozen=True)
class Task:
    """What a framework is asked to do. micro: batches per step; record, save, resume: folders."""

    model: str
    steps: int = STEPS
    micro: int = 1
    bf16: bool = False
    compiled: bool = False
    record: Path | None = None
    save: Path | None = None
    resume: Path | None = None
    residuals: str | None = None  # the policy where `resume` is of another world size

    def new_model(self) -> Model:
        return MODELS[self.model]()

    def plan(self, model: Model) -> Plan:
        return Plan.uniform(model, "topk", density=0.1, warmup_steps=1)

    def rows(self) -> list[Batch]:
        """All ranks' rows in the order that is trained on: a batch of rank 0, one of rank 1, and so on."""
        count = STEPS * self.micro * BATCH * dist.get_world_size()
        tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": row, "labels": row} for row in tokens]

    def batches(self, rank: int) -> Iterator[list[Batch]]:
        """A rank's batches, by step."""
        rows = self.rows()
        apart = BATCH * dist.get_world_size()
        parts = [rows[start : start + BATCH] for start in range(BATCH * rank, len(rows), apart)]
        stacked = [{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in parts]
        first = SAVED if self.resume else 0
        return (stacked[step * self.micro : (step + 1) * self.micro] for step in range(first, self.steps))

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()


@dataclass
class Outcome:
    """What a run ended with."""

    model: Model
    optimizer: torch.optim.Optimizer
    state: Any = None  # None: the run recorded

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, the optimizer's state and the residuals, by name."""
        values = {f"model/{name}": value.detach() for name, value in self.model.named_parameters()}
        for name, value in self.model.named_parameters():
            entry = self.optimizer.state[value]
            values |= {f"optimizer/{name}/{what}": t for what, t in entry.items() if isinstance(t, torch.Tensor)}
        states = {} if self.state is None else self.state.state_dict()["states"]
        return {name: value.clone() for name, value in (values | states).items()}


def save(folder: Path, parts: dict[str, Any]) -> None:
    """This rank's file."""
    folder.mkdir(exist_ok=True, parents=True)
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{dist.get_rank()}.pt")


def restore(task: Task, parts: dict[str, Any]) -> None:
    """From the files of all ranks that saved, which may be another number."""
    assert task.resume is not None
    files = sorted(task.resume.glob("*.pt"))
    saved = [torch.load(file, weights_only=True) for file in files]
    compression = parts.pop("compression")
    for name, part in parts.items():
        part.load_state_dict(saved[0][name])
    if task.residuals is None:
        compression.load_state_dict(saved[dist.get_rank()]["compression"])
    else:
        compression.load_state_dicts([one["compression"] for one in saved], task.residuals)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# --- a loop without DDP, and the frameworks ---------------------------------------------------------------------------


def without_ddp(task: Task) -> Outcome:
    """Each rank's own backward passes, and an `Exchange` after them."""
    model = task.new_model()
    optimizer, named = adamw(model), dict(model.named_parameters())
    exchange = Exchange(task.plan(model), named.items(), optimizer=optimizer, deterministic=True)
    parts = {"model": model, "optimizer": optimizer, "compression": exchange}
    if task.resume:
        restore(task, dict(parts))
    for step, micros in enumerate(task.batches(dist.get_rank())):
        for batch in micros:
            with task.autocast():
                loss = model(**batch).loss
            (loss / task.micro).backward()
        exchange.step({name: parameter.grad for name, parameter in named.items()})
        optimizer.step()
        optimizer.zero_grad()
        if task.save and step + 1 == SAVED:
            save(task.save, parts)
    exchange.close()
    return Outcome(model, optimizer, exchange)


def in_ddp(task: Task) -> Outcome:
    model = task.new_model()
    wrapped = DistributedDataParallel(model)
    forward = torch.compile(wrapped, backend=BACKEND) if task.compiled else wrapped
    optimizer = adamw(model)
    if task.record:
        attached: Any = TraceRecorder(wrapped, task.record, optimizer=optimizer)
    else:
        attached = CompressionState(task.plan(model), wrapped, optimizer=optimizer, deterministic=True)
        wrapped.register_comm_hook(attached, compression_hook)
    parts = {"model": model, "optimizer": optimizer, "compression": attached}
    if task.resume:
        restore(task, dict(parts))
    with attached:
        for step, micros in enumerate(task.batches(dist.get_rank())):
            for position, batch in enumerate(micros):
                with nullcontext() if position == task.micro - 1 else wrapped.no_sync(), task.autocast():
                    (forward(**batch).loss / task.micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            if task.save and step + 1 == SAVED:
                save(task.save, parts)
    return Outcome(model, optimizer, None if task.record else attached)


def in_accelerate(task: Task) -> Outcome:
    AcceleratorState._reset_state()  # another precision in the same process
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if task.bf16 else "no",
        gradient_accumulation_steps=task.micro,
        dynamo_plugin=TorchDynamoPlugin(backend=BACKEND) if task.compiled else None,
    )
    bare = task.new_model()
    inner = adamw(bare)
    model, optimizer = accelerator.prepare(bare, inner)
    if task.record:
        attached: Any = gradlab.capture.accelerate.record(accelerator, model, task.record, optimizer)
    else:
        plan = task.plan(bare)
        options = {"residuals": task.residuals, "deterministic": True}
        attached = gradlab.runtime.accelerate.compress(accelerator, model, plan, optimizer, **options)
    if task.resume:
        accelerator.load_state(str(task.resume))
    with attached:
        for step, micros in enumerate(task.batches(dist.get_rank())):
            for batch in micros:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            if task.save and step + 1 == SAVED:
                accelerator.save_state(str(task.save))
    return Outcome(bare, inner, None if task.record else attached)


class Module(LightningModule):
    """A model of transformers for Lightning."""

    def __init__(self, network: Model, micro: int) -> None:
        super().__init__()
        self.network, self.micro = network, micro

    def training_step(self, batches: list[Batch], index: int) -> torch.Tensor:
        # By step: a checkpoint within an epoch does not skip what a plain DataLoader has given already.
        batch = batches[self.trainer.global_step * self.micro + index % self.micro]
        loss: torch.Tensor = self.network(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.network)


def in_lightning(task: Task) -> Outcome:
    module = Module(task.new_model(), task.micro)
    plan = task.plan(module)
    if task.record:
        callback: Any = gradlab.capture.lightning.RecordingCallback(task.record)
    else:
        options = {"residuals": task.residuals, "deterministic": True}
        callback = gradlab.runtime.lightning.CompressionCallback(plan, **options)
    saving = [ModelCheckpoint(task.save, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)] * bool(task.save)
    trainer = LightningTrainer(
        strategy="ddp",
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=task.steps,
        accumulate_grad_batches=task.micro,
        precision="bf16-mixed" if task.bf16 else "32-true",
        callbacks=[callback, *saving],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(task.save),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    whole = Task(task.model, task.steps, task.micro)
    batches = [batch for step in whole.batches(dist.get_rank()) for batch in step]
    loader = DataLoader([batches] * len(batches), batch_size=None)
    path = str(task.resume / f"step={SAVED}.ckpt") if task.resume else None
    trainer.fit(torch.compile(module, backend=BACKEND) if task.compiled else module, loader, ckpt_path=path)
    return Outcome(module, trainer.optimizers[0], None if task.record else callback.state)


def in_trainer(task: Task) -> Outcome:
    model = task.new_model()
    # BERT takes the number of tokens and divides by its own; the Trainer would multiply by the ranks as if it had not.
    model.accepts_loss_kwargs = False
    optimizer = adamw(model)
    folder = task.save or task.resume
    arguments = TrainingArguments(
        str(folder.parent if folder else "unused"),
        use_cpu=True,
        max_steps=task.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=task.micro,
        max_grad_norm=0.0,
        bf16=task.bf16,
        torch_compile=task.compiled,
        torch_compile_backend=BACKEND if task.compiled else None,
        save_strategy="steps" if task.save else "no",
        save_steps=SAVED,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(model, arguments, train_dataset=task.rows(), optimizers=(optimizer, constant))
    if task.record:
        callback: Any = gradlab.capture.transformers.RecordingCallback(task.record, trainer=trainer)
        trainer.add_callback(callback)
    else:
        plan = task.plan(model)
        options = {"residuals": task.residuals, "deterministic": True}
        callback = gradlab.compress(trainer, plan, **options)
    trainer.train(resume_from_checkpoint=str(task.resume) if task.resume else None)
    return Outcome(model, optimizer, None if task.record else callback.state)


FRAMEWORKS: dict[str, Callable[[Task], Outcome]] = {
    "DDP": in_ddp,
    "Accelerate": in_accelerate,
    "Lightning": in_lightning,
    "Trainer": in_trainer,
}


# --- what is to hold --------------------------------------------------------------------------------------------------


def bare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as the bare model has them: of a LightningModule's network, and of a compiled model."""
    return {name.replace("network.", "").replace("_orig_mod.", ""): value for name, value in tensors.items()}


def different(one: Outcome, other: Outcome) -> list[str]:
    first, second = bare(one.tensors()), bare(other.tensors())
    if first.keys() != second.keys():
        return sorted(first.keys() ^ second.keys())
    return [name for name in first if not torch.equal(first[name], second[name])]


def far(one: Outcome, other: Outcome) -> float:
    """The largest relative distance of a parameter."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)


def wrong(out: Outcome) -> str | None:
    report = out.state.report()
    if report["iteration"] != STEPS or not report["compressing"]:
        return f"{report['iteration']} steps of {STEPS}, compressing: {report['compressing']}"
    if report["payload_bytes_per_step"] > report["dense_payload_bytes"] / 2:
        return f"{report['payload_bytes_per_step']} of {report['dense_payload_bytes']} bytes were sent"
    return None


def as_without_ddp(train: Callable[[Task], Outcome], task: Task) -> str:
    out, expected = train(task), without_ddp(task)
    if problem := wrong(out):
        return problem
    names = different(out, expected)
    return "passed" if not names else f"{len(names)} tensors differ, as {names[0]}; {far(out, expected):.1e} at most"


def compresses(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    return as_without_ddp(train, Task(model))


def accumulation(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    return as_without_ddp(train, Task(model, micro=2))


def bf16(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    return as_without_ddp(train, Task(model, bf16=True))


def compiled(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    """Compiled code rounds otherwise: near what is not compiled, and the same on both ranks."""
    torch.compiler.reset()
    task = Task(model, compiled=True)
    out = train(task)
    if problem := wrong(out):
        return problem
    distance = far(out, without_ddp(Task(model)))
    sums = Ranks(dist.group.WORLD, torch.device("cpu")).gather([float(p.sum()) for p in out.model.parameters()])
    if sums[0] != sums[1]:
        return "ranks disagree"
    return "passed" if distance < 0.01 else f"{distance:.1e} from what is not compiled"


def records(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    """The trace is sound; its first gradients are those of the model alone, rank by rank."""
    task = Task(model, record=folder / "trace")
    train(task)
    dist.barrier()
    if found := check(task.record).problems:
        return str(found[0])
    own = task.new_model()
    own(**next(task.batches(dist.get_rank()))[0]).loss.backward()
    with Trace(task.record) as trace:
        if len(trace.steps) != STEPS:
            return f"{len(trace.steps)} of {STEPS} steps were recorded"
        got = next(iter(trace.iterate())).gradients[dist.get_rank()]
    got = {name.replace("network.", ""): torch.from_numpy(value) for name, value in got.items()}
    other = [name for name, p in own.named_parameters() if not torch.equal(got[name], p.grad)]
    return "passed" if not other else f"{len(other)} layers were recorded otherwise, as {other[0]}"


def saves(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    """And so does the loop without DDP."""
    without_ddp(Task(model, save=folder / "without"))
    out = train(Task(model, save=folder / f"checkpoint-{SAVED}"))
    torch.save(bare(out.tensors()), folder / f"end-{dist.get_rank()}.pt")
    return "saved"


def resumes(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    out = bare(train(Task(model, resume=folder / f"checkpoint-{SAVED}")).tensors())
    expected = torch.load(folder / f"end-{dist.get_rank()}.pt", weights_only=True)
    if expected.keys() != out.keys():
        return f"other tensors: {sorted(expected.keys() ^ out.keys())[0]}"
    names = [name for name in out if not torch.equal(out[name], expected[name])]
    return "passed" if not names else f"{len(names)} of {len(out)} tensors differ, as {names[0]}"


def rescaled(train: Callable[[Task], Outcome], model: str, folder: Path) -> str:
    """More ranks than saved go on from the mean of their residuals, as the loop without DDP does."""
    out = train(Task(model, resume=folder / f"checkpoint-{SAVED}", residuals="split"))
    expected = without_ddp(Task(model, resume=folder / "without", residuals="split"))
    names = different(out, expected)
    return "passed" if not names else f"{len(names)} tensors differ, as {names[0]}; {far(out, expected):.1e} at most"


FIRST = {
    "records": records,
    "compresses": compresses,
    "saves": saves,
    "accumulation": accumulation,
    "bf16": bf16,
    "compile": compiled,
}
CELLS = {"first": FIRST, "resumed": {"resumes bit for bit": resumes}, "rescaled": {"other world size": rescaled}}


def cell(what: Callable[..., str], framework: str, model: str, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        verdict = what(FRAMEWORKS[framework], model, folder)
    except GradlabError as error:
        verdict = f"refused: {error}"
    except Exception as error:
        if os.environ.get("FRAMEWORKS_TRACEBACK"):
            raise
        verdict = f"failed: {type(error).__name__}: {error}".partition("\n")[0]
    everyone = Ranks(dist.group.WORLD, torch.device("cpu")).gather(verdict)
    return next((f"rank {rank}: {said}" for rank, said in enumerate(everyone) if said != everyone[0]), verdict)


def main(framework: str, folder: Path, cells: dict[str, Callable[..., str]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results: dict[str, dict[str, str]] = {}
    for model in MODELS:
        for name, what in cells.items():
            verdict = cell(what, framework, model, folder / framework / model)
            results.setdefault(model, {})[name] = verdict
            if dist.get_rank() == 0:
                print(f"{framework}, {model}, {name}: {verdict}", file=sys.stderr, flush=True)
                (folder / f"{framework}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # see docs/training.md: Gloo's threads may ask for Python's lock while the interpreter ends


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), CELLS[sys.argv[3] if len(sys.argv) > 3 else "first"])
