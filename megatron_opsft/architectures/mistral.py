"""Mistral: Llama's rows; only models without a sliding window."""

from megatron_opsft.architectures.llama import LAYER_ROWS
from megatron_opsft.architectures.template import Architecture

MISTRAL = Architecture(
    hf_name="MistralForCausalLM",
    model_type="mistral",
    layer_rows=LAYER_ROWS,
    qkv_bias=False,
    qk_norm=False,
    # The class attends within a window of 4,096 where the config does not say null.
    null_fields=("sliding_window",),
)
