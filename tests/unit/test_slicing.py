"""Shards against definitions written out here, and bit-identical round trips."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_opsft.architectures import ARCHITECTURES
from megatron_opsft.architectures.shape import ModelShape, MoeShape
from megatron_opsft.errors import UserError
from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.slicing import (
    fill_shard,
    merge_shards,
    padded_vocab_size,
    shard_parameter,
    shard_shape,
)

HEADS, GROUPS, HEAD, HIDDEN, FFN, VOCAB = 8, 4, 16, 24, 40, 300
TP_SIZES = (1, 2, 4)
MOE = MoeShape(num_experts=3, top_k=2, ffn_size=20, normalize_top_k=True)


def make_table(
    architecture: str = "Qwen2ForCausalLM", *, tied: bool = False, groups: int = GROUPS, tp: int = 1
) -> WeightTable:
    shape = ModelShape(
        architecture=architecture,
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_size=FFN,
        num_heads=HEADS,
        num_kv_heads=groups,
        head_dim=HEAD,
        vocab_size=VOCAB,
        tied_embeddings=tied,
        qkv_bias=ARCHITECTURES[architecture].qkv_bias,
        qk_norm=ARCHITECTURES[architecture].qk_norm,
        norm_eps=1e-6,
        max_position_embeddings=128,
        rope_theta=10000.0,
        moe=MOE if ARCHITECTURES[architecture].expert_rows else None,
    )
    return WeightTable(shape, tp_size=tp)


def random_state(table: WeightTable, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in table.hf_shapes().items()
    }


def shards_of(
    table: WeightTable, state: dict[str, Tensor], mcore_name: str, tp: int
) -> list[Tensor]:
    rule = table.by_mcore_name(mcore_name)
    dtype = next(iter(state.values())).dtype
    shards = []
    for tp_rank in range(tp):
        shard = torch.full(shard_shape(rule, tp), torch.nan, dtype=dtype)
        fill_shard(
            rule,
            lambda rect: rect.view(state[rect.tensor]),
            shard,
            tp_rank=tp_rank,
            tp_size=tp,
        )
        shards.append(shard)
    return shards


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hf_to_shards_to_hf_is_bit_identical(architecture: str, tied: bool, tp: int) -> None:
    table = make_table(architecture, tied=tied)
    state = random_state(table, torch.bfloat16)
    back: dict[str, Tensor] = {}
    for rule in table.rules:
        shards = shards_of(table, state, rule.mcore_name, tp)
        assert not any(shard.isnan().any() for shard in shards), rule.mcore_name
        if not rule.replica:
            back |= merge_shards(rule, shards)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_equals_the_definition_row_by_row(kind: str, groups: int) -> None:
    table = make_table(groups=groups)
    state = random_state(table)
    q, k, v = (state[f"model.layers.1.self_attn.{x}_proj.{kind}"] for x in "qkv")
    for tp in (size for size in TP_SIZES if groups % size == 0):
        shards = shards_of(table, state, f"decoder.layers.1.self_attention.linear_qkv.{kind}", tp)
        for tp_rank, shard in enumerate(shards):
            rows = []
            for group in range(tp_rank * groups // tp, (tp_rank + 1) * groups // tp):
                for head in range(group * HEADS // groups, (group + 1) * HEADS // groups):
                    rows += [q[head * HEAD + i] for i in range(HEAD)]
                rows += [k[group * HEAD + i] for i in range(HEAD)]
                rows += [v[group * HEAD + i] for i in range(HEAD)]
            assert torch.equal(shard, torch.stack(rows))


@pytest.mark.parametrize("tp", TP_SIZES)
def test_mlp_and_projection_shards_equal_torch_chunks(tp: int) -> None:
    table = make_table()
    state = random_state(table)
    prefix, hf = "decoder.layers.0.", "model.layers.0."
    fc1 = shards_of(table, state, prefix + "mlp.linear_fc1.weight", tp)
    gate = state[hf + "mlp.gate_proj.weight"].chunk(tp)
    up = state[hf + "mlp.up_proj.weight"].chunk(tp)
    fc2 = shards_of(table, state, prefix + "mlp.linear_fc2.weight", tp)
    down = state[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)
    proj = shards_of(table, state, prefix + "self_attention.linear_proj.weight", tp)
    out = state[hf + "self_attn.o_proj.weight"].chunk(tp, dim=1)
    norm = shards_of(table, state, prefix + "input_layernorm.weight", tp)
    for r in range(tp):
        assert torch.equal(fc1[r], torch.cat([gate[r], up[r]]))
        assert torch.equal(fc2[r], down[r])
        assert torch.equal(proj[r], out[r])
        assert torch.equal(norm[r], state[hf + "input_layernorm.weight"])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_shards_are_the_padded_embedding_with_zero_rows(tp: int) -> None:
    table = make_table(tied=True)
    state = random_state(table)
    embedding = state["model.embed_tokens.weight"]
    expected = torch.cat([embedding, torch.zeros(384 - VOCAB, HIDDEN)])
    rule = table.by_mcore_name("embedding.word_embeddings.weight")
    for name in (rule.mcore_name, "output_layer.weight"):
        shards = shards_of(table, state, name, tp)
        assert torch.equal(torch.cat(shards), expected)
    rows = 384 // tp
    real = [min(max(VOCAB - r * rows, 0), rows) for r in range(tp)]
    assert [shard_parameter(rule, r, tp).padding_row for r in range(tp)] == real
    assert torch.equal(merge_shards(rule, shards)["model.embed_tokens.weight"], embedding)


def test_padded_vocab_size_is_the_same_for_every_power_of_two() -> None:
    assert {padded_vocab_size(151_936, tp) for tp in (1, 2, 4, 8, 16, 64)} == {151_936}
    assert {padded_vocab_size(300, tp) for tp in (1, 2, 4, 8)} == {384}
    assert padded_vocab_size(300, 3) == 384
    assert padded_vocab_size(300, 5) == 640
    assert make_table(tp=5).padded_vocab == 640


def test_fill_reads_only_the_ranks_own_slice_once_per_tensor() -> None:
    table = make_table()
    state = random_state(table)
    rule = table.by_mcore_name("decoder.layers.0.self_attention.linear_qkv.weight")
    calls: list[str] = []

    def read(rect: Rect) -> Tensor:
        calls.append(str(rect).removeprefix("model.layers.0.self_attn."))
        return rect.view(state[rect.tensor])

    fill_shard(rule, read, torch.empty(shard_shape(rule, 2)), tp_rank=1, tp_size=2)
    assert calls == [
        "q_proj.weight[64:128, 0:24]",
        "k_proj.weight[32:64, 0:24]",
        "v_proj.weight[32:64, 0:24]",
    ]


def test_tp_that_does_not_divide_is_named() -> None:
    table = make_table(groups=2)
    rule = table.by_mcore_name("decoder.layers.0.self_attention.linear_qkv.weight")
    with pytest.raises(UserError, match=r"parallel\.tp=4 .*num_key_value_heads=2"):
        shard_parameter(rule, 0, 4)
    odd_ffn = WeightTable(replace(table.shape, ffn_size=36))
    with pytest.raises(UserError, match=r"parallel\.tp=8 .*gate_proj.weight=36"):
        shard_parameter(odd_ffn.by_mcore_name("decoder.layers.0.mlp.linear_fc1.weight"), 0, 8)


def test_shard_of_the_wrong_shape_is_refused() -> None:
    rule = make_table().by_mcore_name("decoder.layers.0.mlp.linear_fc1.weight")
    with pytest.raises(UserError, match=r"linear_fc1.weight has shape \[40, 24\].*\[80, 24\]"):
        fill_shard(rule, lambda *_: torch.empty(0), torch.empty(40, 24), tp_rank=0, tp_size=1)
