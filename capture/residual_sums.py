"""Find the layers that read the result of a residual addition, in the autograd graph of one output.

Abrahamyan, Chen, Bekoulis and Deligiannis, "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS
2021, section III and Fig. 4: the gradients of layers that come after residual connections carry most information.

Autograd keeps an operation's operands as edges. The edge of an operand that needs no gradient (an input, a mask) is
None. The graph is read from the parameters to the output, every node once. A value computed from parameters alone
(transposed, scaled, multiplied) is a weight. A value computed from weights and data is an activation. If two
activations are added, the layers that read the sum are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import Node

from gradlab.layout import named_layers

# Products of two operands that are each either a weight or an activation.
_PRODUCTS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Linear"})
# In these a weight always meets data, even if the data are indices, which have no edge.
_LAYERS = re.compile(r"Conv(?!ert)|Embedding|Rnn")
# In these a parameter of any shape is a bias, a scale or a part of the result, never a matrix that multiplies.
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Lerp", "Addcmul", "Addcdiv", "Where", "Maximum", "Minimum", "Cat"}
    | {"Stack", "Copy", "CopySlices", "IndexPut", "Scatter", "SelectScatter", "SliceScatter", "PreluKernel"}
)


@dataclass(frozen=True)
class _Value:
    """The result of an operation.

    weight: it depends on parameters alone.
    matrix: it depends on a parameter of two dimensions or more.
    summed: it is a sum of two activations, or computed from such a sum without another matrix.
    """

    weight: bool = False
    matrix: bool = False
    summed: bool = False


def layers_after_addition(output: torch.Tensor, model: nn.Module) -> tuple[str, ...]:
    """Name, in order of registration, the parameters of matrices whose operation reads a sum of two activations.

    Both activations depend on parameter matrices. Operations without one may lie between the sum and that operation:
    element-wise functions, normalisation, reshapes, pooling, dropout, operations unknown here. A bias of any shape is
    not an activation. Two embeddings are two activations. A residual branch around the model's input is not seen,
    because the input depends on no parameter. The graph of the output (or loss) is only read: nothing is computed or
    changed.

    A parameter that several operations use is named if one of them reads a sum. A parameter is left out if the output
    does not depend on it, or if its operation has several matrices at once (one compiled into a single node, cuDNN's
    LSTM).
    """
    if output.grad_fn is None:
        return ()
    reading = {id(parameter) for parameter in _parameters_in(_reading_weights(output.grad_fn))}
    return tuple(
        layer.name for layer, parameter in named_layers(model) if id(parameter) in reading and parameter.ndim > 1
    )


def _reading_weights(root: Node) -> list[Node]:
    """Return the nodes of weights that are applied to a sum."""
    values: dict[Node, _Value] = {}
    weights = []
    for node in _operands_first([root]):
        operands = [None if before is None else values[before] for before, _ in node.next_functions]
        values[node] = _value(node, operands)
        matrices = _own_matrices(node, operands)
        if len(matrices) == 1 and any(operand is not None and operand.summed for operand in operands):
            weights += matrices
    return weights


def _operands_first(roots: Iterable[Node]) -> list[Node]:
    """Return all nodes that the roots lead to, each once and after its operands; no recursion, as networks are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, finished = waiting.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(before, False) for before, _ in node.next_functions if before is not None]
    return order


def _value(node: Node, operands: Sequence[_Value | None]) -> _Value:
    known = [operand for operand in operands if operand is not None]
    if not node.next_functions:
        return _leaf(node)
    matrix = any(operand.matrix for operand in known)
    if all(operand.weight for operand in known):
        return _Value(weight=not _meets_data(node, operands), matrix=matrix)
    if _is_residual(node, operands):
        return _Value(matrix=True, summed=True)
    # An operand without gradient may be a matrix that is not trained, in a product that has one activation only.
    through_matrix = bool(_own_matrices(node, operands)) or (_multiplies(node) and None in operands)
    return _Value(matrix=matrix, summed=not through_matrix and any(operand.summed for operand in known))


def _leaf(node: Node) -> _Value:
    """Return the value of a leaf: a parameter, or data whose gradient someone wants."""
    variable = getattr(node, "variable", None)
    if not isinstance(variable, nn.Parameter):
        return _Value()
    return _Value(weight=True, matrix=variable.ndim > 1)


def _is_residual(node: Node, operands: Sequence[_Value | None]) -> bool:
    """Tell whether a node adds two different activations that depend on matrices: not a bias, not x + x."""
    both = [operand for operand in operands if operand is not None and operand.matrix and not operand.weight]
    return _kind(node) == "Add" and len(both) == 2 and len(set(node.next_functions)) == 2


def _meets_data(node: Node, operands: Sequence[_Value | None]) -> bool:
    """Tell whether an operation on weights also reads data that need no gradient.

    It does not where weights are multiplied (B A of a low-rank update) or masked.
    """
    if _kind(node) in _PRODUCTS:
        return any(operand is None or not operand.matrix for operand in operands)
    return _multiplies(node)


def _own_matrices(node: Node, operands: Sequence[_Value | None]) -> list[Node]:
    """Return the weights with a matrix that the operation applies to an activation."""
    kind = _kind(node)
    if kind in _ELEMENTWISE or "Norm" in kind or all(operand is None or operand.weight for operand in operands):
        return []
    edges = zip(node.next_functions, operands, strict=True)
    return [source for (source, _), operand in edges if source and operand and operand.weight and operand.matrix]


def _multiplies(node: Node) -> bool:
    return _kind(node) in _PRODUCTS or _LAYERS.search(_kind(node)) is not None


def _kind(node: Node) -> str:
    """Name the operation: "Addmm" of AddmmBackward0, "CopySlices" of torch::autograd::CopySlices."""
    return re.sub(r"Backwards?\d*$", "", node.name().rpartition("::")[2])


def _parameters_in(weights: Iterable[Node]) -> list[nn.Parameter]:
    """Return the parameters that weights are computed from."""
    leaves = [getattr(node, "variable", None) for node in _operands_first(weights)]
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
