"""A report's pages: one per question, then one per layer. An answer in words comes before its tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isinf, prod
from statistics import median
from typing import TYPE_CHECKING, Any

from gradlab.analysis.figures import forecast as forecast_plot
from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.speed import Judged, SpeedForecast
from gradlab.analysis.measure.rate_distortion import rate_of_mean
from gradlab.analysis.report.drawings import (
    fit_drawings,
    replay_drawings,
    run_drawings,
    sign_drawings,
    slice_structure_drawings,
    spectrum_drawings,
)
from gradlab.analysis.report.local_steps import local_steps_section
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.report.page import Drawing, Section, Table
from gradlab.analysis.report.tables import (
    comparison_table,
    fit_table,
    layer_table,
    replay_table,
    sign_table,
    slice_structure_table,
)
from gradlab.analysis.report.verdict import (
    agreement_line,
    comparison_verdict,
    fit_verdict,
    ranking_line,
    replay_verdict,
    speed_verdict,
)
from gradlab.formatting import (
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Json = Mapping[str, Any]

_MOST_ROWS = 60
# Residual norm under error feedback: its growth from the last but one quarter of the steps to the last.
_GROWING, _SETTLED = 1.2, 200  # steps after a cold start, during which it grows in any case
_SHOWN_DENSITY = 0.01
# Shuffled over paired information from which on an estimator says nothing.
_BY_CHANCE = 0.9
# Squared errors, of the energy, between which a codec says something and sends something.
_USEFUL = (0.05, 0.9)


def comparison_sections(
    runs: Json, replays: Json, fits: Mapping[str, GradiveqMeasurement], spectrum: Json | None
) -> list[Section]:
    """Make the pages of training runs, with what was predicted of them.

    Args:
        runs: the trainer's reports by name.
        replays: `Replay.to_json()` by the runs' names.
        fits: provenances of GradiVeQ fits by the runs' names.
        spectrum: `TraceSpectrum.to_json()` of the replayed trace, or None.

    Returns:
        The sections, in order.
    """
    sections = [
        Section(
            "runs",
            "What happened in training, and what was predicted",
            comparison_verdict(runs),
            [comparison_table(runs, replays)],
            run_drawings(runs, replays),
        )
    ]
    if fits:
        tables = [fit_table(fit) for fit in fits.values()]
        drawings = [item for name, fit in fits.items() for item in fit_drawings(fit, name)]
        answer = " ".join(fit_verdict(fit) for fit in fits.values())
        sections.append(Section("fits", "Do fits hold on later iterations?", answer, tables, drawings))
    if spectrum:
        answer = agreement_line(spectrum)
        sections.append(Section("spectrum", "How correlated are gradients?", answer, [], spectrum_drawings(spectrum)))
    return sections


def trace_sections(data: Json, look: Look = THOROUGH) -> list[Section]:
    """Make the pages of a recording.

    data: what report.json holds, "fit" as a `GradiveqMeasurement`, "payoff" as a `SpeedForecast`, "local_steps"
    as a `LocalSpeed`. look: how many figures there are.
    """
    makers = (_speed, local_steps_section, _replays, _between_nodes, _noise_scale, _limits, _within_node, _signs)
    sections = [section for make in makers if (section := make(data)) is not None]
    sections = [replace(section, drawings=section.drawings[: look.figures]) for section in sections]
    return [*sections, _all_layers(data), *_layers(data, look.layer_figures)]


def _speed(data: Json) -> Section | None:
    speed: SpeedForecast | None = data.get("payoff")
    if speed is None:
        return None
    rows = []
    for item in speed.configurations:
        where = [str(item.nodes), spell_rate(item.bits_per_second)]
        uncompressed = [(item.dense_way, item.dense_seconds), (f"{speed.network.dense}, 16 bits", item.half_seconds)]
        for name, seconds in [*uncompressed, *sorted(item.seconds.items(), key=lambda pair: pair[1])]:
            factors = [format_ratio(step / seconds if seconds else None) for _, step in uncompressed]
            rows.append([*where, name, format_seconds(seconds), *factors, *_judged_cells(speed.judged.get(name))])
    even = [
        [name, str(node.job.world_size), _even(node.break_even), _even(node.half_break_even)]
        for name, forecast in speed.forecasts.items()
        for node in forecast.nodes
    ]
    what = "step" if speed.compute_seconds else "exchange alone"
    note = (
        f"Forecast from computing time ({speed.network.profile.compute_source}), the codec times of the replays, "
        "and the bytes that the codecs ask for. Plain DDP in 16 bits: half the bytes, casting not counted. Cosine: of "
        "the replayed update with the true mean, both summed over so many steps. The like ended: losses over dense "
        "training's of the methods with the nearest cosines in the trainings of docs/comparison.md and docs/text.md, "
        "least, middle and most. They are few, on small tasks: an observation, no bound."
    )
    columns = ("nodes", "link", "plan", what, "speed-up", "vs 16 bits", "cosine", "summed over", "the like ended")
    tables = [Table("Step times", columns, rows, note, text_columns=3)]
    if speed.compute_seconds is not None:
        caution = "Speed alone: whether a plan's update is worth it is another question, see its cosine above."
        header = ("plan", "nodes", "faster than dense", "faster than 16 bits")
        tables.append(Table("Break-even link speed", header, even, caution, text_columns=1))
    drawing = Drawing(
        "payoff",
        "Step time over link speed",
        f"Where a plan's line is below that of {speed.network.dense} it saves time; grey: the links asked for.",
        partial(forecast_plot.plot_speed, speed),
    )
    return Section("payoff", "Will compression pay?", speed_verdict(data), tables, [drawing])


def _judged_cells(judged: Judged | None) -> tuple[str, str, str]:
    if judged is None or judged.ended is None:
        return "-", "-", "-"
    return f"{judged.cosine:.3f}", str(judged.length), ended_cell(judged)


def ended_cell(judged: Judged) -> str:
    """Write what a plan's like ended at, over dense training: least, middle and most."""
    if judged.ended is None:
        return "-"
    ends = (judged.ended.low, judged.ended.middle, judged.ended.high)
    return ", ".join(f"{100 * end:+.1f} %" for end in ends)


