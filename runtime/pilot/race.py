"""Decide which plans of a pilot go on, and when: pure functions of the losses.

Successive halving (K. Jamieson and A. Talwalkar, arXiv:1502.07943) trains all candidates a little, and the better half
longer. Here the candidates have an order, the bytes that they send, and the wanted one is the first that holds. So
they are tried in this order, each as long as it may hold, and those behind `keep` plans that hold are not needed. No
plan is trained twice over the same batches, and none is left out that halving would have kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradlab.runtime.pilot.result import Outcome, outcome_of
from gradlab.saving import Saving

LEAST_STEPS = 8  # that say something of a plan
_EARLY = 3  # the first look comes after a third of the steps


def looks(steps: int, longest: int) -> tuple[int, ...]:
    """List after how many of a pilot's steps a plan is looked at; `longest` is for plans that hold until then.

    >>> looks(60, 120), looks(12, 12)
    ((20, 60, 120), (12,))
    """
    early = steps // _EARLY
    return tuple(sorted({one for one in (early, steps, longest) if LEAST_STEPS <= one <= longest} | {longest}))


def in_order(savings: Mapping[str, Saving]) -> list[str]:
    """Sort plans by the bytes that they send, fewest first; equal ones stay in their order."""
    return sorted(savings, key=lambda name: -(savings[name].ratio or 0.0))


def may_hold(outcome: Outcome, max_loss: float) -> bool:
    """Say whether a plan is worth more steps: its end may be within the limit. One that is not finite is not."""
    return outcome.end.low <= max_loss


def is_decided(outcomes: Iterable[Outcome], longest: int, max_loss: float, keep: int) -> bool:
    """Say whether plans that send more need not be tried: `keep` plans have held to the end."""
    return sum(one.steps >= longest and one.holds(max_loss) for one in outcomes) >= keep


def race(
    losses: Mapping[str, Sequence[float]],
    dense: Sequence[float],
    savings: Mapping[str, Saving],
    *,
    steps: int,
    max_loss: float,
    keep: int = 3,
    chance: float = 0.0,
) -> list[Outcome]:
    """Tell from whole recorded trainings, losses by step from one snapshot, what a pilot would have found.

    Returns outcomes of the plans that it would have tried, fewest bytes first. Their `steps` are what it would have
    cost.
    """
    longest, found = len(dense), list[Outcome]()
    for name in in_order(savings):
        if is_decided(found, longest, max_loss, keep):
            break
        for look in looks(steps, longest):
            outcome = outcome_of(name, losses[name][:look], dense[:look], savings[name], chance)
            if not may_hold(outcome, max_loss):
                break
        found.append(outcome)
    return found
