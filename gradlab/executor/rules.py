"""Named rules on what a run measures: when a number says that training goes wrong, and what to do then.

The functions are pure: they take norms, rates and counts, and know no process group. DDP's engine asks them on measured
steps, and a replay on recorded ones.

How thresholds were chosen. A codec C that never enlarges the compression error, ||x - C(x)|| <= ||x||, leaves at step t
a residual of at most sum_(s <= t) ||g_s|| <= t max ||g||, by induction over e_t = x_t - C(x_t), x_t = g_t + e_(t-1). A
delta-contraction leaves one with E||e||^2 <= 4 (1 - delta) / delta^2 max E||g||^2 (Karimireddy et al., "Error feedback
fixes SignSGD", ICML 2019, Lemma 3). A residual above twice the smaller of the two bounds therefore belongs to no
healthy run. The factor 2 is for gradients that were not measured, and for bounds on expectations.

A bounded residual may still be too large. One of t gradients' norms at compressed step t has sent nothing; independent
gradients add up to sqrt(t) norms, below t / 10 from t = 100 on. A residual above t / 10 therefore holds a part that
gradients have in common and that waits for a tenth of the run. Residuals delay updates, and with them the learning rate
up to which training is stable falls (Stich and Karimireddy, "The error-feedback framework", JMLR 2020): beyond it
gradients grow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch

from gradlab.codec import Codec
from gradlab.codec.wrapper import innermost, wrappers_of
from gradlab.errors import GradlabError
from gradlab.json_form import require_form
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer

LEVELS = ("ignore", "warn", "error")
SLACK = 2.0
LATE_SHARE, LATE_FROM = 0.1, 200  # of compressed steps' gradients may wait, judged from this step on
APART, WINDOW, SPAN = 10, 5, 20  # steps between gradients that are compared; such gradients in a median, and at most
GROWN, WAITING = 2.0, 10.0  # times that gradients grow, and gradient norms that wait meanwhile
NO_GUARANTEE = 100.0  # gradient norms: the bound taken for a codec without a known delta, that of delta = 0.02
RATE_FACTOR = 2.0  # between two steps
RATE_SHARE = 0.01  # of the largest learning rate: below it, what a residual holds no longer matters
HUGE = 1e15  # a state above it overflows in squares, sums or products of float32
LOCAL_GRADIENTS = "the optimizer applies gradients of each rank alone, so that ranks drift apart"
SCALED_STEPS = 20  # halvings that bring a GradScaler's first factor, 2^16, below 1


#: What to do when a rule fires, by its name, as the option `rules` has it. docs/training.md says when each one fires.
RULES: dict[str, str] = {
    "residual_grows": (
        "the codec enlarges the residual under error feedback: choose contraction=measured, the wrapper's default, "
        "settings that contract (qsgd: norm=max or more bits), a higher density or rank, or no error feedback"
    ),
    "sent_late": (
        "gradients are applied late, so that training slows down or diverges: choose a higher density or rank, more "
        "bits or smaller buckets, a lower learning rate, or begin compression later (warmup_steps)"
    ),
    "non_finite": (
        "look at the loss, the learning rate and the first step at which this began; pass scaler= if a loss scaler is "
        "to skip such steps"
    ),
    "no_feedback": "put error feedback around the codec, or choose a learning rate for it",
    "outer_feedback": (
        "make the plan by Plan.uniform(model, codec, exchanges='pseudo-gradients'), which keeps no errors, or take an "
        "outer optimizer without momentum (functools.partial(torch.optim.SGD, lr=1.0))"
    ),
    "hook_not_reached": "see the reason",
    "layer_not_averaged": "then make the plan and attach anew",
    "local_gradients": (
        "end each optimizer step with a forward pass of the DDP model and one backward pass, outside of no_sync(): DDP "
        "averages in the first backward pass after its forward pass alone, not in a second one through a retained "
        "graph, nor after autograd.grad with static_graph=True"
    ),
    "several_backwards": (
        "put no_sync() around forward and backward of all passes but the last (Accelerate: sync_each_batch=False; "
        "FSDP2: set_requires_gradient_sync(False)); where another network's loss passes through this model, call "
        "requires_grad_(False) on it meanwhile"
    ),
    "rates_change": (
        "change the rate in smaller steps, begin compression after the warm-up (warmup_steps), or let residuals follow "
        "the rate (step_size_ratio: true; its law is that of SGD)"
    ),
    "bytes_sent": (
        "put two_way around the codec (wrappers=[Wrap('error_feedback'), Wrap('two_way')]), whose messages do not grow "
        "with the ranks, or send 16 bits (codec cast)"
    ),
}
_SPOILED = (
    "gradients of one step were too large for what is kept from step to step: go on from a checkpoint from before that "
    "step, or attach anew, which starts without states; clip gradients, or lower the learning rate"
)


_FINDING = {
    **{"rule": str, "group": (str, None), "step": (int, None), "value": (float, None), "threshold": (float, None)},
    **{"seen": str, "remedy": str, "ranks": [int]},
}


@dataclass(frozen=True)
class Finding(Jsonable):
    """A rule that fired.

    group: the plan's; None if it is not about one.
    step: the iteration at which it was seen; None before the first one.
    value, threshold: the measured number, and the one that it passed.
    seen: observation, with numbers.
    ranks: those that saw it.
    """

    rule: str
    group: str | None
    step: int | None
    value: float
    threshold: float
    seen: str
    remedy: str
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str | None]:
        """The key of a finding that is shown once: a rule in a group."""
        return self.rule, self.group

    @property
    def severity(self) -> float:
        """How many times its threshold the value is."""
        share = self.value / self.threshold if self.threshold else math.inf
        return share if not math.isnan(share) else math.inf

    @staticmethod
    def from_json(written: Mapping[str, Any]) -> Finding:
        """Read what `to_json` wrote; a value that was not finite comes back as infinity."""
        require_form(written, _FINDING, "a finding")
        numbers = {name: math.inf if written[name] is None else written[name] for name in ("value", "threshold")}
        known = {item.name: written[item.name] for item in fields(Finding)}
        return Finding(**{**known, **numbers, "ranks": tuple(written["ranks"])})


def finding(rule: str, seen: str, value: float, threshold: float, **where: Any) -> Finding:
    """Make a finding of a rule, with the rule's remedy; `where` is its group and step, as far as there are any."""
    place = {"group": None, "step": None, **where}
    return Finding(rule, value=value, threshold=threshold, seen=seen, remedy=RULES[rule], **place)


