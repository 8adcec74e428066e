"""YaRN: what config.json says of it, and its frequencies, are read as transformers reads them."""

import json
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import ModelShape, YarnScaling
from megatron_opsft.models.storage.hf_writer import side_files
from megatron_opsft.models.storage.model_paths import MODEL_CONFIGS
from megatron_opsft.runtime.device import select_device
from megatron_opsft.trainer.model.build import scaled_rope_frequencies
from megatron_opsft.trainer.model.transformer_config import transformer_config

R1_0528 = MODEL_CONFIGS / "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "head_dim": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
}
# What Qwen's cards tell a user to add.
DOCUMENTED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"factor": 4},
    {"factor": 1.0, "original_max_position_embeddings": 131072},
    {"factor": 40.5, "original_max_position_embeddings": 4096},
    {"truncate": False},
    {"truncate": False, "factor": 7.3, "beta_fast": 64.5, "beta_slow": 0.25},
    {"beta_fast": 16},
    {"beta_slow": 2},
    {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},  # no blend at all
    {"beta_fast": 6e3, "beta_slow": 5e3, "truncate": True},
    {"beta_slow": 1e-30},  # the blend would end beyond the head
    {"mscale": 0.707, "mscale_all_dim": 1.2},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707},  # one alone has no effect
    {"mscale_all_dim": 1.2},
    {"attention_factor": 0.9},
    {"attention_factor": 1.3, "mscale": 0.707, "mscale_all_dim": 1.2},
    {"attention_factor": None, "mscale": None},
    {"attn_factor": 0.8782488562869419},  # has no effect
    {"rope_theta": 10000.0},
]


def written(directory: Path, settings: dict[str, Any], **changes: Any) -> Path:
    """A directory with the config.json of a Qwen3 model."""
    rope = {"rope_scaling": DOCUMENTED | settings}
    (directory / "config.json").write_text(json.dumps(QWEN3 | rope | changes))
    return directory


def read(directory: Path, settings: dict[str, Any], **changes: Any) -> YarnScaling:
    scaling = read_model_shape(written(directory, settings, **changes)).rope_scaling
    assert isinstance(scaling, YarnScaling)
    return scaling


def assert_as_in_transformers(directory: Path) -> tuple[ModelShape, PretrainedConfig]:
    """To the bit. Returns what both have read."""
    shape = read_model_shape(directory)
    config = AutoConfig.from_pretrained(directory)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    found = scaled_rope_frequencies(shape)
    assert found.dtype == torch.float32
    assert torch.equal(found, frequencies)
    assert isinstance(shape.rope_scaling, YarnScaling)
    assert shape.rope_scaling.attention_factor == attention_factor
    return shape, config


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_and_attention_factor_are_those_of_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert_as_in_transformers(written(tmp_path, settings))


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80])
@pytest.mark.parametrize("theta", [10000.0, 500000])
def test_frequencies_of_other_heads_and_bases_are_those_of_transformers(
    tmp_path: Path, head_dim: int, theta: float
) -> None:
    assert_as_in_transformers(written(tmp_path, {}, head_dim=head_dim, rope_theta=theta))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},  # the legacy key, the model's own length
        {"original_max_position_embeddings": 65536},  # counts before the setting
        {"rope_scaling": None, "rope_parameters": DOCUMENTED | {"rope_theta": 5e5}},
        {"max_position_embeddings": 40960},  # Qwen3-8B's, if the user has left it
    ],
    ids=str,
)
def test_every_spelling_is_read_as_by_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    shape, config = assert_as_in_transformers(written(tmp_path, {}, **changes))
    assert isinstance(shape.rope_scaling, YarnScaling)
    original = config.rope_parameters["original_max_position_embeddings"]
    assert shape.rope_scaling.original_max_position == original
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.max_position_embeddings == config.max_position_embeddings


