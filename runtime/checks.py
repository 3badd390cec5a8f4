"""Checks when a run is set up, on all ranks alike, so that it does not fail at step 4000."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab import codecs
from gradlab.ddp.groups import Ranks
from gradlab.ddp.model import refuse_complex, sparse_layers
from gradlab.ddp.optimizers import HeldLayers
from gradlab.ddp.switch import attached_hook
from gradlab.ddp.topology import Topology
from gradlab.errors import GradlabError
from gradlab.executor.rules import RULES
from gradlab.layout import Layer, names_as_in
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import compressed_layers, conflict_of, follower_of, layers_that_may_follow, needs_of
from gradlab.plan.plan import check_model
from gradlab.plan.shards import conflict_between_nodes
from gradlab.plan.traffic import excess_of
from gradlab.runtime.engine.options import RunOptions

Pairs = Sequence[tuple[Layer, torch.Tensor]]
Result = TypeVar("Result")


def check(plan: Plan, pairs: Pairs, world_size: int, options: RunOptions) -> None:
    """Check that plan, layers with their parameters, and options go together."""
    options.check()
    check_model(plan, [layer for layer, _ in pairs])
    device_of_model(pairs)
    compressed = {name for group in plan.compressed_groups for name in group.layers}
    refuse_complex((layer, tensor) for layer, tensor in pairs if layer.name in compressed)
    held = HeldLayers(options.optimizer, {parameter: layer.name for layer, parameter in pairs})
    _check_optimizers(plan, held)
    plan.payload_bytes(world_size)  # refuses what makes no sense at this world size
    _refuse_more_than_plain_ddp(plan, world_size, options)


def _refuse_more_than_plain_ddp(plan: Plan, world_size: int, options: RunOptions) -> None:
    asked_for = isinstance(options.rules, str) or "bytes_sent" in (options.rules or {})
    if not asked_for and (excess := excess_of(plan, world_size, bits=32)):
        raise GradlabError(
            f"{excess.sentence(world_size)}: {RULES['bytes_sent']}; rules={{'bytes_sent': 'warn'}} runs it as it is"
        )


def named_as_in(plan: Plan, pairs: Pairs) -> Pairs:
    """Return layers under the names that a plan has for them, see `names_as_in`."""
    names = names_as_in([layer.name for layer in plan.layers], [layer.name for layer, _ in pairs])
    return [(replace(layer, name=name), tensor) for (layer, tensor), name in zip(pairs, names, strict=True)]


def given_plan(plan: object, caller: str, of_steps: Any = None, momentum: Callable[[], bool] = lambda: True) -> Plan:
    """Return the plan that a user gave, as such, as the path of an artifact or, where a model takes local steps
    (`of_steps`), as a codec's name; refuse anything else. momentum: whether the outer optimizer has some."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise GradlabError(f"{caller}: the plan is a {type(plan).__name__}, expected a Plan or the path of an artifact")
    name = os.fspath(plan)
    if name in codecs.names() and not os.path.exists(name):
        if of_steps is not None:
            # Without momentum a residual corrects what was lost, as among gradients: see docs/local-steps.md.
            return Plan.uniform(of_steps, name, exchanges="pseudo-gradients" if momentum() else "gradients")
        raise GradlabError(
            f"{caller}: {name!r} is a codec, expected a Plan or the path of an artifact; Plan.uniform(model, {name!r}) "
            "makes a plan of it"
        )
    from gradlab.artifact import Artifact

    return Artifact.load(plan).plan


def check_ddp(model: DistributedDataParallel, process_group: dist.ProcessGroup | None, timeout: object) -> None:
    """Check that a DDP model takes a hook, without sparse gradients, and that the codecs' group and timeout fit it."""
    check_timeout(timeout)
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise GradlabError(f"process_group is {type(process_group).__name__}, expected a ProcessGroup")
        given, its = (dist.get_process_group_ranks(group) for group in (process_group, model.process_group))
        if given != its:
            raise GradlabError(f"process_group is of ranks {given}, the DDP model's of {its}")
    if getattr(model, "mixed_precision", None) is not None:
        raise GradlabError(
            "DDP's mixed_precision brings a communication hook of its own; use torch.autocast, or model.to(dtype)"
        )
    if getattr(model, "_use_python_reducer", False):
        raise GradlabError(
            "the DDP model has compiled autograd's Python reducer, which gives hooks no buckets; make the model with "
            "torch._dynamo.config.optimize_ddp = True"
        )
    if sparse := sparse_layers(model):
        raise GradlabError(
            f"{', '.join(sparse)}: an embedding with sparse=True, and only dense gradients can be compressed; make it "
            "with sparse=False, before it is put into DDP"
        )
    if hook := attached_hook(model):
        raise GradlabError(
            f"the DDP model has the communication hook {hook} already, and DDP takes one only: attach once, and "
            "after a run that ended or failed make a new DDP model (with a framework, a new Trainer)"
        )


