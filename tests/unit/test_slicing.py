"""Shards: padding, what is read for one, and a layout that a model does not allow.

That they hold the model and come back bit for bit: tests/gloo/test_weight_sync.py; that every shard
is the one that Megatron expects: the logits of tests/gloo/test_convert_load.py.
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import SHAPES, weights
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.slicing import (
    fill_shard,
    padded_vocab_size,
    shard_parameter,
    shard_shape,
)

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
