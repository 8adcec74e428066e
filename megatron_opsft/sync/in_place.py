"""The transfers that write weights in place: into the engine's own parameters, and back."""

from megatron_opsft.model.shards import ModelShards
from megatron_opsft.rollout.engine import EngineLayout, EngineWeights
from megatron_opsft.runtime.distributed import ranks_by_value
from megatron_opsft.sync.transfer import Transfer
from megatron_opsft.weights.reshard import Placement
from megatron_opsft.weights.schedule import Schedule, make_schedule
from megatron_opsft.weights.slicing import shard_parameter


def push_transfer(
    shards: ModelShards, engine: EngineLayout, own: EngineWeights, bucket_bytes: int
) -> tuple[Transfer, int]:
    """Trainer -> engine, and the most bytes that a rank sends; collective over the world."""
    schedule = _schedule(
        shards, trainer_placements(shards), _engine_placements(engine, own), bucket_bytes
    )
    program = schedule.program(shards.layout.rank)
    return Transfer(program, shards.by_name, own.tensors), max(schedule.bytes_sent)


def pull_transfer(
    shards: ModelShards, engine: EngineLayout, own: EngineWeights, bucket_bytes: int
) -> Transfer:
    """Engine -> trainer; collective over the world."""
    schedule = _schedule(
        shards, _engine_placements(engine, own), trainer_placements(shards), bucket_bytes
    )
    return Transfer(schedule.program(shards.layout.rank), own.tensors, shards.by_name)


def other_dtype(shards: ModelShards, engine: EngineLayout, own: EngineWeights) -> str:
    """Why this rank's engine cannot be written in place because of a dtype; empty if it can."""
    for parameter in engine.parameters_of(own.tp_rank):
        dtype = own.tensors[parameter.name].dtype
        if dtype != shards.dtype:
            return f"the engine holds {parameter.name} in {dtype}, not in {shards.dtype}"
    return ""


def _schedule(
    shards: ModelShards, sources: list[Placement], targets: list[Placement], bucket_bytes: int
) -> Schedule:
    return make_schedule(
        sources,
        targets,
        itemsize=shards.dtype.itemsize,
        world_size=shards.layout.world_size,
        bucket_bytes=bucket_bytes,
    )


def trainer_placements(shards: ModelShards) -> list[Placement]:
    """What every training rank holds, exchanged by name."""
    layout, table = shards.layout, shards.table
    names = tuple(rule.mcore_name for rule, _ in shards.parameters)
    cuts = {is_expert: layout.cut(is_expert=is_expert) for is_expert in (False, True)}
    places = tuple(cut.tp_rank for cut in cuts.values())
    return [
        Placement(
            ranks=ranks,
            parameters=tuple(
                shard_parameter(rule, tp_ranks[rule.is_expert], cuts[rule.is_expert].tp_size)
                for rule in map(table.by_mcore_name, held)
            ),
        )
        for (tp_ranks, held), ranks in ranks_by_value((places, names)).items()
    ]


def _engine_placements(engine: EngineLayout, own: EngineWeights) -> list[Placement]:
    return [
        Placement(ranks=ranks, parameters=engine.parameters_of(tp_rank))
        for tp_rank, ranks in ranks_by_value(own.tp_rank).items()
    ]
