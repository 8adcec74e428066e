"""The weight rules of LoRA adapters: how A and B of each linear layer are named and cut.

A linear layer with weight W computes W x + (alpha / r) B A x; only A [r, in] and B [out, r] are
trained. Hugging Face has an adapter for q_proj, k_proj and v_proj each, where Megatron has one
fused weight. Its adapter is fused likewise: the three A lie one below the other, and the rows of B
are cut and ordered as the weight's. So a rank's shard of W + (alpha / r) B A follows from its own
shards of W, A and B.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685); names as
in PEFT.
"""

from collections.abc import Iterable

from megatron_opsft.config.training import LoraConfig
from megatron_opsft.models.architectures.template import (
    Section,
    ShardKind,
    WeightRule,
)
from megatron_opsft.records import TensorShape, record

LORA_A, LORA_B = "lora_A", "lora_B"
MERGE_BYTES = 2**27
"""Bytes of float64 sums W + (alpha / r) B A that are computed at a time."""


@record
class AdapterRules:
    """The rules of one Megatron weight and of its adapter."""

    weight: WeightRule
    lora_A: WeightRule
    """[parts x r, in]: A of each adapted HF weight, one below the other."""
    lora_B: WeightRule
    """[out of all parts, r]: B of each adapted HF weight; rows cut and ordered as the weight's."""
    parts: tuple[str | None, ...]
    """For each HF weight in the order in which they are fused: its layer's name in Hugging Face,
    such as `model.layers.0.self_attn.q_proj`; None for one without an adapter.
    """


def adapter_rules(rule: WeightRule, lora: LoraConfig) -> AdapterRules | None:
    """Return the rules of a weight's adapter; None for a parameter that gets none."""
    parts: list[str | None] = []
    for hf_name in rule.hf_shapes:
        layer, _, kind = hf_name.rpartition(".")
        is_target = kind == "weight" and layer.rpartition(".")[-1] in lora.targets
        parts.append(layer if is_target else None)
    adapted = [part for part in parts if part is not None]
    if not adapted:
        return None
    a_shapes: dict[str, TensorShape] = {}
    b_shapes: dict[str, TensorShape] = {}
    for layer in adapted:
        num_outputs, num_inputs = rule.hf_shapes[f"{layer}.weight"]
        a_shapes[f"{layer}.{LORA_A}.weight"] = (lora.rank, num_inputs)
        b_shapes[f"{layer}.{LORA_B}.weight"] = (num_outputs, lora.rank)
    # The weight is cut along its inputs or along its outputs; the factor that has that axis is cut
    # as it is, and the other factor is the same on every rank.
    cuts_inputs = rule.kind is ShardKind.ROW
    return AdapterRules(
        weight=rule,
        lora_A=_factor_rule(
            rule, LORA_A, a_shapes, ShardKind.ROW if cuts_inputs else ShardKind.COPY
        ),
        lora_B=_factor_rule(
            rule, LORA_B, b_shapes, ShardKind.COPY if cuts_inputs else rule.kind
        ),
        parts=tuple(parts),
    )


def _factor_rule(
    weight: WeightRule, name: str, hf_shapes: dict[str, TensorShape], kind: ShardKind
) -> WeightRule:
    num_rows = sum(rows for rows, _ in hf_shapes.values())
    _, num_columns = next(iter(hf_shapes.values()))
    return WeightRule(
        # linear_qkv.weight -> linear_qkv.adapter.lora_A; of a grouped linear's third expert,
        # linear_fc1.weight2 -> linear_fc1.adapter2.lora_A
        mcore_name=weight.mcore_name.replace(".weight", ".adapter") + f".{name}",
        kind=kind,
        hf_shapes=hf_shapes,
        mcore_shape=(num_rows, num_columns),
        sections=tuple(
            Section(name, name, 0, rows) for name, (rows, _) in hf_shapes.items()
        ),
        num_groups=weight.num_groups,
        head_dim=weight.head_dim,
        layer=weight.layer,
        expert=weight.expert,
    )


def adapters_of_rules(
    rules: Iterable[WeightRule], lora: LoraConfig
) -> tuple[WeightRule, ...]:
    """Return the rules of all A and B of the adapters of these weights, in their order."""
    trained: list[WeightRule] = []
    for rule in rules:
        of_weight = adapter_rules(rule, lora)
        if of_weight is not None:
            trained += [of_weight.lora_A, of_weight.lora_B]
    return tuple(trained)
