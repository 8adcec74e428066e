"""vLLM's fused parameters, put together from whole HF tensors with cat and chunk alone.

What vLLM 0.32 itself holds after loading the same tensors was compared with this once, for every
model of `tiny_models.SHAPES`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_opsft.models.architectures.shape import ModelShape

Cut = Callable[[str], Tensor]


def vllm_weights(
    shape: ModelShape, hf: Mapping[str, Tensor], tp_rank: int, tp_size: int
) -> dict[str, Tensor]:
    """name -> parameter of one tensor-parallel rank; hf: every HF tensor."""

    def rows(name: str) -> Tensor:
        return hf[name].chunk(tp_size)[tp_rank]

    def columns(name: str) -> Tensor:
        return hf[name].chunk(tp_size, dim=1)[tp_rank]

    def heads(name: str) -> Tensor:
        every = hf[name].split(shape.head_dim)
        if tp_size > len(every):
            every = tuple(head for head in every for _ in range(tp_size // len(every)))
        return torch.cat(every).chunk(tp_size)[tp_rank]

    def vocabulary(name: str) -> Tensor:
        table = hf[name]
        padding = table.new_zeros(-len(table) % 64, table.shape[1])
        return torch.cat([table, padding]).chunk(tp_size)[tp_rank]

    found = {"model.embed_tokens.weight": vocabulary("model.embed_tokens.weight")}
    if not shape.tied_embeddings:
        found["lm_head.weight"] = vocabulary("lm_head.weight")
    found["model.norm.weight"] = hf["model.norm.weight"]
    for layer in (f"model.layers.{n}." for n in range(shape.num_layers)):
        norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        found |= {layer + norm: hf[layer + norm] for norm in norms}
        found |= _feed_forward(shape, hf, layer + "mlp.", rows, columns)
        if f"{layer}linear_attn.A_log" in hf:
            found |= _delta_net(shape, hf, layer + "linear_attn.", tp_rank, tp_size)
            continue
        attention = layer + "self_attn."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            query = rows(f"{attention}q_proj.{kind}")
            key, value = heads(f"{attention}k_proj.{kind}"), heads(f"{attention}v_proj.{kind}")
            found[f"{attention}qkv_proj.{kind}"] = torch.cat([query, key, value])
        found[f"{attention}o_proj.weight"] = columns(f"{attention}o_proj.weight")
        if shape.qk_norm:
            norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
            found |= {layer + norm: hf[layer + norm] for norm in norms}
    return found


def _feed_forward(
    shape: ModelShape, hf: Mapping[str, Tensor], mlp: str, rows: Cut, columns: Cut
) -> dict[str, Tensor]:
    found = {}
    gated = mlp
    if moe := shape.moe:
        gated = f"{mlp}shared_expert." if moe.shared_ffn_size else ""
        for name in ("gate.weight", "shared_expert_gate.weight"):
            if mlp + name in hf:
                found[mlp + name] = hf[mlp + name]
        experts = [f"{mlp}experts.{n}." for n in range(moe.num_experts)]
        fused = f"{mlp}experts.routed_experts."
        found[f"{fused}w13_weight"] = torch.stack(
            [torch.cat([rows(f"{e}gate_proj.weight"), rows(f"{e}up_proj.weight")]) for e in experts]
        )
        found[f"{fused}w2_weight"] = torch.stack([columns(f"{e}down_proj.weight") for e in experts])
    if gated:
        gate, up = rows(f"{gated}gate_proj.weight"), rows(f"{gated}up_proj.weight")
        found[f"{gated}gate_up_proj.weight"] = torch.cat([gate, up])
        found[f"{gated}down_proj.weight"] = columns(f"{gated}down_proj.weight")
    return found


def _delta_net(
    shape: ModelShape, hf: Mapping[str, Tensor], prefix: str, tp_rank: int, tp_size: int
) -> dict[str, Tensor]:
    delta = shape.delta
    assert delta is not None

    def share(tensor: Tensor, axis: int = 0) -> Tensor:
        return tensor.chunk(tp_size, dim=axis)[tp_rank]

    def shares_of_qkv(name: str) -> list[Tensor]:
        sections = [delta.key_size, delta.key_size, delta.value_size]
        return [share(section) for section in hf[prefix + name].split(sections)]

    z, b, a = (share(hf[f"{prefix}in_proj_{part}.weight"]) for part in "zba")
    return {
        f"{prefix}in_proj_qkvz.weight": torch.cat([*shares_of_qkv("in_proj_qkv.weight"), z]),
        f"{prefix}in_proj_ba.weight": torch.cat([b, a]),
        f"{prefix}conv1d.weight": torch.cat(shares_of_qkv("conv1d.weight")),
        f"{prefix}A_log": share(hf[f"{prefix}A_log"]).float(),  # in a model of any dtype
        f"{prefix}dt_bias": share(hf[f"{prefix}dt_bias"]),
        f"{prefix}norm.weight": hf[f"{prefix}norm.weight"],
        f"{prefix}out_proj.weight": share(hf[f"{prefix}out_proj.weight"], 1),
    }
