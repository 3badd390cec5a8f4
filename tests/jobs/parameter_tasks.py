"""Jobs of real ranks whose FSDP2 gathers parameters compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from gradlab import codecs
from gradlab.codec import seeded_generator
from gradlab.codec.abilities import decompress
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Group, Plan, Wrap
from gradlab.runtime import FSDPCompression, compress_fsdp
from jobs.fsdp_tasks import OPTIONS, Network, _refusal, _train, adamw, mesh_of, plan_of, sharded, words_of


def attached(model: Any, group: dist.ProcessGroup, parameters: Any, optimizer: Any = None) -> FSDPCompression:
    """Two nodes that average gradients as they are, and gather parameters by a plan."""
    mesh, plan = mesh_of(group, 2), Plan(layers_of(model))
    return compress_fsdp(model, plan, between=mesh["replicate"], parameters=parameters, optimizer=optimizer)


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """The whole parameters that a pass computed with, of units that keep them after it."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def decoded(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], rotated: bool = False) -> dict[str, Any]:
    """One pass: what it computed with, against every rank's shard compressed and decoded by itself."""
    model = sharded(mesh_of(group, 2)["shard"], reshard_after_forward=False)
    exact = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    layers, around = layers_of(model), (Wrap("hadamard", {"block": 16}),) if rotated else ()
    matrices = [layer.name for layer in layers if len(layer.shape) > 1 and layer.name != "embedding.weight"]
    plan = Plan(layers, tuple(Group(name, (name,), codec, settings, around) for name in matrices))
    state = attached(model, group, plan)
    model(words_of(dist.get_rank(group), 0))
    found = gathered(model)
    method, wrong = codecs.make(codec, **settings), []
    for name, whole in exact.items():
        expected = whole
        if name in matrices and not rotated:
            size = -(-len(whole) // 2)
            padded = torch.cat([whole, whole.new_zeros(2 * size - len(whole), *whole.shape[1:])])
            pieces = [
                decompress(method, method.compress(piece.reshape(-1), seeded_generator("none")), piece.reshape(-1))
                for piece in padded.split(size)
            ]
            expected = torch.cat(pieces).view(padded.shape)[: len(whole)]
        error = float((found[name] - expected).norm() / whole.norm().clamp_min(1e-30))
        if error > (0.1 if name in matrices and rotated else 0.0):
            wrong.append((name, error))
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, {name: value.tolist() for name, value in found.items()}, group=group)
    state.close()
    return {"wrong": wrong, "agree": all(one == everyone[0] for one in everyone), "changed": _far(found, exact)}


def _far(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[str]:
    return sorted(name for name in found if not torch.equal(found[name], exact[name]))


def trained(group: dist.ProcessGroup, parameters: Any, shard: dict[str, Any]) -> dict[str, Any]:
    """Steps of training: bytes, what evaluation computes with, and what stays of it after the end."""
    rank = dist.get_rank(group)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if "mp_policy" in shard else {}
    model = sharded(mesh_of(group, 2)["shard"], **{**shard, **policy})
    whole = Network()
    optimizers = adamw(model.parameters())
    state = attached(model, group, parameters, optimizers)
    for step in range(3):
        _train(model, optimizers, rank, step)
    report = state.report()["parameters"]
    whole.load_state_dict({name: one.full_tensor() for name, one in model.state_dict().items()})

    def evaluated() -> bool:
        with torch.no_grad():
            return torch.equal(model.eval()(words_of(rank, 9)), whole(words_of(rank, 9)))

    during = evaluated()
    state.close()
    model.train()
    with torch.no_grad():
        after = torch.equal(model(words_of(rank, 9)), whole(words_of(rank, 9)))
    model.reshard()
    return {**report, "evaluated": during, "after": after, "dense": 2 * sum(one.numel() for one in whole.parameters())}


def beside(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether training through what FSDP may do beside is the training without it, bit for bit."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)

    def ended(name: str) -> list[torch.Tensor]:
        chosen = OPTIONS[name]
        model = sharded(mesh["shard"], chosen.get("change", lambda block: block))
        if chosen.get("prefetch"):
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
            model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
        optimizers = adamw(model.parameters())
        with attached(model, group, "int8", optimizers):
            for step in range(3):
                _train(model, optimizers, rank, step)
        return [one.to_local() for one in model.parameters()]

    usual = ended("default")
    names = ("checkpointing", "compiled", "prefetching")
    return {name: all(map(torch.equal, ended(name), usual)) for name in names}


def resumed(group: dist.ProcessGroup, settings: dict[str, Any], around: list[str]) -> list[bool]:
    """A run that goes on from shards and state of another one, and that one."""
    rank = dist.get_rank(group)
    models = [sharded(mesh_of(group, 2)["shard"]) for _ in range(2)]
    optimizers = [[torch.optim.SGD(model.parameters(), lr=0.5)] for model in models]
    wraps = [Wrap(name) for name in around]
    plan = Plan.uniform(layers_of(models[0]), "block_scaled", exchanges="parameters", wrappers=wraps, **settings)
    states = [attached(*pair) for pair in zip(models, [group] * 2, [plan] * 2, optimizers, strict=True)]
    for step in range(3):
        _train(models[0], optimizers[0], rank, step)
    models[1].load_state_dict(models[0].state_dict())
    saved = states[0].state_dict()
    try:
        states[1].load_state_dict({**saved, "parameters": {"held": {}}})  # damaged: nothing is taken of it
    except GradlabError:
        assert states[1].iteration == 0
    else:
        raise AssertionError("what is damaged was taken")
    states[1].load_state_dict(saved)
    same = []
    for step in range(3, 5):
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, rank, step)
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        same.append(all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs))
    for state in states:
        state.close()
    return same