def _even(value: float | None) -> str:
    if value is None:
        return "at no link speed"
    return "at any link speed" if isinf(value) else f"below {spell_rate(value)}"


def _replays(data: Json) -> Section | None:
    replays = data["replays"]
    if not replays:
        return None
    drawings, answer = replay_drawings(replays), replay_verdict(replays)
    growing = [name for name, replay in replays.items() if _grows(replay["summary"])]
    if any(replay["summary"].get("unsent") for replay in replays.values()):
        drawings.append(
            Drawing(
                "waiting",
                "Residual norm under error feedback",
                "Norm of the compression error over that of the same iteration's gradient. Where it goes on growing, "
                "old gradients pile up.",
                partial(information_plots.plot_waiting, replays),
            )
        )
    if growing:
        answer += f" The residual norm still grows at the end with {', '.join(growing)}."
    ranking = data.get("ranking")
    if ranking:
        answer += f" {ranking_line(ranking)}"
        drawings.append(
            Drawing(
                "ranking",
                "Whether plans keep their order",
                "Plans by the cosine of their update with the true mean, in windows of the run. Bars: 95 % intervals "
                "of the rank correlation over plans (Bonett and Wright 2000), from five plans on.",
                partial(information_plots.plot_ranking, ranking),
            )
        )
    tables = [replay_table(replays), _group_table(replays)]
    return Section("replays", "What do compressors do to these gradients?", answer, tables, drawings)


def _grows(summary: Json) -> bool:
    return summary["compressed_steps"] >= _SETTLED and (summary.get("residual_growth") or 0.0) > _GROWING


def _group_table(replays: Json) -> Table:
    rows = []
    for name, replay in replays.items():
        for group, cost in replay.get("groups", {}).items():
            rows.append(
                [
                    group,
                    name,
                    format_bytes(cost["payload_bytes"]),
                    format_bytes(cost["wire_bytes"]),
                    format_seconds(cost["codec_seconds"]),
                    format_percent(replay["layer_errors"].get(group)),
                ]
            )
    columns = ("group", "plan", "payload", "wire", "codec time", "error of a rank")
    shown = rows[:_MOST_ROWS]
    note = (
        "Per step and rank: mean bytes, and each group's part of the plan's codec time, its median over the same steps."
    )
    if len(rows) > len(shown):
        note += f" The first {len(shown)} of {len(rows)}; all are in report.json."
    return Table("By group", columns, shown, note, text_columns=2)


_HALF_LOST = 0.5  # of the energy: among the errors at which codecs stand nearest to the floor
_REMARK_COLUMNS = ("layer", "series", "what was found")
_ESTIMATORS = {"copula": "copula", "quantiles": "quantiles", "ksg": "nearest neighbours"}