def check_timeout(timeout: object) -> None:
    """Refuse a timeout that is neither None nor a positive timedelta."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise GradlabError(f"timeout = {timeout!r}, expected a timedelta above 0")


def check_nodes(plan: Plan, topology: Topology) -> None:
    """Check that a plan can run between nodes: there are several, and the plan is not chosen anew on the way."""
    if len(topology.nodes) == 1:
        raise GradlabError(
            f"within: all {topology.local_ranks} ranks are on one node, so that there is nothing to compress between "
            "nodes; within=None compresses between ranks"
        )
    if conflict := conflict_between_nodes(plan):
        raise GradlabError(conflict)


_GIVE_ALL = "give all optimizers that train the model: optimizer=[a, b]"


def _check_optimizers(plan: Plan, held: HeldLayers) -> None:
    """Refuse what optimizers and plan would both do, and a plan that has to know more of optimizers than was given."""
    needs = needs_of(plan)
    for need in () if held.optimizers else needs:
        if need.startswith("follows"):
            raise GradlabError(f"the plan's {follower_of(plan)} {need}: pass optimizer=, which has it")
        if need.startswith("applies"):
            raise GradlabError(f"the plan {need}: pass optimizer=, so that its own is known to be off")
    if held.optimizers and held.named_missing(compressed_layers(plan)):
        _check_missing(unknown_needs(plan, held), held)
    if (settings := held.settings()) and (conflict := conflict_of(plan, settings)):
        raise GradlabError(str(conflict))


def unknown_needs(plan: Plan, held: HeldLayers) -> dict[str, tuple[str, ...]]:
    """Return what a plan has to know of optimizers, with layers that no given optimizer holds."""
    needs = needs_of(plan)
    if held.plain_sgd(compressed_layers(plan)):
        needs["lets residuals follow SGD's learning rate"] = layers_that_may_follow(plan)
    return {need: layers for need, layers in needs.items() if not set(held.missing).isdisjoint(layers)}


def _check_missing(needs: Mapping[str, tuple[str, ...]], held: HeldLayers) -> None:
    """Name the layers that no optimizer holds. Refuse what the plan needs to know of them, if another one has them."""
    if not held.partial:  # one with copies of its own does that on purpose
        if follows := next((need for need in needs if need.startswith("follows")), None):
            raise GradlabError(
                f"the plan {follows}, and {_holds(held)}, so that their rates are not known; {_GIVE_ALL}"
            )
        warnings.warn(
            "the optimizer holds none of the model's parameters: its momentum and weight decay are taken for those of "
            "this run, and its learning rates are not known; pass the one that steps the model, made after fully_shard",
            stacklevel=2,
        )
        return
    for need, layers in needs.items():
        if (unknown := held.named_missing(layers)) and (others := held.also_held_by()):
            raise GradlabError(
                f"the plan {need}, and {_holds(held)}: another optimizer ({', '.join(others)}) trains {unknown}; "
                f"{_GIVE_ALL}"
            )
    warnings.warn(
        f"{_holds(held)}; layers that no optimizer holds count as not moving until a parameter group holds them: "
        f"{_GIVE_ALL}, or leave out what does not train (requires_grad_(False) before DDP)",
        stacklevel=2,
    )


def _holds(held: HeldLayers) -> str:
    who = "the optimizer holds" if len(held.optimizers) == 1 else "the optimizers hold"
    return f"{who} {held.total - len(held.missing)} of {held.total} parameters (not {held.named_missing()})"


def device_of_model(pairs: Pairs) -> torch.device:
    """Find the one device that a model's gradients are on; refuse a model on several."""
    devices = sorted({str(parameter.device) for _, parameter in pairs})
    if len(devices) != 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise GradlabError(
            f"parameters on {', '.join(devices) or 'no device'}, expected all on the CPU or on one CUDA device"
        )
    return torch.device(devices[0])


def agree_on(
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    attempt: Callable[[], Result],
    settings: Callable[[Result], dict[str, Any]] = lambda _: {},
) -> Result:
    """Return what an attempt does, if it succeeds on all ranks, with the same settings of it (plain JSON).

    Else raise the same line everywhere: the problem of the lowest rank, or the first difference. `groups` are one of
    all ranks, or of a mesh those of this rank's row and column.
    """
    done, problem, same = list[Result](), None, {}
    try:
        done.append(attempt())
        same = settings(done[0])
    except GradlabError as error:
        problem = str(error)
    except Exception as error:  # the others wait to hear of it
        problem = f"{type(error).__name__}: {error}"
    of_groups = [Ranks(group, device) for group in groups]
    for ranks in of_groups:
        problem = ranks.first_of(problem)
        try:
            if problem is None:
                ranks.require_same(same)
        except GradlabError as error:
            problem = str(error)
    for ranks in of_groups[1:] and of_groups:  # once more: a column has other rows' problems
        problem = ranks.first_of(problem)
    if problem is not None:
        raise GradlabError(problem)
    return done[0]
