"""Names of Megatron parameters inside a distributed checkpoint.

In a checkpoint one tensor holds a parameter of all layers, with the layer as its first axis, or
of all experts, with layer and expert as its first two axes, whatever the parallel layout. In a
model with layers of several kinds every layer has tensors of its own. Norms have the names of the
TransformerEngine layers (`ShardedTensor` keys and prepended axes of `sharded_state_dict`).
"""

import re
from itertools import product
from typing import NamedTuple

from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.records import TensorShape

# Modules with an `_extra_state`. Two norms have none: over heads, and in front of a router.
_WITH_STATE = re.compile(r"^decoder\.layers\..+(?:linear_fc[12]|layernorm)\.weight$")
_ATTENTION_MODULES = ("linear_qkv", "linear_proj", "core_attention")
_DELTA_MODULES = ("in_proj", "out_norm", "out_proj")
# Megatron's plain layers rename the norm in front of experts too, TransformerEngine's do not.
_MOE_NORM = "decoder.layers.pre_mlp_layernorm.weight"
_PLAIN_MOE_NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


class Entry(NamedTuple):
    """The tensor of a checkpoint, or the slice of one, that is a parameter."""

    key: str
    """Name of the tensor."""
    lead: tuple[int, ...] = ()
    """Indices on the prepended axes of that tensor: layer, expert."""


def entry_of(rule: WeightRule) -> Entry:
    """Return where a checkpoint with TransformerEngine's names has the parameter of `rule`: the
    tensor of all layers (and experts), and the parameter's indices in it.
    """
    if rule.layer is None:
        return Entry(rule.mcore_name)
    key = rule.mcore_name
    lead: tuple[int, ...] = ()
    if rule.stacks_layers:
        key, lead = key.replace(f".{rule.layer}.", ".", 1), (rule.layer,)
    if rule.expert is None:
        return Entry(key, lead)
    # layers.3.mlp.experts.linear_fc1.weight7 -> layers.mlp.experts.experts.linear_fc1.weight
    key = key.replace(".experts.", ".experts.experts.").removesuffix(str(rule.expert))
    return Entry(key, (*lead, rule.expert))


class StoredPart(NamedTuple):
    """Rows of a parameter that a checkpoint has in one entry."""

    entry: Entry
    first_row: int
    """The first of them in the parameter."""
    num_rows: int


def parts_in(entry: Entry, rule: WeightRule) -> list[StoredPart]:
    """Return the parts of the parameter of `rule`, whose entry this is: a checkpoint may have a
    tensor for each of its sections.
    """
    if not rule.stored_apart:
        return [StoredPart(entry, 0, rule.mcore_shape[0])]
    parts, first_row = [], 0
    for section in rule.sections:
        of_section = entry._replace(key=f"{entry.key}.{section.name}")
        parts.append(StoredPart(of_section, first_row, section.num_rows))
        first_row += section.num_rows
    return parts


def possible_entries(rule: WeightRule) -> list[Entry]:
    """Return `entry_of`, then the entries that other writers use: each layer by itself, or the norm
    renamed.
    """
    usual = entry_of(rule)
    entries = [usual, Entry(rule.mcore_name)]
    if usual.key == _MOE_NORM:
        entries.append(Entry(_PLAIN_MOE_NORM, usual.lead))
    return entries


def lead_sizes(table: WeightTable) -> dict[str, TensorShape]:
    """Return key -> sizes of its prepended axes, in the order of the model."""
    sizes: dict[str, TensorShape] = {}
    for rule in table.exported:
        entry = entry_of(rule)
        # Indices only grow in the order of the model.
        sizes[entry.key] = tuple(index + 1 for index in entry.lead)
    return sizes


def extra_state_keys(table: WeightTable) -> list[str]:
    """Return the keys of the `_extra_state` objects that Megatron's layers ask for.

    Megatron's own linears have empty ones, TransformerEngine's modules keep FP8 scales in them;
    norms and attention have them in some versions only. A loader ignores those it does not know.
    """
    sizes_of: dict[str, TensorShape] = {}
    if table.shape.delta is None:
        for module in _ATTENTION_MODULES:
            key = f"decoder.layers.self_attention.{module}"
            sizes_of[key] = (table.shape.num_layers,)
    else:
        for layer in range(table.shape.num_layers):
            is_delta = table.shape.kind_of(layer) == "linear_attention"
            for module in _DELTA_MODULES if is_delta else _ATTENTION_MODULES:
                sizes_of[f"decoder.layers.{layer}.self_attention.{module}"] = ()
    for key, sizes in lead_sizes(table).items():
        if _WITH_STATE.match(key):
            sizes_of[key.removesuffix(".weight")] = sizes
    sizes_of["decoder.final_layernorm"] = ()
    keys = []
    for module, sizes in sizes_of.items():
        sizes = sizes or (1,)
        total = ".".join(map(str, sizes))
        for lead in product(*map(range, sizes)):
            position = ".".join(map(str, lead))
            keys.append(f"{module}._extra_state/shard_{position}_{total}")
    return keys
