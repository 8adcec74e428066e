"""The limit of open files: raised as far as it goes, and refused where that is not far enough."""

import resource

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.job import allow_open_files, needed_files

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of a process that starts with the usual ones."""
    current = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(current))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: current.__setitem__(slice(2), new))
    return current


def test_the_soft_limit_becomes_the_hard_one(limits: list[int]) -> None:
    allow_open_files(0, 1)
    assert limits == [4096, 4096]


def test_too_few_for_rank_0_alone_is_one_line_with_the_number(limits: list[int]) -> None:
    allow_open_files(5, 4096)
    with pytest.raises(UserError, match=r"rank 0 of 4096 needs 12704 open files and may have 4096"):
        allow_open_files(0, 4096)
    limits[1] = resource.RLIM_INFINITY
    allow_open_files(0, 4096)


def test_a_rank_s_need_grows_with_the_logarithm_of_their_number() -> None:
    assert [needed_files(1, size) for size in (64, 512, 4096)] == [368, 392, 416]
    # Of each rank: the store, its watchdog, its checkpoints.
    assert needed_files(0, 512) == 392 + 3 * 512
