"""Hugging Face engines with weights, for tests that push none."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import Decoder


def engine_from_disk(
    model_dir: Path, tokenizer: Decoder, *, dtype: torch.dtype, device: str, batch_size: int
) -> HfEngine:
    """The model with the weights of the directory, as version 0."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation=GROUPED_SDPA
    )
    return HfEngine(model.to(device), tokenizer, batch_size, version=0)
