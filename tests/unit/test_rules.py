"""The weight tables agree with transformers, and a directory of another model is named."""

from dataclasses import replace

import pytest
import torch
from hf_configs import hf_config
from hf_reference import hf_weights
from tiny_models import SHAPES
from transformers import AutoModelForCausalLM

from megatron_opsft.errors import UserError
from megatron_opsft.weights.rules import WeightTable

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
