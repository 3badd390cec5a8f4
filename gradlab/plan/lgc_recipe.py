"""LGC's plan of a model: the first layer dense, the last sparse, one autoencoder for what is selected of all others.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021,
section VI-A.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from gradlab.codec import Tensors
from gradlab.errors import GradlabError
from gradlab.layout import Layer, bare_names, layers_of
from gradlab.plan.coverage import list_roles
from gradlab.plan.plan import Group, Plan, Schedule, Wrap, groups_of_the_rest

PATTERNS = ("ring", "server")
VECTORS = ("dense", "autoencoder", "sparse")
GROUP, VECTORS_GROUP = "autoencoder", "vectors"


def graph_order(model: nn.Module) -> list[str]:
    """List names of parameters in the order in which torch.fx sees their modules called first, without those never
    called; for a model that torch.fx cannot trace, all in the order of registration."""
    registered = [name for name, _ in model.named_parameters()]
    bare = dict(zip(registered, bare_names(registered), strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.fx.symbolic_trace(model).graph
    except Exception:  # whatever a model's own code makes of a proxy
        return list(bare.values())
    called = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    ordered = dict.fromkeys(
        name for target in called for name in registered if name == target or name.startswith(f"{target}.")
    )
    return [bare[name] for name in ordered]


@dataclass(frozen=True, kw_only=True)
class LgcRecipe:
    """The parts of LGC's plan beside its codec's settings.

    Args:
        first, last: names of the first and the last layer; None: the first and the last matrix or convolution in the
            order of the model's graph (of recorded layers: in the order of registration).
        momentum: m of momentum correction, as in the paper's text. The optimizer's own must be 0. None: accumulation
            without momentum, as in the printed algorithms.
        vectors: place of biases, normalization vectors and layers below 256 elements: "dense"; "autoencoder", into its
            group, at least one value of each; "sparse", as the last layer, in one group of their own. The paper's
            Table VI counts no bytes for dense vectors.
        keep: kind of residual, see `error_feedback`: "unselected", the paper's, or "difference", the compression
            error.
        warmup_steps: dense iterations before the first compressed one.
        seed: seed of the random streams that ranks share.
    """

    first: str | None = None
    last: str | None = None
    vectors: str = "dense"
    momentum: float | None = None
    keep: str = "unselected"
    warmup_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vectors not in VECTORS:
            raise GradlabError(f"LGC: vectors = {self.vectors!r}, expected one of {', '.join(VECTORS)}")


def lgc_plan(
    model: nn.Module | Sequence[Layer],
    pattern: str = "ring",
    recipe: LgcRecipe | None = None,
    *,
    autoencoder: torch.Tensor | None = None,
    error: float | None = None,
    **settings: Any,
) -> Plan:
    """Build LGC's plan, with the codec `lgc_ring` or `lgc_server`: lgc_plan(model, "ring", momentum=0.9, density=0.01).

    The first layer stays dense, and so do vectors and layers below 256 elements unless `vectors` says otherwise. The
    last layer's largest values travel without the autoencoder: in a ring at a random leader's positions, to a server at
    each rank's own.

    >>> from gradlab.plan import lgc_plan
    >>> plan = lgc_plan([Layer(f"conv{n}.weight", (64, 64, 3, 3), "convolution") for n in range(4)])
    >>> [(group.codec, len(group.layers)) for group in plan.groups]
    [('lgc_ring', 2), ('clt_k', 1)]

    Args:
        model: the model, or its layers.
        pattern: "ring" or "server".
        recipe: None for `LgcRecipe()`.
        autoencoder: weights that were learned before, one vector (weights,).
        error: error of these weights on gradients that they were not learned from, relative to zeros. Above the
            codec's `most_error` the weights are not used.
        settings: settings of the codec, by name. A name that is a field of `LgcRecipe` (first, last, vectors,
            momentum, keep, warmup_steps, seed) replaces that field of `recipe`.

    Raises:
        GradlabError: for another pattern, an unknown layer, a model without a layer between the first and the last, or
            a setting out of range.
    """
    if pattern not in PATTERNS:
        raise GradlabError(f"LGC: pattern {pattern!r}, expected 'ring' or 'server'")
    changes = {item.name: settings.pop(item.name) for item in fields(LgcRecipe) if item.name in settings}
    recipe = replace(recipe or LgcRecipe(), **changes)
    layers = layers_of(model) if isinstance(model, nn.Module) else tuple(model)
    order = graph_order(model) if isinstance(model, nn.Module) else [layer.name for layer in layers]
    first, last = _ends(layers, order, recipe)
    around = _residuals(recipe.momentum, keep=recipe.keep)
    between, vectors = _between(layers, first, last), _vectors(layers, first, last)
    if recipe.vectors == "autoencoder":
        between = tuple(layer.name for layer in layers if layer.name in {*between, *vectors})
    groups = [Group(GROUP, between, f"lgc_{pattern}", settings, around)]
    sparse: dict[str, tuple[str, ...]] = {last: (last,)} if last not in ("", first) else {}
    if recipe.vectors == "sparse" and vectors:
        sparse[VECTORS_GROUP] = vectors
    codec, chosen = ("clt_k", {"leader": "random"}) if pattern == "ring" else ("topk", {})
    chosen = {"density": settings.get("density", 0.001), **chosen}
    groups += [Group(name, members, codec, chosen, _residuals(recipe.momentum)) for name, members in sparse.items()]
    compressed = {name for group in groups for name in group.layers}
    groups += groups_of_the_rest(layers, [layer for layer in layers if layer.name in compressed], around)
    schedule = Schedule(recipe.warmup_steps)
    return Plan(layers, tuple(groups), schedule, recipe.seed, _learned(autoencoder, error))


def _is_large(layer: Layer) -> bool:
    return layer.dimensions >= 2 and layer.numel >= 256


def _ends(layers: Sequence[Layer], order: Sequence[str], recipe: LgcRecipe) -> tuple[str, str]:
    """Names of the first and the last layer: the recipe's, or those of the large layers in `order`; "" without any."""
    by_name = {layer.name: layer for layer in layers}
    for name in (recipe.first, recipe.last):
        if name is not None and name not in by_name:
            raise GradlabError(f"LGC: no layer {name!r} in the model")
    large = [name for name in order if name in by_name and _is_large(by_name[name])] or [""]
    return recipe.first or large[0], recipe.last or large[-1]


