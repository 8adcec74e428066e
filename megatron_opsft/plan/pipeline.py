"""When the ranks of a pipeline are through with their passes, in the order of Megatron's schedules.

1F1B (Narayanan et al., 2019) and its interleaved form (2021): megatron.core.pipeline_parallel's
`get_pp_rank_microbatches` and `get_schedule_table`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one model chunk of a stage."""

    is_forward: bool
    chunk: int
    microbatch: int


def pipeline_ends(forward: Any, backward: Any) -> Any:
    """Seconds from the first pass to the end of each stage's last one, float64 [pp, dp].

    forward, backward: seconds of a pass, float64 [pp, chunks, dp, micro-batches]; with several
    chunks the number of micro-batches is a multiple of pp. Replicas do not wait for each other.
    """
    pp, num_chunks, dp, count = forward.shape
    ends = np.zeros((pp, dp))
    done: dict[tuple[Pass, int], Any] = {}
    orders = [rank_order(stage, pp, count, num_chunks) for stage in range(pp)]
    waiting = [next(order, None) for order in orders]
    while any(waiting):
        for stage, order in enumerate(orders):
            while one := waiting[stage]:
                needed = input_of(one, stage, pp, num_chunks)
                if needed is not None and needed not in done:
                    break
                start = ends[stage] if needed is None else np.maximum(ends[stage], done[needed])
                seconds = forward if one.is_forward else backward
                done[one, stage] = start + seconds[stage, one.chunk, :, one.microbatch]
                ends[stage] = done[one, stage]
                waiting[stage] = next(order, None)
    return ends


def rank_order(stage: int, pp: int, num_microbatches: int, num_chunks: int = 1) -> Iterator[Pass]:
    """Every pass of a pipeline rank: forward passes that fill the pipeline, then one forward and
    one backward pass in turn.
    """
    total = num_microbatches * num_chunks
    warm_up = pp - stage - 1
    if num_chunks > 1:
        warm_up = 2 * warm_up + (num_chunks - 1) * pp
    warm_up = min(warm_up, total)
    # `pp` micro-batches go through one chunk before they go through the next.
    group = pp if num_chunks > 1 else 1
    for k in range(total + warm_up):
        if k < total:
            yield _pass(k, group, num_chunks, is_forward=True)
        if k >= warm_up:
            yield _pass(k - warm_up, group, num_chunks, is_forward=False)


def _pass(k: int, group: int, num_chunks: int, *, is_forward: bool) -> Pass:
    """The k-th forward or backward pass of a rank."""
    lap, place = divmod(k, group * num_chunks)
    chunk, microbatch = divmod(place, group)
    return Pass(
        is_forward, chunk if is_forward else num_chunks - 1 - chunk, lap * group + microbatch
    )


def input_of(one: Pass, stage: int, pp: int, num_chunks: int = 1) -> tuple[Pass, int] | None:
    """(pass, stage) whose output a pass takes; None: it begins with the tokens, or with the loss
    that the same chunk has just computed.
    """
    step = 1 if one.is_forward else -1
    if 0 <= stage - step < pp:
        return one, stage - step
    if 0 <= one.chunk - step < num_chunks:
        return one._replace(chunk=one.chunk - step), pp - 1 if one.is_forward else 0
    return None
