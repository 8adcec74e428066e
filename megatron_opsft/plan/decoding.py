"""How rollout engines get through the responses that they are asked for: decoding steps, how many
sequences are in them, and the tokens that these hold; pure.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.rollout.hf import CHECK_EVERY, COMPACT_AT


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_steps` decoding steps of `batch` sequences; context: tokens of all of them together,
    prompts included, on average over the steps.
    """

    num_steps: int
    batch: int
    context: float


def refilled_segments(lengths: Sequence[int], prompt_tokens: float, slots: int) -> list[Segment]:
    """Continuous batching (vLLM): a slot that gets free takes the next of the lengths at once."""
    waiting = list(reversed(lengths))
    running: list[tuple[int, float]] = []  # a heap of (step at which it ends, tokens it then holds)
    segments = []
    now, held = 0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            length = waiting.pop()
            heapq.heappush(running, (now + length, prompt_tokens + length))
            held += prompt_tokens
        steps, batch = running[0][0] - now, len(running)
        segments.append(Segment(steps, batch, held + batch * steps / 2))
        now += steps
        held += batch * steps
        while running and running[0][0] == now:
            held -= heapq.heappop(running)[1]
    return segments


def static_segments(
    lengths: Sequence[int], prompt_tokens: float, slots: int, limit: int
) -> list[Segment]:
    """Batch after batch (the Hugging Face engine): a batch is looked at every four tokens, and its
    finished rows leave when they are a quarter of it. The first token is the prefill's.

    limit: the longest response, at which a batch is looked at for the last time.
    """
    segments = []
    for start in range(0, len(lengths), slots):
        rows = sorted(lengths[start : start + slots], reverse=True)
        looked_at = done = 0  # tokens of every row; decoding steps so far
        while rows:
            looked_at = min(looked_at + CHECK_EVERY, limit)
            if steps := looked_at - 1 - done:
                context = len(rows) * (prompt_tokens + done + (steps + 1) / 2)
                segments.append(Segment(steps, len(rows), context))
            done += steps
            finished = sum(n <= looked_at for n in rows)
            if finished >= COMPACT_AT * len(rows):
                rows = rows[: len(rows) - finished]
    return segments
