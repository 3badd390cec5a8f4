"""Facts of an FSDP2 model: its units, the shards that a rank holds of them, and how a gradient lies flat.

`fully_shard` makes a module a unit whose parameters travel together. In backward a rank gets the sum of its shards of a
unit's gradients as one flat tensor, one padded shard after another, of the parameters that have a gradient. torch tells
this layout to nobody, so that private attributes are read here, and in `gradlab.ddp.sharded_passes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlab.ddp.averaged import AveragedLayers
from gradlab.ddp.groups import Ranks, part_of
from gradlab.ddp.model import without_compile
from gradlab.ddp.topology import group_along
from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers

_MESH = 'mesh = init_device_mesh("cuda", (nodes, local_ranks), mesh_dim_names=("replicate", "shard"))'
SHARDED = ("fully_shard was called", "call fully_shard")  # for `not_averaged`
_MOST_SUMS = 2**16  # of sizes, that are looked through for those that came
HOW_TO = f'{_MESH}; fully_shard(module, mesh=mesh["shard"]); compress_fsdp(model, plan, between=mesh["replicate"])'


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter.

    layer: layer of the whole parameter.
    parameter: the DTensor that the module has.
    shape: shape of the part, which may be empty.
    padded_shape: shape of its place in the flat gradient, the largest part of any rank.
    dtype: type of the gradient that travels.
    along: dimension along which FSDP2 shards the layer; cut: that along which tensor parallelism has cut it before,
        None: it has not.
    """

    layer: Layer
    parameter: Any
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: torch.dtype
    along: int
    cut: int | None

    @property
    def padded(self) -> int:
        """Elements that the part takes up in the flat gradient."""
        return _numel(self.padded_shape)

    @property
    def numel(self) -> int:
        """Elements of the part's gradient."""
        return _numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the part's gradient."""
        return self.numel * self.dtype.itemsize

    def join(self, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Join the shards of all ranks, in their order and each in the padded shape, into the whole gradient.

        parts: shards of each part of the layers that tensor parallelism has cut; without it there is one.
        """
        length = self.layer.shape[self.along] // (len(parts) if self.cut == self.along else 1)
        whole = [torch.cat(list(shards), self.along).narrow(self.along, 0, length) for shards in parts]
        return whole[0] if self.cut is None else torch.cat(whole, self.cut)

    def values(self) -> torch.Tensor:
        """Return the part's own values, which the optimizer changes in place."""
        return self.parameter.to_local().detach()

    def fill_gradient(self, value: float) -> None:
        """Overwrite the part's gradient, if it has one."""
        if self.parameter.grad is not None:
            self.parameter.grad.to_local().fill_(value)


@dataclass(frozen=True)
class Unit:
    """A module that `fully_shard` was called on, with parameters of its own.

    name: the module's, empty for the model itself.
    shards: shards of the parameters that travel together, in the order of the flat gradient.
    """

    name: str
    module: Any
    shards: tuple[Shard, ...]
    device: torch.device

    @property
    def title(self) -> str:
        """The unit's name in errors."""
        return _titled(self.name)

    @property
    def padding(self) -> int:
        """Bytes of the flat gradient that are no part of a shard."""
        return sum((shard.padded - _numel(shard.shape)) * shard.dtype.itemsize for shard in self.shards)

    def gradients(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut a flat gradient (elements,), padded shards one after another, into those of the shards, as views, by
        layer name."""
        return {shard.layer.name: piece[: _numel(shard.shape)].view(shard.shape) for shard, piece in self._pieces(flat)}

    def padded_gradients(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Do as `gradients`, with the padding, so that all ranks have the same shapes."""
        return {shard.layer.name: piece.view(shard.padded_shape) for shard, piece in self._pieces(flat)}

    def gathered(self) -> list[tuple[Shard | None, int]]:
        """Return what the unit's all-gather takes of a rank, in order: shards, None for one of a frozen parameter, and
        their padded number of elements."""
        (group,) = _param_groups(self.module)
        known = {id(shard.parameter): shard for shard in self.shards}
        return [(known.get(id(one.sharded_param)), one.padded_sharded_param_size.numel()) for one in group.fsdp_params]

    @property
    def divisor(self) -> float | None:
        """Divisor of the sum of all ranks' gradients (set_gradient_divide_factor); None: FSDP takes their mean."""
        factor: float | None = _param_groups(self.module)[0].gradient_divide_factor
        return factor

    def scales(self, dtype: torch.dtype, nodes: int) -> tuple[float, float]:
        """Return what a flat gradient is divided by for codecs, and multiplied by after the exchange.

        The mean over nodes of what codecs see is what the optimizer gets; of sums, to the last bit where the number of
        nodes is a power of two. FSDP divides by the second after its hook: it
        is not 1 where a 16-bit mean might underflow.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        group = _param_groups(self.module)[0]
        factors = _get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            None,
            dtype,
            self.device.type,
            self.divisor,
            group.force_sum_reduction_for_comms,
        )
        later = float(factors[1] or 1.0)
        return (later if self.divisor is None else later / nodes), later

    def require_unchanged(self) -> None:
        """Refuse changes since the unit was looked at that would go wrong without a word: parameters replaced or
        thawed."""
        (group,) = _param_groups(self.module)
        known = {id(shard.parameter) for shard in self.shards}
        now = [one.sharded_param for one in group.fsdp_params]
        if not known <= {id(parameter) for parameter in now}:
            raise GradlabError(
                f"{self.title}: its parameters were replaced, as load_state_dict(assign=True) does; load first, then "
                "attach gradlab and make the optimizer"
            )
        if any(parameter.requires_grad and id(parameter) not in known for parameter in now):
            raise GradlabError(_thawed(self.title))

    @property
    def puts_off(self) -> bool:
        """Whether nodes are to be averaged with a later micro-batch: set_requires_all_reduce(False)."""
        return not _param_groups(self.module)[0].all_reduce_grads

    def _pieces(self, flat: torch.Tensor) -> list[tuple[Shard, torch.Tensor]]:
        present = [shard for shard in self.shards if shard.parameter.requires_grad]
        found = only_ones([shard.padded for shard in present], flat.numel())
        if found is None:
            raise GradlabError(
                f"{self.title}: a gradient of {flat.numel()} elements, expected "
                f"{sum(shard.padded for shard in present)}, of {len(present)} parameters, or of some whose sizes alone "
                "have that sum; where some have no gradient in a step, call "
                "model.set_reduce_scatter_unused_params(True)"
            )
        came = [present[place] for place in found]
        return list(zip(came, flat.split([shard.padded for shard in came]), strict=True))


def only_ones(sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Return the places of the sizes, from 1, whose sum is `total`; None where there are none, or several choices.

    >>> from gradlab.ddp.sharded_units import only_ones
    >>> only_ones([3, 5, 8, 5], 21), only_ones([3, 5, 8, 5], 11), only_ones([3, 5, 8, 5], 8)
    ((0, 1, 2, 3), (0, 2), None)
    """
    if sum(sizes) == total:
        return tuple(range(len(sizes)))
    found: dict[int, tuple[int, ...] | None] = {0: ()}  # None: in several ways
    for place, size in enumerate(sizes):
        longer = [(before + size, None if places is None else (*places, place)) for before, places in found.items()]
        found |= {of: None if of in found else places for of, places in longer if of <= total}
        if len(found) > _MOST_SUMS:
            return None
    return found.get(total)


def _thawed(title: str) -> str:
    return (
        f"{title}: parameters that were frozen when gradlab was attached have gradients now, and nodes would drift "
        "apart; unfreeze them before"
    )


def refuse_thawed(model: nn.Module, units: Sequence[Unit]) -> None:
    """Let backward fail where a unit without trainable parameters gets some, instead of letting nodes drift apart."""
    busy = {id(unit.module) for unit in units}
    for name, module in sharded_modules(model):
        if id(module) not in busy and _param_groups(module):
            module.set_all_reduce_hook(partial(_fail_thawed, _titled(name)))


def averaged_units(model: nn.Module, units: Iterable[Unit]) -> AveragedLayers:
    """Return what is averaged of a model: the parameters of its units, those included that are frozen."""
    groups = [group for unit in units for group in _param_groups(unit.module)]

    def parameters() -> list[torch.Tensor]:
        """Both forms of each: the model has the gathered ones from a unit's forward pass to its backward pass."""
        forms = ((one.sharded_param, getattr(one, "_unsharded_param", None)) for g in groups for one in g.fsdp_params)
        return [parameter for both in forms for parameter in both if parameter is not None]

    return AveragedLayers(model, parameters)


def _fail_thawed(title: str, flat: torch.Tensor) -> None:
    raise GradlabError(_thawed(title))


def sharded_modules(model: object) -> list[tuple[str, Any]]:
    """List the modules of a model that `fully_shard` was called on, itself among them, with their names: the first of
    several that it took together."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    first: dict[int, tuple[str, Any]] = {}
    for name, module in named:
        if hasattr(module, "set_all_reduce_hook"):
            first.setdefault(id(module._get_fsdp_state()), (name, module))
    return list(first.values())


def let_go_of_gathered(model: nn.Module) -> None:
    """Have a model show its shards again: a forward pass leaves the parameters of some units gathered."""
    for _, module in sharded_modules(model):
        module.reshard()


def units_of(model: object, caller: str) -> list[Unit]:
    """List the units of a model between two steps. Several meshes, and parameters of no unit, or on another device than
    the gradients, are refused.
    """
    inner = without_compile(model)
    if not isinstance(inner, nn.Module):
        raise GradlabError(f"{caller}: got a {type(inner).__name__}, expected a model that fully_shard was called on")
    let_go_of_gathered(inner)
    layers = {parameter: layer for layer, parameter in named_layers(inner)}
    units = [
        Unit(name, module, tuple(_shards(group, layers)), group.device)
        for name, module in sharded_modules(inner)
        for group in _groups(module, name, caller)
        if any(shard in layers for shard in _parameters(group))
    ]
    if not units:
        raise GradlabError(
            f"{caller}: got a {type(inner).__name__} without a module that fully_shard was called on, or without a "
            f"trainable parameter there; {HOW_TO}"
        )
    sharded = {shard.parameter for unit in units for shard in unit.shards}
    if outside := [layer.name for parameter, layer in layers.items() if parameter not in sharded]:
        raise GradlabError(
            f"{caller}: {outside[0]} and {len(outside) - 1} other parameters are of no module that fully_shard was "
            "called on; call it on the model itself, last"
        )
    if not hasattr(inner, "set_all_reduce_hook"):
        raise GradlabError(
            f"{caller}: fully_shard was called on parts of the model alone, and each has a backward pass of its own; "
            "call it on the model itself, last"
        )
    return units


def replicas_of(units: Iterable[Unit], given: Any, caller: str) -> Any:
    """Return what joins ranks that hold the same shards: what was given, or the other dimension of native HSDP's mesh.

    Raises:
        GradlabError: where units differ in that, or other ranks were given.
    """
    native = {}
    for unit in units:
        mesh = _param_groups(unit.module)[0].mesh_info
        group = getattr(mesh, "replicate_process_group", None)
        native[None if group is None else tuple(dist.get_process_group_ranks(group))] = group
    if len(native) > 1:
        raise GradlabError(f"{caller}: some modules are under native HSDP and others are not, expected one mesh")
    ((ranks, group),) = native.items()
    along = None if given is None or group is None else group_along(given, "between")
    if along is not None and tuple(dist.get_process_group_ranks(along)) != ranks:
        raise GradlabError(f"{caller}: between is not the dimension of the model's mesh along which it is replicated")
    return group if given is None else given


def other_parts(units: Iterable[Unit]) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other parts of layers that tensor parallelism has cut; None without it."""
    for unit in units:
        dimensions = _dimensions(_param_groups(unit.module)[0])
        for shard in unit.shards:
            mesh = shard.parameter.device_mesh
            if mesh.ndim > dimensions:
                group = mesh.get_group(mesh.ndim - 1)
                assert isinstance(group, dist.ProcessGroup)
                return group
    return None


def group_of_all(
    units: Sequence[Unit],
    row: dist.ProcessGroup,
    column: dist.ProcessGroup,
    nodes: Sequence[Sequence[int]],
) -> dist.ProcessGroup:
    """Make a process group of all ranks that a model is on, a collective of them: those of `nodes`, which share one
    part of its layers, of which these are the row and the column of this rank, and those with other parts."""
    device, parts = units[0].device, other_parts(units)
    grids = [nodes] if parts is None else Ranks(parts, device).gather([list(node) for node in nodes])
    groups = (row, column) if parts is None else (row, column, parts)
    return part_of(groups, sorted(rank for grid in grids for node in grid for rank in node), None, device)


def leave_averaging(units: Iterable[Unit]) -> None:
    """Have FSDP reduce gradients inside nodes alone from now on, as on a mesh of one dimension: under native HSDP hooks
    come after its own average. Parameters stay as they are, and `set_hooks` puts it back.

    torch has no public way: a unit is told that its mesh is the dimension along which it is sharded. The effect is
    looked at, so that another version of torch is refused.
    """
    for unit in units:
        (group,) = _param_groups(unit.module)
        before = group.mesh_info
        if type(before).__name__ != "HSDPMeshInfo":
            continue
        shards = before.shard_process_group
        try:
            from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

            alone = FSDPMeshInfo(before.mesh, shard_mesh_dim=before.shard_mesh_dim)
            for name in ("reduce_scatter_process_group", "dp_mesh_dims", "spmd_mesh", "is_spmd_mesh"):
                setattr(alone, name, getattr(before, name, None))
            # FSDP gathers in another way where the mesh after forward passes is another one.
            after = group.post_forward_mesh_info
            group.post_forward_mesh_info = alone if after is before else after
            group.mesh_info = alone
            kept = group._all_gather_process_group is shards and not hasattr(alone, "replicate_process_group")
        except (ImportError, AttributeError, TypeError):
            kept = False
        if not kept:
            raise GradlabError(
                f"{unit.title} is under native HSDP, and torch {torch.__version__} averages between nodes there. "
                f"Shard along one dimension and let gradlab average: {HOW_TO}"
            )


def shard_group(units: Iterable[Unit], caller: str) -> dist.ProcessGroup:
    """Return the process group along which a model's parameters are sharded; refuse several."""
    groups: dict[tuple[int, ...], tuple[str, Any]] = {}
    for unit in units:
        group = _param_groups(unit.module)[0].mesh_info.shard_process_group
        groups.setdefault(tuple(dist.get_process_group_ranks(group)), (unit.name, group))
    if len(groups) > 1:
        texts = [f"{_titled(name)} over ranks {list(ranks)}" for ranks, (name, _) in groups.items()]
        raise GradlabError(f"{caller}: modules are sharded along several meshes ({'; '.join(texts[:2])}), expected one")
    ((_, group),) = groups.values()
    assert isinstance(group, dist.ProcessGroup)
    return group


def attached_hooks(units: Iterable[Unit]) -> list[str]:
    """Name the units that have an all-reduce hook already."""
    return [unit.title for unit in units for group in _param_groups(unit.module) if group._all_reduce_hook is not None]


def custom_reductions(units: Iterable[Unit]) -> list[str]:
    """Name the units whose reduce-scatter somebody has replaced already."""
    comms = ((unit, group._reduce_scatter_comm) for unit in units for group in _param_groups(unit.module))
    return [unit.title for unit, comm in comms if type(comm).__name__ != "DefaultReduceScatter"]


def all_gather_of(unit: Unit) -> Any:
    """Return what gathers a unit's parameters; None below torch 2.8, which has one way."""
    (group,) = _param_groups(unit.module)
    return getattr(group, "_all_gather_comm", None)


def require_native_gathers(units: Iterable[Unit], caller: str) -> None:
    """Refuse units whose all-gather somebody has replaced, or cannot be replaced."""
    for unit in units:
        kind = type(all_gather_of(unit)).__name__
        if kind == "NoneType":
            raise GradlabError(f"{caller}: all-gathers need torch 2.8 or newer, this is {torch.__version__}")
        if kind != "DefaultAllGather":
            raise GradlabError(f"{caller}: {unit.title} has an all-gather of its own already, and FSDP takes one")


def set_all_gather(unit: Unit, gather: Any) -> None:
    """Replace what gathers a unit's parameters."""
    unit.module.set_custom_all_gather(gather)


def set_hooks(module: Any, all_reduce: Any, reduce_scatter: Any = None, meshes: tuple[Any, Any] | None = None) -> None:
    """Set a module's all-reduce hook, and what replaces its reduce-scatter and its meshes, if anything does."""
    module.set_all_reduce_hook(all_reduce)
    if reduce_scatter is not None:
        module.set_custom_reduce_scatter(reduce_scatter)
    if meshes is not None:
        (group,) = _param_groups(module)
        group.mesh_info, group.post_forward_mesh_info = meshes


def has_hooks(unit: Unit, all_reduce: Any, reduce_scatter: Any = None) -> bool:
    """Whether a unit's module still has the hooks that `set_hooks` set."""
    (group,) = _param_groups(unit.module)
    return group._all_reduce_hook is all_reduce and reduce_scatter in (None, group._reduce_scatter_comm)


def hooks_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """List the modules that `fully_shard` was called on, each with its all-reduce hook, reduce-scatter and meshes as
    they are, for `set_hooks`. The reduce-scatter cannot be replaced below torch 2.8: None then."""
    return [
        (
            module,
            group._all_reduce_hook,
            getattr(group, "_reduce_scatter_comm", None),
            (group.mesh_info, group.post_forward_mesh_info),
        )
        for _, module in sharded_modules(model)
        for group in _param_groups(module)
    ]


def layers_of_units(model: object) -> tuple[Layer, ...]:
    """List the whole layers of a model, in registration order."""
    inner = without_compile(model)
    assert isinstance(inner, nn.Module)
    return tuple(layer for layer, _ in named_layers(inner))


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch below 2.12 has one
        one = state._fsdp_param_group
        groups = [] if one is None else [one]
    return list(groups)


def _groups(module: nn.Module, name: str, caller: str) -> list[Any]:
    """The parameter groups of a module that `fully_shard` was called on, checked."""
    groups = _param_groups(module)
    where = f"{caller}: {_titled(name)}"
    if len(groups) > 1:
        raise GradlabError(f"{where} has parameters on several meshes (shard_placement_fn), expected one")
    for group in groups:
        kind = type(group.mesh_info).__name__
        if kind not in ("FSDPMeshInfo", "HSDPMeshInfo"):
            raise GradlabError(f"{where} is not sharded ({kind}), as under `replicate`; compress takes a model in DDP")
        for shard in group.fsdp_params:
            if shard.sharded_param.is_meta:
                raise GradlabError(
                    f"{where} has its parameters on the meta device; make them first: model.to_empty(device=...), and "
                    "initialize or load them"
                )
            if shard.offload_to_cpu:
                raise GradlabError(
                    f"{where} has its parameters offloaded to the CPU, away from its gradients; leave the policy out"
                )
    return groups


def _dimensions(group: Any) -> int:
    """Dimensions of the mesh of a unit's parameters along which FSDP2 shards and replicates: `dp_mesh_dims` names them
    where the whole mesh was given."""
    info = group.mesh_info
    named = getattr(info, "dp_mesh_dims", None)
    return int(info.mesh.ndim if named is None else len(named.shard_names) + len(named.replicate_names))


def _parameters(group: Any) -> Iterator[nn.Parameter]:
    return (shard.sharded_param for shard in group.fsdp_params)


def _shards(group: Any, layers: Mapping[nn.Parameter, Layer]) -> Iterator[Shard]:
    policy, dimensions = group.mp_policy, _dimensions(group)
    for one in group.fsdp_params:
        if one.sharded_param in layers:
            placements = one.sharded_param.placements
            cuts = [getattr(placed, "dim", None) for placed in placements[dimensions:]]
            yield Shard(
                layers[one.sharded_param],
                one.sharded_param,
                tuple(one.sharded_size),
                tuple(one.padded_sharded_param_size),
                policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype,
                placements[dimensions - 1].dim,  # under native HSDP the first says that nodes hold the same
                cuts[0] if cuts else None,
            )


def _titled(name: str) -> str:
    return f"module {name}" if name else "the model itself"


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
