"""Weight tables against transformers and vLLM: tensors, shards, and what is refused by name.

That shards hold the model and come back bit for bit: tests/gloo/test_weight_sync.py; that each is
the one that Megatron expects: the logits of tests/gloo/test_convert_load.py.
"""

from dataclasses import replace

import pytest
import torch
from hf_configs import hf_config
from hf_reference import hf_weights
from tiny_models import SHAPES, weights
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_weights import vllm_weights

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.sharding import check_rollout_tp
from megatron_opsft.models.weights.filling import fill_shard
from megatron_opsft.models.weights.rectangles import Parameter, Rect
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.slicing import (
    padded_vocab_size,
    shard_parameter,
    shard_shape,
)
from megatron_opsft.models.weights.vllm_layout import vllm_parameters

Shapes = dict[str, tuple[int, ...] | None]
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
NORM = "model.layers.3.post_attention_layernorm.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_hf_shapes_equal_those_of_transformers(name: str, tied: bool) -> None:
    shape = replace(SHAPES[name], tied_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(shape))
    assert type(model).__name__ == shape.architecture
    expected = {name: tuple(p.shape) for name, p in hf_weights(model).items()}
    assert WeightTable(shape).hf_shapes() == expected


def test_a_saved_constant_of_the_positions_is_no_tensor_too_many() -> None:
    table = WeightTable(SHAPES["llama_mha"])
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    table.check_hf(table.hf_shapes() | constant, "dir")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama3", {"model.norm.weight": None}, r"dir .*missing model\.norm\.weight$"),
        ("llama3", {"model.layers.0.self_attn.q_proj.bias": (64,)}, "unexpected .*q_proj.bias"),
        ("qwen3", {NORM: (63,)}, rf"{NORM} has shape \[63\].*\[64\]"),
        ("qwen2_tied", {"lm_head.weight": (384, 64)}, "lm_head.weight has shape"),
        ("qwen3_moe", {EXPERT.format(7): None}, rf"missing {EXPERT.format(7)}"),
        ("qwen3_moe", {EXPERT.format(8): (40, 64)}, rf"unexpected {EXPERT.format(8)}"),
        ("qwen3_moe", {"model.layers.0.mlp.gate.bias": (8,)}, "unexpected .*mlp.gate.bias"),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_named(
    name: str, changes: Shapes, said: str
) -> None:
    table = WeightTable(SHAPES[name])
    shapes = {n: s for n, s in (table.hf_shapes() | changes).items() if s is not None}
    with pytest.raises(UserError, match=said):
        table.check_hf(shapes, "dir")


QKV, FC1 = (f"decoder.layers.0.{n}.weight" for n in ("self_attention.linear_qkv", "mlp.linear_fc1"))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_shards_are_the_padded_embedding_with_zero_rows(tp: int) -> None:
    table, state = WeightTable(SHAPES["qwen2_tied"]), weights("qwen2_tied")
    expected = torch.cat([state["model.embed_tokens.weight"], torch.zeros(384 - 301, 64)])
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rule, shards = table.by_mcore_name[name], []
        for rank in range(tp):
            shards.append(torch.full(shard_shape(rule, tp), torch.nan))
            fill_shard(
                rule, lambda r: r.view(state[r.tensor]), shards[-1], tp_rank=rank, tp_size=tp
            )
        assert torch.equal(torch.cat(shards), expected)


def test_padded_vocab_size_is_the_same_for_every_power_of_two() -> None:
    assert {padded_vocab_size(151_936, tp) for tp in (1, 2, 4, 8, 16, 64)} == {151_936}
    assert [padded_vocab_size(300, tp) for tp in (1, 8, 3, 5)] == [384, 384, 384, 640]


def test_fill_reads_only_the_ranks_own_slice_once_per_tensor() -> None:
    state, calls = weights("qwen2"), []

    def read(rect: Rect) -> Tensor:
        calls.append(str(rect).removeprefix("model.layers.0.self_attn."))
        return rect.view(state[rect.tensor])

    rule = WeightTable(SHAPES["qwen2"]).by_mcore_name[QKV]
    fill_shard(rule, read, torch.empty(shard_shape(rule, 2)), tp_rank=1, tp_size=2)
    rows = {"q": "32:64", "k": "16:32", "v": "16:32"}
    assert calls == [f"{x}_proj.weight[{part}, 0:64]" for x, part in rows.items()]


@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [
        (QKV, 4, r"parallel\.tp=4 .*num_key_value_heads=2"),
        (FC1, 8, r"parallel\.tp=8 .*gate_proj.weight=36"),
    ],
)
def test_tp_that_does_not_divide_is_named(name: str, tp: int, said: str) -> None:
    table = WeightTable(replace(SHAPES["qwen2"], ffn_size=36))
    with pytest.raises(UserError, match=said):
        shard_parameter(table.by_mcore_name[name], 0, tp)


def filled(parameter: Parameter, hf: dict[str, Tensor]) -> Tensor:
    """The parameter as its description says: every element written once, padding zero."""
    tensor, written = torch.full(parameter.shape, torch.nan), torch.zeros(parameter.shape)
    for part in parameter.copies:
        part.target.view(tensor).copy_(part.source.view(hf[part.source.tensor]))
        part.target.view(written).add_(1)
    if all(part.target.matrix is None for part in parameter.copies):
        tensor[parameter.padding_row :] = 0
        written[parameter.padding_row :] += 1
    assert written.eq(1).all(), parameter.name
    return tensor


VLLM_CASES = [
    (model, tp)
    for model, shape in SHAPES.items()
    for tp in (1, 2, 4)
    if shape.delta is None or shape.delta.num_key_heads % tp == 0
]


@pytest.mark.parametrize(("model", "tp"), VLLM_CASES)
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
