"""Methods of training as their papers compare them, by name: plans of codecs with the wrappers that belong to them.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 4: SGD and SGDM; signSGD with majority vote (Bernstein et al., ICML 2018) and signum (ICLR 2019);
dist-EF-SGD(M), Algorithm 2 with eq. (1); dist-EF-blockSGD(M), Algorithms 3 and 4. Alistarh, Grubic, Li, Tomioka,
Vojnovic, NeurIPS 2017: QSGD has the L2 norm of section 3 and its lemmas, "QSGD, max norm" that of section 4 (QSGD
variants), which is also the codec's default. Others: see the paper in each codec.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.plan import Plan, Wrap


@dataclass(frozen=True)
class Method:
    """A published method of training.

    wrappers: around the codec, outermost first, inside the momentum wrapper.
    momentum: the wrapper that applies momentum, with its settings beside mu; None: no momentum.
    one_block: whether all layers are one group.
    every_tensor: whether vectors and small layers are compressed too.
    """

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrap, ...] = ()
    momentum: Wrap | None = None
    one_block: bool = False
    every_tensor: bool = False


FOLLOWS = {"step_size_ratio": True}
FEEDBACK = Wrap("error_feedback", {"step_size_ratio": False})
FEEDBACK_BOTH_WAYS = (Wrap("error_feedback", FOLLOWS), Wrap("two_way", FOLLOWS))
VOTE = (Wrap("two_way", {"error_feedback": False}),)
BARE_SIGNS = {"scale": "one", "zeros": "random"}  # a coin ends the ties of an even number of ranks
NESTEROV = Wrap("local_momentum", {"nesterov": True})
DAMPENED = Wrap("local_momentum", {"nesterov": False, "dampening": True})
SIGNUM = Wrap("local_momentum", {**DAMPENED.settings, "start": "zero"})
WHOLE_MODEL = {"across_layers": True}
SIGN_METHODS: dict[str, Method] = {
    "SGD": Method("identity", every_tensor=True),
    "SGDM": Method("identity", momentum=Wrap("momentum", {"nesterov": True}), every_tensor=True),
    "signSGD": Method("sign", BARE_SIGNS, VOTE, every_tensor=True),
    "signum": Method("sign", BARE_SIGNS, VOTE, SIGNUM, every_tensor=True),
    "dist-EF-SGD": Method("sign", WHOLE_MODEL, FEEDBACK_BOTH_WAYS, one_block=True, every_tensor=True),
    "dist-EF-SGDM": Method("sign", WHOLE_MODEL, FEEDBACK_BOTH_WAYS, NESTEROV, one_block=True, every_tensor=True),
    "dist-EF-blockSGD": Method("sign", {}, FEEDBACK_BOTH_WAYS, every_tensor=True),
    "dist-EF-blockSGDM": Method("sign", {}, FEEDBACK_BOTH_WAYS, NESTEROV, every_tensor=True),
}
LOCO = Wrap("error_feedback", {"decay": 0.95, "buffer": "int8", "reset_steps": 512, "step_size_ratio": False})
DEMO = Wrap("error_feedback", {"carried": 0.999, "step_size_ratio": True})  # their momentum holds the learning rate
# Of pseudo-gradients, which hold the inner learning rate; the outer optimizer has no momentum.
SPARSE_LOCO = Wrap("error_feedback", {"carried": 0.95, "step_size_ratio": False})
# Their compressed momentum holds no learning rate.
KEPT_BOTH_WAYS = (FEEDBACK, Wrap("two_way", {"step_size_ratio": False}))
ZERO_ONE = Wrap("onebit_adam", {"variance": "zero_one"})
METHODS: dict[str, Method] = {
    **SIGN_METHODS,
    "1-bit SGD": Method("one_bit", {}, KEPT_BOTH_WAYS, every_tensor=True),
    "TernGrad": Method("terngrad", {"shared_scale": True}, every_tensor=True),
    "QSGD": Method("qsgd", {"norm": "l2"}),
    "QSGD, max norm": Method("qsgd", {"norm": "max"}),
    "natural compression": Method("natural", every_tensor=True),
    "LoCo": Method("block_scaled", {"dtype": "int4"}, (LOCO,)),
    "Sparse GD": Method("topk", {}, (FEEDBACK,)),
    "MEM-SGD": Method("topk", {}, (Wrap("error_feedback", FOLLOWS),)),
    "global top-k": Method("topk", {}, (FEEDBACK,), one_block=True),
    "Rethink-GS": Method("threshold", {}, (FEEDBACK,), one_block=True),
    "DGC": Method("sampled_threshold", {"density": 0.001}, (Wrap("sparsity_warmup"),), Wrap("momentum_correction")),
    "ScaleCom": Method("clt_k", {}, (Wrap("error_feedback", {"decay": 0.9, "step_size_ratio": False}),)),
    "DeMo": Method("dct_topk", {"average": "senders", "sign": True}, (DEMO,), every_tensor=True),
    "PowerSGD": Method("powersgd", {}, (FEEDBACK,)),
    "1-bit Adam": Method("sign", {}, (Wrap("onebit_adam"), *KEPT_BOTH_WAYS), every_tensor=True),
    "0/1 Adam": Method("sign", {}, (ZERO_ONE, *KEPT_BOTH_WAYS), every_tensor=True),
    "Dion": Method("identity", {}, (Wrap("dion"),), every_tensor=True),
    "NUQSGD": Method("nuqsgd"),
    "IntSGD": Method("intsgd", {"bits": 32, "scale": "running"}, every_tensor=True),
    "THC, uniform": Method("intsgd", {}, (Wrap("hadamard"),)),
    "EF21": Method("topk", {}, (Wrap("ef21"),)),
    "EF21-SGDM": Method("topk", {}, (Wrap("ef21"),), DAMPENED),
    "SparseLoCo": Method("chunk_topk", {}, (SPARSE_LOCO,)),
}


def known_name(name: str, among: Iterable[str] = tuple(METHODS)) -> str:
    """Return a method's name, whatever its case; a close match is named if there is none."""
    known = list(among)
    by_lower, lower = {one.lower(): one for one in known}, str(name).lower()
    if lower in by_lower:
        return by_lower[lower]
    close = difflib.get_close_matches(lower, by_lower, n=1)
    hint = f"; did you mean {by_lower[close[0]]}?" if close else ""
    raise GradlabError(f"no method {name!r}{hint} (there are {', '.join(known)})")


