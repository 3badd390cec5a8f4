"""A plan: which group of layers gets which codec, and from which step on.

A layer in no group is sent dense. The same plan drives the offline replay and the online engine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from gradlab import codecs
from gradlab import wrappers as wrapper_registry
from gradlab.codec import Bytes, Codec, Compressor, PlanDefaults, Table, Tensors, hash_tensor
from gradlab.codec.routes import BOTH_WAYS_FROM, sums_in_shards
from gradlab.codec.settings import build_settings, plain
from gradlab.errors import GradlabError
from gradlab.layout import ROLES, Layer, canonical_json, describe_difference, fingerprint, layers_of
from gradlab.plan.coverage import known_roles, left_dense, require_compressed, warn_left_dense
from gradlab.plan.refresh import Refresh
from gradlab.printable import can_be_written
from gradlab.segments import segments

#: Bytes of the float32 on which a step with compressed groups agrees: are all gradients finite on all ranks?
FINITE_FLAG_BYTES = 4
# Bytes of gradients: layers below the first share groups of at most the second, where so many follow one another. On a
# CPU a layer by itself costs 50 to 500 microseconds of Python and kernel launches in a step.
SMALL_LAYER_BYTES, SMALL_GROUP_BYTES, FEWEST_SMALL = 2**16, 2**20, 8
GPU_GROUP_BYTES = 25 * 2**20
EXCHANGES = "gradients", "pseudo-gradients", "parameters"
ANSWER = 4.0  # times a message's bytes per value: at most 1.25 times what 4 ranks send that gather


@dataclass(frozen=True)
class Wrap:
    """A wrapper's id with its settings as plain JSON values: Wrap("error_feedback", {"decay": 0.1}).

    >>> plan = Plan.uniform([Layer("w", (64, 32))], "topk", wrappers=[Wrap("error_feedback", {"decay": 0.1})])
    >>> plan.groups[0].wrappers
    (Wrap(name='error_feedback', settings={'decay': 0.1}),)
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, value: Any) -> Wrap:
        """Raises GradlabError for anything but what `to_json` writes."""
        sound = isinstance(value, dict) and isinstance(value.get("name"), str)
        if not sound or not isinstance(value.get("settings"), dict):
            raise GradlabError(f"not a group of a plan: its wrapper {str(value)[:200]}")
        return cls(value["name"], value["settings"])


#: Error feedback as the only wrapper of a group, with its default settings.
FEEDBACK = (Wrap("error_feedback"),)


@dataclass(frozen=True)
class Group:
    """Layers that one codec treats together.

    name: unique in the plan.
    layers: names, in order.
    codec: the codec's id.
    settings: settings of the codec, plain JSON values.
    wrappers: around the codec, outermost first.

    >>> from gradlab.plan import Group
    >>> group = Group("head", ("head.weight",), "topk", {"density": 0.01}, (Wrap("error_feedback"),))
    >>> Plan([Layer("head.weight", (10, 64))], (group,)).payload_bytes(world_size=4)
    42.0

    Raises:
        GradlabError: for a name that cannot be written as UTF-8.
    """

    name: str
    layers: tuple[str, ...]
    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrap, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings))
        if not can_be_written(self.name):
            raise GradlabError(f"group {self.name}: a name with half of a UTF-16 pair cannot be written: rename it")

    @property
    def plainly_dense(self) -> bool:
        """Whether the group is averaged and nothing else."""
        return self.codec == "identity" and not self.wrappers and not self.settings.get("ring")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layers": list(self.layers),
            "codec": self.codec,
            "settings": dict(self.settings),
            "wrappers": [wrap.to_json() for wrap in self.wrappers],
        }

    @classmethod
    def from_json(cls, value: Any) -> Group:
        """Raises GradlabError for anything but what `to_json` writes."""
        if not isinstance(value, dict) or not {"name", "layers", "codec", "settings", "wrappers"} <= set(value):
            raise GradlabError(f"not a group of a plan: {str(value)[:200]}")
        layers, settings = value["layers"], value["settings"]
        sound = isinstance(layers, list) and all(isinstance(name, str) for name in layers)
        if not sound or not isinstance(settings, dict) or not all(isinstance(value[k], str) for k in ("name", "codec")):
            raise GradlabError(f"not a group of a plan: {str(value)[:200]}")
        if not isinstance(value["wrappers"], list):
            raise GradlabError(f"not a group of a plan: {str(value)[:200]}")
        wrappers = tuple(Wrap.from_json(item) for item in value["wrappers"])
        return cls(value["name"], tuple(layers), value["codec"], settings, wrappers)


