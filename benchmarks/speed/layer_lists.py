"""Lists of layers that benchmarks take for real models, made without the models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from torch import nn

from gradlab.layout import Layer


def resnet18() -> list[Layer]:
    """ResNet-18's weight matrices and the scales of its batch norms, CIFAR form: 11.7 million values."""
    layers, channels = [Layer("conv1.weight", (64, 3, 3, 3), "convolution")], 64
    for stage, block in product(range(4), range(2)):
        name, width = f"layer{stage + 1}.{block}", 64 * 2**stage
        layers.append(Layer(f"{name}.conv1.weight", (width, channels, 3, 3), "convolution"))
        layers.append(Layer(f"{name}.bn1.weight", (width,), "normalization"))
        layers.append(Layer(f"{name}.conv2.weight", (width, width, 3, 3), "convolution"))
        if channels != width:
            layers.append(Layer(f"{name}.downsample.weight", (width, channels, 1, 1), "convolution"))
        channels = width
    return [*layers, Layer("fc.weight", (1000, channels), "linear")]


def gpt2_small() -> list[Layer]:
    width = 768

    def vectors(name: str) -> list[Layer]:
        return [Layer(f"{name}.weight", (width,), "normalization"), Layer(f"{name}.bias", (width,), "bias")]

    layers = [Layer("wte.weight", (50257, width), "embedding"), Layer("wpe.weight", (1024, width), "embedding")]
    for block, (norm, part, products) in product(range(12), _GPT2_PARTS):
        layers += vectors(f"h.{block}.{norm}")
        for name, n, m in products:
            layers.append(Layer(f"h.{block}.{part}.{name}.weight", (n * width, m * width), "linear"))
            layers.append(Layer(f"h.{block}.{part}.{name}.bias", (m * width,), "bias"))
    return [*layers, *vectors("ln_f")]


_GPT2_PARTS = (
    ("ln_1", "attn", (("c_attn", 1, 3), ("c_proj", 1, 1))),
    ("ln_2", "mlp", (("c_fc", 1, 4), ("c_proj", 4, 1))),
)
# What the layers of a small model look like, one after another: matrices of several shapes, a vector to every matrix.
_SMALL = ((64, 64), (64,), (128, 64), (128,), (64, 128), (64,), (32, 32, 3, 3), (32,), (96, 48), (96,))
_ROLES = {1: "normalization", 2: "linear", 4: "convolution"}


def small_layers(count: int) -> list[Layer]:
    shapes = [_SMALL[at % len(_SMALL)] for at in range(count)]
    return [Layer(f"layer{at:04d}", shape, _ROLES[len(shape)]) for at, shape in enumerate(shapes)]


_MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda outputs, inputs: nn.Linear(inputs, outputs, bias=False, device="meta"),
    "convolution": lambda outputs, inputs, *kernel: nn.Conv2d(inputs, outputs, kernel, bias=False, device="meta"),
    "embedding": lambda *shape: nn.Embedding(*shape, device="meta"),
}


def on_device(layers: list[Layer]) -> nn.Module:
    """Make a model of these layers, under other names and without memory, for which plans are as for one on a GPU."""
    made = [_MODULES.get(one.role, lambda *shape: nn.LayerNorm(shape, bias=False, device="meta")) for one in layers]
    return nn.ModuleList(make(*one.shape) for make, one in zip(made, layers, strict=True))


LISTS: dict[str, Callable[[], list[Layer]]] = {
    "one tensor": lambda: [Layer("weight", (4096, 2700), "linear")],
    "ResNet-18": resnet18,
    "GPT-2 small": gpt2_small,
    "300 small layers": lambda: small_layers(300),
    "1,000 small layers": lambda: small_layers(1000),
}
