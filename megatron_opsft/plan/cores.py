"""CPU cores that ranks share."""

from collections.abc import Sequence


def shared_ends(seconds: Sequence[float], widths: Sequence[float], num_cores: float) -> list[float]:
    """When each of some pieces of work that begin together ends.

    seconds: of each where as many cores as its width are free for it. With more work than cores all
    of it gets slower alike (processor sharing). Without end of cores: the seconds themselves.
    """
    ends = [0.0] * len(seconds)
    now = served = 0.0
    busy = sum(widths)
    for piece in sorted(range(len(seconds)), key=seconds.__getitem__):
        now += (seconds[piece] - served) * max(1.0, busy / num_cores)
        served, ends[piece] = seconds[piece], now
        busy -= widths[piece]
    return ends