def _between(layers: Sequence[Layer], first: str, last: str) -> tuple[str, ...]:
    """Names of the large layers that are neither the first nor the last."""
    large = [layer.name for layer in layers if _is_large(layer)]
    middle = tuple(name for name in large if name not in (first, last))
    if not middle:
        raise GradlabError(
            f"LGC: {len(large)} layers of two dimensions and 256 elements: the first stays dense and the last is sent "
            f"without the autoencoder, so that no layer is left to learn from; there are {list_roles(layers)}; take "
            "another method, such as powersgd"
        )
    return middle


def _vectors(layers: Sequence[Layer], first: str, last: str) -> tuple[str, ...]:
    """Names of the layers that are not large and neither the first nor the last; those without elements stay dense."""
    return tuple(x.name for x in layers if x.numel and not _is_large(x) and x.name not in (first, last))


def _residuals(momentum: float | None, **keep: str) -> tuple[Wrap, ...]:
    """The wrapper that keeps residuals: error feedback, or momentum correction where there is momentum."""
    if momentum is None:
        return (Wrap("error_feedback", {**keep, "step_size_ratio": False}),)
    return (Wrap("momentum_correction", {"momentum": momentum, **keep}),)


def _learned(autoencoder: torch.Tensor | None, error: float | None) -> dict[str, Tensors]:
    """Return the plan's autoencoder by group: its weights (weights,), and their error (1,)."""
    if autoencoder is None:
        return {}
    return {GROUP: {"autoencoder": autoencoder, **({} if error is None else {"error": torch.tensor([error])})}}
