"""Numbers as text for people."""

import math
from collections.abc import Sequence

from megatron_opsft.errors import plural


def number(value: float | None) -> str:
    """Write a whole number, or one from 1,000 on, without decimals and with commas between
    thousands; another one with three significant digits, with two if it is below 0.001. Write a
    dash for None and for what is not finite.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    # Three digits would write 999.6 as 1e+03.
    if abs(value) >= 999.5 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Write a share in percent."""
    return f"{100 * value:.1f} %"


def tokens(value: float) -> str:
    """Write a number of tokens, or a mean of such numbers: below 1,000 with one decimal."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def count_of(values: Sequence[float], noun: str = "") -> str:
    """Write one number, or the smallest and the largest of several: 256, or 256–512.

    noun: written behind them, `step` as `1 step` or `2 steps`.
    """
    ends = dict.fromkeys((min(values), max(values)))
    text = "–".join(f"{value:,.0f}" for value in ends)
    return f"{text} {plural(noun, *values)}" if noun else text
