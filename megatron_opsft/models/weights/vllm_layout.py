"""The layout of vLLM 0.32: where every HF tensor lies in its parameters, unquantised, at any
tensor-parallel size.

Source: vLLM's model_executor/layers/linear.py, vocab_parallel_embedding.py,
fused_moe/routed_experts.py and mamba/gdn/qwen_gdn_linear_attn.py.
"""

import re
from functools import cache

from megatron_opsft.models.architectures.sharding import (
    check_rollout_tp,
    padded_vocabulary,
)
from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect, whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import TensorShape

# What vLLM fuses: the HF tensors lie one below the other, in the order of the weight table. The
# number in an expert's name is its index in the parameter.
_FUSED = {
    r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.": ".mlp.experts.routed_experts.w13_",
    r"\.mlp\.experts\.(\d+)\.down_proj\.": ".mlp.experts.routed_experts.w2_",
    r"\.self_attn\.[qkv]_proj\.": ".self_attn.qkv_proj.",
    r"\.mlp\.(?:gate|up)_proj\.": ".mlp.gate_up_proj.",
    r"\.mlp\.shared_expert\.(?:gate|up)_proj\.": ".mlp.shared_expert.gate_up_proj.",
    r"\.linear_attn\.in_proj_(?:qkv|z)\.": ".linear_attn.in_proj_qkvz.",
    r"\.linear_attn\.in_proj_[ba]\.": ".linear_attn.in_proj_ba.",
}


def vllm_parameters(
    table: WeightTable, tp_rank: int, tp_size: int
) -> tuple[Parameter, ...]:
    """Describe the parameters of one tensor-parallel rank, by vLLM's names; tied weights once.

    vLLM keeps them as it has loaded them, experts too: unlike other kernels, the Triton kernel for
    experts on a GPU does not rearrange them. Errors: `UserError` for a tp_size that cannot cut the
    model.
    """
    check_rollout_tp(table.shape, tp_size)
    fused: dict[str, list[tuple[str, int | None]]] = {}
    for hf_name in table.hf_shapes():
        name, expert = _vllm_name(hf_name)
        if name.startswith(table.architecture.hf_prefix):
            name = name.replace(table.architecture.hf_prefix, "model.", 1)
        fused.setdefault(name, []).append((hf_name, expert))
    return tuple(
        _parameter(name, members, table, tp_rank, tp_size)
        for name, members in fused.items()
    )


@cache  # the same for every tensor-parallel rank
def _vllm_name(hf_name: str) -> tuple[str, int | None]:
    """Return the parameter with this HF tensor, and the expert's index in it, if any."""
    for pattern, fused_name in _FUSED.items():
        match = re.search(pattern, hf_name)
        if match:
            expert = int(match[1]) if match.groups() else None
            return hf_name.replace(match[0], fused_name, 1), expert
    return hf_name, None


def _parameter(
    name: str,
    members: list[tuple[str, int | None]],
    table: WeightTable,
    tp_rank: int,
    tp_size: int,
) -> Parameter:
    """Describe one parameter; members: HF name and expert of each tensor in it."""
    copies = []
    num_rows = 0
    last_expert: int | None = None
    for hf_name, expert in members:
        if expert != last_expert:  # the next one; each has rows from 0 on
            num_rows, last_expert = 0, expert
        for source in _shard_rects(table, hf_name, tp_rank, tp_size):
            # Below the tensors before it; all have the same width.
            row, width = num_rows, source.col1 - source.col0
            num_rows += source.row1 - source.row0
            if source.num_elements:
                target = Rect(name, row, num_rows, 0, width, expert)
                copies.append(Copy(source, target))
    rule = table.by_hf_name[hf_name]  # all members have the same kind
    if rule.kind is ShardKind.VOCABULARY:
        num_rows = padded_vocabulary(table.shape) // tp_size
    shape: TensorShape = (num_rows, width)[: len(rule.mcore_shape)]
    if len(rule.mcore_shape) == 3:
        shape = (num_rows, *rule.mcore_shape[1:])
    if last_expert is not None:
        shape = (last_expert + 1, *shape)
    is_float32 = name.endswith(".linear_attn.A_log")
    return Parameter(name, shape, tuple(copies), is_float32=is_float32)


def _shard_rects(
    table: WeightTable, hf_name: str, tp_rank: int, tp_size: int
) -> list[Rect]:
    """Return the rectangles of an HF tensor that a rank has, several if it has several sections; no
    rows if its vocabulary is all padding.

    vLLM cuts where Megatron does, except that it never cuts a head of k and v: if there are fewer
    heads than ranks, several ranks have the same head.
    """
    rule, shape = table.by_hf_name[hf_name], table.shape
    rect = whole(hf_name, rule.hf_shapes[hf_name])
    if rule.kind is ShardKind.COPY:
        return [rect]
    if rule.kind is ShardKind.COLUMN:
        rects = []
        for section in rule.sections:
            if section.hf_name == hf_name:
                size = section.num_rows // tp_size
                first = section.start + tp_rank * size
                rects.append(rect.strip(0, first, first + size))
        return rects
    axis = rule.kind.axis
    # The rank has the strip with the number `position` of those that are `size` wide.
    size, position = rule.hf_shapes[hf_name][axis] // tp_size, tp_rank
    is_query = hf_name == next(iter(rule.hf_shapes))
    has_heads = rule.kind in (ShardKind.QKV, ShardKind.GATED_QKV)
    if rule.kind is ShardKind.VOCABULARY:
        size = padded_vocabulary(shape) // tp_size
    elif has_heads and not is_query and tp_size > shape.num_kv_heads:
        size = shape.head_dim
        position = tp_rank // (tp_size // shape.num_kv_heads)
    return [rect.strip(axis, position * size, (position + 1) * size)]
