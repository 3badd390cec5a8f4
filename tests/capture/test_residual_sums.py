"""Which layers read a residual sum: networks whose answer is plain, random ones against an oracle, and odd graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gradlab.capture.residual_sums import layers_after_addition
from gradlab.cli.train.settings import TrainSettings
from gradlab.cli.train.trainer import trace_metadata
from gradlab.datasets import convnet, get, pspnet, resnet, transformer
from gradlab.trace import Trace
from support.command_line import Command
from support.laws import law

DIGITS = ["stages.1.0.conv1.weight", "stages.1.1.conv1.weight", "stages.2.0.conv1.weight", "head.weight"]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# --- networks -------------------------------------------------------------------------------------------------------


def test_in_a_residual_network_the_first_convolution_of_a_block_and_the_head() -> None:
    """Not the first block's: it reads the stem."""
    model = resnet.initialized(channels=1, widths=(4, 8, 8), blocks=(1, 2, 1), classes=3, seed=0)
    assert layers_after_addition(model(normal(2, 1, 8, 8)), model) == tuple(DIGITS)


def test_in_a_transformer_what_reads_the_stream() -> None:
    """Attention's and the feed-forward network's first matrix, and the output layer, which the embedding is as well."""
    model = transformer.initialized(transformer.TransformerSize(11, 5, width=8, layers=2, heads=2), seed=0)
    loss = functional.cross_entropy(model(torch.arange(10).view(2, 5)).flatten(0, 1), torch.arange(10))
    blocks = [f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("attention.qkv", "hidden")]
    assert layers_after_addition(loss, model) == ("tokens.weight", *blocks)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_in_torchs_own_transformer_layers(norm_first: bool, batch_first: bool) -> None:
    """Normalised before the branches or after them. The first attention reads a linear layer, not a sum."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=batch_first) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 8), *layers)
    expected = ("1.linear1.weight", "2.self_attn.in_proj_weight", "2.linear1.weight")
    assert layers_after_addition(model(normal(2, 4, 3)), model) == expected


def test_in_a_pyramid_all_that_reads_the_last_block_pooled_or_concatenated() -> None:
    model = pspnet.initialized((4, 4, 4, 4), classes=3, seed=0)
    layers = layers_after_addition(model(normal(2, 3, 16, 16)), model)
    stages = [f"stages.{n}.conv1.weight" for n in (1, 2, 3)]
    assert layers == (*stages, *(f"pyramid.reduced.{n}.weight" for n in range(4)), "joined.weight")


def test_in_a_plain_network_none() -> None:
    model = convnet.initialized(classes=3, seed=0)
    assert layers_after_addition(model(normal(2, 1, 28, 28)), model) == ()


Step = tuple[str, int, int]
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "norm": lambda x: functional.layer_norm(x, (4,)),
    "reshape": lambda x: x.reshape(2, 3, 2, 2).transpose(2, 3).flatten(2),
    "pool": lambda x: x - x.mean(1, keepdim=True),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "scale": lambda x: 0.5 * x,
    "attend": lambda x: x.softmax(-1) @ x.transpose(1, 2) @ x,
}


@law(
    st.lists(
        st.tuples(st.sampled_from(["linear", "add", *SHAPES]), st.integers(0, 99), st.integers(0, 99)), max_size=15
    ),
    st.booleans(),
)
def test_random_networks_against_an_oracle_that_goes_forward(steps: Sequence[Step], bias: bool) -> None:
    """The oracle keeps two facts beside every tensor: whether a matrix made it, and whether it is a sum."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=bias) for kind, _, _ in steps if kind == "linear")
    layers, expected = iter(model.named_children()), []
    values = [(normal(2, 3, 4), False, False)]
    for kind, first, second in steps:
        (x, made, summed), (y, other, of_sum) = (values[place % len(values)] for place in (first, second))
        if kind == "linear":
            name, layer = next(layers)
            expected += [f"{name}.weight"] if summed else []
            values.append((layer(x), True, False))
        elif kind == "add":
            both = made and other and x is not y
            values.append((x + y, made or other, summed or of_sum or both))
        else:
            values.append((SHAPES[kind](x), made, summed))
    output = torch.stack([x for x, _, _ in values]).sum()
    assert layers_after_addition(output, model) == tuple(expected)