def _between_nodes(data: Json) -> Section | None:
    between = data.get("between_nodes")
    if not between or not between["layers"]:
        return None
    layers, paper = between["layers"], str(between["paper_bins"])
    common, by_chance = (
        median(_mean_of(x, paper, name) / max(_mean_of(x, paper, "entropy"), 1e-9) for x in layers)
        for name in ("information", "shuffled")
    )
    excess = [x["estimators"]["copula"]["excess"] for x in layers]
    ends = [one["low"] for one in excess if one["low"] is not None]
    answer = (
        f"By LGC's histogram {format_percent(common, 0)} of a layer's entropy is common to two ranks (median over "
        "layers); "
        f"of pairs put together at random it is {format_percent(by_chance, 0)}"
        f"{': the estimator finds that much in anything' if by_chance > _BY_CHANCE * common else ''}. What ranks share "
        "in "
        f"an iteration, beyond what they share {between['shift_iterations']} iterations apart, is "
        f"{format_number(median(one['bits'] for one in excess), 2)} bits per parameter (median, Gaussian copula); its "
        f"interval lies above 0 in {sum(end > 0 for end in ends)} of {len(ends)} layers (by chance in "
        f"{len(ends) / 40:.1f})."
    )
    if len(ends) < len(layers):
        first = next(layer for layer, one in zip(layers, excess, strict=True) if one["low"] is None)
        reason = first["estimators"]["copula"]["excess"]["refused"]
        answer += f" Layers without an interval: {len(layers) - len(ends)}, such as {first['name']}: {reason}."
    if drifting := [layer["name"] for layer, one in zip(layers, excess, strict=True) if one["drift"] is not None]:
        answer += (
            f" It drifts over the iterations in {len(drifting)} of {len(layers)} layers ({drifting[0]} first), so that "
            "one mean does not say it all."
        )
    drawings = [
        Drawing(
            "lgc_claim",
            "LGC's claim, by layer",
            "After Fig. 4 of LGC; (first), (last), (+): first and last layer, after a residual addition. (a) The "
            "paper's "
            "estimator, of the pair and of the shuffled pair. (b) Excess over pairs "
            f"{between['shift_iterations']} iterations apart, {format_percent(between['level'], 0)} intervals "
            "over iterations; hollow: none could be given.",
            partial(information_plots.plot_claim, between),
        ),
        Drawing(
            "information",
            "Information over iterations",
            f"After Figs. 3 and 12 of LGC, means over {len(layers[0]['pairs'])} pairs of ranks.",
            partial(information_plots.plot_information_over_iterations, between),
        ),
        Drawing(
            "lags",
            "How long ranks share it",
            "One rank's gradient and another's so many recorded iterations later: what remains at large distances "
            "belongs "
            "to the parameters, not to the iteration.",
            partial(information_plots.plot_lags, between),
        ),
        Drawing(
            "top_indices",
            "Where the largest values lie",
            "What CLT-k relies on: one rank's k largest positions stand for all ranks'.",
            partial(information_plots.plot_top_indices, between),
        ),
    ]
    return Section("between", "What do ranks share?", answer, _between_tables(between), drawings)


def _numbers(values: Iterable[int]) -> str:
    """One number, or the least and the most of several."""
    known = sorted(values)
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _mean_of(layer: Json, bins: str, name: str) -> float:
    values = layer["histograms"][bins][name]
    return float(sum(values) / len(values))


def _between_tables(between: Json) -> list[Table]:
    paper, rows = str(between["paper_bins"]), []
    for layer in between["layers"]:
        top = next((row for row in layer["top_indices"] if row["density"] == _SHOWN_DENSITY), None)
        rows.append(
            [
                layer["name"],
                ", ".join(layer["place"]) or "-",
                *(format_number(_mean_of(layer, paper, name)) for name in ("entropy", "information", "shuffled")),
                *(_with_interval(layer["estimators"][name]["excess"], "bits", 3) for name in _ESTIMATORS),
                _with_interval(layer["mean_cosine"], "mean", 2),
                format_number(layer["signal_to_noise"], 2),
                format_percent(top["overlap"] if top else None),
            ]
        )
    columns = (
        "layer", "place", "entropy (LGC)", "information (LGC)", "shuffled (LGC)", "excess: copula", "quantiles",
        "nearest neighbours", "cosine", "signal / noise", "top 1 % in common",
    )  # fmt: skip
    note = (
        "Bits per parameter. Excess: beyond the shifted null, with its interval over iterations. Estimators looked at "
        "up to "
        f"{between['values']} values of a layer in {between['iterations']} iterations, nearest neighbours at "
        f"{_numbers(layer['estimators']['ksg']['samples'] for layer in between['layers'])}, as many as their intervals "
        "need."
    )
    tables = [Table("Between ranks, by layer", columns, rows, note, text_columns=2)]
    if remarks := _series_remarks(between["layers"]):
        hint = "A trend cannot be told from a wandering that is slower than the recording is long."
        tables.append(
            Table("Series without an interval, or that drift", _REMARK_COLUMNS, remarks, hint, text_columns=3)
        )
    return tables


