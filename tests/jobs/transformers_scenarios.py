"""Hugging Face Trainer with gradlab's callbacks, on two ranks that share a folder, or alone; see framework_jobs.py."""

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import gradlab
from gradlab.capture.transformers import RecordingCallback
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, OuterStep, compression_hook
from gradlab.runtime.checkpoint import sealed
from gradlab.runtime.transformers import CompressionCallback, LocalStepsCallback
from gradlab.trace import Trace
from jobs.report_tasks_frameworks import optimizer_of_a_part

TOKENS, LENGTH, BATCH = 32, 8, 2
SMALL = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **SMALL, **drops))


def bert(dropout: float = 0.1) -> BertForMaskedLM:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(max_position_embeddings=LENGTH, vocab_size=TOKENS, **size, **drops))


def rows(count: int = 64, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(TOKENS, (count, length), generator=torch.Generator().manual_seed(1))
    # No model predicts the first token; the Trainer counts what is not -100.
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in tokens]


def plan(model: torch.nn.Module, **options: Any) -> Plan:
    return Plan.uniform(model, "topk", density=0.1, warmup_steps=1, **options)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "ddp_find_unused_parameters": False}
    size = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "learning_rate": 0.01}
    return TrainingArguments(str(folder), **{"save_strategy": "no", "max_steps": 4, **quiet, **size, **options})


def compressed(
    folder: Path, model: torch.nn.Module, *, callback: dict[str, Any] | None = None, **options: Any
) -> tuple[Trainer, CompressionCallback]:
    trainer = Trainer(model, arguments(folder, **options), train_dataset=rows())
    compression = CompressionCallback(plan(model), trainer=trainer, **{"deterministic": True, **(callback or {})})
    trainer.add_callback(compression)
    return trainer, compression