def differences(group: dist.ProcessGroup) -> dict[str, Any]:
    """The head as ranks hold it after each of some steps, beside sums of what its shards' differences decode to."""
    rank, name = dist.get_rank(group), "head.weight"
    model = sharded(mesh_of(group, 2)["shard"], reshard_after_forward=False)
    layers, optimizers = layers_of(model), adamw(model.parameters())
    plan = Plan(layers, (Group(name, (name,), "block_scaled", {"dtype": "int4"}, (Wrap("ef21"),)),))
    state, same, payloads = attached(model, group, plan, optimizers), [], []
    codec, held = codecs.make("block_scaled", dtype="int4"), dict[int, torch.Tensor]()
    for step in range(4):
        exact = dict(model.named_parameters())[name].full_tensor().detach()
        for place, piece in enumerate(exact.split(len(exact) // 2)):
            before = held.get(place)
            if before is None:
                held[place] = piece.clone()
            else:
                left = (piece - before).reshape(-1)
                sent = decompress(codec, codec.compress(left, seeded_generator("none")), left)
                held[place] = sent.view_as(piece) + before
        model.zero_grad()
        with torch.no_grad():
            model(words_of(rank, step))
        same.append(torch.equal(gathered(model)[name], torch.cat([held[0], held[1]])))
        model.reshard()
        _train(model, optimizers, rank, step)
        payloads.append(state.report()["parameters"]["payload_bytes"])
    with torch.no_grad():
        before = model(words_of(rank, 9))
        model.reshard()
        for parameter in model.parameters():  # without a step, as when other values are loaded
            parameter.mul_(0.5)
        changed = not torch.equal(before, model(words_of(rank, 9)))
    state.close()
    return {"same": same, "payloads": payloads, "changed": changed}


class _OwnAllGather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """Errors of plans that do not fit all-gathers, and of all-gathers that are taken."""
    shard, messages = mesh_of(group, 2)["shard"], {}

    def attempt(name: str, parameters: Any, change: Callable[[Any], Any] = lambda model: None) -> None:
        model = sharded(shard)
        change(model)
        messages[name] = _refusal(lambda: attached(model, group, parameters).close())

    layers = layers_of(Network())
    attempt("a selection", Plan.uniform(layers, "topk", density=0.1))
    attempt("feedback", Plan.uniform(layers, "block_scaled", dtype="int4"))
    attempt("a codec's name", "block_scaled")
    attempt("no format", "int7")
    attempt("other shapes", Plan.uniform(layers_of(Network(width=23)), "block_scaled", exchanges="parameters"))
    own = _OwnAllGather()
    attempt("an all-gather already", "int8", lambda model: model.blocks[1].set_custom_all_gather(own))
    model = sharded(shard)
    state = attached(model, group, "int8")
    model.blocks[0].set_custom_all_gather(own)
    messages["replaced"] = _refusal(lambda: _train(model, [], dist.get_rank(group), 0))
    state.close()
    return messages


def in_two_levels(group: dist.ProcessGroup) -> dict[str, Any]:
    """All three kinds of traffic compressed: gradients between nodes and inside them, and parameters."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    model = sharded(mesh["shard"])
    optimizers = adamw(model.parameters())
    plans = plan_of(model, "topk", {"density": 0.1}), plan_of(model, "block_scaled", {"dtype": "int8"})
    levels = {"between": mesh["replicate"], "within": mesh["shard"], "inside": plans[1], "parameters": "int8"}
    with compress_fsdp(model, plans[0], optimizer=optimizers, **levels) as state:
        for step in range(4):
            _train(model, optimizers, rank, step)
        report = state.report()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, [one.to_local().tolist() for one in model.parameters()], group=group)
    return {"agree": everyone[rank] == everyone[(rank + 2) % 4], **{k: report[k] for k in ("inside", "parameters")}}