@dataclass(frozen=True)
class Schedule:
    """When a plan compresses.

    warmup_steps: dense iterations before the first compressed one.

    >>> from gradlab.plan import Schedule
    >>> [Schedule(warmup_steps=2).compresses(iteration) for iteration in range(4)]
    [False, False, True, True]
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise GradlabError(f"schedule: warmup_steps = {self.warmup_steps!r}, expected a whole number from 0")

    def compresses(self, iteration: int) -> bool:
        """Say whether an iteration runs the codecs.

        Args:
            iteration: its number, from 0.

        Returns:
            True from the end of the warm-up on.
        """
        return iteration >= self.warmup_steps

    def to_json(self) -> dict[str, Any]:
        return {"warmup_steps": self.warmup_steps}

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """Raises GradlabError for anything but what `to_json` writes."""
        if not isinstance(value, dict) or "warmup_steps" not in value:
            raise GradlabError(f"not a schedule: {str(value)[:200]}")
        return cls(value["warmup_steps"])


@dataclass(frozen=True)
class Plan:
    """Groups over the layers of one model, a schedule, a seed for shared random streams, and learned tensors.

    layers: all layers of the model, in order. Those of no group are sent dense.
    groups: groups of compressed layers; no layer is in two.
    schedule: the iteration in which compression begins.
    seed: seed of the random streams that ranks share, 64 bits.
    learned: tensors that a group's codec learned from data, by group name.
    refresh: when settings are chosen anew while training, and from which. None: never.

    >>> plan = Plan.uniform(torch.nn.Linear(64, 32), "topk", density=0.01)
    >>> [(group.layers, group.codec) for group in plan.groups], [layer.name for layer in plan.dense_layers]
    ([(('weight',), 'topk')], ['bias'])
    >>> plan.payload_bytes(world_size=4)
    249.0

    Raises:
        GradlabError: for a group that names an unknown layer, a layer in two groups, two groups of one name, a group
            name with "::", an unknown codec, settings out of range, learned tensors that do not fit, or a refresh of
            what the plan does not have.
    """

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    learned: Mapping[str, Tensors] = field(default_factory=dict)
    refresh: Refresh | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", Table.of(self.layers))
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise GradlabError(f"plan: seed = {str(self.seed)[:80]}, expected a whole number of 64 bits")
        _require_unique("layer", [layer.name for layer in self.layers])
        _require_unique("group", [group.name for group in self.groups])
        _require_unique("grouped layer", [name for group in self.groups for name in group.layers])
        known = Table.of(self.layers).by_name
        for group in self.groups:
            if "::" in group.name:
                raise GradlabError(f"plan: group name {group.name!r}: '::' sets a group apart from its tensors' keys")
            if not group.layers:
                raise GradlabError(f"plan: group {group.name} has no layers")
            if missing := [name for name in group.layers if name not in known]:
                raise GradlabError(f"plan: group {group.name} names layers the model lacks: {', '.join(missing)}")
        _ = self._built  # refuses settings and layers that do not fit
        if strangers := sorted(set(self.learned) - {group.name for group in self.groups}):
            raise GradlabError(f"plan: learned tensors for groups it does not have: {', '.join(strangers)}")
        if self.refresh is not None:
            self.refresh.check(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone. A copy computes what follows from them again."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def uniform(
        cls,
        model: nn.Module | Sequence[Layer],
        codec: str,
        *,
        error_feedback: bool | None = None,
        wrappers: Sequence[Wrap] | None = None,
        warmup_steps: int | None = None,
        minimum_dimensions: int | None = None,
        minimum_numel: int | None = None,
        roles: Collection[str] | None = None,
        group_bytes: float | None = None,
        exchanges: str = "gradients",
        seed: int = 0,
        **settings: Any,
    ) -> Plan:
        """Build a plan that gives every layer the same codec with the same settings. The other layers stay dense.

        An argument that is None takes the codec's own default (`Codec.defaults`): for most codecs layers of at least
        two dimensions and 256 elements, of all roles, from the first iteration on. Eight or more layers below 64 KiB
        that follow one another share groups of at most 1 MiB: they travel and are computed together, and each keeps its
        own scales, thresholds and selections. Each other layer has a group of its own. Signs take every layer, in
        groups of 4 MiB; GradiVeQ takes weight matrices, after 2500 iterations; ecsq has one group of all layers.

        On another device than the CPU all consecutive layers share groups of at most 25 MiB in the same way: a GPU
        takes a group's kernels as fast as one layer's, and the time goes into launching them.

        >>> plan = Plan.uniform(torch.nn.Linear(64, 32), "powersgd", rank=4, warmup_steps=100)
        >>> plan.groups[0].settings, plan.schedule, plan.groups[0].wrappers
        ({'rank': 4}, Schedule(warmup_steps=100), (Wrap(name='error_feedback', settings={}),))

        Args:
            model: the model, or its layers, of which nobody knows where they are.
            codec: the codec's id, such as "topk".
            error_feedback: whether error feedback is put around the codec; not together with `wrappers`.
            wrappers: around the codec, outermost first, in place of the default ones. If one of them applies
                momentum or weight decay, dense layers get the same.
            warmup_steps: dense iterations before the first compressed one.
            minimum_dimensions: dimensions that a layer needs to be compressed.
            minimum_numel: elements that a layer needs to be compressed.
            roles: roles of the layers that are compressed, such as ("convolution",); () compresses none. If roles
                leave more than half of the model's bytes dense, a warning names them.
            group_bytes: bytes of gradients up to which consecutive layers share a group, small or not. 0: one group
                per layer, math.inf: one group of all layers. Such groups are one to a codec that selects, unless it is
                given across_layers = False.
            exchanges: "gradients", or "pseudo-gradients" of local steps, which no rank and no server keeps errors of
                by default: under an outer optimizer with momentum feedback is momentum twice. Or "parameters" that
                FSDP2 gathers: no errors are kept, and embeddings stay exact by default.
            seed: seed of the random streams that ranks share.
            settings: settings of the codec, by name.

        Raises:
            GradlabError: for an unknown codec or role, a setting out of range, `wrappers` with `error_feedback`, or
                arguments by which no layer of the model would be compressed.
        """
        layers = layers_of(model) if isinstance(model, nn.Module) else tuple(model)
        _check_wrappers(wrappers, error_feedback)
        if exchanges not in EXCHANGES:
            raise GradlabError(f"plan: exchanges = {exchanges!r}, expected one of {', '.join(EXCHANGES)}")
        if exchanges != "gradients" and error_feedback is None:
            error_feedback = False
        if exchanges == "parameters":
            roles = tuple(role for role in ROLES if role != "embedding") if roles is None else roles
            wrappers, error_feedback = wrappers or (), None
        built = codecs.make(codec, **settings)
        around = default_wrappers(built, error_feedback) if wrappers is None else tuple(wrappers)
        given: dict[str, Any] = {
            "warmup_steps": warmup_steps,
            "minimum_dimensions": minimum_dimensions,
            "minimum_numel": minimum_numel,
            "roles": None if roles is None else known_roles(roles),
            "group_bytes": group_bytes,
        }
        choice = replace(built.about.defaults, **{name: value for name, value in given.items() if value is not None})
        alone = choice.group_bytes is None and may_span(built)
        if (
            group_bytes is None
            and isinstance(model, nn.Module)
            and any(p.device.type != "cpu" for p in model.parameters())
        ):
            choice = replace(choice, group_bytes=_on_gpu(choice.group_bytes))
        compressed = _compressed(layers, choice)
        averages = Group("", (), codec, settings).plainly_dense  # layers of any size: there is nothing to compress
        if (roles is None or roles) and not averages:
            _check_coverage(codec, layers, compressed, choice)
        members = _consecutive(compressed, choice.group_bytes)
        # Where layers share a group only to travel together, each keeps its own selection.
        of_layers = {**(EACH_BY_ITSELF if alone else {}), **settings}
        groups = [
            Group(group_name(names), names, codec, of_layers if len(names) > 1 else settings, around)
            for names in members
        ]
        rest = groups_of_the_rest(layers, compressed, around)
        return cls(layers, (*groups, *rest), Schedule(choice.warmup_steps), seed)

    def members(self, group: Group) -> tuple[Layer, ...]:
        """Return the layers of a group.

        Args:
            group: group of the plan.

        Returns:
            The layers, in the group's order.
        """
        by_name = Table.of(self.layers).by_name
        return tuple(by_name[name] for name in group.layers)

    @functools.cached_property
    def _built(self) -> dict[str, Codec]:
        """The codecs by group name, for forecasts only, as running or moving one changes it: one for all groups that
        differ in their layers alone."""
        built, alike = dict[str, Codec](), dict[str, Codec]()
        for group in self.groups:
            same = canonical_json(
                [replace(group, name="", layers=()).to_json(), group.name in self.learned and group.name]
            )
            if same in alike:
                alike[same].check(self.members(group))
            built[group.name] = alike[same] = alike.get(same) or self.build(group)
        return built

    def build(self, group: Group, device: torch.device | str = "cpu") -> Codec:
        """Build a new codec for a group, inside the group's wrappers.

        Args:
            group: group of the plan. Its layers are checked against the codec.
            device: the learned tensors'.

        Raises:
            GradlabError: for a setting out of range, or layers that the codec does not take.
        """
        method = codecs.get(group.codec)
        codec = method(build_settings(method, group.settings), self.learned.get(group.name))
        codec.check(self.members(group))
        codec.learned = {key: tensor.to(device) for key, tensor in codec.learned.items()}
        for wrap in reversed(group.wrappers):
            wrapper = wrapper_registry.get(wrap.name)
            codec = wrapper(codec, build_settings(wrapper, wrap.settings))
        return codec

    @functools.cached_property
    def compressed_groups(self) -> tuple[Group, ...]:
        """Groups that are not plainly dense."""
        return tuple(group for group in self.groups if not group.plainly_dense)

    @functools.cached_property
    def dense_layers(self) -> tuple[Layer, ...]:
        """Layers that are sent uncompressed in every phase."""
        compressed = {name for group in self.compressed_groups for name in group.layers}
        return tuple(layer for layer in self.layers if layer.name not in compressed)

    def payload_bytes(
        self, world_size: int, compressing: bool = True, states: Mapping[str, Tensors] | None = None
    ) -> float:
        """Forecast the bytes that a rank contributes per step, mean over ranks, for float32 gradients.

        Args:
            world_size: number of ranks.
            compressing: whether the schedule compresses in the step.
            states: states that the step starts from, by group name. None: the mean over a run.

        Returns:
            Bytes.
        """
        if not compressing or not self.compressed_groups:
            return 4 * sum(layer.numel for layer in self.layers)
        dense = 4.0 * sum(layer.numel for layer in self.dense_layers) + FINITE_FLAG_BYTES
        return dense + sum(
            forecast_group(self, group, world_size, None if states is None else states.get(group.name, {})).payload
            for group in self.compressed_groups
        )

    @property
    def digest(self) -> str:
        """Sha256 (hex) of the plan with its learned tensors: equal plans, and only they, have one digest."""
        hashes = {key: hash_tensor(tensor) for key, tensor in learned_tensors(self).items()}
        return hashlib.sha256(canonical_json([self.to_json(), hashes]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Write everything but the learned tensors as plain JSON.

        Returns:
            An object that `from_json` reads.
        """
        return {
            "layers": [layer.to_json() for layer in self.layers],
            "fingerprint": fingerprint(self.layers),
            "groups": [group.to_json() for group in self.groups],
            "schedule": self.schedule.to_json(),
            "seed": self.seed,
            **({} if self.refresh is None else {"refresh": self.refresh.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Any, tensors: Tensors | None = None) -> Plan:
        """Read a plan from `to_json`'s output and learned tensors, named as `learned_tensors` names them.

        Raises:
            GradlabError: for anything else, or a fingerprint that does not match the layers.
        """
        keys = {"layers", "fingerprint", "groups", "schedule", "seed"}
        if not isinstance(value, dict) or not keys <= set(value):
            raise GradlabError(f"not a plan: expected the keys {', '.join(sorted(keys))}")
        if not isinstance(value["layers"], list) or not isinstance(value["groups"], list):
            raise GradlabError("not a plan: layers and groups must be lists")
        layers = tuple(Layer.from_json(item) for item in value["layers"])
        if fingerprint(layers) != value["fingerprint"]:
            raise GradlabError("plan: the model fingerprint does not match the layers listed")
        learned: dict[str, Tensors] = {}
        for key, tensor in (tensors or {}).items():
            group, _, rest = key.partition("::")
            learned.setdefault(group, {})[rest] = tensor
        groups = tuple(Group.from_json(item) for item in value["groups"])
        refresh = Refresh.from_json(value["refresh"]) if "refresh" in value else None
        return cls(layers, groups, Schedule.from_json(value["schedule"]), value["seed"], learned, refresh)


def forecast_group(plan: Plan, group: Group, world_size: int, state: Tensors | None = None) -> Bytes:
    """Forecast the bytes of one group in a compressed step from a state; None: the mean over a run."""
    codec, layers = plan._built[group.name], plan.members(group)
    if state is not None:
        return codec.forecast(layers, world_size, state)
    key = "forecast", world_size, *((layer.shape, layer.role) for layer in layers)
    return codec.cached(key, lambda: codec.forecast(layers, world_size))


def learned_tensors(plan: Plan) -> Tensors:
    """Return all learned tensors by "<group>::<key>"."""
    return {f"{group}::{key}": t for group, kept in plan.learned.items() for key, t in kept.items()}


def check_model(plan: Plan, layers: Sequence[Layer]) -> None:
    """Refuse a model with other layers than the plan was made for, with one line per layer that differs."""
    if difference := describe_difference(plan.layers, layers):
        shown = difference[:20] + ([f"... and {len(difference) - 20} more"] if len(difference) > 20 else [])
        lines = [f"this plan is for another model ({len(difference)} differences):", *shown]
        raise GradlabError("\n  ".join([*lines, "make a plan of this model's trainable layers"]))


def default_wrappers(codec: Codec, error_feedback: bool | None = None) -> tuple[Wrap, ...]:
    """List the wrappers that a plan puts around a codec by default: error feedback and two-way compression, if any.

    A codec whose payloads are gathered sends N - 1 times its payload. From 5 ranks on, two-way compression takes the
    gather's place. Its answers take 4 times the bytes: a rank then sends 1.25 times what it sends between 4 ranks.

    >>> from gradlab.plan import default_wrappers
    >>> default_wrappers(codecs.make("topk"))
    (Wrap(name='error_feedback', settings={}), Wrap(name='two_way', settings={'from_ranks': 5, 'answer': 4.0}))
    >>> default_wrappers(codecs.make("powersgd"))
    (Wrap(name='error_feedback', settings={}),)

    Args:
        codec: the codec, without wrappers.
        error_feedback: whether error feedback is among them, and servers keep their errors. None: the codec's default.

    Returns:
        The wrappers, outermost first.
    """
    defaults = codec.about.defaults
    around = FEEDBACK if (defaults.error_feedback if error_feedback is None else error_feedback) else ()
    kept = {"error_feedback": False} if error_feedback is False else {}
    if defaults.two_way:
        return (*around, Wrap("two_way", kept))
    if not _gathers(codec):
        return tuple(around)
    return (*around, Wrap("two_way", {"from_ranks": BOTH_WAYS_FROM, "answer": ANSWER, **kept}))


def between(plan: Plan, world_size: int) -> Plan:
    """Return a plan in the form that it takes between so many ranks: two-way compression `from_ranks` on is there, or
    it is not.

    >>> from gradlab.plan.plan import between
    >>> plan = Plan.uniform([Layer("w", (1000, 100), "linear")], "topk")
    >>> [[wrap.name for wrap in between(plan, ranks).groups[0].wrappers] for ranks in (4, 8)]
    [['error_feedback'], ['error_feedback', 'two_way']]
    """

    def taken(wrap: Wrap) -> list[Wrap]:
        settings = dict(wrap.settings)
        from_ranks = settings.pop("from_ranks", None)
        return [wrap] if from_ranks is None else [replace(wrap, settings=settings)] * (world_size >= from_ranks)

    groups = tuple(
        replace(group, wrappers=tuple(one for wrap in group.wrappers for one in taken(wrap))) for group in plan.groups
    )
    return plan if groups == plan.groups else replace(plan, groups=groups)


def _gathers(codec: Codec) -> bool:
    """Return whether all payloads go to all of many ranks, without a setting that asks for it."""
    if not isinstance(codec, Compressor):
        return False
    if codec.traits.own_exchange:
        return hasattr(codec, "settled")
    return getattr(codec.settings, "aggregation", "auto") == "auto" and not sums_in_shards(codec, BOTH_WAYS_FROM)


def _check_wrappers(wrappers: Any, error_feedback: bool | None) -> None:
    """Refuse wrappers that are no list of `Wrap`, or that come together with error_feedback."""
    if wrappers is None:
        return
    if not isinstance(wrappers, Sequence) or not all(isinstance(wrap, Wrap) for wrap in wrappers):
        raise GradlabError(f"plan: wrappers = {str(wrappers)[:80]!r}, expected a list of Wrap(name, settings)")
    if error_feedback is not None:
        raise GradlabError("plan: wrappers and error_feedback are both given: name error_feedback among the wrappers")


def _compressed(layers: Sequence[Layer], choice: PlanDefaults) -> list[Layer]:
    """The layers that are large enough, and of the roles that are compressed."""
    return [layer for layer in _large_enough(layers, choice) if layer.role in choice.roles]


def _large_enough(layers: Sequence[Layer], choice: PlanDefaults) -> list[Layer]:
    return [
        layer
        for layer in layers
        if layer.dimensions >= choice.minimum_dimensions and layer.numel >= choice.minimum_numel
    ]


def _check_coverage(codec: str, layers: Sequence[Layer], compressed: Sequence[Layer], choice: PlanDefaults) -> None:
    """Refuse a plan that compresses nothing; warn where roles are why less than half of the bytes is compressed."""
    sizes = f"from {choice.minimum_dimensions} dimensions and {choice.minimum_numel} elements on"
    require_compressed(codec, layers, compressed, f"layers of role {', '.join(choice.roles)} {sizes}")
    line = left_dense(codec, layers, compressed, _large_enough(layers, choice), choice.roles)
    warn_left_dense(line, stacklevel=4)


def _consecutive(layers: Sequence[Layer], group_bytes: float | None) -> list[tuple[str, ...]]:
    """Return names of consecutive layers that share a group of at most group_bytes bytes of float32 gradients; None:
    small ones do."""
    if group_bytes is None:
        runs = (list(run) for _, run in itertools.groupby(layers, lambda layer: 4 * layer.numel < SMALL_LAYER_BYTES))
        cut = (segments(run, lambda layer: 4 * layer.numel, _group_bytes_of(run)) for run in runs)
        return [tuple(layer.name for layer in group) for groups in cut for group in groups]
    if not isinstance(group_bytes, (int, float)) or not group_bytes >= 0:
        raise GradlabError(f"plan: group_bytes = {group_bytes!r}, expected a number from 0")
    cut_runs = segments(layers, lambda layer: 4 * layer.numel, group_bytes)
    return [tuple(layer.name for layer in run) for run in cut_runs]


EACH_BY_ITSELF = {"across_layers": False}


def may_span(codec: Codec) -> bool:
    """Whether a codec can select from all layers of a group together."""
    return codec.traits.selects and any(field.name == "across_layers" for field in fields(codec.settings))


def _on_gpu(group_bytes: float | None) -> float:
    """Return the group_bytes of a model on a GPU, where they are these on a CPU. 0 stays: a layer has to be alone."""
    return 0 if group_bytes == 0 else max(group_bytes or 0, GPU_GROUP_BYTES)


def _group_bytes_of(run: Sequence[Layer]) -> int:
    """The most bytes of a group in a run of layers that are all small, or all not."""
    many_small = len(run) >= FEWEST_SMALL and 4 * run[0].numel < SMALL_LAYER_BYTES
    return SMALL_GROUP_BYTES if many_small else 0


def group_name(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def groups_of_the_rest(layers: Sequence[Layer], compressed: Sequence[Layer], around: Sequence[Wrap]) -> Iterator[Group]:
    """Yield groups that give the other layers their momentum and weight decay, if the wrappers apply them.

    >>> from gradlab.plan import groups_of_the_rest
    >>> weight, bias = Layer("weight", (64, 32)), Layer("bias", (64,), "bias")
    >>> [group.wrappers for group in groups_of_the_rest([weight, bias], [weight], [Wrap("momentum_correction")])]
    [(Wrap(name='momentum', settings={'momentum': 0.9, 'nesterov': False}),)]

    Args:
        layers: all layers of the model.
        compressed: the layers that are in groups already.
        around: those groups' wrappers, outermost first.

    Yields:
        One group per layer, averaged without compression.
    """
    if same := tuple(_without_compression(around)):
        grouped = {layer.name for layer in compressed}
        for layer in (layer for layer in layers if layer.name not in grouped):
            yield Group(layer.name, (layer.name,), "identity", {}, same)


def _without_compression(around: Sequence[Wrap]) -> Iterator[Wrap]:
    for wrap in around:
        wrapper = wrapper_registry.get(wrap.name)
        if wrapper.effects.applies_weight_decay:
            yield wrap
        if wrapper.effects.replaces_optimizer:
            yield wrap
        elif wrapper.effects.applies_momentum:
            values = asdict(build_settings(wrapper, wrap.settings))  # defaults too: Nesterov's form is not one's only
            yield Wrap("momentum", {key: values[key] for key in ("momentum", "nesterov", "dampening") if key in values})


def _require_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GradlabError(f"plan: {what} {name} appears twice")
        seen.add(name)
