"""Answers that keep a verifier busy, and what its workers hold in memory."""

import os
from pathlib import Path

_FORMS = [  # an answer, and another spelling of it
    (r"\frac{%d}{7}", r"\dfrac{%d}{7}"),
    (r"%d{,}000", r"%d000"),
    (r"-%d\frac{1}{2}", r"-%d.5"),
    (r"%d\%%", r"\frac{%d}{100}"),
    (r"\text{(%d)}", r"%d"),
]


def latex_items(count: int) -> list[tuple[str, str]]:
    """`count` distinct (response, gold): item n, counted from 1, is wrong where 3 divides n."""
    pairs = []
    for n in range(1, count + 1):
        answer, gold = _FORMS[n % len(_FORMS)]
        pairs.append((rf"so \boxed{{{answer % n}}}", gold % (n + (n % 3 == 0))))
    return pairs


def resident_bytes(pid: int) -> int:
    """Of a process of this machine (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
