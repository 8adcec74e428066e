"""How sure a difference is: its interval, and the sentence that says what follows from it."""

import math

_QUANTILE = 1.96  # of the normal distribution, for 95 %


def share_margin(before: float, num_before: int, after: float, num_after: int) -> float:
    """Return half the width of the 95 % interval of the difference of two shares of independent
    observations (Agresti and Caffo 2000).

    before, after: the shares, each of so many observations.
    """
    variance = 0.0
    for measured, num_observed in ((before, num_before), (after, num_after)):
        count = num_observed + 2
        share = (measured * num_observed + 1) / count
        variance += share * (1 - share) / count
    return _QUANTILE * math.sqrt(variance)


def share_interval(
    before: float, num_before: int, after: float, num_after: int
) -> tuple[float, float]:
    """Return both ends of the 95 % interval of after - before, of shares as of `share_margin`."""
    margin = share_margin(before, num_before, after, num_after)
    return after - before - margin, after - before + margin


def signed_interval(low: float, high: float, unit: str) -> str:
    """Write the interval of a difference: "-28.7 to +45.3 points"."""
    return f"{low:+.1f} to {high:+.1f} {unit}"


def interval_of_points(before: float, low: float, high: float) -> str:
    """Write the interval of a difference of shares, in points, within what is possible: from the
    share before it can neither fall below 0 nor rise above 1.
    """
    low, high = max(low, -before), min(high, 1 - before)
    return signed_interval(100 * low, 100 * high, "points")


def describe_evidence(n: str, interval: str, *, holds_zero: bool) -> str:
    """Say on how many observations a difference rests, and whether it can be told from chance.

    n: the observations; interval: as `signed_interval` writes it; both may be "".
    """
    texts = [f"n = {n}"] if n else []
    if interval:
        meaning = "; it holds 0, so this may be chance" if holds_zero else ""
        texts.append(f"95 % interval {interval}{meaning}")
    return "; ".join(texts)