def ends(model: torch.nn.Module, state: CompressionState) -> dict[str, torch.Tensor]:
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return parameters | {f"state/{name}": value for name, value in state.state_dict()["states"].items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refusal(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    with pytest.raises(GradlabError) as caught:
        call(*given, **named)
    return str(caught.value)


# --- the same as a plain loop -----------------------------------------------------------------------------------------


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def plain_loop_gives_the_same(folder: Path) -> bool:
    """Accumulation, clipping, a schedule, and an evaluation in between: parameters and residuals are those of a loop
    over the same batches, written by hand."""
    batches: list[dict[str, torch.Tensor]] = []

    def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_data_collator(examples)
        if batch["input_ids"].shape[1] == LENGTH:  # not of the evaluation
            batches.append({name: value.clone() for name, value in batch.items()})
        return batch

    model = gpt2()
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    trainer = Trainer(
        model,
        arguments(folder, **evaluation),
        data_collator=collate,
        train_dataset=rows(),
        eval_dataset=rows(8, LENGTH - 1),
        optimizers=optimizer_of(model),
    )
    compression = gradlab.compress(trainer, plan(model), deterministic=True)
    trainer.train()
    assert compression.state.iteration == 4
    return same(ends(model, compression.state), by_hand(batches, steps=4))


def by_hand(batches: list[dict[str, torch.Tensor]], steps: int) -> dict[str, torch.Tensor]:
    model = gpt2()
    ddp_model, (optimizer, schedule) = DistributedDataParallel(model), optimizer_of(model)
    items = 2 * dist.get_world_size() * BATCH * (LENGTH - 1)  # tokens that all ranks predict in one step
    with CompressionState(plan(model), ddp_model, optimizer=optimizer, deterministic=True) as state:
        ddp_model.register_comm_hook(state, compression_hook)
        for step in range(steps):
            for micro, batch in enumerate(batches[2 * step : 2 * step + 2]):
                with ddp_model.no_sync() if micro == 0 else nullcontext():
                    loss = ddp_model(**batch, num_items_in_batch=torch.tensor(items)).loss
                    (loss * dist.get_world_size()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return ends(model, state)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def trained_twice(folder: Path) -> list[Any]:
    """One Trainer trains, and then continues from its own checkpoint of the middle: the same end, with dropout."""
    model = bert()
    trainer, compression = compressed(folder / "run", model, save_strategy="steps", save_steps=2)
    trainer.train()
    first = ends(model, compression.state)
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    again = ends(model, compression.state)
    return [same(first, again), compression.state.iteration, len(compression.state.statistics.steps)]


def copied(folder: Path, name: str, change: Callable[[Path], None]) -> Path:
    """A copy of the run's folder in which rank 1's file of checkpoint-2 was changed."""
    place = folder / name / "checkpoint-2"
    if dist.get_rank() == 1:
        shutil.copytree(folder / "run" / "checkpoint-2", place)
        change(place / "gradlab_rank_1.pt")
    dist.barrier()
    return place


def resumed(place: Path, **callback: Any) -> int:
    trainer, compression = compressed(place.parent, bert(), callback=callback)
    trainer.train(resume_from_checkpoint=str(place))
    return compression.state.iteration


def of_another_run(path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, "marks": {"run": "another", "global_step": 2}}, path)


def checkpoints(folder: Path) -> dict[str, Any]:
    """What is refused, on both ranks, though rank 1's file alone was changed."""
    missing = copied(folder, "missing", Path.unlink)
    damaged = copied(folder, "damaged", lambda path: path.write_bytes(path.read_bytes()[:100]))
    another = copied(folder, "another", of_another_run)
    whole = copied(folder, "whole", lambda path: None)
    elsewhere, _ = compressed(folder / "elsewhere", bert())
    return {
        "missing": refusal(resumed, missing),
        "damaged": refusal(resumed, damaged),
        "another_run": refusal(resumed, another),
        "moved_with_its_folder": resumed(whole),
        "elsewhere": refusal(elsewhere.train, resume_from_checkpoint=str(whole)),
        "missing_started_anew": resumed(missing, resume_from_checkpoint=False),
    }


def named_elsewhere(folder: Path) -> int:
    place = str(folder / "run" / "checkpoint-2")
    trainer, compression = compressed(folder / "elsewhere", bert(), callback={"resume_from_checkpoint": place})
    trainer.train(resume_from_checkpoint=place)
    return compression.state.iteration


def folder_without_resuming(folder: Path) -> bool:
    """The callback is told of a folder that the Trainer is not: rank 0 says so."""
    callback = {"resume_from_checkpoint": str(folder / "run" / "checkpoint-2")}
    trainer, _ = compressed(folder / "anew", bert(), callback=callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return any("the Trainer begins anew" in str(one.message) for one in caught) == (dist.get_rank() == 0)


def another_world_size(folder: Path) -> dict[str, Any]:
    """Files as if one rank had saved them: refused, and loaded where a policy for the residuals is given."""
    place = copied(folder, "one", Path.unlink)
    if dist.get_rank() == 0:
        path = place / "gradlab_rank_0.pt"
        torch.save(sealed({**torch.load(path, weights_only=True), "world_size": 1}), path)
    dist.barrier()
    return {
        "another_world_size": refusal(resumed, place),
        "another_world_size_split": resumed(place, residuals="split"),
    }


def dense_checkpoint(folder: Path) -> dict[str, Any]:
    """Of a run without the callback, and of one that saves the model alone: started anew, with a warning of rank 0."""
    Trainer(bert(), arguments(folder / "dense", save_strategy="steps", save_steps=2), train_dataset=rows()).train()
    bare, _ = compressed(folder / "bare", bert(), save_strategy="steps", save_steps=2, save_only_model=True)
    bare.train()
    results: dict[str, Any] = {"model_alone": [path.name for path in (folder / "bare").glob("*/gradlab*")]}
    for name in ("dense", "bare"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps = resumed(folder / name / "checkpoint-2")
        said = sum("holds no compression states, they start anew" in str(one.message) for one in caught)
        results[name] = [steps, said == (dist.get_rank() == 0)]
    return results


def best_and_last_kept(folder: Path) -> bool:
    """Old checkpoints go with their files: what stays is whole, and nothing of a removed folder is left."""
    kept = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = Trainer(
        gpt2(), arguments(folder / "best", **kept, **evaluation), train_dataset=rows(), eval_dataset=rows(8)
    )
    trainer.add_callback(CompressionCallback(plan(trainer.model), trainer=trainer))
    trainer.train()
    dist.barrier()
    left = list((folder / "best").glob("checkpoint-*"))
    files = ("gradlab_rank_0.pt", "gradlab_rank_1.pt", "optimizer.pt")
    return bool(left) and all((place / name).exists() for place in left for name in files)


# --- and beside -------------------------------------------------------------------------------------------------------


def logged(folder: Path) -> list[Any]:
    trainer, compression = compressed(folder / "logged", gpt2(), callback={"log": True}, logging_steps=2)
    trainer.train()
    history = trainer.state.log_history
    ours = [row["step"] for row in history if "gradlab/payload_bytes" in row]
    names = {name for row in history for name in row if name.startswith("gradlab/")}
    return [ours, [row["step"] for row in history if "loss" in row], names == set(compression.state.scalars())]


def recorded(folder: Path) -> list[Any]:
    """Micro-batches of each step, whether the run is the unrecorded one bit for bit, and whether losses are there.

    And what the recorder made of a budget that four whole steps keep, not the 64 that it plans for a run of unknown
    length: their number, and how many layers it samples.
    """
    parameters, planned = [], [0, 0]
    for record in (True, False):
        model = bert()
        options = arguments(folder / "recorded", gradient_accumulation_steps=2, logging_steps=1)
        trainer = Trainer(model, options, train_dataset=rows())
        if record:
            recording = RecordingCallback(folder / "trace", trainer=trainer, budget="600kB")
            trainer.add_callback(recording)
        trainer.train()
        if record:
            planned = [recording.recorder.size.steps, len(recording.recorder.size.samples)]
        parameters.append(dict(model.named_parameters()))
    dist.barrier()
    with Trace(folder / "trace") as trace:
        steps = list(trace.iterate())
    first, second = steps[0].gradients
    unequal = all((first[name] != second[name]).any() for name in first)
    losses = all(bool((step.loss > 0).all()) for step in steps)
    return [[int(step.accumulation[0]) for step in steps], same(*parameters), bool(unequal), losses, planned]


def in_data_parallel() -> Trainer:
    """What the Trainer makes of several GPUs in one process."""
    trainer, _ = compressed(Path("unused"), gpt2())
    trainer.model_wrapped = torch.nn.DataParallel(trainer.model)
    return trainer


def alone(folder: Path) -> dict[str, Any]:
    trainer, _ = compressed(Path("unused"), gpt2())
    recording = Trainer(gpt2(), arguments(Path("unused")), train_dataset=rows())
    recording.add_callback(RecordingCallback("trace", trainer=recording))
    return {
        "one_process": refusal(trainer.train),
        "one_process_recording": refusal(recording.train),
        "several_gpus": refusal(in_data_parallel().train),
        "unknown_policy": refusal(CompressionCallback, plan(gpt2()), trainer=trainer, residuals="keep"),
    }


def local_steps(folder: Path) -> list[Any]:
    """Outer steps after 2, 4 and 6 optimizer steps: their number; whether the run ends as a plain loop over the same
    batches does; and whether one that is resumed within a round ends as one that never stopped; bit for bit."""
    batches: list[dict[str, torch.Tensor]] = []

    def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_data_collator(examples)
        batches.append({name: value.clone() for name, value in batch.items()})
        return batch

    def run(name: str, resume: Path | None = None) -> tuple[LocalStepsCallback, torch.nn.Module]:
        model = gpt2()
        saves = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        trainer = Trainer(
            *(model, arguments(folder / name, **saves)),
            data_collator=collate,
            train_dataset=rows(),
            optimizers=optimizer_of(model),
        )
        callback = gradlab.compress(trainer, plan(model, exchanges="pseudo-gradients"), every=2, deterministic=True)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return callback, model

    callback, model = run("whole")
    by_loop = local_steps_by_hand(batches[:6])
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole" / "checkpoint-3", folder / "resumed" / "checkpoint-3")
    dist.barrier()
    _, resumed = run("resumed", folder / "resumed" / "checkpoint-3")
    return [callback.state.outer.outer_steps, equal_parameters(model, by_loop), equal_parameters(model, resumed)]


def equal_parameters(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def local_steps_by_hand(batches: list[dict[str, torch.Tensor]]) -> torch.nn.Module:
    model = gpt2()
    optimizer, schedule = optimizer_of(model)
    outer = OuterStep(plan(model, exchanges="pseudo-gradients"), model, every=2, deterministic=True)
    for batch in batches:
        items = torch.tensor(dist.get_world_size() * BATCH * (LENGTH - 1))
        (model(**batch, num_items_in_batch=items).loss * dist.get_world_size()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        outer.step()
    outer.close()
    return model


def on_two_ranks(folder: Path) -> dict[str, Any]:
    return {
        "plain_loop": plain_loop_gives_the_same(folder / "plain"),
        "trained_twice": trained_twice(folder),
        **checkpoints(folder),
        "named_elsewhere": named_elsewhere(folder),
        "folder_without_resuming": folder_without_resuming(folder),
        **another_world_size(folder),
        **dense_checkpoint(folder),
        "best_and_last_kept": best_and_last_kept(folder),
        "logged": logged(folder),
        "recorded": recorded(folder),
        "local_steps": local_steps(folder / "local"),
        "part": optimizer_of_a_part(dist.group.WORLD, str(folder / "part")),
    }
