"""Where vLLM keeps a model's weights, and the stream of tensors that it loads them from."""

from collections.abc import Collection, Iterable, Iterator
from functools import cache

from torch import Tensor

from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.weights.rectangles import Parameter, hf_columns
from megatron_opsft.weights.rules import EMBEDDING, TIED_HEAD, WeightTable
from megatron_opsft.weights.vllm_layout import tied_head, vllm_parameters


def vllm_layout(table: WeightTable, tp_size: int, *, packed_head: bool) -> EngineLayout:
    """vLLM's layout of a model. packed_head: the head's product has a copy of a tied embedding.

    Errors: `UserError` when tp_size does not divide the model.
    """

    @cache  # every push asks
    def parameters_of(tp_rank: int) -> tuple[Parameter, ...]:
        parameters = vllm_parameters(table, tp_rank, tp_size)
        if packed_head and table.shape.tied_embeddings:
            parameters = (*parameters, tied_head(parameters))
        return parameters

    names = [parameter.name for parameter in parameters_of(0)]
    return EngineLayout(
        tp_size=tp_size,
        parameters_of=parameters_of,
        hf_columns=hf_columns(table.hf_shapes()),
        uncertain=frozenset(name for name in names if ".experts." in name),
    )


def with_tied_head(
    tensors: Iterable[tuple[str, Tensor]], hf_names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The stream as vLLM needs it: a tied embedding comes under the head's name as well. hf_names:
    of all tensors.
    """
    embedding = EMBEDDING.hf_tensors[0][0]
    for name, tensor in tensors:
        yield name, tensor
        if name == embedding and TIED_HEAD not in hf_names:
            yield TIED_HEAD, tensor
