"""Checks that a model can be cut as the parallel layout says."""

from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Check that the model can be cut as `parallel` says.

    Errors: `UserError` naming the number that the layout does not divide, or the wrong key.
    """
    etp_key = "etp" if parallel.etp else "tp"
    _check_divides("tp", parallel.tp, shape.num_heads, "attention heads")
    _check_divides("tp", parallel.tp, shape.num_kv_heads, "key/value heads")
    _check_divides(etp_key, parallel.expert_tp, shape.shard_ffn[1], "feed-forward size")
    if shape.moe is not None:
        _check_divides("ep", parallel.ep, shape.moe.num_experts, "experts")
    if shape.moe is None and (parallel.ep > 1 or parallel.etp):
        key = "ep" if parallel.ep > 1 else "etp"
        raise UserError(
            f"parallel.{key}={getattr(parallel, key)}: the model has no experts; leave it out"
        )
    if parallel.ep == 1 and parallel.expert_tp != parallel.tp:
        raise UserError(
            f"parallel.etp={parallel.etp} other than parallel.tp={parallel.tp} needs parallel.ep "
            "above 1; leave it out"
        )
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"parallel.tp={parallel.tp} with a mixture of experts needs "
            "parallel.sequence_parallel=true"
        )
    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        raise UserError(
            f"parallel.pp={parallel.pp} x vpp={parallel.vpp or 1} does not divide the model's "
            f"{shape.num_layers} layers"
        )
    if parallel.vpp and parallel.pp < 2:
        raise UserError(f"parallel.vpp={parallel.vpp} needs parallel.pp of at least 2")


def _check_divides(key: str, size: int, number: int, name: str) -> None:
    if number % size:
        raise UserError(
            f"parallel.{key}={size} does not divide the model's {number} {name}; "
            f"use a divisor of {number}"
        )


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