def test_the_attention_factor_follows_the_rule_of_the_paper(tmp_path: Path) -> None:
    assert read(tmp_path, {}).attention_factor == pytest.approx(1.138629436, abs=1e-9)
    pair = read(tmp_path, {"mscale": 0.5, "mscale_all_dim": 2.0}).attention_factor
    assert pair == pytest.approx((0.05 * log(4) + 1) / (0.2 * log(4) + 1), rel=1e-15)
    assert read(tmp_path, {"attention_factor": 2}).attention_factor == 2.0
    assert read(tmp_path, {"factor": 1, "original_max_position_embeddings": 131072}) == YarnScaling(
        factor=1.0,
        original_max_position=131072,
        attention_factor=1.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
    )


def test_a_shipped_reasoner_is_read_and_its_attn_factor_has_no_effect() -> None:
    shape, _ = assert_as_in_transformers(R1_0528)
    assert shape.max_position_embeddings == 131072
    assert shape.rope_scaling == YarnScaling(
        factor=4.0,
        original_max_position=32768,
        attention_factor=0.1 * log(4.0) + 1.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
    )


def test_whatever_is_made_from_a_model_has_its_settings_bit_for_bit() -> None:
    made = side_files(R1_0528, torch.bfloat16)["config.json"]
    assert made == (R1_0528 / "config.json").read_bytes()


def test_megatron_scales_scores_by_the_square_and_other_models_by_its_own_default(
    tmp_path: Path,
) -> None:
    def scale_of(directory: Path) -> float | None:
        scale: float | None = transformer_config(
            read_model_shape(directory),
            dtype="float32",
            parallel=ParallelConfig(),
            train=TrainConfig(),
            device=select_device("cpu"),
        ).softmax_scale
        return scale

    scale = scale_of(written(tmp_path, {"attention_factor": 1.5}))
    assert scale == pytest.approx(2.25 / sqrt(128), rel=1e-15)
    assert scale_of(written(tmp_path, {}, rope_scaling=None)) is None


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"factor": None}, {}, r"rope_scaling\.factor is null"),
        ({"factor": "4"}, {}, r'rope_scaling\.factor must be a positive number, not "4"'),
        ({"factor": 0.5}, {}, r"rope_scaling\.factor must be at least 1, not 0\.5"),
        ({}, {"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor must be a positive number"),
        (
            {"original_max_position_embeddings": 0},
            {},
            r"rope_scaling\.original_max_position_embeddings must be a positive whole number",
        ),
        ({}, {"original_max_position_embeddings": 1.5}, "original_max_position_embeddings must be"),
        ({"attention_factor": 0}, {}, r"rope_scaling\.attention_factor must be a positive number"),
        ({"mscale": -1}, {}, r"rope_scaling\.mscale must be a positive number, not -1"),
        ({"mscale": 1, "mscale_all_dim": True}, {}, r"rope_scaling\.mscale_all_dim must be"),
        ({"beta_fast": "fast"}, {}, r"rope_scaling\.beta_fast must be a positive number"),
        ({"beta_slow": None}, {}, r"rope_scaling\.beta_slow is null"),
        (
            {"beta_fast": 1, "beta_slow": 3},
            {},
            r"rope_scaling\.beta_fast=1\.0 must not be below beta_slow=3\.0",
        ),
        ({"truncate": 1}, {}, r"rope_scaling\.truncate must be true or false, not 1"),
        ({"truncate": None}, {}, r"rope_scaling\.truncate is null"),
        ({"mrope_section": [1]}, {}, r"rope_scaling\.mrope_section is not supported with .*yarn"),
        ({}, {"rope_theta": 1.0}, r"rope_theta must be above 1 with rope_type=yarn, not 1\.0"),
        (
            {"factor": 3.9},
            {},
            r"max_position_embeddings=131072 is more than rope_scaling\.factor=3\.9 times "
            r"original_max_position_embeddings=32768",
        ),
    ],
)
def test_wrong_settings_are_named_in_one_line(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: {message}") as error:
        read(tmp_path, settings, **changes)
    assert "\n" not in str(error.value)
