"""Methods of training as their papers compare them, by name: plans that bring momentum and weight decay along.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 4: SGD and SGDM; signSGD with majority vote (Bernstein et al., ICML 2018) and signum (ICLR 2019);
dist-EF-SGD(M), Algorithm 2 with eq. (1); dist-EF-blockSGD(M), Algorithms 3 and 4.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap


@dataclass(frozen=True)
class Method:
    """codec, settings: of a plan; wrappers: around it, inside of momentum; momentum: the wrapper that applies it, with
    settings beside mu, or None; one_block: of all layers."""

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrap, ...] = ()
    momentum: Wrap | None = None
    one_block: bool = False


FOLLOWS = {"step_size_ratio": True}
FEEDBACK_BOTH_WAYS = (Wrap("error_feedback", FOLLOWS), Wrap("two_way", FOLLOWS))
VOTE = (Wrap("two_way", {"error_feedback": False}),)
BARE_SIGNS = {"scale": "one", "zeros": "random"}  # a coin ends the ties of an even number of ranks
NESTEROV = Wrap("local_momentum", {"nesterov": True})
METHODS: dict[str, Method] = {
    "SGD": Method("identity"),
    "SGDM": Method("identity", momentum=Wrap("momentum", {"nesterov": True})),
    "signSGD": Method("sign", BARE_SIGNS, VOTE),
    "signum": Method("sign", BARE_SIGNS, VOTE, Wrap("local_momentum", {"nesterov": False, "dampening": True})),
    "dist-EF-SGD": Method("sign", {"across_layers": True}, FEEDBACK_BOTH_WAYS, one_block=True),
    "dist-EF-SGDM": Method("sign", {"across_layers": True}, FEEDBACK_BOTH_WAYS, NESTEROV, one_block=True),
    "dist-EF-blockSGD": Method("sign", {}, FEEDBACK_BOTH_WAYS),
    "dist-EF-blockSGDM": Method("sign", {}, FEEDBACK_BOTH_WAYS, NESTEROV),
}


def known_name(name: str) -> str:
    """The name of a method, in whatever case it is written.

    Raises:
        GradlabError: if there is none; a close match is named.
    """
    by_lower, lower = {known.lower(): known for known in METHODS}, str(name).lower()
    if lower in by_lower:
        return by_lower[lower]
    close = difflib.get_close_matches(lower, by_lower, n=1)
    hint = f"; did you mean {by_lower[close[0]]}?" if close else ""
    raise GradlabError(f"no method {name!r}{hint} (there are {', '.join(METHODS)})")


def method_plan(
    model: nn.Module | Sequence[Layer],
    name: str,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    server: str = "sharded",
    warmup_steps: int = 0,
    group_bytes: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Plan:
    """The plan of a method in `METHODS`, of every tensor; the optimizer is to be SGD without momentum.

    momentum: mu, of methods that have it (name ends in M, or signum); weight_decay: lambda, added times the parameters
    to each rank's gradient, before momentum and compression; 0 leaves it to the optimizer, as published code of signSGD
    and signum does, which votes on the loss alone; server: "sharded" over the ranks, or "rank": all on rank 0, as in
    the paper (the same numbers on the CPU, but for the coins that end a vote's ties); warmup_steps: dense iterations
    before it; group_bytes: as for `Plan.uniform`, where not all layers are one block; settings: of the codec, such as
    block_size, beside the method's own.

    Raises:
        GradlabError: for an unknown name (close ones are named), or a setting out of range.
    """
    method = METHODS[known_name(name)]
    around = [Wrap("weight_decay", {"rate": weight_decay})] if weight_decay else []
    if method.momentum is not None:
        around.append(Wrap(method.momentum.name, {"momentum": momentum, **method.momentum.settings}))
    for wrap in method.wrappers:
        around.append(Wrap(wrap.name, {**wrap.settings, **({"server": server} if wrap.name == "two_way" else {})}))
    return Plan.uniform(
        model,
        method.codec,
        wrappers=around,
        warmup_steps=warmup_steps,
        minimum_dimensions=0,
        minimum_numel=1,
        group_bytes=math.inf if method.one_block else group_bytes,
        seed=seed,
        **{**method.settings, **settings},
    )