# --- odd graphs -----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """last(combine(first(x), second(x))) of one matrix each."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), last
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.combine(self.first(x), self.second(x)))


def layers_in(model: nn.Module, *shape: int) -> tuple[str, ...]:
    return layers_after_addition(model(normal(*(shape or (3, 4)))), model)


class Doubled(torch.autograd.Function):
    """A function of someone's own: unknown here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class OwnProduct(torch.autograd.Function):
    """A linear layer of someone's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.T, x.T @ gradients[0]


class TwoProducts(torch.autograd.Function):
    """Two layers in one node; nothing asks for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return x @ first @ second


def written_over(x: torch.Tensor, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A parameter in place of the first row, as class tokens are put in."""
    x = x.clone()
    x[:1] = row
    return x @ weight


class Applied(nn.Module):
    """A function of an activation and parameters of the given shapes, called 0, 1, ..."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.own)


@pytest.mark.parametrize(
    "combine",
    [
        torch.add,
        lambda a, b: a.add_(b),
        lambda a, b: torch.cat([a + b, a], 1)[:, :4],
        lambda a, b: Doubled.apply(a + b),
        lambda a, b: 0.1 * (a + 2 * b) + 1,
    ],
)
def test_sums_of_two_branches(combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert layers_in(Branches(combine, nn.Linear(4, 2))) == ("last.weight",)


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a * b,
        lambda a, b: a - b,
        lambda a, b: a + a,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a + b.detach(),
        lambda a, b: a + torch.ones(3, 4),
    ],
)
def test_what_is_no_sum_of_two_branches(combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert layers_in(Branches(combine, nn.Linear(4, 2))) == ()


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (Applied(lambda x, w: x @ w, (4, 2)), ("last.own.0",)),
        (Applied(OwnProduct.apply, (4, 2)), ("last.own.0",)),
        (Applied(lambda x, w: torch.einsum("bi,oi->bo", x, w), (2, 4)), ("last.own.0",)),
        (Applied(lambda x, w: functional.conv1d(x[:, None], w), (2, 1, 3)), ("last.own.0",)),
        # A mask on a weight, and a low-rank update: all parameters that make up the matrix.
        (Applied(lambda x, w: x @ (w * torch.eye(4)), (4, 4)), ("last.own.0",)),
        (Applied(lambda x, w, b, a: x @ (w + b @ a), (4, 4), (4, 1), (1, 4)), tuple(f"last.own.{n}" for n in range(3))),
        (nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 2)), ("last.1.weight",)),
        (Applied(written_over, (1, 4), (4, 2)), ("last.own.1",)),
        # A scale and a bias are not what a layer multiplies by, whatever their shape.
        (Applied(lambda x, s, b, w: (x * s + b) @ w, (1, 4), (3, 4), (4, 2)), ("last.own.2",)),
    ],
)
def test_what_reads_the_sum(last: nn.Module, expected: tuple[str, ...]) -> None:
    assert layers_in(Branches(torch.add, last)) == expected


def test_an_operation_on_several_matrices_names_none() -> None:
    """As one compiled into a single node, or cuDNN's LSTM: which of them reads the sum cannot be told."""
    two = Applied(TwoProducts.apply, (4, 4), (4, 4))
    assert layers_in(Branches(torch.add, two)) == ()
    assert layers_in(Branches(torch.add, nn.Sequential(two, nn.Linear(4, 4)))) == ()