def no_feedback(codecs: Mapping[str, Codec]) -> Finding | None:
    """Name the groups whose codec needs error feedback and has none, of codecs with their wrappers by group."""
    lost = [name for name, codec in codecs.items() if _lacks_feedback(codec)]
    if not lost:
        return None
    groups = lost[0] if len(lost) == 1 else f"{lost[0]} and {len(lost) - 1} more"
    method = innermost(codecs[lost[0]]).name
    return finding("no_feedback", f"{groups}: later steps do not correct the error of {method}", 1, 1)


def outer_feedback(layers: Sequence[str], momentum: str | None) -> Finding | None:
    """Name layers of pseudo-gradients with error feedback whose outer optimizer has momentum: the residual is a second
    one."""
    if not layers or momentum is None:
        return None
    seen = f"{layers[0]}: error feedback under an outer optimizer with {momentum} is momentum twice"
    return finding("outer_feedback", seen, 1, 1)


def _lacks_feedback(codec: Codec) -> bool:
    method, kept = innermost(codec), any(wrapper.effects.keeps_residual for wrapper in wrappers_of(codec))
    needs = method.about.defaults.error_feedback or method.traits.selects or method.traits.refuses_feedback
    return bool(needs) and not kept


def levels(chosen: Mapping[str, str] | str | None) -> dict[str, str]:
    """Return what each rule does when it fires ("ignore", "warn" or "error"), by name; a rule that is not named
    warns."""
    if not isinstance(chosen, (str, Mapping, type(None))):
        raise GradlabError(f"rules = {chosen!r}, expected one of {', '.join(LEVELS)}, or a dict of rules and these")
    named = dict.fromkeys(RULES, chosen) if isinstance(chosen, str) else dict(chosen or {})
    for rule, level in named.items():
        if rule not in RULES:
            raise GradlabError(f"rules: there is no rule {str(rule)[:80]!r}; there are {', '.join(RULES)}")
        if level not in LEVELS:
            raise GradlabError(f"rules: {rule} = {str(level)[:80]!r}, expected one of {', '.join(LEVELS)}")
    return {**dict.fromkeys(RULES, "warn"), **named}


# --- the residual ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback:
    """How a group keeps its residual, as far as its size depends on it.

    delta: delta of the codec's contraction; 0: nothing is known, and nothing is assumed; None: nothing is known.
    gain: most norm of the compressor input without the residual, in gradient norms: 1 / (1 - m) under momentum.
    follows: whether the residual is multiplied by the ratio of learning rates.
    """

    delta: float | None = None
    gain: float = 1.0
    follows: bool = False


