"""The weight tables: names, shapes, strictness, and agreement with transformers."""

from dataclasses import replace

import pytest
import torch
from hf_reference import hf_weights
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_opsft.architectures import ARCHITECTURES
from megatron_opsft.architectures.shape import ModelShape, MoeShape
from megatron_opsft.errors import UserError
from megatron_opsft.weights.rules import WeightTable

MOE = MoeShape(num_experts=5, top_k=2, ffn_size=24, normalize_top_k=True)


def make_shape(architecture: str, *, tied: bool = False, num_kv_heads: int = 2) -> ModelShape:
    return ModelShape(
        architecture=architecture,
        num_layers=3,
        hidden_size=48,
        ffn_size=80,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=300,
        tied_embeddings=tied,
        qkv_bias=ARCHITECTURES[architecture].qkv_bias,
        qk_norm=ARCHITECTURES[architecture].qk_norm,
        norm_eps=1e-6,
        max_position_embeddings=128,
        rope_theta=10000.0,
        moe=MOE if ARCHITECTURES[architecture].expert_rows else None,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hf_shapes_equal_those_of_transformers(architecture: str, tied: bool) -> None:
    head_dim = 12 if architecture == "Qwen2ForCausalLM" else 16  # Qwen2 has none of its own
    shape = replace(make_shape(architecture, tied=tied), head_dim=head_dim)
    config = AutoConfig.for_model(
        ARCHITECTURES[architecture].model_type,
        num_hidden_layers=3,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=300,
        tie_word_embeddings=tied,
        **({"num_experts": 5, "moe_intermediate_size": 24} if shape.moe else {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == architecture
    expected = {name: tuple(p.shape) for name, p in hf_weights(model).items()}
    assert WeightTable(shape).hf_shapes() == expected


def test_local_and_te_tables_differ_in_the_norms_alone() -> None:
    shape = make_shape("Qwen3ForCausalLM")
    local, te = WeightTable(shape, "local"), WeightTable(shape, "te")
    differing = [
        (a.mcore_name, b.mcore_name)
        for a, b in zip(local.rules, te.rules, strict=True)
        if a.mcore_name != b.mcore_name
    ]
    assert differing[:2] == [
        (
            "decoder.layers.0.input_layernorm.weight",
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.0.pre_mlp_layernorm.weight",
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        ),
    ]
    assert len(differing) == 2 * shape.num_layers
    assert local.hf_shapes() == te.hf_shapes()


def test_experts_of_the_local_and_the_te_table_have_the_same_hf_tensors() -> None:
    shape = make_shape("Qwen3MoeForCausalLM")
    local, te = WeightTable(shape, "local"), WeightTable(shape, "te")
    for projection, hf, size in (
        ("linear_fc1", ("gate_proj", "up_proj"), (48, 48)),
        ("linear_fc2", ("down_proj",), (48, 24)),
    ):
        mlp = "decoder.layers.2.mlp.experts."
        rule = local.by_mcore_name(f"{mlp}local_experts.4.{projection}.weight")
        grouped = te.by_mcore_name(f"{mlp}{projection}.weight4")
        names = tuple(f"model.layers.2.mlp.experts.4.{name}.weight" for name in hf)
        assert rule.hf_names == grouped.hf_names == names
        assert rule.mcore_shape == grouped.mcore_shape == size
    for table in (local, te):
        router = table.by_hf_name("model.layers.1.mlp.gate.weight")
        assert router.mcore_name == "decoder.layers.1.mlp.router.weight"
        assert router.mcore_shape == (5, 48)
        norm = table.by_hf_name("model.layers.1.post_attention_layernorm.weight")
        assert norm.mcore_name == "decoder.layers.1.pre_mlp_layernorm.weight"
    with pytest.raises(UserError, match="experts.local_experts.5"):
        local.by_mcore_name("decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight")


def test_tied_head_is_a_parameter_of_the_last_stage_but_never_exported() -> None:
    table = WeightTable(make_shape("Qwen2ForCausalLM", tied=True))
    head = table.by_mcore_name("output_layer.weight")
    assert head.replica and head.hf_names == ("model.embed_tokens.weight",)
    assert table.by_hf_name("model.embed_tokens.weight").mcore_name.startswith("embedding.")
    assert "lm_head.weight" not in table.hf_shapes()
    whole = table.stage_rules(range(3), has_embedding=True, has_output=True)
    last = table.stage_rules(range(2, 3), has_embedding=False, has_output=True)
    assert head not in whole and head in last


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_stages_together_hold_every_rule_once(architecture: str, tied: bool) -> None:
    table = WeightTable(make_shape(architecture, tied=tied), "te")
    stages = [
        table.stage_rules(range(0, 1), has_embedding=True, has_output=False),
        table.stage_rules(range(1, 3), has_embedding=False, has_output=True),
    ]
    names = [rule.mcore_name for stage in stages for rule in stage]
    assert sorted(names) == sorted(rule.mcore_name for rule in table.rules)
    table.check_mcore_names([rule.mcore_name for rule in stages[0]], stages[0])
    with pytest.raises(UserError, match=r"missing decoder.layers.0.*; unexpected extra"):
        table.check_mcore_names(["extra", *(rule.mcore_name for rule in stages[0][:-1])], stages[0])


def test_check_hf_names_missing_unexpected_and_misshapen_tensors() -> None:
    table = WeightTable(make_shape("LlamaForCausalLM"))
    shapes = table.hf_shapes()
    table.check_hf(shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, "dir")
    with pytest.raises(UserError, match=r"dir .*missing model\.norm\.weight$"):
        table.check_hf({n: s for n, s in shapes.items() if n != "model.norm.weight"}, "dir")
    with pytest.raises(UserError, match="unexpected model.layers.0.self_attn.q_proj.bias"):
        table.check_hf(shapes | {"model.layers.0.self_attn.q_proj.bias": (64,)}, "dir")
    with pytest.raises(UserError, match=r"lm_head.weight has shape \[299, 48\].*\[300, 48\]"):
        table.check_hf(shapes | {"lm_head.weight": (299, 48)}, "dir")


def test_check_hf_names_experts_that_are_missing_or_more_than_the_config_says() -> None:
    table = WeightTable(make_shape("Qwen3MoeForCausalLM"))
    shapes = table.hf_shapes()
    table.check_hf(shapes, "dir")
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        table.check_hf({n: s for n, s in shapes.items() if n != name.format(4)}, "dir")
    with pytest.raises(UserError, match=r"unexpected model\.layers\.1\.mlp\.experts\.5\.up_proj"):
        table.check_hf(shapes | {name.format(5): (24, 48)}, "dir")
    with pytest.raises(UserError, match=r"unexpected model\.layers\.0\.mlp\.gate\.bias"):
        table.check_hf(shapes | {"model.layers.0.mlp.gate.bias": (5,)}, "dir")


def test_check_hf_tolerates_a_repeated_head_only_when_tied_and_of_the_right_shape() -> None:
    table = WeightTable(make_shape("Qwen3ForCausalLM", tied=True))
    table.check_hf(table.hf_shapes() | {"lm_head.weight": (300, 48)}, "dir")
    with pytest.raises(UserError, match="lm_head.weight has shape"):
        table.check_hf(table.hf_shapes() | {"lm_head.weight": (384, 48)}, "dir")
