"""LGC's plan of a model: the first layer dense, the last sparse, one autoencoder for what is selected of all others.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021,
section VI-A.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import Layer, layers_of
from gradlab.plan.plan import Group, Plan, Schedule, Wrap, groups_of_the_rest

PATTERNS = ("ring", "server")
GROUP = "autoencoder"
_DENSE_STEPS = 200


def graph_order(model: nn.Module) -> list[str]:
    """List a model's parameters in the order in which torch.fx sees their modules called first.

    Parameters of modules that are never called are left out. For a model that torch.fx cannot trace, the order is that
    of registration, and no parameter is left out.

    Args:
        model: any model.

    Returns:
        Names of parameters.
    """
    registered = [name for name, _ in model.named_parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.fx.symbolic_trace(model).graph
    except Exception:  # whatever a model's own code makes of a proxy
        return registered
    called = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    ordered = dict.fromkeys(
        name for target in called for name in registered if name == target or name.startswith(f"{target}.")
    )
    return list(ordered)


def lgc_plan(
    model: nn.Module | Sequence[Layer],
    pattern: str = "ring",
    *,
    first: str | None = None,
    last: str | None = None,
    momentum: float | None = None,
    keep: str = "unselected",
    warmup_steps: int = _DENSE_STEPS,
    autoencoder: torch.Tensor | None = None,
    error: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Plan:
    """Build LGC's plan, with the codec `lgc_ring` or `lgc_server`.

    The first layer, vectors and layers below 256 elements stay dense. The last layer's largest values travel without
    the autoencoder: in a ring at a random leader's positions, to a server at each rank's own.

    Args:
        model: the model, or its layers.
        pattern: "ring" or "server".
        first, last: names of the first and the last layer; None: the first and the last matrix or convolution in the
            order of the model's graph (of recorded layers: in the order of registration).
        momentum: m of momentum correction, as in the paper's text; the optimizer's own must be 0. None: accumulation
            without momentum, as in the printed algorithms.
        keep: what a residual is, see `error_feedback`: "unselected", the paper's, or "difference", the compression
            error.
        warmup_steps: dense iterations before the first compressed one.
        autoencoder: weights that were learned before, one vector (weights,).
        error: of these weights on gradients that they were not learned from, relative to sending zeros. Above the
            codec's `most_error` the weights are not used.
        seed: of the random streams that ranks share.
        settings: of the codec.

    Raises:
        GradlabError: for another pattern, an unknown layer, a model without a layer between the first and the last, or
            a setting out of range.
    """
    if pattern not in PATTERNS:
        raise GradlabError(f"LGC: pattern {pattern!r}, expected 'ring' or 'server'")
    layers = layers_of(model) if isinstance(model, nn.Module) else tuple(model)
    by_name = {layer.name: layer for layer in layers}
    order = graph_order(model) if isinstance(model, nn.Module) else list(by_name)
    large = [name for name in order if name in by_name and _is_large(by_name[name])]
    for name in (first, last):
        if name is not None and name not in by_name:
            raise GradlabError(f"LGC: no layer {name!r} in the model")
    ends = {first or (large[0] if large else ""), last or (large[-1] if large else "")}
    middle = tuple(layer.name for layer in layers if _is_large(layer) and layer.name not in ends)
    if not middle:
        raise GradlabError(
            f"LGC: {len(large)} layers of two dimensions and 256 elements: the first stays dense and the last is sent "
            "without the autoencoder, so that no layer is left to learn from"
        )
    if momentum is None:
        around: tuple[Wrap, ...] = (Wrap("error_feedback", {"keep": keep, "step_size_ratio": False}),)
        exact: tuple[Wrap, ...] = (Wrap("error_feedback", {"step_size_ratio": False}),)
    else:
        around = (Wrap("momentum_correction", {"momentum": momentum, "keep": keep}),)
        exact = (Wrap("momentum_correction", {"momentum": momentum}),)
    groups = [Group(GROUP, middle, f"lgc_{pattern}", settings, around)]
    end = last or large[-1]
    density = settings.get("density", 0.001)
    if end != (first or large[0]):
        sparse = ("clt_k", {"leader": "random"}) if pattern == "ring" else ("topk", {})
        groups.append(Group(end, (end,), sparse[0], {"density": density, **sparse[1]}, exact))
    compressed = [by_name[name] for group in groups for name in group.layers]
    groups += groups_of_the_rest(layers, compressed, around)
    learned = {} if autoencoder is None else {GROUP: {"autoencoder": autoencoder}}
    if autoencoder is not None and error is not None:
        learned[GROUP]["error"] = torch.tensor([error])
    return Plan(layers, tuple(groups), Schedule(warmup_steps), seed, learned)


def _is_large(layer: Layer) -> bool:
    return len(layer.shape) >= 2 and layer.numel >= 256
