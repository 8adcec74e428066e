"""Who holds what in trainers and engines, without processes."""

from collections.abc import Callable

from megatron_opsft.models.weights.rectangles import Parameter
from megatron_opsft.models.weights.reshard import Placement
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter


def megatron_placements(
    table: WeightTable,
    *,
    tp: int,
    pp: int,
    dp: int,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
) -> tuple[Placement, ...]:
    """Who holds what in Megatron's default rank order: tp fastest, then dp, then pp; of experts
    their tp, then ep, then what is left.

    Layers are cut evenly; virtual chunk c of stage p is block c * pp + p of them.
    `UserError` for a tp that cannot cut the model.
    """
    etp, num_local = etp or tp, table.num_experts // ep
    num_blocks = pp * (vpp or 1)
    assert table.shape.num_layers % num_blocks == 0
    size = table.shape.num_layers // num_blocks
    placements = []
    for stage in range(pp):
        holding: dict[tuple[int, int, int], list[int]] = {}
        for number in range(tp * dp):  # of the stage's ranks
            place = number % tp, number % etp, number // etp % ep
            holding.setdefault(place, []).append(stage * tp * dp + number)
        for (tp_rank, etp_rank, ep_rank), ranks in holding.items():
            rules = [
                rule
                for block in range(stage, num_blocks, pp)
                for rule in table.stage_rules(
                    range(block * size, (block + 1) * size),
                    has_embedding=block == 0,
                    has_output=block == num_blocks - 1,
                    experts=range(ep_rank * num_local, (ep_rank + 1) * num_local),
                )
            ]
            parameters = tuple(
                shard_parameter(rule, *((etp_rank, etp) if rule.is_expert else (tp_rank, tp)))
                for rule in rules
            )
            placements.append(Placement(tuple(ranks), parameters))
    return tuple(placements)


def engine_placements(
    parameters_of: Callable[[int], tuple[Parameter, ...]], tp_size: int, world_size: int
) -> tuple[Placement, ...]:
    """Who holds what where engine r lives on ranks r * tp_size to (r + 1) * tp_size - 1.

    parameters_of: tensor-parallel rank -> its parameters.
    """
    assert world_size % tp_size == 0
    return tuple(
        Placement(tuple(range(tp_rank, world_size, tp_size)), parameters_of(tp_rank))
        for tp_rank in range(tp_size)
    )
