"""Hugging Face's configuration of a model of any supported shape."""

from dataclasses import asdict

from transformers import AutoConfig, PretrainedConfig

from megatron_opsft.models.architectures.families import ARCHITECTURES
from megatron_opsft.models.architectures.shape import Llama3Scaling, ModelShape


def hf_config(shape: ModelShape) -> PretrainedConfig:
    """What the model's config.json says; attention without a window, and what sees is tiny."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        scaling = asdict(shape.rope_scaling)
        rope["rope_type"] = "llama3" if isinstance(shape.rope_scaling, Llama3Scaling) else "yarn"
        rope["original_max_position_embeddings"] = scaling.pop("original_max_position")
        rope |= scaling
    delta_nets: dict[str, object] = {}
    if shape.rotary_dim is not None:
        rope["partial_rotary_factor"] = shape.rotary_dim / shape.head_dim
        rope["mrope_section"] = [shape.rotary_dim // 2 - 2, 1, 1]
    if shape.delta is not None:
        delta_nets = {
            "layer_types": list(shape.layer_kinds),
            "linear_num_key_heads": shape.delta.num_key_heads,
            "linear_num_value_heads": shape.delta.num_value_heads,
            "linear_key_head_dim": shape.delta.key_head_dim,
            "linear_value_head_dim": shape.delta.value_head_dim,
            "linear_conv_kernel_dim": shape.delta.conv_size,
        }
    experts: dict[str, object] = {}
    if shape.moe is not None:
        experts = {
            "num_experts": shape.moe.num_experts,
            "num_experts_per_tok": shape.moe.top_k,
            "moe_intermediate_size": shape.moe.ffn_size,
            "norm_topk_prob": shape.moe.normalize_top_k,
        }
        if shape.moe.shared_ffn_size:
            experts["shared_expert_intermediate_size"] = shape.moe.shared_ffn_size
    fields = dict(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=rope,
        sliding_window=None,
        **experts,
        **delta_nets,
    )
    architecture = ARCHITECTURES[shape.architecture]
    if architecture.nested_in is not None:
        fields = {
            architecture.nested_in: fields,
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
            },
            "tie_word_embeddings": shape.tied_embeddings,
        }
    return AutoConfig.for_model(architecture.model_type, **fields)
