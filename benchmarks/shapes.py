"""Shapes of real models, and a small one made of them."""

from dataclasses import replace
from pathlib import Path

from megatron_opsft.architectures.config_from_hf import read_model_shape

CONFIGS = Path(__file__).parents[1] / "megatron_opsft/assets/model_configs/deepseek-ai"
R1_DISTILL_QWEN_1P5B = read_model_shape(CONFIGS / "DeepSeek-R1-Distill-Qwen-1.5B")
SHAPES = {
    "46m": replace(
        R1_DISTILL_QWEN_1P5B,
        num_layers=8,
        hidden_size=512,
        ffn_size=1792,
        num_heads=8,
        head_dim=64,
        vocab_size=18432,
    ),
    "1.5b": R1_DISTILL_QWEN_1P5B,
    "7b": read_model_shape(CONFIGS / "DeepSeek-R1-Distill-Qwen-7B"),
}
