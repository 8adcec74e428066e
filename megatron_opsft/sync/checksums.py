"""Trainer's and engine's checksums, compared: whether the engine holds the trainer's weights."""

from collections.abc import Mapping, Sequence

from megatron_opsft.architectures.template import ShardKind
from megatron_opsft.errors import SyncError
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.runtime.distributed import gather_from_all, sum_over
from megatron_opsft.weights.checksum import expected_checksums, parameter_checksums
from megatron_opsft.weights.rectangles import Copy


def differing_parameters(shards: ModelShards, engine: RolloutEngine) -> list[list[str]]:
    """By rank: the parameters of its engine whose checksum is not the trainer's.

    Collective over the world.
    Errors: `SyncError` on every rank where an engine's draft model is not as it was loaded.
    """
    if fault := next(filter(None, gather_from_all([engine.draft_fault()])), ""):
        raise SyncError(f"{fault}; nothing was sampled with it")
    layout = engine.layout
    held, tensors = _answered_for(shards), shards.by_name
    found = parameter_checksums(layout.parameters_of(layout.tp_rank), engine.weights())
    wrong: list[str] = []
    for tp_rank in range(layout.tp_size):
        parameters = layout.parameters_of(tp_rank)
        mine = expected_checksums(parameters, held, tensors)
        expected = sum_over(mine.cpu().clone()).tolist()
        if tp_rank == layout.tp_rank:
            pairs = zip(parameters, found, expected, strict=True)
            wrong = [parameter.name for parameter, a, b in pairs if a != b]
    return gather_from_all([wrong])


def _answered_for(shards: ModelShards) -> Mapping[str, Sequence[Copy]]:
    """HF name -> what this rank answers for: replicas share the work, each part has one."""
    layout = shards.layout
    held: dict[str, list[Copy]] = {}
    for index, (rule, _) in enumerate(shards.parameters):
        shard = layout.shard(is_expert=rule.is_expert)
        is_repeated = rule.replica or (rule.kind is ShardKind.COPY and shard.tp_rank > 0)
        if is_repeated or index % shard.num_copies != shard.copy_rank:
            continue
        for part in shards.part(rule).parts:
            held.setdefault(part.source.tensor, []).append(part)
    return held
