"""All layers in a table, and a page for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.report.between_ranks import with_interval
from gradlab.analysis.report.layer_matrix import plans_on_layer
from gradlab.analysis.report.limits import USEFUL
from gradlab.analysis.report.page import Drawing, Section
from gradlab.analysis.report.tables import layer_table
from gradlab.formatting import format_count

Json = Mapping[str, Any]

_MOST_COMPARED = 100  # layers, the largest, on whose pages plans are compared


def layers_section(data: Json, figures: int) -> Section:
    """Make the page of all layers."""
    table, anchors = layer_table(data["spectrum"]), layer_anchors(data)
    parts = [_layer(data, layer, figures) for layer in data["spectrum"]["layers"]]
    return Section("layers", "All layers", "", [table.linked(anchors)], parts=parts)


def layer_anchors(data: Json) -> dict[str, str]:
    """Name the anchors of the layers' pages, by the layers' names."""
    return {layer["name"]: f"layer-{place}" for place, layer in enumerate(data["spectrum"]["layers"])}


def _layer(data: Json, layer: Json, figures: int) -> Section:
    name, anchor = layer["name"], layer_anchors(data)[layer["name"]]
    drawings: Sequence[Drawing] = ()
    if _among_largest(data, name, figures):
        draw = partial(information_plots.plot_layer, data, name)
        caption = "What ranks share, its spectrum, and codecs above its floor."
        drawings = [Drawing(anchor.replace("-", "_"), name, caption, draw)]
    tables = plans_on_layer(data["replays"], name) if _among_largest(data, name, _MOST_COMPARED) else []
    return Section(anchor, name, "; ".join(_facts(data, layer)) + ".", tables, drawings, of_layer=True)


def _among_largest(data: Json, name: str, count: int) -> bool:
    largest = sorted(data["spectrum"]["layers"], key=lambda layer: -prod(layer["shape"]))[:count]
    return any(layer["name"] == name for layer in largest)


def _facts(data: Json, layer: Json) -> list[str]:
    name = layer["name"]
    between = information_plots.named_layer(data.get("between_nodes"), name)
    facts = [
        " x ".join(map(str, layer["shape"])),
        f"{format_count(prod(layer['shape']))} parameters",
        *(between["place"] if between else []),
    ]
    if layer["mean_cosine"] is not None:
        facts.append(f"cosine between ranks {layer['mean_cosine']:.2f}")
    if between:
        facts.append(f"excess {with_interval(between['estimators']['copula']['excess'], 'bits', 3)} bits (copula)")
    limit = information_plots.named_layer(data.get("limits"), name)
    useful = [row for row in (limit or {}).get("codecs", ()) if USEFUL[0] <= row["relative_error"] <= USEFUL[1]]
    if useful:
        best = min(useful, key=lambda row: row["above_floor"])
        facts.append(f"nearest to the floor: {best['setting']}, {best['above_floor']:.2f} bits above")
    return facts
