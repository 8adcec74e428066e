"""Trainer's and engine's checksums, compared: whether the engine holds the trainer's weights."""

from collections.abc import Collection, Mapping, Sequence
from math import lcm

from megatron_opsft.architectures.template import ShardKind
from megatron_opsft.errors import SyncError
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.runtime.distributed import gather_from_all, sum_over
from megatron_opsft.weights.checksum import expected_checksums, parameter_checksums
from megatron_opsft.weights.rectangles import Copy


def differing_parameters(
    shards: ModelShards, engine: RolloutEngine, ignored: Collection[str]
) -> list[list[str]]:
    """By rank: the parameters of its engine whose checksum is not the trainer's.

    ignored: names that are left out. Collective over the world.
    Errors: `SyncError` on every rank where an engine's draft model is not as it was loaded.
    """
    described = engine.layout
    layout = shards.layout
    trained = (layout.shard(is_expert=is_expert).tp_size for is_expert in (False, True))
    cuts = lcm(*trained, described.tp_size)
    own = engine.weights()
    told = gather_from_all([(own.signed_zeros, engine.draft_fault())])
    if fault := next((fault for _, fault in told if fault), ""):
        raise SyncError(f"{fault}; nothing was sampled with it")
    # Engines are alike: all can tell zeros apart, or none.
    signed_zeros = all(signed for signed, _ in told)
    held, tensors = _answered_for(shards), shards.by_name
    found = parameter_checksums(
        described.parameters_of(own.tp_rank),
        own.tensors,
        hf_columns=described.hf_columns,
        cuts=cuts,
        signed_zeros=signed_zeros,
    )
    wrong: list[str] = []
    for tp_rank in range(described.tp_size):
        parameters = described.parameters_of(tp_rank)
        mine = expected_checksums(
            parameters,
            held,
            tensors,
            hf_columns=described.hf_columns,
            cuts=cuts,
            signed_zeros=signed_zeros,
        )
        expected = sum_over(mine.cpu().clone()).tolist()
        have = found if tp_rank == own.tp_rank else expected
        wrong += [
            parameter.name
            for parameter, a, b in zip(parameters, have, expected, strict=True)
            if a != b and parameter.name not in ignored
        ]
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
