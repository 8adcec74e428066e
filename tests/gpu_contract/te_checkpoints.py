"""What models of either kind of layers write into a checkpoint, and how the two differ."""

from collections.abc import Iterator
from math import prod
from typing import Any

from megatron_opsft.weights.checkpoint_keys import entry_of, extra_state_keys, lead_sizes
from megatron_opsft.weights.rules import WeightTable


def checkpoint_entries(models: list[Any]) -> tuple[dict[str, set[Any]], set[str]]:
    """What the models write: key -> (whole shape, offset, shape) of its pieces; object keys."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    tensors: dict[str, set[Any]] = {}
    objects = set()
    for model in models:
        state = model.sharded_state_dict(metadata={})
        apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensor):
                place = (tuple(entry.global_shape), tuple(entry.global_offset), entry.local_shape)
                tensors.setdefault(entry.key, set()).add(place)
            elif isinstance(entry, ShardedObject):
                objects.add(entry.unique_key)
    return tensors, objects


def key_problems(table: WeightTable, te: list[Any], local: list[Any]) -> Iterator[str]:
    """Differences of what both kinds of layers write, and from what the converter counts on."""
    (found, objects), (plain, plain_objects) = checkpoint_entries(te), checkpoint_entries(local)
    known = set(extra_state_keys(table))
    yield from (f"checkpoint object {key} is unknown" for key in (objects | plain_objects) - known)
    for key in found.keys() ^ plain.keys():
        yield f"checkpoint key {key} is written by {'TE' if key in found else 'plain'} layers alone"
    yield from (
        f"checkpoint key {key} has other pieces"
        for key in found.keys() & plain.keys()
        if found[key] != plain[key]
    )
    sizes = lead_sizes(table)
    wanted = {
        entry_of(rule.mcore_name).key: (*sizes[entry_of(rule.mcore_name).key], *rule.mcore_shape)
        for rule in table.rules
        if not rule.replica
    }
    for key, places in found.items():
        shapes = {shape for shape, _, _ in places}
        # Gate and up lie on an axis of their own: the elements are the same.
        if key not in wanted or {prod(s) for s in shapes} != {prod(wanted[key])}:
            yield f"checkpoint key {key} has shapes {shapes}, not {wanted.get(key)}"
