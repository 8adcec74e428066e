"""This rank's own share of a checkpoint: of every parameter the range that its data-parallel rank
updates, with the float32 main weights and the moments.

Megatron's distributed optimizer cuts the flattened parameters of a TP x PP shard among the
data-parallel ranks. A range of a flattened matrix is at most three rectangles: a piece of a row,
whole rows, a piece of a row. As rectangles of the whole model's tensors they can be read back at
any TP x PP x DP, and every rank writes and reads its own alone: nothing is gathered, and nothing is
copied, since a rectangle is contiguous in the optimizer's memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.planner import ReadItem

from megatron_opsft.models.storage.dist_metadata import (
    METADATA_NAME,
    damage_named,
    unpickle_metadata,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def describe_models(models: Sequence[GPTModel]) -> dict[str, dict[str, Any]]:
    """`sharded_state_dict` of each model chunk, by the name that it has in a checkpoint."""
    return {
        "model" if len(models) == 1 else f"model{number}": model.sharded_state_dict(
            metadata={}
        )
        for number, model in enumerate(models)
    }


def own_share(
    model_state: dict[str, Any], optimizer: ChainedOptimizer, *, is_loading: bool
) -> list[ShardedTensor]:
    """Rectangles of weights, main weights and moments; each is a view of the live memory.

    model_state: of `describe_models`.
    Keys: a weight by Megatron's own key K, its main weight by `optimizer.state.fp32_param.K` unless
    the weight is float32 itself, a moment by `optimizer.state.exp_avg.K`.
    is_loading: without the weights that follow from main weights.
    """
    described = {
        id(value.data): value
        for value in nested_values(model_state)
        if is_tensor(value)
    }
    share: list[ShardedTensor] = []
    for weight, start, end, tensors in _owned_ranges(optimizer):
        own = {f"optimizer.state.{name}.": tensors[name] for name in MOMENTS}
        if weight.dtype is torch.float32:
            own[""] = tensors["main"]  # a view of the weight
        else:
            own["optimizer.state.fp32_param."] = tensors["main"]
            if not is_loading:
                own[""] = weight.detach().view(-1)[start:end]
        for piece in pieces_of(described[id(weight)], weight):
            view: Any = piece.data
            first = view.storage_offset() - weight.storage_offset()
            for prefix, values in own.items():
                share += _rectangles(piece, first, values, start, prefix)
    return share


@torch.no_grad()
def gather_weights(optimizer: ChainedOptimizer) -> None:
    """Make the weights from main weights that were loaded; collective over data-parallel ranks."""
    for weight, start, end, tensors in _owned_ranges(optimizer):
        weight.view(-1)[start:end].copy_(tensors["main"])
    chunks = cast("list[DistributedDataParallel]", _parts(optimizer)[0].model_chunks)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def pieces_of(described: Any, values: Tensor) -> list[ShardedTensor]:
    """What a parameter is in the whole model, with the given values: its part, or several where it
    is fused of several, each a view of them. described: of the parameter, in `describe_models`.
    """
    described = replace(described, data=values)
    if isinstance(described, ShardedTensor):
        return [described]
    return list(nested_values(described.build()))


def is_tensor(value: Any) -> bool:
    """Whether a value of `describe_models` is a parameter."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)


def _owned_ranges(
    optimizer: ChainedOptimizer,
) -> Iterator[tuple[Tensor, int, int, dict[str, Tensor]]]:
    """(parameter, first element, end, main weight and moments of that range) of this rank."""
    for part in _parts(optimizer):
        buckets = [
            b for buffer in part.gbuf_ranges for own in buffer.values() for b in own
        ]
        for weight, ranges in (
            (w, r) for b in buckets for w, r in b["param_map"].items()
        ):
            group, order = part.model_param_group_index_map[weight]
            main = part.optimizer.param_groups[group]["params"][order]
            moments = {name: part.optimizer.state[main][name] for name in MOMENTS}
            owned = ranges["param"]
            yield weight, owned.start, owned.end, {"main": main.detach(), **moments}


def _parts(optimizer: ChainedOptimizer) -> list[DistributedOptimizer]:
    """One, or two with expert parallelism."""
    return cast("list[DistributedOptimizer]", optimizer.chained_optimizers)


def _rectangles(
    piece: ShardedTensor, first: int, values: Tensor, start: int, prefix: str
) -> Iterator[ShardedTensor]:
    """values: flat, from element `start` of the parameter, of which the piece begins at `first`."""
    rows, width = (1, *piece.local_shape)[-2:]
    lead = len(piece.global_shape) - len(piece.local_shape)
    begin = max(start, first)
    end = min(start + values.numel(), first + rows * width)
    for low, high in flat_rectangles(begin - first, end - first, width):
        height = max(1, (high - low) // width)
        shape = (height, (high - low) // height)[-len(piece.local_shape) :]
        row, column = divmod(low, width)
        offset = list(piece.global_offset)
        offset[-1] += column
        if len(piece.local_shape) == 2:
            offset[-2] += row
        local = (1,) * lead + shape
        yield replace(
            piece,
            key=prefix + piece.key,
            data=values[first + low - start : first + high - start].view(local),
            dtype=values.dtype,
            local_shape=local,
            global_offset=tuple(offset),
            axis_fragmentations=None,  # rectangles are no grid
            prepend_axis_num=0,
            replica_id=(
                *piece.replica_id[:2],
                0,
            ),  # data-parallel ranks hold different ones
        )


def flat_rectangles(low: int, high: int, width: int) -> list[tuple[int, int]]:
    """Cut a range of a flattened matrix with rows of `width` into consecutive rectangles: part of a
    row, whole rows, part of a row; those that are empty are left out.
    """
    head = min(high, -(-low // width) * width)
    tail = max(head, high // width * width)
    return [(a, b) for a, b in ((low, head), (head, tail), (tail, high)) if a < b]


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is an object, not a tensor")


def read_tensors(wanted: list[ShardedTensor], directory: Path) -> None:
    """Fill the tensors' own memory, each rank alone, and run nothing that is in the files: what
    Megatron's `load` unpickles may call anything. No collectives. Errors: `UserError` naming the
    file.
    """
    metadata = unpickle_metadata(directory)
    reader, planner = FileSystemReader(directory), _TensorPlanner()
    of_file: dict[str, list[ReadItem]] = defaultdict(list)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys({"": wanted})
    with damage_named(directory / METADATA_NAME):
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key, True), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        for item in planner.create_local_plan().items:
            of_file[metadata.storage_data[item.storage_index].relative_path].append(
                item
            )
    for name, items in of_file.items():
        with damage_named(directory / name):
            reader.read_data(LoadPlan(items), planner).wait()
