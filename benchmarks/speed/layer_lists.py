"""Lists of layers that benchmarks take for real models, made without the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradlab.layout import Layer

# What the layers of a small model look like, one after another: matrices of several shapes, a vector to every matrix.
_SMALL = ((64, 64), (64,), (128, 64), (128,), (64, 128), (64,), (32, 32, 3, 3), (32,), (96, 48), (96,))


def one_tensor() -> list[Layer]:
    """One matrix of 11 million values."""
    return [Layer("weight", (4096, 2700), "linear")]


def resnet(widths: Sequence[int], blocks: int, classes: int) -> list[Layer]:
    """List a residual network's weight matrices and the scales of its batch norms, CIFAR form; a stage per width."""
    channels = widths[0]
    layers = [Layer("conv1.weight", (channels, 3, 3, 3), "convolution")]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            layers.append(Layer(f"{name}.conv1.weight", (width, channels, 3, 3), "convolution"))
            layers.append(Layer(f"{name}.bn1.weight", (width,), "normalization"))
            layers.append(Layer(f"{name}.conv2.weight", (width, width, 3, 3), "convolution"))
            if channels != width:
                layers.append(Layer(f"{name}.downsample.weight", (width, channels, 1, 1), "convolution"))
            channels = width
    return [*layers, Layer("fc.weight", (classes, channels), "linear")]


def resnet18() -> list[Layer]:
    """ResNet-18: 11.7 million values."""
    return resnet((64, 128, 256, 512), 2, 1000)


def gpt2_small() -> list[Layer]:
    """GPT-2 small: 124 million values in 148 layers."""
    width = 768

    def vectors(name: str, size: int) -> list[Layer]:
        return [Layer(f"{name}.weight", (size,), "normalization"), Layer(f"{name}.bias", (size,), "bias")]

    layers = [Layer("wte.weight", (50257, width), "embedding"), Layer("wpe.weight", (1024, width), "embedding")]
    for block in range(12):
        for norm, products in (("ln_1", ("attn.c_attn", "attn.c_proj")), ("ln_2", ("mlp.c_fc", "mlp.c_proj"))):
            layers += vectors(f"h.{block}.{norm}", width)
            for product in products:
                n, m = _GPT2_PRODUCTS[product]
                layers.append(Layer(f"h.{block}.{product}.weight", (n * width, m * width), "linear"))
                layers.append(Layer(f"h.{block}.{product}.bias", (m * width,), "bias"))
    return [*layers, *vectors("ln_f", width)]


_GPT2_PRODUCTS = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}


def small_layers(count: int) -> list[Layer]:
    """So many layers of 32 to 9216 values, of ten shapes in turn, every other one a vector."""
    shapes = [_SMALL[at % len(_SMALL)] for at in range(count)]
    return [Layer(f"layer{at:04d}", shape, _role(shape)) for at, shape in enumerate(shapes)]


def _role(shape: tuple[int, ...]) -> str:
    return {1: "normalization", 2: "linear"}.get(len(shape), "convolution")


LISTS: dict[str, Callable[[], list[Layer]]] = {
    "one tensor": one_tensor,
    "ResNet-18": resnet18,
    "GPT-2 small": gpt2_small,
    "300 small layers": lambda: small_layers(300),
    "1,000 small layers": lambda: small_layers(1000),
}
