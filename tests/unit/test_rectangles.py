"""vLLM's parameters against tensors that were put together without them; sizes it cannot use."""

from dataclasses import replace

import pytest
import torch
from tiny_models import SHAPES, weights
from torch import Tensor
from vllm_weights import vllm_weights

from megatron_opsft.errors import UserError
from megatron_opsft.weights.rectangles import Parameter
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.vllm_layout import check_rollout_tp, vllm_parameters


def filled(parameter: Parameter, hf: dict[str, Tensor]) -> Tensor:
    """The parameter as its description says: every element written once, padding zero."""
    tensor, written = torch.full(parameter.shape, torch.nan), torch.zeros(parameter.shape)
    for part in parameter.parts:
        part.target.view(tensor).copy_(part.source.view(hf[part.source.tensor]))
        part.target.view(written).add_(1)
    if len(parameter.shape) < 3:
        tensor[parameter.padding_row :] = 0
        written[parameter.padding_row :] += 1
    assert written.eq(1).all(), parameter.name
    return tensor


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", SHAPES)
def test_vllm_parameters_equal_those_of_cat_and_chunk(model: str, tp: int) -> None:
    hf = weights(model)
    for rank in range(tp):
        expected = vllm_weights(SHAPES[model], hf, rank, tp)
        parameters = vllm_parameters(WeightTable(SHAPES[model]), rank, tp)
        assert sorted(p.name for p in parameters) == sorted(expected)
        for parameter in parameters:
            assert torch.equal(filled(parameter, hf), expected[parameter.name]), parameter.name


@pytest.mark.parametrize(
    ("model", "change", "tp", "message"),
    [
        ("qwen2", {}, 3, "3 does not divide num_attention_heads=4; choose a divisor of 4"),
        ("qwen2", {"num_heads": 12, "num_kv_heads": 4}, 6, "nor a multiple of num_key_value_heads"),
        ("qwen2", {"ffn_size": 98}, 4, "4 does not divide intermediate_size=98"),
        ("qwen2", {"num_heads": 6, "num_kv_heads": 3}, 3, "3 does not .* padded vocab_size=320"),
        ("qwen3_moe", {"num_heads": 16}, 16, "16 does not divide moe_intermediate_size=40"),
        ("qwen3_moe_unnormalized", {"num_heads": 8}, 8, "8 is more than num_experts=6"),
    ],
)
def test_a_tp_that_vllm_cannot_use_is_named(
    model: str, change: dict[str, int], tp: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"rollout.tp=.*{message}"):
        check_rollout_tp(replace(SHAPES[model], **change), tp)
