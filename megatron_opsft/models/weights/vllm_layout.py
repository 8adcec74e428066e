"""Where every HF tensor sits in the parameters of vLLM 0.32, unquantised, at any tensor-parallel
size.

The source: model_executor/layers/linear.py, vocab_parallel_embedding.py and
fused_moe/routed_experts.py.
"""

import re
from functools import cache

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.template import Rule, ShardKind
from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.slicing import divide

_VOCABULARY_MULTIPLE = 64

# What vLLM fuses: the parts lie one below the other, in the order of the weight table. The number
# in an expert's name is its index in the parameter.
_FUSED = (
    (
        re.compile(r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\."),
        ".mlp.experts.routed_experts.w13_",
    ),
    (
        re.compile(r"\.mlp\.experts\.(\d+)\.down_proj\."),
        ".mlp.experts.routed_experts.w2_",
    ),
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.mlp\.(?:gate|up)_proj\."), ".mlp.gate_up_proj."),
)


def vllm_parameters(
    table: WeightTable, tp_rank: int, tp_size: int
) -> tuple[Parameter, ...]:
    """The parameters of one tensor-parallel rank, by vLLM's names; tied weights once.

    All are as loaded: on a GPU the Triton kernel keeps experts so. Errors: `UserError` for a
    tp_size that cannot cut the model.
    """
    check_rollout_tp(table.shape, tp_size)
    fused: dict[str, list[tuple[str, int | None]]] = {}
    for hf_name in table.hf_shapes():
        name, expert = _vllm_name(hf_name)
        fused.setdefault(name, []).append((hf_name, expert))
    return tuple(
        _parameter(name, members, table, tp_rank, tp_size)
        for name, members in fused.items()
    )


def check_rollout_tp(shape: ModelShape, tp_size: int) -> None:
    """UserError if vLLM cannot cut this model into `tp_size` parts."""
    divide(shape.num_heads, tp_size, "num_attention_heads", "rollout.tp")
    if shape.num_kv_heads % tp_size and tp_size % shape.num_kv_heads:
        raise UserError(
            f"rollout.tp={tp_size} is neither a divisor nor a multiple of "
            f"num_key_value_heads={shape.num_kv_heads}"
        )
    name, size = shape.shard_ffn
    divide(size, tp_size, name, "rollout.tp")
    divide(_padded_vocabulary(shape), tp_size, "the padded vocab_size", "rollout.tp")
    if shape.moe is not None and tp_size > shape.moe.num_experts:
        raise UserError(
            f"rollout.tp={tp_size} is more than num_experts={shape.moe.num_experts}"
        )


def _padded_vocabulary(shape: ModelShape) -> int:
    return -(-shape.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


@cache  # the same for every tensor-parallel rank
def _vllm_name(hf_name: str) -> tuple[str, int | None]:
    """The parameter's name, and the index in it."""
    for pattern, name in _FUSED:
        if match := pattern.search(hf_name):
            expert = int(match[1]) if match.groups() else None
            return hf_name[: match.start()] + name + hf_name[match.end() :], expert
    return hf_name, None


def _parameter(
    name: str,
    members: list[tuple[str, int | None]],
    table: WeightTable,
    tp_rank: int,
    tp_size: int,
) -> Parameter:
    """members: HF name and expert of each tensor in it."""
    parts = []
    heights: dict[int | None, int] = {}
    for hf_name, expert in members:
        rule = table.by_hf_name[hf_name]
        held = _held_rect(hf_name, rule, table.shape, tp_rank, tp_size)
        columns, row = held.col1 - held.col0, heights.get(expert, 0)
        heights[expert] = row + held.row1 - held.row0
        parts.append(Copy(held, Rect(name, row, heights[expert], 0, columns, expert)))
    rows = padding_row = next(iter(heights.values()))
    if rule.kind is ShardKind.VOCABULARY:
        rows = _padded_vocabulary(table.shape) // tp_size
    matrix = (rows, columns)[: len(rule.hf_shapes[0])]
    experts = () if None in heights else (len(heights),)
    filled = tuple(part for part in parts if part.source.num_elements)
    return Parameter(name, (*experts, *matrix), filled, padding_row)


def _held_rect(
    hf_name: str, rule: Rule, shape: ModelShape, tp_rank: int, tp_size: int
) -> Rect:
    """What a rank holds of an HF tensor; no rows where its vocabulary is all padding.

    vLLM cuts where Megatron does, but for whole heads of k and v: where there are fewer than ranks,
    each is on several.
    """
    index = rule.hf_names.index(hf_name)
    height, width = (*rule.hf_shapes[index], 1)[:2]
    if rule.kind is ShardKind.COPY:
        return Rect(hf_name, 0, height, 0, width)
    if rule.kind is ShardKind.ROW:
        size = width // tp_size
        return Rect(hf_name, 0, height, tp_rank * size, (tp_rank + 1) * size)
    size, part = height // tp_size, tp_rank
    if rule.kind is ShardKind.VOCABULARY:
        size = _padded_vocabulary(shape) // tp_size
    elif rule.kind is ShardKind.QKV and index > 0 and tp_size > shape.num_kv_heads:
        size, part = shape.head_dim, tp_rank // (tp_size // shape.num_kv_heads)
    return Rect(
        hf_name, min(part * size, height), min((part + 1) * size, height), 0, width
    )
