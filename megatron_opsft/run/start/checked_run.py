"""The one door of a run: `plan`, `launch`, `train --check` and `train` all make a `CheckedRun`.

Nothing here needs torch or reads a file.
"""

from dataclasses import dataclass
from math import lcm

from megatron_opsft.config import Config
from megatron_opsft.config.training import check_world
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.sharding import check_layout, check_rollout_tp
from megatron_opsft.rollout.limits import (
    EngineTraits,
    check_engine_ranks,
    check_engine_settings,
    engine_traits,
)
from megatron_opsft.run.start.lengths import check_lengths, fit_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run whose settings fit each other, its model and its ranks."""

    config: Config
    """The configuration, with the lengths that the user did not set."""
    shape: ModelShape
    world_size: int

    @property
    def engine(self) -> EngineTraits:
        """What the rollout engine can do."""
        return engine_traits(self.config.rollout.engine)


def check_settings(config: Config, shape: ModelShape, world_size: int) -> CheckedRun:
    """Check a configuration against the model's shape and the number of ranks.

    Errors: `UserError` for the first setting that cannot work.
    """
    config = fit_lengths(config, shape.max_position_embeddings)
    rollout = config.rollout
    check_layout(shape, config.parallel)
    check_routing_replay(shape, config)
    check_lengths(config, shape.max_position_embeddings)
    check_world(world_size, config.parallel)
    check_engine_settings(
        rollout.engine, rollout.tp, rollout.speculative, seeded=rollout.seeded
    )
    check_engine_ranks(rollout.tp, world_size)
    check_rollout_tp(shape, rollout.tp)
    if config.model.load == "engine" and not engine_traits(rollout.engine).reads_files:
        raise UserError(
            "model.load=engine: it works only with vLLM; set rollout.engine=vllm, or "
            "model.load=disk"
        )
    return CheckedRun(config=config, shape=shape, world_size=world_size)


def fewest_ranks(config: Config) -> int:
    """Return the smallest number of ranks that can have the layout and its engine."""
    parallel = config.parallel
    expert_ranks = 1
    if parallel.ep > 1:
        expert_ranks = parallel.expert_tp * parallel.ep * parallel.pp
    return lcm(parallel.replica_size, expert_ranks, config.rollout.tp)


MOST_REPLAYED_EXPERTS = 256
"""Experts of a model whose routing can be replayed: `records.Sample.routing` is uint8."""


def check_routing_replay(shape: ModelShape, config: Config) -> None:
    """Check that `train.routing_replay`, if set, has a routing to replay.

    Errors: `UserError` if it has none.
    """
    if not config.train.routing_replay:
        return
    if shape.moe is None:
        problem = "the model has no experts"
    elif config.method.has_fixed_data:
        name = config.method.name
        problem = f"method.name={name} trains on fixed data, which no engine has routed"
    elif shape.moe.num_experts > MOST_REPLAYED_EXPERTS:
        problem = f"the model has {shape.moe.num_experts} experts, and choices are kept in one byte"
    else:
        return
    raise UserError(f"train.routing_replay=true: {problem}; leave it out")