def feedback_of(codec: Codec, layers: Sequence[Layer], plain_sgd: bool) -> Feedback | None:
    """Return how a group keeps its residual; None if it keeps none."""
    wrappers = list(wrappers_of(codec))
    keeper = next((wrapper for wrapper in wrappers if wrapper.effects.keeps_residual), None)
    if keeper is None:
        return None
    gain = math.prod(1 / (1 - w.settings.momentum) for w in wrappers if w.effects.applies_momentum and _amplifies(w))
    wanted = getattr(keeper.settings, "step_size_ratio", None)
    return Feedback(expected_delta(codec, layers), gain, plain_sgd if wanted is None else wanted)


def server_feedback_of(codec: Codec, layers: Sequence[Layer], plain_sgd: bool) -> Feedback | None:
    """Say how the servers of two-way compression keep their residual; None if they keep none. Arguments as above."""
    for wrapper in wrappers_of(codec):
        if wrapper.effects.server_residual and wrapper.settings.error_feedback:
            wanted = wrapper.settings.step_size_ratio
            return Feedback(expected_delta(codec, layers), follows=plain_sgd if wanted is None else wanted)
    return None


def _amplifies(wrapper: Any) -> bool:
    return (wrapper.effects.before_compression or wrapper.effects.keeps_residual) and hasattr(
        wrapper.settings, "momentum"
    )


def expected_delta(codec: Codec, layers: Sequence[Layer]) -> float | None:
    """Return the delta by which a codec contracts: the one it guarantees, or a sparsifier's density. A selection whose
    number of elements is not set (threshold) sends a residual whenever it is large enough: 0."""
    method = innermost(codec)
    delta = method.guarantees(layers).delta
    if delta is None and method.traits.selects:
        delta = getattr(method.settings, "density", 0.0)
    return delta


def residual_limit(steps: int, delta: float | None, gain: float = 1.0) -> float:
    """Return the largest residual norm of a healthy run after so many steps, in norms of its largest gradient."""
    bound = NO_GUARANTEE if delta is None else math.inf
    if delta:
        bound = 2 * math.sqrt(1 - min(delta, 1.0)) / delta
    return SLACK * gain * max(1.0, min(float(steps), bound))


class ResidualWatch:
    """The residual norms of one group, step by step."""

    def __init__(self, group: str, feedback: Feedback, whose: str = "residual") -> None:
        self.group, self.feedback, self._whose = group, feedback, whose
        self._largest = 0.0  # gradient norm, times the learning rate where residuals follow it
        self.held = 0.0  # residual norm of the last step that was judged, in norms of the largest gradient

    def add(self, step: int, steps: int, residual: float, gradient: float, rate: float | None = None) -> Finding | None:
        """Judge a measured step from both norms in one unit; the residuals of a rate of zero are not judged."""
        weight = 1.0 if rate is None or not self.feedback.follows else rate
        if math.isfinite(gradient):
            self._largest = max(self._largest, weight * gradient)
        if not (weight > 0 and self._largest > 0):
            return None
        ratio, limit = weight * residual / self._largest, residual_limit(steps, self.feedback.delta, self.feedback.gain)
        self.held = ratio
        if ratio <= limit:  # False for NaN, which fires
            return None
        seen = f"the {self._whose}'s norm is {ratio:.3g} times the largest gradient's, expected at most {limit:.3g}"
        return finding("residual_grows", seen, ratio, limit, group=self.group, step=step)


class LateWatch:
    """The residuals of one group, of ranks and servers together, beside the growth of gradients meanwhile."""

    def __init__(self, group: str, gain: float) -> None:
        self.group, self._gain = group, gain
        self._noted: deque[tuple[int, float]] = deque(maxlen=SPAN)  # (step, gradient norm), so many steps apart

    def add(self, step: int, steps: int, held: float, gradient: float) -> Finding | None:
        """Judge a measured step. held: norms of residuals over the largest gradient's, added up."""
        if 0 < gradient < math.inf and (not self._noted or step - self._noted[-1][0] >= APART):
            self._noted.append((step, gradient))
        seen, where = (
            f"residuals hold {held:.3g} times the largest gradient's norm",
            {"group": self.group, "step": step},
        )
        most = LATE_SHARE * steps * self._gain
        if steps >= LATE_FROM and held > most:
            return finding("sent_late", f"{seen} after {steps} steps", held, most, **where)
        grown = self._growth()
        if grown > GROWN and held > WAITING:
            return finding("sent_late", f"{seen}, and gradients have grown {grown:.3g} times", grown, GROWN, **where)
        return None

    def _growth(self) -> float:
        norms = [norm for _, norm in self._noted]
        return median(norms[-WINDOW:]) / median(norms[:WINDOW]) if len(norms) >= 2 * WINDOW else 1.0


# --- the others -----------------------------------------------------------------------------------------------------


