"""What LGC's bytes are: the paper's Table VI counted again, and the ratios of docs/lgc.md, part by part.

    python benchmarks lgc_bytes table6 [--rows rows.jsonl]
    python benchmarks lgc_bytes trained --train benchmarks/results/lgc-training.jsonl [--rows rows.jsonl]

Bytes per rank and iteration in the third phase, as the plans forecast them: positions are taken to be random. Nothing
is trained here.

table6: ResNet-50 on 2 nodes and ResNet-101 on 4, by the shapes of their layers, 0.1 % of every layer selected. The
102.2 MB that the paper gives for ResNet-50 are those of 1000 classes. Its 170 MB for ResNet-101 are those of 10, or of
1000 in MiB. The paper's numbers stand beside. "code + values" counts neither positions nor what is dense.

trained: the plans of `benchmarks/papers/lgc.py`, beside the bytes that its runs counted in their last 50 iterations.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lgc import METHODS, RANKS, tasks
from rows import Row, read

from gradlab.layout import Layer, layers_of
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


def table6_rows() -> Iterator[Row]:
    """Yield a row for every method on every model."""
    methods = [Method("top-k", "sparse"), *(Method(pattern, v) for pattern in ("ring", "server") for v in VECTORS)]
    for model, nodes, classes in COUNTED:
        layers = resnet_layers(BLOCKS[model], classes)
        for method in methods:
            yield {
                "table": "table6",
                **{"model": model, "nodes": nodes, "classes": classes, **asdict(method)},
                "gradient": 4 * sum(layer.numel for layer in layers),
                "ranks": [asdict(parts) for parts in method.ranks(layers, nodes)],
                "paper": list(PAPER[model, method.name]),
            }


def trained_rows(runs: Sequence[Row]) -> Iterator[Row]:
    """Yield a row for every method that `benchmarks/papers/lgc.py` trained, with the bytes that the runs counted."""
    for task, setting in tasks().items():
        model = setting.task.model(0)
        gradient = 4 * sum(layer.numel for layer in layers_of(model))
        for method, make in METHODS.items():
            ended = [gradient / row["last_ratio"] for row in runs if (row["task"], row["method"]) == (task, method)]
            if ended and method != "dense":
                yield {
                    "table": "trained",
                    **{"task": task, "method": method, "gradient": gradient},
                    "ranks": [asdict(payload_parts(make(setting, model), RANKS))],
                    "counted": statistics.fmean(ended),
                }


def table(rows: Sequence[Row]) -> str:
    """Tabulate rows of one table in kB, with ratios; ranks that differ are apart by a slash."""
    head = ["code", "positions", "values", "dense", "sent", "ratio", "code + values", "its ratio"]
    head += ["paper, MB", "its ratio"] if rows[0]["table"] == "table6" else ["counted", "its ratio"]
    lines = ["| | " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(head)]
    for row in rows:
        ranks = [PayloadParts(**parts) for parts in row["ranks"]]
        bare = [rank.code + rank.values for rank in ranks]
        parts = [[getattr(rank, name) for rank in ranks] for name in ("code", "positions", "values", "dense")]
        cells = [_kilobytes(part) for part in parts]
        for sums in ([rank.total for rank in ranks], bare):
            cells += [_kilobytes(sums), _apart([f"{row['gradient'] / one:.0f}" for one in sums])]
        lines.append(f"| {_name(row)} | " + " | ".join([*cells, *_beside(row)]) + " |")
    return "\n".join(lines)


def _name(row: Row) -> str:
    if row["table"] == "trained":
        return f"{row['task']}: {row['method']}"
    what = row["name"] if row["name"] == "top-k" else f"{row['name']}, vectors {row['vectors']}"
    return f"{row['model']}, {row['classes']} classes, {row['nodes']} nodes: {what}"


def _beside(row: Row) -> list[str]:
    if row["table"] == "table6":
        return list(row["paper"])
    return [_kilobytes([row["counted"]]), f"{row['gradient'] / row['counted']:.0f}"]


def _kilobytes(sizes: Sequence[float]) -> str:
    return _apart([f"{size / 1e3:.2f}" for size in sizes])


def _apart(texts: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["table6", "trained"])
    parser.add_argument("--train", type=Path, help="rows of benchmarks/papers/lgc.py")
    parser.add_argument("--rows", type=Path, help="keep the rows there, in place of the table's old ones")
    chosen = parser.parse_args()
    if chosen.table == "trained" and chosen.train is None:
        parser.error("trained: --train is needed, the rows of benchmarks/papers/lgc.py")
    rows = list(table6_rows() if chosen.table == "table6" else trained_rows(read(chosen.train)))
    print(table(rows))
    if chosen.rows:
        others = [row for row in read(chosen.rows) if row["table"] != chosen.table]
        chosen.rows.write_text("".join(f"{json.dumps(row)}\n" for row in [*others, *rows]))


if __name__ == "__main__":
    main()
