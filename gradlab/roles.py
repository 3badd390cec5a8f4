"""The role of a parameter, by its module's class and attributes and its name.

Classes of transformers and of other libraries are known by their names and attributes, so that none has to be there.
A weight's first axis is taken for its outputs, as `torch.nn.functional.linear` has it, unless the role is a transposed
one.
"""

from __future__ import annotations

import re

import torch
from torch import nn

WEIGHTS = (
    "convolution",
    "transposed_convolution",
    "linear",
    "transposed_linear",
    "embedding",
    "experts",
    "transposed_experts",
)
ROLES = (*WEIGHTS, "normalization", "bias", "other")
# Layers of three dimensions that are a batch of matrices, one per expert.
STACKS = frozenset({"experts", "transposed_experts"})
# Layers whose weight has its inputs before its outputs.
TRANSPOSED = frozenset({"transposed_convolution", "transposed_linear", "transposed_experts"})

_BIAS = re.compile(r"(^|_)bias(_(?!table)|$)")  # a table of biases is looked up, as embeddings are
# Position embeddings, class tokens and the like, which models keep as parameters of their own.
_EMBEDDING = re.compile(r"(^|_)(pos|positions?|positional|emb|embed|embeddings?|tokens?)(_|$)")
_LINEAR = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def module_role(module: nn.Module, name: str, parameter: torch.Tensor) -> str:
    """Return the role of a module's parameter, one of `ROLES`; "other" is what no rule knows, never a matrix of
    `torch.nn`."""
    normalizes = isinstance(module, _NORMS) or (parameter.ndim < 2 and _class_has(module, "norm"))
    if _BIAS.search(name) or (normalizes and name == "beta"):
        return "bias"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "transposed_convolution" if module.transposed else "convolution"
    if isinstance(module, _LINEAR):
        return "linear"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if normalizes:
        return "normalization"
    return _by_name(module, name, parameter)


def _by_name(module: nn.Module, name: str, parameter: torch.Tensor) -> str:
    """The role of a parameter whose module's class is not one of `torch.nn`."""
    if parameter.ndim > 0 and _EMBEDDING.search(name):
        return "embedding"
    if parameter.ndim == 3 and _holds_experts(module, len(parameter)):
        return "transposed_experts" if _inputs_first(module, name, parameter) else "experts"
    if parameter.ndim != 2:
        return "other"
    if any(base.__name__ == "Conv1D" for base in type(module).__mro__) and hasattr(module, "nf"):
        return "transposed_linear"  # transformers.pytorch_utils.Conv1D, of GPT-2
    if name == "weight" and _class_has(module, "embedding"):
        return "embedding"
    return "linear" if name.endswith("weight") or _class_has(module, "expert") else "other"


def _class_has(module: nn.Module, word: str) -> bool:
    return word in type(module).__name__.lower()


def _holds_experts(module: nn.Module, count: int) -> bool:
    counts = (getattr(module, name, None) for name in ("num_experts", "num_local_experts"))
    return _class_has(module, "expert") or count in counts


def _inputs_first(module: nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """Return whether an expert stack is (E, inputs, outputs): as the module states, or by its hidden size, which
    projections down to it have as their outputs, all others as their inputs."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    rows, columns = parameter.shape[1:]
    if rows == columns or hidden not in (rows, columns):
        return False
    return (rows == hidden) != ("down" in name)
