"""A batch of work dealt out to engines: to each an equal part, and to an engine that has room what
another one has not begun.

How far a part is used up stands in the job's store, where its own engine takes from the front and
others from the back. A response does not depend on who makes it. In a large job nobody asks anybody
as long as there is work in one's own part, and a counter says when there is none left in any.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

from megatron_opsft.rollout.engine import Replica
from megatron_opsft.rollout.requests import PromptRequest, join_requests, single_requests
from megatron_opsft.runtime.job import Job

_ASKED = 16  # parts looked at before the fullest of them is chosen


def deal_evenly(requests: Sequence[PromptRequest], num_parts: int) -> list[list[PromptRequest]]:
    """So many parts of as many responses each, but for one, as requests for single responses.

    A part has requests in their order, far apart; siblings stay together but where two parts meet.
    """
    in_turn = [r for first in range(num_parts) for r in requests[first::num_parts]]
    singles = single_requests(in_turn)
    return [singles[start:stop] for start, stop in pairwise(part_bounds(len(singles), num_parts))]


def part_bounds(num_responses: int, num_parts: int) -> list[int]:
    """Where the parts begin, and the end: response n is of part n * num_parts // num_responses."""
    return [-(-number * num_responses // num_parts) for number in range(num_parts + 1)]


class WorkQueue:
    """The parts of all engines, as one rank sees them; `take` is what its engines call."""

    def __init__(
        self, name: str, parts: Sequence[Sequence[PromptRequest]], job: Job, replica: Replica
    ) -> None:
        """name: of this queue among all of the job; parts: of single responses, one for each engine
        of the job, the same on all ranks.
        """
        self._name, self._parts, self._job, self._replica = name, parts, job, replica
        self._sizes = [len(part) for part in parts]
        # What stands in the store of a part, as far as is known here: (first, behind the last).
        self._known = {number: (0, size, "") for number, size in enumerate(self._sizes)}
        self._takes, self._changes = count(), count()
        self._written: list[str] = []
        self._used_up = f"{name}/used up"  # how many parts are

    def take(self, room: int) -> list[PromptRequest]:
        """See `rollout.engine.Take`.

        The other ranks of a tensor-parallel engine get what its first one takes.
        """
        name = f"{self._name}/take/{self._replica.number}/{next(self._takes)}"
        if not self._replica.answers:
            number, start, stop = json.loads(self._job.get(name))
        else:
            number, start, stop = self._claim(self._replica.number, room)
            if self._replica.num_ranks > 1:
                self._written.append(name)
                self._job.put(name, json.dumps((number, start, stop)))
        return join_requests(self._parts[number][start:stop])

    def forget(self) -> None:
        """Leave nothing in the store, when every rank has seen the end."""
        if self._replica.answers:
            self._written.append(self._key(self._replica.number))
        if self._replica.number == 0:
            self._written.append(self._used_up)
        for name in self._written:
            self._job.drop(name)

    def _claim(self, own: int, room: int) -> tuple[int, int, int]:
        """(part, first response, behind the last) for at most `room`; of no response at the end."""
        if claimed := self._change(own, room, from_behind=False):
            return claimed
        for numbers in self._others(own):
            if self._job.add(self._used_up, 0) == sum(map(bool, self._sizes)):
                break
            for number in numbers:
                self._look(number)
            for number in sorted(numbers, key=self._left, reverse=True):
                if claimed := self._change(number, room, from_behind=True):
                    return claimed
        return own, 0, 0

    def _others(self, own: int) -> Iterator[list[int]]:
        """All parts but one, some at a time, beginning behind it."""
        numbers = [*range(own + 1, len(self._parts)), *range(own)]
        return (numbers[i : i + _ASKED] for i in range(0, len(numbers), _ASKED))

    def _left(self, number: int) -> int:
        start, stop, _ = self._known[number]
        return stop - start

    def _change(self, number: int, room: int, *, from_behind: bool) -> tuple[int, int, int] | None:
        """Take something from a part; None where nothing is left of it."""
        while self._left(number):
            start, stop, written = self._known[number]
            if from_behind:
                middle = self._cut(number, stop - min(room, -(-(stop - start) // 2)), stop)
                left, claimed = (start, middle), (middle, stop)
            else:
                middle = min(start + room, stop)
                left, claimed = (middle, stop), (start, middle)
            if self._write(number, written, *left):
                if left[0] == left[1]:
                    self._job.add(self._used_up, 1)
                return (number, *claimed)
        return None

    def _cut(self, number: int, start: int, stop: int) -> int:
        """Where to begin instead of `start`, so that siblings stay together if that leaves any."""
        part = self._parts[number]
        for place in range(start, stop):
            if place == 0 or part[place - 1].problem_id != part[place].problem_id:
                return place
        return start

    def _write(self, number: int, written: str, start: int, stop: int) -> bool:
        """Whether the part was as known; it is now in any case."""
        # No two writers write the same: a swap that failed cannot look like one that did not.
        mine = f"{start} {stop} {self._replica.number} {next(self._changes)}"
        if self._replica.count == 1:
            self._known[number] = (start, stop, mine)
            return True
        found = self._job.swap(self._key(number), written, mine)
        self._read(number, found)
        return found == mine

    def _look(self, number: int) -> None:
        """What the store says of a part; nothing stands there before its first change."""
        if self._replica.count > 1 and self._left(number):
            _, _, written = self._known[number]
            self._read(number, self._job.swap(self._key(number), written, written))

    def _read(self, number: int, found: str) -> None:
        if found:
            start, stop = map(int, found.split(" ")[:2])
            self._known[number] = (start, stop, found)

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"
