"""What a model and a layout must agree on, checked without Megatron."""

from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Errors: `UserError` naming the number that the layout does not divide."""
    for key, size, name, value in (
        ("tp", parallel.tp, "attention heads", shape.num_heads),
        ("tp", parallel.tp, "key/value heads", shape.num_kv_heads),
        (
            "etp" if parallel.etp else "tp",
            parallel.expert_tp,
            "feed-forward size",
            shape.shard_ffn[1],
        ),
        (
            "ep",
            parallel.ep,
            "experts",
            shape.moe.num_experts if shape.moe else parallel.ep,
        ),
    ):
        if value % size:
            raise UserError(
                f"parallel.{key}={size} does not divide the model's {value} {name}; "
                f"use a divisor of {value}"
            )
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


MOST_REPLAYED_EXPERTS = 256
"""`train.routing_replay` hands choices of experts on as uint8 (`records.Sample.routing`)."""


def check_routing_replay(shape: ModelShape, config: Config) -> None:
    """Errors: `UserError` where there is no routing to replay."""
    problem = (
        "the model has no experts"
        if shape.moe is None
        else f"method.name={config.method.name} trains on fixed data, which no engine has routed"
        if config.method.has_fixed_data
        else f"the model has {shape.moe.num_experts} experts, and choices are kept in one byte"
        if shape.moe.num_experts > MOST_REPLAYED_EXPERTS
        else ""
    )
    if config.train.routing_replay and problem:
        raise UserError(f"train.routing_replay=true: {problem}; leave it out")