def test_inputs_that_are_normalised_are_data_and_not_weights() -> None:
    """Autograd sees parameters of the normalisation only, which then meet a matrix, as weights meet each other."""
    model = Branches(torch.add, nn.Linear(4, 2))
    for name in ("first", "second"):
        setattr(model, name, nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)))
    assert layers_in(model) == ("last.weight",)


def test_a_bias_of_the_inputs_shape_is_no_branch() -> None:
    """As learned positions are; a sum of two embeddings is one of two activations."""
    model = nn.Sequential(nn.Linear(4, 4), Applied(torch.add, (3, 4)), nn.Linear(4, 2))
    assert layers_in(model) == ()


def test_a_matrix_that_is_not_trained_stands_between_all_the_same() -> None:
    for last in (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)):
        model = Branches(torch.add, nn.Sequential(last.requires_grad_(False), nn.Linear(4, 2)))
        assert layers_in(model) == ()


def test_a_layer_used_twice_is_named_if_it_reads_a_sum_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, Branches(torch.add, shared), nn.Linear(4, 4))
    assert layers_in(model) == ("0.weight",)


def test_parameters_outside_the_graph_and_outputs_without_one() -> None:
    model = Branches(torch.add, nn.Linear(4, 2))
    model.unused = nn.Linear(4, 4)
    assert layers_in(model) == ("last.weight",)
    assert layers_after_addition(model(normal(3, 4)), nn.Linear(4, 4)) == ()
    assert layers_after_addition(model(normal(3, 4)).detach(), model) == ()
    assert layers_after_addition(model.last.weight, model) == ()
    with torch.no_grad():
        assert layers_in(model) == ()


def test_an_input_that_wants_a_gradient_is_no_branch() -> None:
    """Nor is it a weight, although it is a leaf of the graph."""
    x = normal(3, 4).requires_grad_()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert layers_after_addition(model[1](x + model[0](x)), model) == ()


def test_names_are_those_of_the_bare_model() -> None:
    model = nn.Module()
    model.module = Branches(torch.add, nn.Linear(4, 2))
    assert layers_after_addition(model.module(normal(3, 4)), model) == ("last.weight",)


def test_a_deep_graph_of_many_paths_takes_a_moment() -> None:
    """5000 sums of two: more than Python's recursion allows, 2 to the power of 5000 paths."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = model[0](normal(1, 4))
    for _ in range(5000):
        x = x + x.abs()
    assert layers_after_addition(model[1](x), model) == ("1.weight",)


def test_nothing_is_changed_and_the_backward_pass_may_be_over() -> None:
    model = resnet.initialized(channels=1, widths=(4, 4), blocks=(1, 1), classes=3, seed=0)
    before = copy.deepcopy(model.state_dict())
    output = model.eval()(normal(2, 1, 8, 8)).sum()
    expected = layers_after_addition(output, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    output.backward()
    assert layers_after_addition(output, model) == expected == ("stages.1.0.conv1.weight", "head.weight")


# --- in a trace -----------------------------------------------------------------------------------------------------


def test_a_recording_of_the_reference_trainer_says_so(gradlab: Command, tmp_path: Path) -> None:
    words = ["train", "digits", "--emulate", 2, "--steps", 1, "--batch-size", 2, "--capture", tmp_path / "trace"]
    code, _, err = gradlab(*words)
    assert code == 0, err
    with Trace(tmp_path / "trace") as trace:
        assert trace.metadata["after_addition"] == DIGITS
        assert set(DIGITS) <= {layer.name for layer in trace.layers}
        assert trace.metadata["batch_size"] == 2


def test_asking_advances_no_generator() -> None:
    workload, settings = get("digits"), TrainSettings("digits", capture="trace")
    data, state = workload.load(train_limit=8), torch.get_rng_state()
    metadata = trace_metadata(settings, workload, workload.recipe, data)
    assert metadata["after_addition"] == DIGITS
    assert torch.equal(torch.get_rng_state(), state)
