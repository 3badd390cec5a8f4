"""Answer for twelve pairs of model and link, as the README does: what to take, and how long a step is.

    python benchmarks pairs --predict       forecasts the six pairs that nobody has measured
    python benchmarks pairs --table

Measured pairs are rows of link_table: four ranks on processors, behind limited links. Forecasts take computing from
there, or, with the codecs' time too, from gpu_speed's steps on one GPU, for eight nodes of one GPU each. A plan that
is taken saves 5 % at least. It is among those that ended like dense training in docs/comparison.md: 16 bits, int8 and 4
bits. PowerSGD loses more, so that its time stands below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from layer_lists import LISTS
from predicted_steps import CORES, LATENCY, fitted_link
from rows import Row, fill, markdown, options, read

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.decide import SPEED_NOISE
from gradlab.analysis.forecast.link import Link, parse_bandwidth, spell_rate
from gradlab.analysis.forecast.network import CodecTime, Profile
from gradlab.analysis.forecast.processors import Processor
from gradlab.formatting import format_seconds
from gradlab.layout import Layer
from gradlab.plan import Plan

RESULTS = Path(__file__).parents[1] / "results"
LINKS = ("50mbit", "200mbit", "1gbit", "10gbit")
PLAIN, HALF, POWERSGD = "plain", "16 bits", "PowerSGD"
#: Way by name: its name in link_table's rows and in gpu_speed's.
WAYS = {
    PLAIN: ("none", "plain"),
    HALF: ("fp16", "PyTorch bf16 hook"),
    "int8": ("int8", "block_scaled int8"),
    "4 bits": ("qsgd", "qsgd 4 bits"),
    POWERSGD: ("powersgd_2", "powersgd 4"),
}
CODECS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "int8": ("block_scaled", {}),
    "4 bits": ("qsgd", {"bits": 4}),
    POWERSGD: ("powersgd", {}),
}
#: Title of each model: its name in link_table's rows, None of the one that gpu_speed has.
MODELS = {
    "transformer, 5 M parameters": "transformer",
    "ResNet-18, 11 M": "resnet18",
    "GPT-2 small, 124 M, on 8 H200": None,
}
FASTEST_MEASURED = "1gbit"
GPUS = 8


def _layers(model: str | None) -> list[Layer]:
    """List layers; of the transformer, which is another program's, matrices of as many values."""
    if model == "transformer":
        return [Layer(f"{n}.weight", (1024, 256), "linear") for n in range(20)]
    return LISTS["ResNet-18" if model else "GPT-2 small"]()


def _measured(model: str | None, link: str) -> dict[str, Row]:
    rows = [row for row in read(RESULTS / "link-table.jsonl") if (row["model"], row["rate"]) == (model, link)]
    return {way: row for way, (hook, _) in WAYS.items() for row in rows if row["hook"] == hook}


def predicted(key: Row) -> Row:
    """Forecast the step of each way on a link, in seconds."""
    model, found = MODELS[key["model"]], dict[str, float]()
    for way, (codec, settings) in CODECS.items():
        rank = {"rank": 2 if model else 4} if codec == "powersgd" else {}
        plan = Plan.uniform(_layers(model), codec, warmup_steps=0, **settings, **rank)
        network = _on_processors(model, way, key["link"]) if model else _on_gpus(way, key["link"])
        [(_, pair)] = forecast(plan, network).comparisons
        found |= {PLAIN: pair.dense.seconds, HALF: pair.half.seconds, way: pair.compressed.seconds}
    return {"seconds": {way: round(seconds, 4) for way, seconds in found.items()}}


def _on_processors(model: str, way: str, rate: str) -> Network:
    """The network of link_table: ranks that share two cores, whose codecs take the processor time that they took."""
    row = _measured(model, FASTEST_MEASURED)[way]
    link = fitted_link(read(RESULTS / "predicted-steps.jsonl"), row["ranks"])
    link = replace(link, bits_per_second=parse_bandwidth(rate))
    codec = CodecTime(row["cpu_s"]["gradlab-engine"], row["ranks"], False, "the measured steps")
    profile = Profile(row["compute_s"], "measured", codec)
    return Network(
        [replace(link, bits_per_second=parse_bandwidth(rate))], [row["ranks"]], profile, CORES / row["ranks"]
    )


def _on_gpus(way: str, rate: str) -> Network:
    """Nodes of one GPU, on which codecs take what they made a step longer where nothing travelled."""
    steps = {row["way"]: row for row in read(RESULTS / "device-step.jsonl")}
    plain, step = steps["plain"], steps[WAYS[way][1]]
    codec = CodecTime(step["seconds"] - plain["seconds"], 1, True, "steps of one rank")
    profile = Profile(plain["seconds"], "measured", codec)
    device = Processor(plain["device"], True, 1.0, {})
    return Network([Link(parse_bandwidth(rate), LATENCY)], [GPUS], profile, processor=device)


def answer(seconds: Mapping[str, float]) -> str:
    """Say which way to take, of steps by way; beside it 16 bits, and PowerSGD if it is faster."""
    plain, less = seconds[PLAIN], 1 - SPEED_NOISE
    best = min((way for way in WAYS if way not in (PLAIN, POWERSGD)), key=lambda way: seconds[way])
    best = HALF if seconds[best] >= less * seconds[HALF] else best
    if seconds[best] > less * plain:
        return f"do not compress: {format_seconds(plain, 2)}"
    others = [way for way in (HALF, POWERSGD) if way != best and (way == HALF or seconds[way] < less * seconds[best])]
    taken = f"**{best}: {format_seconds(seconds[best], 2)}**"
    return "<br>".join([taken, *(f"{way} {format_seconds(seconds[way], 2)}" for way in (PLAIN, *others))])


def table(rows: Sequence[Row]) -> str:
    """One line per model, a column per link; forecasts in italics."""
    known = {(row["model"], row["link"]): answer(row["seconds"]) for row in rows}
    lines = []
    for title, model in MODELS.items():
        steps = {link: {way: row["step_s"] for way, row in _measured(model, link).items()} for link in LINKS}
        cells = [answer(steps[link]) if steps[link] else f"*{known[title, link]}*" for link in LINKS]
        lines.append([title.replace(", ", "<br>"), *cells])
    return markdown(("training", *(spell_rate(parse_bandwidth(link)) for link in LINKS)), lines)


def main() -> None:
    chosen = options(__doc__, rows=RESULTS / "pairs.jsonl", predict=False, table=False)
    if chosen.predict:
        pairs = product(MODELS.items(), LINKS)
        keys = [{"model": title, "link": link} for (title, model), link in pairs if not _measured(model, link)]
        fill(chosen.rows, keys, predicted)
    print(table(read(chosen.rows)))
