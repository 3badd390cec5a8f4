"""LGC's bytes: the paper's Table VI counted again, part by part.

    python benchmarks lgc_bytes

Bytes per rank and iteration in the third phase, as the plans forecast them: positions are taken to be random. Nothing
is trained. ResNet-50 on 2 nodes and ResNet-101 on 4, by the shapes of their layers, 0.1 % of every layer selected. The
102.2 MB that the paper gives for ResNet-50 are those of 1000 classes. Its 170 MB for ResNet-101 are those of 10, or of
1000 in MiB. The paper's numbers stand beside. "code + values" counts neither positions nor what is dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rows import Row

from gradlab.layout import Layer
from gradlab.plan import PayloadParts, Plan, lgc_plan, payload_parts
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
    """List the layers of a ResNet of bottleneck blocks (He et al., CVPR 2016, Table 1), in order.

    Args:
        blocks: bottlenecks of each of the four stages.
        classes: outputs of the last layer.

    Returns:
        Convolutions without biases, each followed by the weight and bias of its batch normalization; then the fully
        connected layer.
    """

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


@dataclass(frozen=True)
class Method:
    """A method of Table VI: "top-k", or an LGC pattern and where its vectors go."""

    name: str
    vectors: str = "dense"

    def plan(self, layers: Sequence[Layer]) -> Plan:
        """Build the method's plan, at the paper's density."""
        if self.name == "top-k":
            every = {"minimum_dimensions": 0, "minimum_numel": 1}
            return Plan.uniform(layers, "topk", density=DENSITY, index_coding="smallest", **every)
        return lgc_plan(layers, self.name, density=DENSITY, vectors=self.vectors)

    def ranks(self, layers: Sequence[Layer], nodes: int) -> list[PayloadParts]:
        """Return the parts of a mean rank; of a server, those of the code's sender and of another rank."""
        parts = payload_parts(self.plan(layers), nodes)
        if self.name != "server":
            return [parts]
        return [replace(parts, code=nodes * parts.code), replace(parts, code=0.0)]


def counted() -> Iterator[Row]:
    """Yield a row for every method on every model."""
    methods = [Method("top-k", "sparse"), *(Method(pattern, v) for pattern in ("ring", "server") for v in VECTORS)]
    for model, nodes, classes in COUNTED:
        layers = resnet_layers(BLOCKS[model], classes)
        for method in methods:
            yield {
                **{"model": model, "nodes": nodes, "classes": classes, **asdict(method)},
                "gradient": 4 * sum(layer.numel for layer in layers),
                "ranks": [asdict(parts) for parts in method.ranks(layers, nodes)],
                "paper": list(PAPER[model, method.name]),
            }


def table(rows: Sequence[Row]) -> str:
    """Tabulate rows in kB, with ratios; ranks that differ are apart by a slash."""
    head = ["code", "positions", "values", "dense", "sent", "ratio", "code + values", "its ratio"]
    head += ["paper, MB", "its ratio"]
    lines = ["| | " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(head)]
    for row in rows:
        ranks = [PayloadParts(**parts) for parts in row["ranks"]]
        bare = [rank.code + rank.values for rank in ranks]
        parts = [[getattr(rank, name) for rank in ranks] for name in ("code", "positions", "values", "dense")]
        cells = [_kilobytes(part) for part in parts]
        for sums in ([rank.total for rank in ranks], bare):
            cells += [_kilobytes(sums), _apart([f"{row['gradient'] / one:.0f}" for one in sums])]
        lines.append(f"| {_name(row)} | " + " | ".join([*cells, *row["paper"]]) + " |")
    return "\n".join(lines)


def _name(row: Row) -> str:
    what = row["name"] if row["name"] == "top-k" else f"{row['name']}, vectors {row['vectors']}"
    return f"{row['model']}, {row['classes']} classes, {row['nodes']} nodes: {what}"


def _kilobytes(sizes: Sequence[float]) -> str:
    return _apart([f"{size / 1e3:.2f}" for size in sizes])


def _apart(texts: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    print(table(list(counted())))
