"""Plans beside layers: tables that take turns in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradlab.analysis.section import Section, Table
from gradlab.formatting import format_bytes, format_percent, format_seconds

Json = Mapping[str, Any]
Value = float | None

_MOST_LAYERS = 400


def layer_anchors(data: Json) -> dict[str, str]:
    """Name the anchors of the layers' pages, by the layers' names."""
    return {layer["name"]: f"layer-{place}" for place, layer in enumerate(data["spectrum"]["layers"])}


def layer_matrix_section(data: Json) -> Section | None:
    """Make the page: error, bytes and codec time of every plan on every layer. None: nothing was replayed."""
    replays: Mapping[str, Json] = data["replays"]
    if not replays:
        return None
    sizes = {layer["name"]: math.prod(layer["shape"]) for layer in data["spectrum"]["layers"]}
    tables = [_matrix(number, replays, sizes, layer_anchors(data)) for number in range(len(_MEASURES))]
    answer = "A layer's name leads to its own page. Darker: more."
    return Section("layer-matrix", "Layer by layer: what each plan does", answer, tables)


def plans_on_layer(replays: Mapping[str, Json], name: str) -> list[Table]:
    """Compare the plans on one layer."""
    rows = [
        [plan, *(text(of(replay, name)) for _, of, text, _ in _MEASURES)]
        for plan, replay in replays.items()
        if _error(replay, name) is not None or name in replay.get("groups", {})
    ]
    return [Table("Plans on this layer", ("plan", *(title for title, *_ in _MEASURES)), rows)] if rows else []


def _error(replay: Json, name: str) -> Value:
    return replay["layer_errors"].get(name)


def _of_group(what: str) -> Callable[[Json, str], Value]:
    return lambda replay, name: replay.get("groups", {}).get(name, {}).get(what)


_BY_GROUP = "Per step and rank. Layers that travel together are one group, under the group's name."
# Title, what is looked up, how it is written, and what it means.
_MEASURES: Sequence[tuple[str, Callable[[Json, str], Value], Callable[[Value], str], str]] = (
    ("error of a rank", _error, format_percent, "Median of ‖input - decoded‖ / ‖input‖ of a rank's compressor."),
    ("payload", _of_group("payload_bytes"), format_bytes, f"What a rank contributes. {_BY_GROUP}"),
    ("wire", _of_group("wire_bytes"), format_bytes, f"What a rank's network interface sends. {_BY_GROUP}"),
    ("codec time", _of_group("codec_seconds"), format_seconds, f"Each group's part of the codec time. {_BY_GROUP}"),
)


def _matrix(number: int, replays: Mapping[str, Json], sizes: Mapping[str, int], anchors: Mapping[str, str]) -> Table:
    """Make one table: a row per layer in the model's order, a column per plan, darker where a value is larger."""
    title, of, text, note = _MEASURES[number]
    values: dict[str, dict[str, float]] = {}
    for plan, replay in replays.items():
        for name in dict.fromkeys([*replay["layer_errors"], *replay.get("groups", {})]):
            if (value := of(replay, name)) is not None:
                values.setdefault(name, {})[plan] = value
    plans = list(dict.fromkeys(plan for row in values.values() for plan in row))
    names = _largest(values, sizes)
    rows = [[name, *(text(values[name].get(plan)) for plan in plans)] for name in names]
    every = [value for name in names for value in values[name].values()]
    shades = [[0.0, *(_shade(values[name].get(plan), every) for plan in plans)] for name in names]
    if len(names) < len(values):
        note += f" The largest {len(names)} of {len(values)}; all are in report.json."
    links = {name: anchors[name] for name in names if name in anchors}
    head = "layer" if of is _error else "layer or group"
    return Table(title, (head, *plans), rows, note, links=links, shades=shades, takes_turns=True)


def _largest(names: Iterable[str], sizes: Mapping[str, int]) -> list[str]:
    """Keep so many names of the largest layers, groups first, in the model's order."""
    place = {name: number for number, name in enumerate(sizes)}
    largest = sorted(names, key=lambda name: -sizes.get(name, math.inf))[:_MOST_LAYERS]
    return sorted(largest, key=lambda name: place.get(name, len(place)))


def _shade(value: Value, every: Sequence[float]) -> float:
    """Place a value between the least and the most, by its logarithm: 0 to 1."""
    known = [one for one in every if one > 0]
    if value is None or value <= 0 or not known or min(known) == max(known):
        return 0.0
    return math.log(value / min(known)) / math.log(max(known) / min(known))
