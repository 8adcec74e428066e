"""Separate engines that die, without processes."""

from typing import Any

import pytest

from megatron_opsft.errors import EngineDied, EnginesLost, UserError
from megatron_opsft.rollout.remote.fleet import MAX_DEATHS, Fleet


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks tell each other, without a process group."""
    module = "megatron_opsft.rollout.remote.fleet"
    monkeypatch.setattr(f"{module}.any_over_world", bool)
    monkeypatch.setattr(f"{module}.gather_from_all", list)


class Process:
    """All that is asked of one that is never told anything."""

    pid = 1

    def close(self) -> None:
        """Nothing to end."""


class Machine:
    """Starts so many processes, then none any more."""

    def __init__(self, num_starts: int) -> None:
        self.left, self.tried = num_starts, 0

    def connect(self, number: int, context: Any) -> Any:
        self.tried += 1
        self.left -= 1
        if self.left < 0:
            raise EngineDied(f"engine {number}: nobody answers")
        return Process()


def fleet_on(machine: Machine) -> Fleet:
    return Fleet([0, 1], machine.connect, lambda client: None, timeout_seconds=1.0)


def lose(fleet: Fleet, number: int) -> None:
    with fleet.noting(number):
        raise EngineDied("it was lost")


def test_an_engine_that_never_was_there_is_wrong_input() -> None:
    with pytest.raises(UserError, match="cannot be started: engine 1: nobody answers"):
        fleet_on(Machine(1))


def test_a_lost_engine_is_replaced() -> None:
    fleet = fleet_on(Machine(3))
    assert not fleet.replace_dead()
    lose(fleet, 1)
    assert [number for number, _ in fleet.living()] == [0]
    assert fleet.replace_dead()
    assert [number for number, _ in fleet.living()] == [0, 1]


def test_an_engine_that_was_there_and_stays_away_is_worth_another_start_of_the_run() -> None:
    machine = Machine(2)
    fleet = fleet_on(machine)
    lose(fleet, 0)
    with pytest.raises(EnginesLost, match="gone, and no other one can be started: engine 0"):
        fleet.replace_dead()
    assert machine.tried == 2 + MAX_DEATHS