def non_finite(step: int, in_a_row: int, scaled: bool, layers: Collection[str], state: str = "") -> Finding | None:
    """Judge a step, the last of several in a row, whose gradients were not finite in these layers of this rank, or in
    the mean alone; `state` is that of `spoiled`. A loss scaler makes a few of them normal."""
    most = SCALED_STEPS if scaled else 1
    if in_a_row < most:
        return None
    if state:
        seen = f"gradients were finite and results are not: {state}; no codec state moves"
        return replace(finding("non_finite", seen, in_a_row, most, step=step), remedy=_SPOILED)
    where = ", ".join(list(layers)[:3]) or "the mean of the ranks"
    seen = f"gradients are not finite in {where}; every rank's become NaN, and no codec state moves"
    if scaled:
        seen = f"{seen}; this is the {in_a_row}th such step in a row, and the loss scale below 1 if it began at 65536"
    return finding("non_finite", seen, in_a_row, most, step=step)


def spoiled(codecs: Mapping[str, Codec], states: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """Say, from one rank's codecs and states by group, which state makes results infinite; nothing if none does."""
    largest = (0.0, "", "")
    for group, state in states.items():
        keepers = {what: one.name for one in wrappers_of(codecs[group]) for what in one.entries}
        for key, value in state.items():
            layer, _, what = key.rpartition("/")
            if value.is_floating_point() and value.numel():
                size = float(value.abs().max().nan_to_num(nan=math.inf, posinf=math.inf))
                what = what.removesuffix("_scale")
                largest = max(largest, (size, layer, f"{what} of {keepers.get(what, codecs[group].name)}"))
    size, layer, what = largest
    if size < HUGE:
        return ""
    return f"the {what} holds values of up to {size:.3g} in {layer}, with which every later step overflows"


def several_passes(passes: int) -> str:
    """Say how many synchronised backward passes came for one optimizer step."""
    return f"{passes} synchronised backward passes for one optimizer step"


def rate_change(before: Iterable[float], now: Iterable[float], largest: float) -> float:
    """Return the largest factor between layers' learning rates of two steps, 1 or more. Rates of zero, and two that are
    both below 1 % of the largest of the run so far, count as unchanged."""
    factors = [1.0]
    for old, new in set(zip(before, now, strict=True)):
        if old > 0 and new > 0 and max(old, new) >= RATE_SHARE * largest:
            factors.append(max(new / old, old / new))
    return max(factors)


def rates_change(step: int, factor: float, residual: float | None) -> Finding | None:
    """Judge a change of learning rates while residuals are kept as they are. Below a residual of 1 gradient norm,
    little is applied at the wrong rate."""
    if factor <= RATE_FACTOR or residual is None or residual < 1.0:
        return None
    seen = (
        f"the learning rate changed {factor:.3g} times in one step; residuals of up to {residual:.3g} gradient norms "
        "were gathered at the old rate and are applied at the new one"
    )
    return finding("rates_change", seen, factor, RATE_FACTOR, step=step)


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


# --- what is told ---------------------------------------------------------------------------------------------------


def merged(by_rank: Sequence[Iterable[Finding]], names: Sequence[int] | None = None) -> list[Finding]:
    """Join what ranks found: one finding per rule and group, the severest, with the ranks that saw it, by `names`."""
    joined: dict[tuple[str, str | None], Finding] = {}
    for rank, findings in zip(range(len(by_rank)) if names is None else names, by_rank, strict=True):
        for one in findings:
            before = joined.get(one.key)
            ranks = (*(before.ranks if before else ()), rank)
            worst = one if before is None or one.severity > before.severity else before
            joined[one.key] = replace(worst, ranks=ranks)
    return list(joined.values())


def sentence(findings: Sequence[Finding], world_size: int) -> str:
    """Return findings of one rule as one line: the severest, how many more there are, the ranks, and what to do."""
    worst = max(findings, key=lambda one: one.severity)
    more = f" (and in {len(findings) - 1} more groups)" if len(findings) > 1 else ""
    when = "" if worst.step is None else f"step {worst.step}: "
    where = "" if worst.group is None else f"{worst.group}: "
    seen_by = f" [on rank {_short(worst.ranks)}, of {world_size} ranks]" if 0 < len(worst.ranks) < world_size else ""
    return f"{when}{where}{worst.seen}{more}{seen_by}; {worst.remedy} (rule {worst.rule})"


def by_rule(findings: Iterable[Finding], world_size: int) -> dict[str, str]:
    """Return one line per rule, see `sentence`, by the rule's name."""
    found: dict[str, list[Finding]] = {}
    for one in findings:
        found.setdefault(one.rule, []).append(one)
    return {name: sentence(of_rule, world_size) for name, of_rule in found.items()}


def sentences(findings: Iterable[Finding], world_size: int) -> list[str]:
    """Return one line per rule, see `sentence`."""
    return list(by_rule(findings, world_size).values())
