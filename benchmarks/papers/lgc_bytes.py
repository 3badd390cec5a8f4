"""LGC's bytes: the paper's Table VI counted again, part by part.

    python benchmarks lgc_bytes

Bytes per rank and iteration in the third phase, as the plans forecast them (positions are taken to be random), by the
shapes of ResNet-50 on 2 nodes and ResNet-101 on 4, with 0.1 % of every layer selected. The paper's numbers stand
beside: 102.2 MB for ResNet-50 are those of 1000 classes, 170 MB for ResNet-101 those of 10, or of 1000 in MiB. "code +
values" counts neither positions nor what is dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from gradlab.layout import Layer
from gradlab.plan import Plan, lgc_plan, payload_parts
from gradlab.plan.lgc_recipe import VECTORS

BLOCKS = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3)}
EXPANSION = 4  # of a bottleneck: channels out, in those of its 3 x 3 convolution
DENSITY = 0.001
# Model, nodes, classes.
COUNTED = (("ResNet-50", 2, 1000), ("ResNet-101", 4, 1000), ("ResNet-101", 4, 10))
# Table VI: size in MB and ratio; of a server, those of the rank that sends the common code and of another one.
PAPER = {
    ("ResNet-50", "top-k"): ("0.102", "1000"),
    ("ResNet-50", "ring"): ("0.032", "3193"),
    ("ResNet-50", "server"): ("0.017 / 0.012", "5709 / 8616"),
    ("ResNet-101", "top-k"): ("0.17", "1000"),
    ("ResNet-101", "ring"): ("0.074", "2297"),
    ("ResNet-101", "server"): ("0.021 / 0.01", "8095 / 17000"),
}


def resnet_layers(blocks: Sequence[int], classes: int) -> tuple[Layer, ...]:
    """List the layers of a ResNet of bottlenecks (He et al., CVPR 2016, Table 1), as many in each stage as `blocks`."""

    def convolution(name: str, outputs: int, inputs: int, size: int) -> Iterator[Layer]:
        yield Layer(f"{name}.weight", (outputs, inputs, size, size), "convolution")
        yield Layer(f"{name}.norm.weight", (outputs,), "normalization")
        yield Layer(f"{name}.norm.bias", (outputs,), "bias")

    layers, channels = [*convolution("conv1", 64, 3, 7)], 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            layers += convolution(f"{name}.conv1", width, channels, 1)
            layers += convolution(f"{name}.conv2", width, width, 3)
            layers += convolution(f"{name}.conv3", EXPANSION * width, width, 1)
            if not block:
                layers += convolution(f"{name}.downsample", EXPANSION * width, channels, 1)
            channels = EXPANSION * width
    return (*layers, Layer("fc.weight", (classes, channels), "linear"), Layer("fc.bias", (classes,), "bias"))


def plan(layers: Sequence[Layer], name: str, vectors: str) -> Plan:
    """Build a method's plan at the paper's density: "top-k", or an LGC pattern and where its vectors go."""
    if name == "top-k":
        every = {"minimum_dimensions": 0, "minimum_numel": 1}
        return Plan.uniform(layers, "topk", density=DENSITY, index_coding="smallest", **every)
    return lgc_plan(layers, name, density=DENSITY, vectors=vectors)


def counted() -> Iterator[list[str]]:
    """Yield a line for every method on every model, in kB, with ratios; ranks of a server that differ have a slash."""
    methods = [("top-k", "sparse"), *product(("ring", "server"), VECTORS)]
    for (model, nodes, classes), (name, vectors) in product(COUNTED, methods):
        layers = resnet_layers(BLOCKS[model], classes)
        mean, gradient = payload_parts(plan(layers, name, vectors), nodes), 4 * sum(layer.numel for layer in layers)
        of_server = [replace(mean, code=nodes * mean.code), replace(mean, code=0.0)]  # the code's sender, another
        ranks = of_server if name == "server" else [mean]
        cells = [_kilobytes([getattr(rank, key) for rank in ranks]) for key in ("code", "positions", "values", "dense")]
        for sums in ([rank.total for rank in ranks], [rank.code + rank.values for rank in ranks]):
            cells += [_kilobytes(sums), _apart([f"{gradient / one:.0f}" for one in sums])]
        what = name if name == "top-k" else f"{name}, vectors {vectors}"
        yield [f"{model}, {classes} classes, {nodes} nodes: {what}", *cells, *PAPER[model, name]]


def main() -> None:
    heads = ["", "code", "positions", "values", "dense", "sent", "ratio", "code + values", "its ratio"]
    heads += ["paper, MB", "its ratio"]
    lines = [f"| {' | '.join(line)} |" for line in counted()]
    print("\n".join(["|" + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1), *lines]))


def _kilobytes(sizes: Sequence[float]) -> str:
    return _apart([f"{size / 1e3:.2f}" for size in sizes])


def _apart(texts: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(texts))
