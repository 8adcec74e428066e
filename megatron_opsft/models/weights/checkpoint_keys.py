"""Names of Megatron parameters inside a distributed checkpoint.

In a checkpoint one tensor holds a parameter of all layers, with the layer as its first axis, or
of all experts, with layer and expert as its first two axes, whatever the parallel layout. Norms
have the names of the TransformerEngine layers (`ShardedTensor` keys and prepended axes of
`sharded_state_dict`).
"""

import re
from dataclasses import dataclass
from itertools import product

from megatron_opsft.models.weights.rules import WeightTable

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
# Modules with an `_extra_state`. Two norms have none: over heads, and in front of a router.
_WITH_STATE = re.compile(r"^decoder\.layers\..+(?:linear_fc[12]|layernorm)\.weight$")
# Megatron's plain layers rename the norm in front of experts too, TransformerEngine's do not.
_MOE_NORM = "pre_mlp_layernorm.weight"
_PLAIN_MOE_NORM = "mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """The tensor of a checkpoint, or the slice of one, that is a parameter."""

    key: str
    """Name of the tensor."""
    lead: tuple[int, ...] = ()
    """Indices on the prepended axes of that tensor: layer, expert."""


def entry_of(te_name: str) -> Entry:
    """Return the entry of a parameter; te_name: its global name in TransformerEngine's spelling."""
    layer_match = _LAYER.match(te_name)
    if layer_match is None:
        return Entry(te_name)
    layer, name_in_layer = int(layer_match[1]), layer_match[2]
    expert_match = _EXPERT.match(name_in_layer)
    if expert_match is None:
        return Entry(f"decoder.layers.{name_in_layer}", (layer,))
    key = f"decoder.layers.mlp.experts.experts.{expert_match[1]}.weight"
    return Entry(key, (layer, int(expert_match[2])))


def other_entries(te_name: str) -> tuple[Entry, ...]:
    """Return the entries that other writers use: each layer by itself, or the norm renamed."""
    match = _LAYER.match(te_name)
    if match is None:
        return ()
    single_layer = Entry(te_name)
    if match[2] != _MOE_NORM:
        return (single_layer,)
    renamed = Entry(f"decoder.layers.{_PLAIN_MOE_NORM}", (int(match[1]),))
    return single_layer, renamed


def lead_sizes(table: WeightTable) -> dict[str, tuple[int, ...]]:
    """Return key -> sizes of its prepended axes, in the order of the model."""
    sizes: dict[str, tuple[int, ...]] = {}
    for rule in table.exported:
        entry = entry_of(rule.mcore_name)
        # Indices only grow in the order of the model.
        sizes[entry.key] = tuple(index + 1 for index in entry.lead)
    return sizes


def extra_state_keys(table: WeightTable) -> list[str]:
    """Return the keys of the `_extra_state` objects that Megatron's layers ask for.

    Megatron's own linears have empty ones, TransformerEngine's modules keep FP8 scales in them;
    norms and attention have them in some versions only. A loader ignores those it does not know.
    """
    num_layers = table.shape.num_layers
    keys = []
    for module in ("linear_qkv", "linear_proj", "core_attention"):
        prefix = f"decoder.layers.self_attention.{module}._extra_state"
        keys += [f"{prefix}/shard_{layer}_{num_layers}" for layer in range(num_layers)]
    for key, sizes in lead_sizes(table).items():
        if not _WITH_STATE.match(key):
            continue
        prefix = f"{key.removesuffix('.weight')}._extra_state"
        total = ".".join(map(str, sizes))
        for lead in product(*map(range, sizes)):
            keys.append(f"{prefix}/shard_{'.'.join(map(str, lead))}_{total}")
    return [*keys, "decoder.final_layernorm._extra_state/shard_0_1"]
