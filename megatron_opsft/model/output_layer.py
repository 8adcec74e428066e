"""The output layer of a GPTModel, whose product the losses take over themselves: the model hands on
hidden states in place of logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_opsft.loss.output_head import OutputHead


@contextmanager
def without_output_layer(models: Sequence[GPTModel]) -> Iterator[None]:
    """Inside, the output layer of these GPTModels hands its input on."""
    layers = [model.output_layer for model in models if model.post_process]
    for layer in layers:
        layer.forward = _hand_on  # hides the class's method
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _hand_on(
    hidden: Tensor, weight: Tensor | None = None, **unused: Any
) -> tuple[Tensor, Tensor | None]:
    """In place of `ColumnParallelLinear.forward`, which returns (logits, bias)."""
    return hidden, None


def output_weight(model: GPTModel) -> Tensor:
    """This rank's rows of the output layer of a GPTModel on the last pipeline stage."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


def output_head(model: GPTModel, vocab_size: int, temperature: float) -> OutputHead:
    """The output layer of a GPTModel on the last pipeline stage; `vocab_size` without padding."""
    return OutputHead(
        weight_VH=output_weight(model),
        vocab_size=vocab_size,
        group=model.pg_collection.tp,
        temperature=temperature,
    )
