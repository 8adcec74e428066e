"""The limit of open files: raised as far as it goes, and refused where that is not far enough."""

import resource

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.job import allow_open_files


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of a process that starts with the usual ones."""
    current = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(current))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: current.__setitem__(slice(2), new))
    return current


def test_the_soft_limit_is_raised_and_too_few_for_rank_0_is_one_line(limits: list[int]) -> None:
    allow_open_files(5, 4096)
    assert limits == [4096, 4096]
    with pytest.raises(UserError, match=r"rank 0 of 4096 needs 12704 open files and may have 4096"):
        allow_open_files(0, 4096)
    limits[1] = resource.RLIM_INFINITY
    allow_open_files(0, 4096)
