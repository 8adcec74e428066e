"""Names of Megatron parameters inside a distributed checkpoint.

There all layers of a model are one tensor with the layer as its first axis, and all experts one
with layer and expert as its first two, whatever the parallel layout; norms go by the names of the
TransformerEngine layers (`ShardedTensor` keys and prepended axes of `sharded_state_dict`).
"""

import re
from dataclasses import dataclass
from itertools import product

from megatron_opsft.models.weights.rules import WeightTable

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
# Of the norms those that no linear layer takes in: over heads, and in front of a router.
_WITH_STATE = re.compile(r"^decoder\.layers\..+(?:linear_fc[12]|layernorm)\.weight$")
# Megatron's plain layers rename the norm in front of experts too, TransformerEngine's do not.
_MOE_NORM, _PLAIN_MOE_NORM = (
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a parameter is: `lead` are its indices on the prepended axes of the tensor `key`."""

    key: str
    lead: tuple[int, ...] = ()


def entry_of(te_name: str) -> Entry:
    """The entry of a parameter, given by its global name in TransformerEngine's spelling."""
    layered = _LAYER.match(te_name)
    if layered is None:
        return Entry(te_name)
    layer, rest = int(layered[1]), layered[2]
    expert = _EXPERT.match(rest)
    if expert is None:
        return Entry(f"decoder.layers.{rest}", (layer,))
    return Entry(
        f"decoder.layers.mlp.experts.experts.{expert[1]}.weight",
        (layer, int(expert[2])),
    )


def other_entries(te_name: str) -> tuple[Entry, ...]:
    """Where other writers put the same parameter: each layer by itself, or the norm renamed."""
    layered = _LAYER.match(te_name)
    if layered is None:
        return ()
    entries = [Entry(te_name)]
    if layered[2] == _MOE_NORM:
        entries.append(Entry(f"decoder.layers.{_PLAIN_MOE_NORM}", (int(layered[1]),)))
    return tuple(entries)


def lead_sizes(table: WeightTable) -> dict[str, tuple[int, ...]]:
    """Key -> sizes of its prepended axes, in the order of the model."""
    sizes: dict[str, tuple[int, ...]] = {}
    for rule in table.exported:
        entry = entry_of(rule.mcore_name)
        known = sizes.get(entry.key, (0,) * len(entry.lead))
        sizes[entry.key] = tuple(
            max(n, i + 1) for n, i in zip(known, entry.lead, strict=True)
        )
    return sizes


def extra_state_keys(table: WeightTable) -> list[str]:
    """Keys of the `_extra_state` objects that Megatron's layers ask for.

    Megatron's own linears have them without content, TransformerEngine's modules for FP8 scales;
    norms and attention have them in some versions only. A loader ignores those it does not know.
    """
    layers = table.shape.num_layers
    parts = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    parts += ["self_attention.core_attention"]
    keys = [
        f"decoder.layers.{part}._extra_state/shard_{layer}_{layers}"
        for part in parts
        for layer in range(layers)
    ]
    for key, sizes in lead_sizes(table).items():
        if not _WITH_STATE.match(key):
            continue
        module = key.removesuffix(".weight")
        total = ".".join(map(str, sizes))
        keys += [
            f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{total}"
            for index in product(*map(range, sizes))
        ]
    return [*keys, "decoder.final_layernorm._extra_state/shard_0_1"]
