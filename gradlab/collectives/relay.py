"""All-to-alls in two hops on a grid of the ranks, along rows and then along columns: fewer messages, more bytes.

N ranks fill rows x columns, row by row. Each sends rows + columns - 2 messages, where N - 1 go to every rank directly.
A part for one rank alone travels twice, unless it stays in a row or a column; a vector for all ranks travels once.
"""

from __future__ import annotations

import math

LEAST_RANKS = 64  # from which two hops are considered


def grid(ranks: int) -> tuple[int, int]:
    """Return the rows and columns of N ranks, as nearly a square as divides; one row for a prime.

    >>> from gradlab.collectives.relay import grid
    >>> grid(64), grid(96), grid(67)
    ((8, 8), (8, 12), (1, 67))
    """
    rows = max(rows for rows in range(1, math.isqrt(ranks) + 1) if ranks % rows == 0)
    return rows, ranks // rows


def relay_below(ranks: int, direct_seconds: float, relayed_seconds: float, seconds_per_byte: float) -> int:
    """Return from how many bytes of the largest part on an all-to-all is faster directly. 0: it always is.

    Two hops send (rows - 1) (columns - 1) parts more than one.

    >>> from gradlab.collectives.relay import relay_below
    >>> relay_below(64, direct_seconds=3.1e-3, relayed_seconds=0.65e-3, seconds_per_byte=1e-9)
    50000

    Args:
        ranks: number of ranks N.
        direct_seconds: time of an all-to-all of next to no bytes.
        relayed_seconds: time of the same in two hops.
        seconds_per_byte: time of a byte sent.
    """
    rows, columns = grid(ranks)
    saved, price = direct_seconds - relayed_seconds, (rows - 1) * (columns - 1) * seconds_per_byte
    return 0 if rows == 1 or saved <= 0 else round(min(saved / price, 2**40)) if price else 2**40
