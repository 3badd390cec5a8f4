"""Every codec's exchange on the device against the CPU's: two ranks in lockstep, in one process.

Codecs whose random numbers come from the CPU, or that draw none, must give the same values under error feedback. The
others draw where the gradient is: there the average and the variance over many draws are compared.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from outcome import FAILED, PASSED, Check, Difference, Outcome, Place
from subjects import cases, codec_of, exchange, gradients, lockstep, plan_for

from gradlab.codec import Tensors
from gradlab.plan import Plan
from gradlab.plan.state_bytes import with_buffers

RANKS, STEPS, DRAWS = 2, 4, 64
CPU = torch.device("cpu")
DRAW_ON_THE_DEVICE = ("qsgd", "nuqsgd", "terngrad", "natural", "intsgd")
CASES_THAT_DRAW = ("block_scaled, fp8",)
DRAWS_LATER = ("intsgd, running",)
# Another device's last bits (2e-7) grow to 4e-5 in cast, whose roundings they turn.
TOLERANCE = 1e-3
# Of the mean square of a standardised difference, and of one variance by the other.
DISTANCES, VARIANCES = (0.8, 1.25), (0.9, 1.1)


def draws_on_the_device(case: str) -> bool:
    """Whether a case's random numbers are the device's own, in the first step too."""
    return (case not in DRAWS_LATER and codec_of(case) in DRAW_ON_THE_DEVICE) or case in CASES_THAT_DRAW


def same_values(place: Place, case: str, buffer: str = "float32") -> Outcome:
    """Four steps with error feedback."""
    plan, difference = without_draws(plan_for(case, "layer", feedback=True)), Difference()
    plan = with_buffers(plan, buffer)
    expected = lockstep(plan, RANKS, STEPS, CPU)
    for step, got in enumerate(lockstep(plan, RANKS, STEPS, place.device)):
        difference.add_all(f"step {step}", got, expected[step])
    return difference.outcome(TOLERANCE)


def without_draws(plan: Plan) -> Plan:
    """GradiVeQ's samples in whole numbers, which are drawn on the device, become exact ones; IntSGD rounds."""
    exact = {"gradiveq": {"sample_bits": 0}, "intsgd": {"random": False}}
    groups = [replace(one, settings={**one.settings, **exact.get(one.codec, {})}) for one in plan.groups]
    return replace(plan, groups=tuple(groups))


def same_distribution(place: Place, case: str) -> Outcome:
    """Average and variance over draws, of every element that varies; what does not vary must be the same."""
    plan = plan_for(case, "layer", feedback=False)
    # Another seed, so that this is no comparison with itself where the device is the CPU.
    ours, theirs = draws(replace(plan, seed=plan.seed + 1), place.device), draws(plan, CPU)
    distances, spreads, fixed = [], torch.zeros(2, dtype=torch.float64), Difference()
    for layer, here in ours.items():
        there = theirs[layer]
        variances = torch.stack([here.var(0), there.var(0)])
        varies = (variances > 1e-10 * there.square().mean()).any(0)
        gap = (here.mean(0) - there.mean(0))[varies]
        distances.append(gap.square() / (variances[:, varies].sum(0) / DRAWS))
        spreads += variances.sum(1)
        fixed.add(layer, here.mean(0)[~varies], there.mean(0)[~varies])
    distance, ratio = float(torch.cat(distances).mean()), float(spreads[0] / spreads[1])
    sound = DISTANCES[0] < distance < DISTANCES[1] and VARIANCES[0] < ratio < VARIANCES[1] and fixed.largest < 1e-5
    expected = f"{DISTANCES[0]}..{DISTANCES[1]}, {VARIANCES[0]}..{VARIANCES[1]}"
    return Outcome(PASSED if sound else FAILED, f"z^2 {distance:.2f}, variance x {ratio:.2f}", expected)


def draws(plan: Plan, device: torch.device) -> Tensors:
    """By layer, the averaged gradient of DRAWS exchanges of the same gradients: (DRAWS, numel), on the CPU, float64."""
    codecs = {group.name: plan.build(group, device) for group in plan.groups}
    grads = [gradients(rank, 0, device) for rank in range(RANKS)]
    drawn: dict[str, list[torch.Tensor]] = {}
    for draw in range(DRAWS):
        means, _ = exchange(plan, codecs, grads, {name: [{}] * RANKS for name in codecs}, draw)
        for layer, mean in means.items():
            drawn.setdefault(layer, []).append(mean.detach().cpu().double().reshape(-1))
    return {layer: torch.stack(means) for layer, means in drawn.items() if means[0].numel()}


CHECKS: dict[str, Check] = {
    case: functools.partial(same_distribution if draws_on_the_device(case) else same_values, case=case)
    for case in cases()
} | {"topk, residuals on the host": functools.partial(same_values, case="topk", buffer="host")}
