"""The order of a pipeline rank's passes, as Megatron's schedules have it; pure.

1F1B (Narayanan et al., 2019) and its interleaved form (2021): megatron.core.pipeline_parallel's
`get_pp_rank_microbatches` and `get_schedule_table`.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of one micro-batch through one model chunk of a stage."""

    forward: bool
    microbatch: int
    chunk: int


def rank_order(stage: int, pp: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
    """Every pass of a pipeline rank. With `vpp` > 1 `num_microbatches` is a multiple of `pp`."""
    total = num_microbatches * vpp
    warm_up = pp - stage - 1
    if vpp > 1:
        warm_up = 2 * warm_up + (vpp - 1) * pp
    warm_up = min(warm_up, total)
    for k in range(total + warm_up):
        if k < total:
            yield _pass(k, pp, vpp, forward=True)
        if k >= warm_up:
            yield _pass(k - warm_up, pp, vpp, forward=False)


def _pass(k: int, pp: int, vpp: int, *, forward: bool) -> Pass:
    """The k-th one of a rank: with virtual stages `pp` micro-batches go through one chunk before
    they go through the next.
    """
    if vpp == 1:
        return Pass(forward, k, 0)
    group, place = divmod(k, pp * vpp)
    chunk, microbatch = divmod(place, pp)
    return Pass(forward, group * pp + microbatch, chunk if forward else vpp - 1 - chunk)


def what_it_needs(one: Pass, stage: int, pp: int, vpp: int = 1) -> tuple[Pass, int] | None:
    """(pass, stage) whose output it takes; None: it begins with the tokens, or with the loss that
    the same chunk has just computed.
    """
    if one.forward:
        if stage > 0:
            return one, stage - 1
        before = Pass(True, one.microbatch, one.chunk - 1)
        return (before, pp - 1) if one.chunk > 0 else None
    if stage < pp - 1:
        return one, stage + 1
    after = Pass(False, one.microbatch, one.chunk + 1)
    return (after, 0) if one.chunk < vpp - 1 else None
