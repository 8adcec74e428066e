"""Routing replay: in the trainer's passes every token goes to the experts that the rollout engine
chose for it.

Engine and trainer round differently, so their routers disagree when experts nearly tie. A token
computed by another expert gets a probability that differs by far more than rounding. Megatron-Core
can replay choices (`RouterReplay`); this module gives each micro-batch's choices to the routers of
this rank, for the tokens of this rank. How much each chosen expert counts is still the trainer's
decision, with its gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_opsft.records import MicroBatch


def routers_of(model: GPTModel) -> Iterator[tuple[int, RouterReplay]]:
    """Yield each layer's number in the whole model, from 0, and the replay of its router."""
    for layer in cast(Any, model.decoder.layers):
        replay = getattr(getattr(layer.mlp, "router", None), "router_replay", None)
        if replay is not None:
            yield layer.layer_number - 1, replay


@contextmanager
def replaying(
    model: GPTModel, batch: MicroBatch, config: TransformerConfig
) -> Iterator[None]:
    """Let the forward pass of `model` on `batch` use the batch's routing. Afterwards, while
    `replayed` lasts, passes that recompute activations use the batches' routings in turn.

    A batch without a routing is all padding; its tokens go to the first experts.
    """
    routing_TLK = _routing_of_rank(model, batch, config)
    for layer, router in routers_of(model):
        router.set_target_indices(routing_TLK[:, layer].long())
        # Megatron keeps every routing for a pass that recomputes. If none will come, drop it.
        if config.recompute_granularity is None or not torch.is_grad_enabled():
            router.replay_backward_list.clear()
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield
    for _, router in routers_of(model):
        router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def _routing_of_rank(
    model: GPTModel, batch: MicroBatch, config: TransformerConfig
) -> Tensor:
    """Return the experts of this rank's tokens, uint8 [T, L, K], on the device of the batch.

    L: layers. K: experts of a token. Sequence parallelism leaves a rank a part of the T tokens.
    """
    routing_TW = batch.routing_TW
    if routing_TW is None:
        routing_TW = torch.arange(config.moe_router_topk, dtype=torch.uint8)
        routing_TW = routing_TW.repeat(batch.num_tokens, config.num_layers)
    if config.sequence_parallel:
        group = model.pg_collection.tp
        routing_TW = routing_TW.chunk(group.size())[group.rank()]
    routing_TLK = routing_TW.view(len(routing_TW), config.num_layers, -1)
    return routing_TLK.to(batch.tokens_T.device)


@contextmanager
def replayed(models: Sequence[GPTModel]) -> Iterator[None]:
    """Use around a forward-backward schedule: on exit every router chooses by itself again and
    drops the choices that it has kept.
    """
    try:
        yield
    finally:
        for model in models:
            for _, router in routers_of(model):
                router.clear_router_replay_action()
                router.clear_indices()
