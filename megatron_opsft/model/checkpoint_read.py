"""A checkpoint's tensors, read by each rank alone and without running what is in its files.

Megatron's `load` unpickles `.metadata`, and whatever that calls an object, without limits.
"""

from collections import defaultdict
from pathlib import Path

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.planner import ReadItem

from megatron_opsft.storage.dist_metadata import METADATA_NAME, damage_named, unpickle_metadata


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is an object, not a tensor")


def read_tensors(wanted: list[ShardedTensor], directory: Path) -> None:
    """Fill the tensors' own memory. No collectives. Errors: `UserError` naming the file."""
    metadata = unpickle_metadata(directory)
    reader, planner = FileSystemReader(directory), _TensorPlanner()
    of_file: dict[str, list[ReadItem]] = defaultdict(list)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys({"": wanted})
    with damage_named(directory / METADATA_NAME):
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key, True), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        for item in planner.create_local_plan().items:
            of_file[metadata.storage_data[item.storage_index].relative_path].append(item)
    for name, items in of_file.items():
        with damage_named(directory / name):
            reader.read_data(LoadPlan(items), planner).wait()
