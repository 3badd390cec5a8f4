"""Tasks for real ranks: runs that rules speak up in, and runs that they have nothing to say about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gradlab import version
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan, Wrap
from gradlab.runtime import Exchange

SHAPE = (64, 64)


@contextmanager
def listening() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught if "gradlab" in str(warning.message)]


def plan(codec: str, settings: dict[str, Any], *wraps: Wrap) -> Plan:
    layers = (Layer("a", SHAPE, "linear"), Layer("b", (64,), "vector"))
    return Plan(layers, (Group("a", ("a",), codec, settings, wraps or (Wrap("error_feedback"),)),))


def exchange(group: dist.ProcessGroup, chosen: Plan, **options: Any) -> Exchange:
    parameters = torch.nn.ParameterDict({"a": torch.zeros(SHAPE), "b": torch.zeros(64)})
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    return Exchange(chosen, parameters.named_parameters(), group, optimizer=optimizer, **options)


def train(run: Exchange, rank: int, steps: int) -> None:
    """Gradients with a part that all ranks and steps share, and noise."""
    stream = torch.Generator().manual_seed(rank)
    shared = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    for _ in range(steps):
        run.step({"a": shared + torch.randn(SHAPE, generator=stream), "b": torch.ones(64)})


def diverging(group: dist.ProcessGroup, rules: Any = None) -> dict[str, Any]:
    """QSGD of 2 bits with the L2 norm: each step multiplies the residual."""
    error, rank = "", dist.get_rank(group)
    settings = {"bits": 2, "norm": "l2", "bucket_size": 4096}
    with listening() as warned:
        run = exchange(
            group, plan("qsgd", settings, Wrap("error_feedback", {"contraction": "none"})), rules=rules, measure_every=2
        )
        with run:
            try:
                train(run, rank, 12)
            except GradlabError as raised:
                error = str(raised)
            report, table = run.report(), run.table()
    return {
        "warned": warned,
        "rules": report["rules"],
        "table": table,
        "error": error,
        "steps": report["iteration"],
    }


HEALTHY: dict[str, tuple[str, dict[str, Any], tuple[Wrap, ...]]] = {
    "topk": ("topk", {"density": 0.001}, ()),
    "dgc": ("topk", {"density": 0.001}, (Wrap("momentum_correction"),)),
    "powersgd": ("powersgd", {"rank": 1}, ()),
    "sign": ("sign", {}, ()),
    "terngrad": ("terngrad", {}, ()),
}


def healthy(group: dist.ProcessGroup) -> dict[str, Any]:
    """The largest residual norm over the gradient norm, and what was said."""
    ratios, found = {}, {}
    with listening() as warned:
        for name, (codec, settings, wraps) in HEALTHY.items():
            run = exchange(group, plan(codec, settings, *wraps), measure_every=5)
            with run:
                train(run, dist.get_rank(group), 30)
                measured = [step for step in run.statistics.steps if step.residual_norms]
                ratios[name] = max(step.residual_norms["a"] / step.gradient_norms["a"] for step in measured)
                found[name] = run.report()["rules"]
    return {"ratios": ratios, "rules": found, "warned": warned}


def server_diverging(group: dist.ProcessGroup) -> dict[str, Any]:
    """Two-way compression by a codec that does not contract, without a factor that would make it."""
    layers = (Layer("a", SHAPE, "linear"), Layer("b", (64,), "vector"))
    settings = {"bits": 2, "norm": "l2", "bucket_size": 2048}
    around = (Wrap("two_way", {"contraction": "none"}),)
    with listening() as warned:
        run = exchange(group, Plan(layers, (Group("a", ("a",), "qsgd", settings, around),)), measure_every=2)
        with run:
            train(run, dist.get_rank(group), 12)
            found = run.report()["rules"]
    return {"warned": warned, "rules": found}


def overflowing(group: dist.ProcessGroup) -> dict[str, Any]:
    """One finite step too large for what top-k keeps back, on rank 0 alone, and healthy ones after it."""
    with listening() as warned:
        run, error = exchange(group, plan("topk", {"density": 0.01}), rules={"non_finite": "error"}), ""
        with run:
            try:
                for step in range(6):
                    size = 1e38 if step else (3e38, 1.0)[dist.get_rank(group)]
                    run.step({"a": torch.full(SHAPE, size), "b": torch.ones(64)})
            except GradlabError as raised:
                error = str(raised)
            found = run.report()["rules"]
    return {"warned": warned, "rules": found, "error": error}


def rates(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """A rate that falls to a tenth at once, one that does so smoothly, and residuals that follow the first."""
    said = {}
    kept = Wrap("error_feedback", {"step_size_ratio": False})
    cases = {"jump": (kept, 12), "smooth": (kept, 0), "followed": (Wrap("error_feedback"), 12)}
    for name, (wrap, jump) in cases.items():
        with listening() as warned:
            parameters = torch.nn.ParameterDict({"a": torch.zeros(SHAPE), "b": torch.zeros(64)})
            optimizer = torch.optim.SGD(parameters.parameters(), lr=1.0)
            chosen = plan("topk", {"density": 0.01}, wrap)
            options: dict[str, Any] = {"optimizer": optimizer, "measure_every": 5}
            with Exchange(chosen, parameters.named_parameters(), group, **options) as run:
                for step in range(20):
                    optimizer.param_groups[0]["lr"] = (0.1 if step >= jump else 1.0) if jump else 0.89**step
                    train(run, dist.get_rank(group), 1)
        said[name] = warned
    return said


def versions(group: dist.ProcessGroup) -> str:
    """Rank 1 has another version of gradlab."""
    before = version.VERSION
    version.VERSION = "0.0.1" if dist.get_rank(group) == 1 else before
    try:
        exchange(group, plan("topk", {}))
    except GradlabError as raised:
        return str(raised)
    finally:
        version.VERSION = before
    return ""
