"""Shapes of real models, and small ones made of them."""

from dataclasses import replace
from pathlib import Path

from megatron_opsft.models.architectures.config_from_hf import read_model_shape

CONFIGS = Path(__file__).parents[1] / "megatron_opsft/assets/model_configs/deepseek-ai"
_1P5B = read_model_shape(CONFIGS / "DeepSeek-R1-Distill-Qwen-1.5B")
_46M = replace(_1P5B, num_layers=8, hidden_size=512, ffn_size=1792, num_heads=8, head_dim=64)
_TINY = replace(_46M, num_layers=2, hidden_size=96, ffn_size=256, num_heads=4, head_dim=24)
SHAPES = {
    "tiny": replace(_TINY, vocab_size=512),
    "small": replace(_46M, num_layers=4, ffn_size=2048, vocab_size=32000),
    "46m": replace(_46M, vocab_size=18432),
    "1.5b": _1P5B,
    "7b": read_model_shape(CONFIGS / "DeepSeek-R1-Distill-Qwen-7B"),
}
