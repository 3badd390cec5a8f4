"""Numbers as people read them: one form for reports and for commands."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from gradlab.errors import GradlabError

# Shown for a number that does not exist (a world of one rank has no cosine between ranks).
ABSENT = "-"
POINTS = 40  # of a sparkline
BARS = "▁▂▃▄▅▆▇█"

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def _exists(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def significant(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits and no exponent: 12345 -> "12300", 0.01234 -> "0.0123"."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    # Rounding may carry into a further digit (9.996 -> 10.0), which then shows one decimal less.
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, decimals)}f}"


def format_bytes(count: float | None, digits: int = 3) -> str:
    """Write bytes with SI units (1 kB = 1000 bytes) and significant digits: "1.23 MB"; whole bytes below 1000."""
    if not _exists(count):
        return ABSENT
    value, unit = float(count or 0.0), 0
    # 999.5 would be shown as 1000 of its unit: it belongs to the next.
    while abs(value) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    number = f"{value:.0f}" if unit == 0 else significant(value, digits)
    return f"{number} {_BYTE_UNITS[unit]}"


def parse_bytes(text: str | int, name: str = "bytes") -> int:
    """Return bytes, at least 1, of a whole number or one with a unit: kB, MB, GB, TB, PB, or KiB, MiB, GiB, TiB,
    PiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kKMGTP]?)(i?)[bB]?\s*", str(text))
    sound = type(text) in (int, str) and match is not None and not (match[3] and not match[2])
    factor = (1024 if match[3] else 1000) ** " kmgtp".index(match[2].lower() or " ") if match and sound else 0
    count = int(float(match[1]) * factor) if match and sound else 0
    if not 1 <= count < 2**60:
        raise GradlabError(f"{name} is {text!r}, expected bytes from 1 on, such as 20GB, 512MiB or 2000000")
    return count


def format_seconds(duration: float | None, digits: int = 3) -> str:
    """Write a duration in s, ms, µs or ns with so many significant digits; from 120 s on, in minutes and seconds."""
    if not _exists(duration):
        return ABSENT
    value = float(duration or 0.0)
    if value == 0:
        return "0 s"
    if abs(value) >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    for scale, unit in _SECOND_UNITS:
        if abs(value) >= 0.9995 * scale:
            return f"{significant(value / scale, digits)} {unit}"
    return f"{significant(value * 1e9, digits)} ns"


def format_percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage: 0.1234 -> "12.3 %"; small non-zero shares keep one significant digit."""
    if not _exists(share):
        return ABSENT
    value = 100 * float(share or 0.0)
    if value != 0 and abs(value) < 0.5 * 10**-digits:
        return f"{significant(value, 1)} %"
    return f"{value:.{digits}f} %"


def format_ratio(value: float | None) -> str:
    """Write a factor with three significant digits: 15.72 -> "15.7x", 1234.5 -> "1230x". None and NaN are "-"."""
    return f"{significant(float(value or 0.0))}x" if _exists(value) else ABSENT


def format_number(value: float | None, digits: int = 3) -> str:
    """Write a plain number with so many significant digits."""
    return significant(float(value or 0.0), digits) if _exists(value) else ABSENT


def format_counted(count: int, noun: str) -> str:
    """Write a count with its noun: (1, "node") -> "1 node", (8, "node") -> "8 nodes"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_count(value: int) -> str:
    """Write a whole number in groups of three: 1234567 -> "1 234 567" (no-break spaces)."""
    return f"{value:,}".replace(",", "\u202f")


def sparkline(series: Sequence[float | None]) -> str:
    """Draw a series in at most `POINTS` characters: means of stretches, blank where nothing is known."""
    count = min(POINTS, len(series))
    edges = [point * len(series) // count for point in range(count + 1)] if count else []
    means = [_mean(series[first:last]) for first, last in pairwise(edges)]
    known = [value for value in means if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high / 2 - low / 2  # halves, as the difference of two large numbers may overflow
    top = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round((value / 2 - low / 2) / span * top) if span else top // 2]
        for value in means
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(value / len(known) for value in known) if known else None
