"""How numbers are written for people."""

import math
from collections.abc import Sequence


def number(value: float | None) -> str:
    """Three digits, thousands apart; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    is_whole = abs(value) >= 999.5 or value == int(
        value
    )  # of which three digits would be 1e+03
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def percent(value: float) -> str:
    """A share, in percent."""
    return f"{100 * value:.1f} %"


def tokens(value: float) -> str:
    """A number of tokens: a digit behind the point where it may be a difference."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def count_of(values: Sequence[float]) -> str:
    """One number, or the smallest and the largest of several: such as 256, or 256–512."""
    return "–".join(
        f"{value:,.0f}" for value in dict.fromkeys((min(values), max(values)))
    )