def _series_remarks(layers: Sequence[Json]) -> list[list[str]]:
    """A row for each series over iterations that has no interval, or drifts."""
    rows = []
    for layer in layers:
        series = {f"excess: {label}": layer["estimators"][name]["excess"] for name, label in _ESTIMATORS.items()}
        for label, found in {**series, "cosine": layer["mean_cosine"]}.items():
            remarks = [f"no interval: {found['refused']}"] if found["refused"] else []
            if found["drift"] is not None:
                remarks.append(_drift_line(found["drift"]))
            if remarks:
                rows.append([layer["name"], label, "; ".join(remarks)])
    return rows


def _drift_line(drift: Sequence[float]) -> str:
    return f"drifts from {format_number(drift[0], 2)} to {format_number(drift[1], 2)}"


def _with_interval(found: Json, name: str, digits: int) -> str:
    if found[name] is None:
        return "-"
    if found["low"] is None:
        return f"{found[name]:.{digits}f} [no interval]"
    return f"{found[name]:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


_SAME_DATA = 1e-6  # noise over signal


def _noise_scale(data: Json) -> Section | None:
    noise = data.get("noise_scale")
    if not noise:
        return None
    size, model = noise["batch_size"], noise["model"]
    unit = "examples" if size else "batches of one rank"
    scale = model["batches"]
    if scale is None:
        least = format_number((size or 1) * model["low"]) if model["low"] is not None else "any number of"
        answer = (
            f"No signal stands out of the ranks' noise: the noise scale is above {least} {unit}, and what is common to "
            "ranks is too little for a code to use."
        )
    elif scale < _SAME_DATA:
        answer = "All ranks computed the same gradient: check that each of them sees data of its own."
    else:
        value, low, high = (None if x is None else (size or 1) * x for x in (scale, model["low"], model["high"]))
        interval = f"no interval: {model['refused']}"
        if not model["refused"]:
            above = format_number(high) if high is not None else "no upper end"
            interval = f"{format_percent(model['level'], 0)} interval {format_number(low)} to {above}"
        answer = (
            f"The gradient noise scale is {format_number(value)} {unit} ({interval}): a rank's batch"
            f"{f' of {size}' if size else ''} is {_times(scale)}, so a gradient is "
            f"{format_percent(1 / (1 + scale), 0)} "
            f"signal, and the mean of {noise['world_size']} is "
            f"{format_percent(1 / (1 + scale / noise['world_size']), 0)}."
        )
    if model["drift"] is not None:
        answer += f" The share of signal {_drift_line(model['drift'])} over the recording."
    drawing = Drawing(
        "noise_scale",
        "Redundancy over batch and ranks",
        "McCandlish et al. 2018: (a) ranks with larger batches agree more; dots are this recording's ranks taken "
        "together in "
        "groups. (b) If ranks are equally correlated: bits per value and rank that coding them together could save at "
        "best, "
        "and the share of signal in their mean; dotted: this recording.",
        partial(information_plots.plot_noise_scale, noise),
    )
    return Section("noise", "How much of a gradient is signal?", answer, [], [drawing])


def _times(scale: float) -> str:
    return f"{format_number(scale, 2)} times smaller" if scale >= 1 else f"{format_number(1 / scale, 2)} times larger"


