"""Two members of a group that is not the job's, in two processes, on any devices."""

import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor

import torch

from megatron_opsft.runtime.spanning_group import Meeting, SpanningGroup, open_meeting

Received = list[list[float]]
# Of both members.
EXPECTED: tuple[Received, Received] = (
    [[10.0] * 3, [110.0] * 3],
    [[0.0] * 3, [1.0] * 3, [100.0] * 3],
)


def rounds_of(devices: tuple[str, str]) -> tuple[Received, Received]:
    """What each of two members has received: two to the second and one to the first, and in another
    group, after both have left that, one each.
    """
    meetings, listeners = [], []
    for _ in range(2):
        meeting, listener = open_meeting("", 2, timeout_seconds=60)
        meetings.append(meeting)
        listeners.append(listener)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        theirs = other.submit(_take_part, meetings, 1, devices[1])
        ours = [
            _round(m, 0, devices[0], number, listeners[number]) for number, m in enumerate(meetings)
        ]
        return [each for part in ours for each in part], theirs.result()


def _take_part(meetings: list[Meeting], rank: int, device: str) -> Received:
    return [each for number, m in enumerate(meetings) for each in _round(m, rank, device, number)]


def _round(
    meeting: Meeting, rank: int, device: str, number: int, listener: socket.socket | None = None
) -> Received:
    """Rank 0 sends two messages in the first group and one in the second, rank 1 one in both."""
    where = torch.device(device)
    group = SpanningGroup(meeting, rank, where, meeting.host, listener)
    sent = [2 - number, 1]  # messages of each rank
    peer = 1 - rank
    outgoing = [
        torch.full((3,), 10.0 * rank + 100 * number + i, device=where) for i in range(sent[rank])
    ]
    incoming = [torch.zeros(3, device=where) for _ in range(sent[peer])]
    group.connect(incoming[0])
    works = group.exchange([(peer, t) for t in incoming], [(peer, t) for t in outgoing], tag=number)
    for work in works:
        work.wait()
    received = [t.tolist() for t in incoming]  # on a GPU this waits for its messages
    group.connect(incoming[0])
    group.close()
    return received
