"""Which cases of a test run at every change, and which only before a release."""

from collections.abc import Iterable
from typing import Any

import pytest


def for_release(cases: Iterable[Any]) -> list[Any]:
    """Cases that combine what other cases of the same test have: `tests/run.sh --release` alone
    runs them. A tuple is the values of several arguments.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.release)
        for case in cases
    ]