def _limits(data: Json) -> Section | None:
    limits = data.get("limits")
    if not limits or not limits["layers"]:
        return None
    nearest: dict[str, list[float]] = {}
    bits: dict[str, list[float]] = {}
    for layer in limits["layers"]:
        for row in layer["codecs"]:
            if _USEFUL[0] <= row["relative_error"] <= _USEFUL[1]:
                nearest.setdefault(row["setting"], []).append(row["above_floor"])
                bits.setdefault(row["setting"], []).append(row["bits"])
    ranked = sorted((median(values), setting) for setting, values in nearest.items())
    answer = "No codec's error lies where a floor says something."
    if ranked:
        answer = (
            f"Of codecs that lose {format_percent(_USEFUL[0], 0)} to {format_percent(_USEFUL[1], 0)} of the energy, "
            f"{ranked[0][1]} stands nearest to the floor: {format_number(ranked[0][0], 2)} bits per value above it "
            "(median "
            f"over layers); {ranked[-1][1]} farthest, {format_number(ranked[-1][0], 2)} above."
        )
    answer += _mean_of_ranks_line(data["spectrum"], limits["world_size"])
    rows = [
        [setting, format_number(median(bits[setting]), 3), format_number(value, 3), str(len(nearest[setting]))]
        for value, setting in ranked
    ]
    note = "Medians over the layers in which the codec's squared error is 5 % to 90 % of the energy; without feedback."
    drawing = Drawing(
        "limits",
        "Bits per value against the least possible",
        "The Gaussian rate-distortion function of one rank's gradient coded by itself (reverse water-filling), on "
        "later iterations than its axes were fitted on, the lower of two descriptions. Codecs stand at the settings "
        "they offer a planner. The largest layers.",
        partial(information_plots.plot_limits, limits),
    )
    table = Table("Above the floor", ("codec", "bits per value", "above the floor", "layers"), rows, note)
    return Section("limits", "How far from the limit are codecs?", answer, [table], [drawing])


def _mean_of_ranks_line(spectrum: Json, ranks: int) -> str:
    """Say that the floor is one rank's, and what coding for the mean over ranks could save; empty for one rank."""
    cosines = [layer["mean_cosine"] for layer in spectrum["layers"] if layer["mean_cosine"] is not None]
    if not cosines:
        return ""
    cosine = min(1.0, max(0.0, sum(cosines) / len(cosines)))
    alone, together = (rate_of_mean(_HALF_LOST, c, ranks) for c in (0.0, cosine))
    return (
        f" The floor is that of one rank's gradient, coded by itself. Codes for the mean of {ranks} ranks alone could "
        f"learn from each other: at a cosine of {format_number(cosine, 2)} and an error of "
        f"{format_percent(_HALF_LOST, 0)} of the mean's energy, {format_number(together, 2)} bits per value in place "
        f"of {format_number(alone, 2)}."
    )


def _within_node(data: Json) -> Section | None:
    fit: GradiveqMeasurement | None = data["fit"]
    structure = data.get("slice_structure")
    shown = structure if structure and structure["layers"] else None
    tables = [*([fit_table(fit)] if fit else []), *([slice_structure_table(shown)] if shown else [])]
    drawings = [
        *(fit_drawings(fit) if fit else []),
        *(slice_structure_drawings(shown) if shown else []),
        *spectrum_drawings(data["spectrum"]),
    ]
    answer = " ".join(line for line in (fit_verdict(fit) if fit else "", agreement_line(data["spectrum"])) if line)
    return Section("within", "What structure is there within a rank?", answer, tables, drawings)


def _signs(data: Json) -> Section | None:
    blocks = data.get("sign_blocks")
    if not blocks:
        return None
    return Section("signs", "How well do signs stand for gradients?", "", [sign_table(blocks)], sign_drawings(blocks))


def _all_layers(data: Json) -> Section:
    return Section("layers", "All layers", "", [layer_table(data["spectrum"])])


def _layers(data: Json, figures: int) -> list[Section]:
    """Make a page per layer. The largest layers have figures, the others words alone."""
    layers = data["spectrum"]["layers"]
    largest = sorted(layers, key=lambda layer: -prod(layer["shape"]))[:figures]
    drawn = {layer["name"] for layer in largest}
    return [_layer(data, layer, place, layer["name"] in drawn) for place, layer in enumerate(layers)]


def _layer(data: Json, layer: Json, place: int, drawn: bool) -> Section:
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
        facts.append(f"excess {_with_interval(between['estimators']['copula']['excess'], 'bits', 3)} bits (copula)")
    limit = information_plots.named_layer(data.get("limits"), name)
    if limit and limit["codecs"]:
        useful = [row for row in limit["codecs"] if _USEFUL[0] <= row["relative_error"] <= _USEFUL[1]]
        if useful:
            best = min(useful, key=lambda row: row["above_floor"])
            facts.append(f"nearest to the floor: {best['setting']}, {best['above_floor']:.2f} bits above")
    drawings: Sequence[Drawing] = ()
    if drawn:
        draw = partial(information_plots.plot_layer, data, name)
        drawings = [
            Drawing(f"layer_{place}", name, "What ranks share, its spectrum, and codecs above its floor.", draw)
        ]
    return Section(f"layer-{place}", name, "; ".join(facts) + ".", (), drawings, of_layer=True)
