"""The pull from an engine in another process: its parameters pass every rank one by one."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_opsft.model.shards import ModelShards
from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.weights.rectangles import Copy


class Readable(Protocol):
    """An engine whose parameters rank 0 can ask for."""

    layout: EngineLayout

    def parameters(self, name: str) -> list[Tensor]: ...


@torch.no_grad()
def broadcast_pull(engine: Readable, shards: ModelShards) -> None:
    """Fill every shard; collective over the world. A rank holds one engine parameter at a time."""
    wanted: dict[str, list[tuple[Copy, Tensor]]] = {}
    for rule, tensor in shards.parameters:
        parameter = shards.part(rule)
        for part in parameter.parts:
            wanted.setdefault(part.source.tensor, []).append((part, tensor))
        tensor[parameter.padding_row :].zero_()
    of_rank = [engine.layout.parameters_of(tp_rank) for tp_rank in range(engine.layout.tp_size)]
    for position, parameter in enumerate(of_rank[0]):
        values = broadcast_object(engine.parameters(parameter.name))
        for tp_rank, value in enumerate(values):
            for held in of_rank[tp_rank][position].parts:
                for part, tensor in wanted.get(held.source.tensor, ()):
                    copy = held.inverse.then(part)
                    if copy is not None:
                        copy.target.view(tensor).copy_(copy.source.view(value))
