"""Whether compression will pay: plans' forecasts on one's own nodes and links, beside what replays say of them.

Speed alone decides nothing: a plan is proposed only if its replayed update keeps a cosine of at least 0.5 with the true
mean. The cosine orders methods much as training does (docs/comparison.md); where to draw the line is a convention, and
a plan that is faster but below it is named with its cosine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.plans import SPEED_NOISE, forecast
from gradlab.analysis.forecast.profile import Profile
from gradlab.errors import GradlabError
from gradlab.formatting import format_percent, format_seconds
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.analysis.replay.result import Replay

LEAST_COSINE = 0.5
# Stands for a computing time that nobody told: the exchange by itself.
_NO_COMPUTING = 1e-9
# By name, codec and settings: one of each kind, none of which needs a fit.
USUAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "16-bit floats": ("cast", {"dtype": "float16"}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "QSGD 4 bits": ("qsgd", {"bits": 4}),
    "1-bit SGD": ("one_bit", {}),
    "PowerSGD rank 4": ("powersgd", {"rank": 4}),
    "top-k 1 %": ("topk", {"density": 0.01}),
    "signs, both ways": ("sign", {}),
}


def usual_plans(layers: Sequence[Layer]) -> dict[str, Plan]:
    """One plan of each kind for a model, as a first look; those that find no layer to compress are left out."""
    found = {}
    for name, (codec, settings) in USUAL.items():
        try:
            plan = Plan.uniform(tuple(layers), codec, warmup_steps=0, **settings)
        except GradlabError:  # no layer large enough
            continue
        if plan.compressed_groups:
            found[name] = plan
    return found


def measure_payoff(
    plans: Mapping[str, Plan],
    replays: Mapping[str, Replay],
    nodes: Sequence[int],
    links: Sequence[Link],
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forecasts of each plan at each number of nodes on each link, and for each place the best, as plain JSON.

    profile: computing time; None: not known, so that times are of the exchange alone.

    Raises:
        GradlabError: as `forecast`.
    """
    known = profile or Profile(_NO_COMPUTING, "not known")
    forecasts = {}
    compressing = {name: plan for name, plan in plans.items() if plan.compressed_groups}
    if not compressing:
        raise GradlabError("no plan compresses anything: all steps are those of plain DDP")
    for done, (name, plan) in enumerate(compressing.items()):
        forecasts[name] = forecast(plan, known, nodes, links).to_json()
        if progress:
            progress("forecasts", done + 1, len(compressing))
    cosines = {name: replays[name].summary().cosine for name in compressing if name in replays}
    places = [
        _place(forecasts, cosines, i, j) for i in range(len(nodes)) for j in range(len(links))
    ]  # fmt: skip
    return {
        "compute_seconds": profile.compute_seconds if profile else None,
        "compute_source": known.compute_source,
        "nodes": list(nodes),
        "links": [_rate(link.bits_per_second) for link in links],
        "cosines": cosines,
        "least_cosine": LEAST_COSINE,
        "forecasts": forecasts,
        "places": places,
    }


def _rate(bits_per_second: float) -> float | str:
    return "unlimited" if math.isinf(bits_per_second) else bits_per_second


def _place(forecasts: Mapping[str, Any], cosines: Mapping[str, float | None], node: int, link: int) -> dict[str, Any]:
    """The fastest plan of those that keep the direction, at one number of nodes on one link."""
    steps = {name: found["nodes"][node]["links"][link] for name, found in forecasts.items()}
    seconds = {name: step["compressed"]["seconds"] for name, step in steps.items()}
    keeping = [name for name in seconds if (cosines.get(name) or 0.0) >= LEAST_COSINE]
    first = next(iter(steps.values()))
    dense = first["dense"]["seconds"]
    best = min(keeping, key=lambda name: seconds[name]) if keeping else None
    saved = 1 - seconds[best] / dense if best is not None and dense > 0 else 0.0
    fastest = min(seconds, key=lambda name: seconds[name])
    return {
        "nodes": next(iter(forecasts.values()))["nodes"][node]["nodes"],
        "bits_per_second": first["bits_per_second"],
        "dense_seconds": dense,
        "seconds": seconds,
        "best": best,
        "best_seconds": seconds[best] if best is not None else None,
        "saved": saved,
        "pays": saved > SPEED_NOISE,
        "fastest": fastest,
        "fastest_saves": 1 - seconds[fastest] / dense if dense > 0 else 0.0,
    }


def payoff_verdict(payoff: Mapping[str, Any]) -> str:
    """The report's first line: where which plan pays, and where not to compress."""
    if payoff["compute_seconds"] is None:
        return _exchange_verdict(payoff)
    paying = [place for place in payoff["places"] if place["pays"]]
    losing = [place for place in payoff["places"] if not place["pays"]]
    parts = [
        f"at {speed(place['bits_per_second'])} between {place['nodes']} nodes, {place['best']} saves "
        f"{format_percent(place['saved'], 0)} of a step ({format_seconds(place['best_seconds'])} instead of "
        f"{format_seconds(place['dense_seconds'])}; its update's cosine with the true mean is "
        f"{payoff['cosines'][place['best']]:.2f} as replayed)"
        for place in paying
    ]
    if losing:
        parts.append(
            f"{_where(losing)} do not compress: no plan whose update keeps a cosine of {payoff['least_cosine']} with "
            "the "
            f"true mean saves more than 5 %{_refused(losing, payoff['cosines'])}"
        )
    text = "; ".join(parts) + "."
    return text[:1].upper() + text[1:]


def _where(places: Sequence[Mapping[str, Any]]) -> str:
    """Speeds by number of nodes: "at 1 Gbit/s and 25 Gbit/s between 8 nodes"."""
    speeds: dict[int, list[str]] = {}
    for place in places:
        speeds.setdefault(place["nodes"], []).append(speed(place["bits_per_second"]))
    return ", ".join(
        f"at {' and '.join(rates)} between {count} node{'s' * (count != 1)}" for count, rates in speeds.items()
    )


def _refused(places: Sequence[Mapping[str, Any]], cosines: Mapping[str, float | None]) -> str:
    """The plan that would save most, if that is one which loses the direction."""
    best = max(places, key=lambda place: float(place["fastest_saves"]))
    if best["fastest_saves"] <= SPEED_NOISE:
        return ""
    cosine = cosines.get(best["fastest"])
    known = "unknown" if cosine is None else f"{cosine:.2f}"
    return f" ({best['fastest']} would save {format_percent(best['fastest_saves'], 0)}, at a cosine of {known})"


def _exchange_verdict(payoff: Mapping[str, Any]) -> str:
    parts = []
    for place in payoff["places"]:
        where = f"at {speed(place['bits_per_second'])} between {place['nodes']} nodes"
        dense = format_seconds(place["dense_seconds"])
        if place["best"] is None:
            parts.append(f"{where} the exchange alone takes {dense}, and no plan keeps the direction")
        else:
            ours = format_seconds(place["best_seconds"])
            parts.append(f"{where} the exchange alone takes {dense}, with {place['best']} {ours}")
    text = "; ".join(parts)
    return (
        f"Whether compression pays cannot be told without the time of computing (--compute-seconds or --run): {text}. "
        "What of it computing hides is not known."
    )


def speed(bits_per_second: float | str) -> str:
    """A link speed in prose: 1e9 -> "1 Gbit/s"."""
    if isinstance(bits_per_second, str):
        return "an unlimited speed"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= 0.9995 * scale:
            return f"{bits_per_second / scale:.4g} {unit}"
    return f"{bits_per_second:.4g} bit/s"
