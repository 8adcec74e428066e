"""Parameters against tensors that were put together without them, and against names written out."""

from dataclasses import replace

import pytest
import torch
from tiny_models import SHAPES, weights
from torch import Tensor
from vllm_weights import vllm_weights

from megatron_opsft.errors import UserError
from megatron_opsft.weights.rectangles import (
    Copy,
    Parameter,
    Rect,
    hf_columns,
    hf_parameters,
)
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


def test_names_and_shapes_of_vllm_0_32() -> None:
    """As `named_parameters` of its models gave them, at tensor-parallel size 2."""
    dense = vllm_parameters(WeightTable(SHAPES["qwen2"]), 1, 2)
    assert {p.name: p.shape for p in dense if ".layers." not in p.name or ".3." in p.name} == {
        "model.embed_tokens.weight": (160, 64),
        "model.layers.3.input_layernorm.weight": (64,),
        "model.layers.3.self_attn.qkv_proj.weight": (64, 64),
        "model.layers.3.self_attn.qkv_proj.bias": (64,),
        "model.layers.3.self_attn.o_proj.weight": (64, 32),
        "model.layers.3.post_attention_layernorm.weight": (64,),
        "model.layers.3.mlp.gate_up_proj.weight": (96, 64),
        "model.layers.3.mlp.down_proj.weight": (64, 48),
        "model.norm.weight": (64,),
        "lm_head.weight": (160, 64),
    }
    experts = vllm_parameters(WeightTable(SHAPES["qwen3_moe"]), 0, 2)
    assert {p.name: p.shape for p in experts if ".3.mlp." in p.name} == {
        "model.layers.3.mlp.gate.weight": (8, 64),
        "model.layers.3.mlp.experts.routed_experts.w13_weight": (8, 40, 64),
        "model.layers.3.mlp.experts.routed_experts.w2_weight": (8, 64, 20),
    }


def test_scarce_kv_heads_are_held_by_several_vllm_ranks() -> None:
    name = "model.layers.0.self_attn.k_proj.bias"
    found = [
        next(
            part.source
            for p in vllm_parameters(table, rank, 4)
            for part in p.parts
            if part.source.tensor == name
        )
        for table in [WeightTable(SHAPES["qwen2"])]
        for rank in range(4)
    ]
    first, second = Rect(name, 0, 16, 0, 1), Rect(name, 16, 32, 0, 1)
    assert found == [first, first, second, second]


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({}, 3, "rollout.tp=3 does not divide num_attention_heads=4; choose a divisor of 4"),
        (
            {"num_heads": 12, "num_kv_heads": 4},
            6,
            "rollout.tp=6 is neither a divisor nor a multiple of num_key_value_heads=4",
        ),
        ({"ffn_size": 98}, 4, "rollout.tp=4 does not divide intermediate_size=98"),
        (
            {"num_heads": 6, "num_kv_heads": 3},
            3,
            "rollout.tp=3 does not divide the padded vocab_size=320",
        ),
    ],
)
def test_a_tp_that_vllm_cannot_use_is_named(change: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rollout_tp(replace(SHAPES["qwen2"], **change), tp)
    with pytest.raises(UserError, match=message):
        vllm_parameters(WeightTable(replace(SHAPES["qwen2"], **change)), 0, tp)


def test_a_tp_that_vllm_cannot_use_for_experts_is_named() -> None:
    experts = replace(SHAPES["qwen3_moe"], num_heads=16)
    with pytest.raises(UserError, match="rollout.tp=16 does not divide moe_intermediate_size=40"):
        check_rollout_tp(experts, 16)
    assert experts.moe is not None
    few = replace(experts, moe=replace(experts.moe, num_experts=6))
    with pytest.raises(UserError, match="rollout.tp=8 is more than num_experts=6"):
        check_rollout_tp(few, 8)


def test_whole_hf_tensors() -> None:
    shapes = {"a": (3, 5), "b": (7,)}
    assert hf_columns(shapes) == {"a": 5, "b": 1}
    a, b = Rect("a", 0, 3, 0, 5), Rect("b", 0, 7, 0, 1)
    assert hf_parameters(shapes) == (
        Parameter("a", (3, 5), (Copy(a, a),), 3),
        Parameter("b", (7,), (Copy(b, b),), 7),
    )


def test_rectangles() -> None:
    rect = Rect("x", 2, 6, 10, 20)
    assert rect.num_elements == 40
    assert rect.intersect(Rect("x", 4, 9, 0, 12)) == Rect("x", 4, 6, 10, 12)
    for apart in (
        Rect("x", 6, 9, 10, 20),
        Rect("x", 2, 6, 20, 21),
        Rect("y", 2, 6, 10, 20),
        Rect("x", 2, 6, 10, 20, 0),
    ):
        assert rect.intersect(apart) is None
    assert Rect("x", 3, 5, 12, 13).relative_to(rect) == Rect("x", 1, 3, 2, 3)
    assert (str(rect), str(replace(rect, index=7))) == ("x[2:6, 10:20]", "x[7, 2:6, 10:20]")
    vector, matrix = torch.arange(6), torch.arange(24).view(4, 6)
    experts = torch.arange(24).view(2, 3, 4)
    assert Rect("v", 1, 4, 0, 1).view(vector).tolist() == [1, 2, 3]
    assert Rect("m", 2, 4, 1, 3).view(matrix).tolist() == [[13, 14], [19, 20]]
    assert Rect("e", 0, 2, 3, 4, 1).view(experts).tolist() == [[15], [19]]


def test_copies_are_cut_inverted_and_joined() -> None:
    shard = Copy(Rect("x", 4, 8, 2, 5), Rect("shard", 1, 5, 3, 6))
    assert shard.inverse == Copy(shard.target, shard.source)
    assert shard.inverse.inverse == shard
    row = Copy(Rect("x", 5, 6, 2, 4), Rect("shard", 2, 3, 3, 5))
    assert shard.cut(Rect("x", 5, 6, 0, 4)) == row
    assert shard.cut(Rect("x", 0, 4, 0, 9)) is None
    assert shard.cut(Rect("y", 5, 6, 0, 4)) is None
    engine = Copy(Rect("x", 0, 6, 0, 4), Rect("engine", 10, 16, 0, 4, 3))
    straight = Copy(Rect("shard", 1, 3, 3, 5), Rect("engine", 14, 16, 2, 4, 3))
    assert shard.inverse.then(engine) == straight
    assert engine.inverse.then(shard) == straight.inverse
    assert shard.inverse.then(Copy(Rect("x", 0, 4, 0, 9), Rect("engine", 0, 4, 0, 9))) is None
