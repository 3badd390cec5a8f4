"""Every codec in every stack of wrappers: which are valid, and why the others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradlab import codecs, wrappers
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan, Schedule, Wrap
from support.contract import SETTINGS, codec_of, learned

# Outermost first. A new codec joins by itself; a new wrapper needs a line here (a test asks for it).
WRAPPINGS: dict[str, tuple[Wrap, ...]] = {
    "none": (),
    "feedback": (Wrap("error_feedback"),),
    "feedback, decay, int8": (Wrap("error_feedback", {"decay": 0.3, "buffer": "int8"}),),
    "feedback, step-size ratio": (Wrap("error_feedback", {"step_size_ratio": True}),),
    "momentum": (Wrap("momentum", {"momentum": 0.8, "nesterov": True}),),
    "momentum over feedback": (Wrap("momentum"), Wrap("error_feedback")),
    "correction": (Wrap("momentum_correction"),),
    "correction, Nesterov, clipped, int8": (
        Wrap("momentum_correction", {"nesterov": True, "clip_norm": 0.5, "buffer": "int8"}),
    ),
    "two-way": (Wrap("two_way"),),
    "two-way under feedback": (Wrap("error_feedback"), Wrap("two_way")),
    "two-way under feedback, bfloat16": (
        Wrap("error_feedback", {"step_size_ratio": True, "buffer": "bfloat16"}),
        Wrap("two_way", {"step_size_ratio": True, "buffer": "bfloat16"}),
    ),
    "one server under feedback": (
        Wrap("error_feedback", {"step_size_ratio": True}),
        Wrap("two_way", {"server": "rank", "step_size_ratio": True, "buffer": "int8"}),
    ),
    "two-way under correction": (Wrap("momentum_correction"), Wrap("two_way")),
    "warm-up under correction": (
        Wrap("momentum_correction"),
        Wrap("sparsity_warmup", {"steps": 6, "stages": 3, "initial_density": 0.5}),
    ),
    "warm-up, two-way under feedback": (
        Wrap("error_feedback"),
        Wrap("sparsity_warmup", {"steps": 6, "stages": 3, "initial_density": 0.5}),
        Wrap("two_way"),
    ),
    "int8 local momentum over two-way feedback": (
        Wrap("local_momentum", {"buffer": "int8"}),
        Wrap("error_feedback", {"step_size_ratio": True}),
        Wrap("two_way", {"step_size_ratio": True}),
    ),
    "local momentum, dampened": (Wrap("local_momentum", {"nesterov": False, "dampening": True}),),
    "weight decay over int8 local momentum": (
        Wrap("weight_decay", {"rate": 0.01}),
        Wrap("local_momentum", {"buffer": "int8"}),
        Wrap("error_feedback", {"step_size_ratio": True}),
    ),
    "weight decay apart over correction": (
        Wrap("weight_decay", {"rate": 0.01, "form": "apart", "momentum": 0.9, "nesterov": True}),
        Wrap("momentum_correction", {"nesterov": True}),
    ),
    "ef21": (Wrap("ef21"),),
    "ef21 under momentum": (Wrap("local_momentum", {"nesterov": False, "dampening": True}), Wrap("ef21")),
    "1-bit Adam": (Wrap("onebit_adam"), Wrap("error_feedback")),
    "zero-one Adam": (
        Wrap("onebit_adam", {"variance": "zero_one", "kappa": 2}),
        Wrap("error_feedback"),
        Wrap("two_way"),
    ),
    "Dion": (Wrap("dion", {"rank_fraction": 0.1}),),
    "feedback over 1-bit Adam": (Wrap("error_feedback"), Wrap("onebit_adam")),
    "feedback over weight decay": (Wrap("error_feedback"), Wrap("weight_decay")),
    "feedback over local momentum": (Wrap("error_feedback"), Wrap("local_momentum")),
    "rotation under feedback": (Wrap("error_feedback"), Wrap("hadamard", {"block": 64})),
    "feedback under rotation": (Wrap("hadamard"), Wrap("error_feedback")),
    "feedback twice": (Wrap("error_feedback"), Wrap("error_feedback")),
    "feedback over correction": (Wrap("error_feedback"), Wrap("momentum_correction")),
    "momentum over correction": (Wrap("momentum"), Wrap("momentum_correction")),
    "two-way over feedback": (Wrap("two_way"), Wrap("error_feedback")),
}
MINIMUM_NUMEL = 256
STATEFUL = ("intsgd, running",)  # settings by which a codec keeps what it does not by default


@dataclass(frozen=True)
class Stack:
    """A codec, or one of the contract's cases, with its wrappers. refusal: what `Plan` says of it; empty if valid.
    gathered: whether the codec gathers where its default would average in shards."""

    codec: str
    wrapping: str
    refusal: str = ""
    gathered: bool = False

    @property
    def name(self) -> str:
        return f"{self.codec} | {self.wrapping}"

    @property
    def wrappers(self) -> tuple[Wrap, ...]:
        return WRAPPINGS[self.wrapping]

    @property
    def applies_momentum(self) -> bool:
        return any(wrappers.get(wrap.name).effects.applies_momentum for wrap in self.wrappers)

    def plan(self, layers: Sequence[Layer], warmup_steps: int = 0, seed: int = 3) -> Plan:
        """The stack on every matrix of `MINIMUM_NUMEL` elements; the rest dense, or with momentum after the average.

        Raises:
            GradlabError: if the stack makes no sense.
        """
        chosen = [layer for layer in layers if len(layer.shape) > 1 and layer.numel >= MINIMUM_NUMEL]
        settings = SETTINGS.get(self.codec, {})
        if "training_steps" in settings and self.wrapping == "feedback":
            settings = {**settings, "training_steps": 5}  # saved while it learns; in other wrappings after that
        if self.gathered:
            settings = {**settings, "aggregation": "gather"}
        groups = [Group(layer.name, (layer.name,), codec_of(self.codec), settings, self.wrappers) for layer in chosen]
        for wrap in self.wrappers:
            if wrap.name == "momentum_correction":
                momentum = Wrap("momentum", {k: v for k, v in wrap.settings.items() if k in ("momentum", "nesterov")})
                rest = [layer for layer in layers if layer not in chosen]
                groups += [Group(layer.name, (layer.name,), "identity", {}, (momentum,)) for layer in rest]
        kept: dict[str, Any] = {}
        if codecs.get(codec_of(self.codec)).about.learns:
            kept = {layer.name: learned(self.codec, (layer,)) for layer in chosen}
        return Plan(tuple(layers), tuple(groups), Schedule(warmup_steps), seed, kept)


def all_stacks() -> list[Stack]:
    """Every codec in every wrapping, with the refusal where there is one."""
    stateful = [Stack(case, "feedback") for case in STATEFUL]
    return [
        judged(stack) for stack in [*(Stack(c, wrapping) for c in codecs.names() for wrapping in WRAPPINGS), *stateful]
    ]


def valid_stacks() -> list[Stack]:
    """The stacks that can run."""
    return [stack for stack in all_stacks() if not stack.refusal]


def judged(stack: Stack) -> Stack:
    """The stack with the refusal, if its plan is refused."""
    try:
        stack.plan([Layer("weight", (24, 40), "linear"), Layer("bias", (24,), "bias")])
    except GradlabError as error:
        return Stack(stack.codec, stack.wrapping, str(error))
    return stack


Stacks = Sequence[Sequence[str]]  # codecs, each with its wrapping


def several_shapes(stacks: Stacks) -> dict[str, tuple[int, ...]]:
    """Shapes of a model in which each stack has a matrix. "first" is in the last bucket that DDP fills."""
    matrices = {f"matrix{number}": (30 + 2 * number, 24) for number in range(len(stacks))}
    return {"first": (16, 8, 3, 3), **matrices, "vector": (65,)}


def several_plan(stacks: Stacks, layers: Sequence[Layer]) -> Plan:
    """Each stack on a matrix of its own, the first stack on the first layer, too."""
    by_name = {layer.name.rpartition(".")[2]: layer for layer in layers}
    own = [[by_name[f"matrix{number}"]] for number in range(len(stacks))]
    own[0].insert(0, by_name["first"])
    plans = [Stack(*stack).plan(some) for stack, some in zip(stacks, own, strict=True)]
    kept = {name: one for plan in plans for name, one in plan.learned.items()}
    return Plan(tuple(layers), tuple(group for plan in plans for group in plan.groups), Schedule(), 3, kept)


def table() -> str:
    """One line per stack: valid, or the refusal."""
    return "\n".join(f"{stack.name:<52} {stack.refusal or 'valid'}" for stack in all_stacks())


if __name__ == "__main__":
    print(table())
