"""Rules, files and settings of LoRA adapters, without ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import hf_model
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, adapter_values, merged_weights

from megatron_opsft.config import Config, LoraConfig, ModelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.adapter_config import (
    adapter_config_json,
    check_same_adapter,
    read_adapter_config,
)
from megatron_opsft.models.storage.adapters import StoredAdapter, adapter_files
from megatron_opsft.models.weights.lora import adapter_rules, adapters_of_rules
from megatron_opsft.models.weights.rectangles import whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.disk import disk_use
from megatron_opsft.trainer.model.lora import first_values

LORA = LoraConfig(rank=4, alpha=8.0)


def test_adapters_are_cut_as_their_weights() -> None:
    rules = WeightTable(SHAPES["qwen2"]).by_mcore_name
    qkv = adapter_rules(rules["decoder.layers.1.self_attention.linear_qkv.weight"], LORA)
    assert qkv is not None
    assert qkv.lora_A.mcore_name == "decoder.layers.1.self_attention.linear_qkv.adapter.lora_A"
    assert (qkv.lora_A.kind.value, qkv.lora_A.mcore_shape) == ("copy", (12, 64))
    assert (qkv.lora_B.kind.value, qkv.lora_B.mcore_shape) == ("qkv", (128, 4))
    layer = "model.layers.1.self_attn"
    assert qkv.lora_B.hf_shapes == {
        f"{layer}.q_proj.lora_B.weight": (64, 4),
        f"{layer}.k_proj.lora_B.weight": (32, 4),
        f"{layer}.v_proj.lora_B.weight": (32, 4),
    }
    down = adapter_rules(rules["decoder.layers.0.mlp.linear_fc2.weight"], LORA)
    assert down is not None
    assert (down.lora_A.kind.value, down.lora_A.mcore_shape) == ("row", (4, 96))
    assert (down.lora_B.kind.value, down.lora_B.mcore_shape) == ("copy", (64, 4))
    values_only = LORA.model_copy(update={"targets": ("v_proj",)})
    some = adapter_rules(rules[qkv.weight.mcore_name], values_only)
    assert some is not None and some.parts == (None, None, f"{layer}.v_proj")
    for name in ("self_attention.linear_qkv.bias", "input_layernorm.weight"):
        assert adapter_rules(rules[f"decoder.layers.1.{name}"], LORA) is None
    assert adapter_rules(rules["output_layer.weight"], LORA) is None


def test_every_expert_has_an_adapter() -> None:
    rules = adapters_of_rules(WeightTable(SHAPES["qwen3_moe"], "te").exported, LORA)
    layers, experts = 4, 8
    assert len(rules) == 2 * layers * (2 + 2 * experts)
    assert "decoder.layers.3.mlp.experts.linear_fc1.adapter7.lora_A" in {
        rule.mcore_name for rule in rules
    }


def test_first_values_change_nothing_and_depend_on_names_and_seed() -> None:
    rules = adapter_rules(
        WeightTable(SHAPES["qwen2"]).by_mcore_name["decoder.layers.0.mlp.linear_fc1.weight"], LORA
    )
    assert rules is not None
    names = [*rules.lora_A.hf_shapes]
    rects = [whole(name, (4, 64)) for name in names]
    gate, up = (first_values(rules, 0)(rect) for rect in rects)
    assert torch.equal(gate, first_values(rules, 0)(rects[0]))
    assert not torch.equal(gate, up)
    assert not torch.equal(gate, first_values(rules, 1)(rects[0]))
    bound = 64**-0.5
    assert 0.9 * bound < gate.abs().max() <= bound
    (b_name, *_) = rules.lora_B.hf_shapes
    assert not first_values(rules, 0)(whole(b_name, (96, 4))).any()


def written(directory: Path, name: str, lora: LoraConfig) -> Path:
    directory.mkdir()
    config = adapter_config_json(ModelConfig(path="some/where"), lora, directory)
    for file, content in adapter_files(adapter_values(name, lora).items(), config).items():
        (directory / file).write_bytes(content)
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_moe",
        pytest.param(
            "qwen3_5_moe",
            marks=pytest.mark.xfail(strict=True, reason="PEFT 0.21 does not adapt its experts"),
        ),
    ],
)
def test_peft_computes_the_merged_model(tmp_path: Path, name: str) -> None:
    """Of experts too, which transformers stacks and PEFT adapts as one tensor."""
    from peft import PeftModel

    adapter = written(tmp_path / "adapter", name, LORA)
    ids = torch.arange(3, 60)[None]
    model: Any = PeftModel.from_pretrained(hf_model(name), str(adapter))
    found = model.eval()(ids).logits
    expected = hf_model(name, merged_weights(name, LORA)).eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (hf_model(name).eval()(ids).logits - expected).abs().max() > 1


def test_configuration_is_read_back(tmp_path: Path) -> None:
    some = LoraConfig(rank=2, alpha=3.5, targets=("v_proj", "q_proj"))
    adapter = written(tmp_path / "adapter", "qwen2", some)
    read = read_adapter_config(adapter, "x")
    assert (read.lora, read.base) == (some, "some/where")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "use_dora=True is not supported"),
        ("rank_pattern", {"q_proj": 8}, "rank_pattern={'q_proj': 8} is not supported"),
        ("bias", "all", "bias='all' is not supported"),
        ("modules_to_save", ["lm_head"], "modules_to_save=['lm_head'] is not supported"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa' is not supported"),
        ("peft_type", "IA3", "peft_type='IA3' is not supported"),
        ("target_modules", ["embed_tokens"], "target_modules=['embed_tokens']: r and lora_alpha"),
        ("r", "four", "r='four'"),
        ("base_model_name_or_path", 5, "base_model_name_or_path is no text"),
    ],
)
def test_what_is_not_a_plain_adapter_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    adapter = written(tmp_path / "adapter", "qwen2", LORA)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError) as caught:
        read_adapter_config(adapter, "model.adapter")
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_run_must_have_the_adapters_settings(tmp_path: Path) -> None:
    adapter = written(tmp_path / "adapter", "qwen2", LORA)
    check_same_adapter(LORA, adapter)
    for changed, advice in (
        ({"rank": 8}, "set lora.rank=4"),
        ({"alpha": 16.0}, "set lora.alpha=8"),
        ({"targets": ("q_proj",)}, "set lora.targets to that"),
    ):
        with pytest.raises(UserError, match=advice):
            check_same_adapter(LORA.model_copy(update=changed), adapter)
    with pytest.raises(UserError, match="has no adapter_config.json"):
        check_same_adapter(LORA, tmp_path)


def test_factors_that_do_not_fit_the_model_are_named(tmp_path: Path) -> None:
    adapter = written(tmp_path / "adapter", "qwen2", LORA)
    table = WeightTable(SHAPES["qwen2"], "te")
    path = adapter / "adapter_model.safetensors"
    values = load_file(path)
    name = "model.layers.0.mlp.up_proj.lora_B.weight"
    for changed, message in (
        ({k: v for k, v in values.items() if not k.endswith(name)}, f"lacks {name}"),
        ({**values, f"base_model.model.{name}": torch.zeros(96, 5)}, f"{name} has shape [96, 5]"),
        ({**values, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "holds lm_head"),
    ):
        save_file(changed, path)
        with pytest.raises(UserError) as caught:
            StoredAdapter(adapter, table, LORA)
        assert message in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors is missing"):
        StoredAdapter(adapter, table, LORA)


def config_of(lora: dict[str, object], parallel: dict[str, object] | None = None) -> Config:
    values: dict[str, Any] = {"model": {"path": "x"}, "data": {"train": "x"}, "lora": lora}
    values["parallel"] = parallel or {}
    values["rollout"] = {"max_response_tokens": 64}
    return Config.model_validate(values)


def test_only_adapters_are_in_a_checkpoint() -> None:
    shape = SHAPES["qwen2"]
    full, adapters = (disk_use(config_of(lora), shape) for lora in ({}, {"rank": 4}))
    sizes = [rule.mcore_shape for rule in adapters_of_rules(WeightTable(shape).exported, LORA)]
    assert adapters.checkpoint == 14 * sum(rows * columns for rows, columns in sizes)
    assert adapters.checkpoint < full.checkpoint / 4
    assert adapters.model == full.model


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora.dropout=0.1: .* leave it at 0"):
        config_of({"rank": 4, "dropout": 0.1})
    with pytest.raises(UserError, match="lora.alpha has no effect with lora.rank=0"):
        config_of({"alpha": 64})
    with pytest.raises(UserError, match="names a layer twice"):
        config_of({"rank": 4, "targets": "q_proj,q_proj"})
    alone = config_of({"rank": 4, "targets": "q_proj,up_proj"})
    assert alone.lora.targets == ("q_proj", "up_proj")
    with pytest.raises(UserError, match="the gate_proj and up_proj of experts get adapters togeth"):
        make_checked_run(alone, SHAPES["qwen3_moe"], 1)
    make_checked_run(alone, SHAPES["qwen3"], 1)
    experts = {"rank": 4, "targets": "gate_proj,up_proj,down_proj"}
    with pytest.raises(UserError, match="needs an adapter outside of the experts; name o_proj"):
        make_checked_run(config_of(experts, {"ep": 2}), SHAPES["qwen3_moe"], 2)
    make_checked_run(config_of(experts), SHAPES["qwen3_moe"], 2)
    # A shared expert is outside of them.
    make_checked_run(config_of(experts, {"ep": 2}), SHAPES["qwen3_5_moe"], 2)