def method_plan(
    model: nn.Module | Sequence[Layer],
    name: str,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_form: str = "gradient",
    server: str = "sharded",
    warmup_steps: int = 0,
    group_bytes: float | None = None,
    step_size_ratio: bool | None = True,
    minimum_dimensions: int | None = None,
    minimum_numel: int | None = None,
    roles: Collection[str] | None = None,
    wrapper_settings: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Plan:
    """Build the plan of a published method, one of `METHODS`.

    Signs, 1-bit SGD, TernGrad, natural compression, DeMo and 1-bit Adam compress every tensor. The others compress the
    layers that their codec takes by default. A method with momentum needs SGD without momentum as the optimizer. So do
    DeMo, whose residual is its momentum, and 1-bit and 0/1 Adam, which are the optimizer: they want `warmup_steps` of
    15 % of a run or more, and SGD at Adam's learning rate, with AdamW's weight decay. Dion is the optimizer too, at
    learning rates of its own, such as 0.01. Under AdamW train a method without momentum, with `step_size_ratio=None`.
    LoCo has a scale per 256 values; with scale=s it has the paper's single s, which has to suit the gradients.

    >>> from gradlab.plan import method_plan
    >>> method_plan([Layer("w", (64, 32))], "DGC", density=0.01).groups[0].wrappers
    (Wrap(name='momentum_correction', settings={'momentum': 0.9}), Wrap(name='sparsity_warmup', settings={}))

    Args:
        model: the model, or its layers.
        name: name of the method. See `METHODS`.
        momentum: mu, of methods that have momentum (names that end in M, signum, DGC).
        weight_decay: lambda. 0 leaves weight decay to the optimizer, as the published code of signSGD and signum does.
        weight_decay_form: "gradient": lambda times the parameters is added to each rank's gradient, before momentum
            and compression, as torch.optim.SGD does. "apart": it has a momentum of its own, of the method's mu and
            form, which is added to the mean, uncompressed, as the published code of DGC and dist-EF-blockSGDM does.
        server: server of two-way methods: "sharded" over the ranks, or "rank", all on rank 0, as in the papers. On the
            CPU both give the same numbers, but for the coins that end a vote's ties.
        warmup_steps: dense iterations before the first compressed one.
        group_bytes: setting of `Plan.uniform`, for methods that do not put all layers in one block.
        step_size_ratio: whether residuals follow the learning rate (dist-EF and MEM-SGD, by their papers, for SGD).
            None: only under SGD without momentum, and are kept as they are under any other optimizer.
        minimum_dimensions, minimum_numel, roles: those of `Plan.uniform`. None: the method's own.
        wrapper_settings: settings beside or in place of the method's own, by the name of one of its wrappers,
            such as {"sparsity_warmup": {"steps": 100}}.
        seed: seed of the random streams that ranks share.
        settings: settings of the codec, such as block_size, beside or in place of the method's own.

    Raises:
        GradlabError: for an unknown name (close ones are named), a setting out of range, or settings of a wrapper that
            the method does not have.
    """
    name = known_name(name)
    method = METHODS[name]
    around = [_weight_decay(method, momentum, weight_decay, weight_decay_form)] if weight_decay else []
    if method.momentum is not None:
        around.append(Wrap(method.momentum.name, {"momentum": momentum, **method.momentum.settings}))
    for wrap in method.wrappers:
        own = {key: step_size_ratio if wrap.settings == FOLLOWS else value for key, value in wrap.settings.items()}
        around.append(Wrap(wrap.name, {**own, **({"server": server} if wrap.name == "two_way" else {})}))
    return Plan.uniform(
        model,
        method.codec,
        wrappers=_with_settings(name, around, wrapper_settings or {}),
        warmup_steps=warmup_steps,
        minimum_dimensions=0 if minimum_dimensions is None and method.every_tensor else minimum_dimensions,
        minimum_numel=1 if minimum_numel is None and method.every_tensor else minimum_numel,
        roles=roles,
        group_bytes=math.inf if method.one_block else group_bytes,
        seed=seed,
        **{**method.settings, **settings},
    )


def named_plan(model: nn.Module | Sequence[Layer], name: str, *, warmup_steps: int = 0, **settings: Any) -> Plan:
    """Build the plan of a published method or, where no method has that very name, the uniform plan of a codec.

    >>> from gradlab.plan import named_plan
    >>> layers = [Layer("w", (64, 32))]
    >>> named_plan(layers, "PowerSGD", rank=2).groups[0].codec, named_plan(layers, "topk").groups[0].codec
    ('powersgd', 'topk')

    Args:
        model: the model, or its layers.
        name: name in `METHODS`, such as "QSGD", or a codec's id, such as "qsgd".
        warmup_steps: dense iterations before the first compressed one.
        settings: those of `method_plan`, or of `Plan.uniform`.

    Raises:
        GradlabError: for an unknown name, or a setting out of range.
    """
    make = method_plan if name in METHODS else Plan.uniform
    return make(model, name, warmup_steps=warmup_steps, **settings)


def _weight_decay(method: Method, mu: float, rate: float, form: str) -> Wrap:
    """Make the wrapper for lambda = rate: apart it has the momentum that the method gives to gradients."""
    settings: dict[str, Any] = {"rate": rate} if form == "gradient" else {"rate": rate, "form": form}
    own = method.momentum.settings if form == "apart" and method.momentum is not None else None
    # Dampened momentum is the average that signum votes on; its published code gives weight decay none.
    if own is not None and not own.get("dampening", False):
        settings |= {"momentum": mu, "nesterov": own.get("nesterov", False)}
    return Wrap("weight_decay", settings)


def _with_settings(name: str, around: Sequence[Wrap], changes: Mapping[str, Mapping[str, Any]]) -> list[Wrap]:
    """Change settings of a method's wrappers, each named in `changes`."""
    known = [wrap.name for wrap in around]
    for wrapper in changes:
        if wrapper not in known:
            raise GradlabError(
                f"settings of wrapper {wrapper!r}, which {name} does not have: its wrappers are "
                f"{', '.join(known) or 'none'}"
            )
    return [Wrap(wrap.name, {**wrap.settings, **changes.get(wrap.name, {})}) for wrap in around]
