"""This rank's share of a checkpoint: for every parameter the range that its data-parallel rank
updates, with the float32 main weights and the moments.

Megatron's distributed optimizer cuts the flattened parameters of a TP x PP shard among the
data-parallel ranks. A range of a flattened matrix is at most three rectangles: some of a row, whole
rows, some of a row. As rectangles of the whole model's tensors they can be read back at any TP x PP
x DP, and every rank writes and reads only its own: nothing is gathered, and nothing is copied,
since a rectangle is contiguous in the optimizer's memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.planner import ReadItem

from megatron_opsft.models.architectures.template import ShardKind, WeightRule
from megatron_opsft.models.storage.dist_metadata import (
    METADATA_NAME,
    damage_named,
    unpickle_metadata,
)
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.runtime.distributed import Shard
from megatron_opsft.runtime.parked import Whereabouts, in_place
from megatron_opsft.runtime.rounding import round_up
from megatron_opsft.trainer.model.lora import Adapter, adapters_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def describe_models(models: Sequence[GPTModel]) -> dict[str, dict[str, Any]]:
    """Return `sharded_state_dict` of each model chunk, by the chunk's name in a checkpoint; with
    LoRA that of its adapters alone.
    """
    described = {}
    if adapters := adapters_of(models):
        return {"model": _describe_adapters(adapters)}
    for number, model in enumerate(models):
        name = "model" if len(models) == 1 else f"model{number}"
        described[name] = model.sharded_state_dict(metadata={})
    return described


def _describe_adapters(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Describe A and B by the tensors of Hugging Face's layers, which all layouts have."""
    described = {}
    for adapter in adapters:
        for rule, factor in adapter.factors():
            described[rule.mcore_name] = ShardedTensorFactory(
                rule.mcore_name,
                factor,
                partial(_pieces_of_factor, rule, adapter.shard),
                merge_fn=lambda pieces: pieces,  # never called: pieces are views
            )
    return described


def _pieces_of_factor(
    rule: WeightRule, shard: Shard, key: str, factor: Tensor, *unused: Any
) -> list[ShardedTensor]:
    """Return views of a rank's A or B, each with its place in a tensor of Hugging Face's layer."""
    copy_of_tp = shard.tp_rank if rule.kind is ShardKind.COPY else 0
    pieces = []
    for copy in shard_parameter(rule, shard.tp_rank, shard.tp_size).copies:
        view = copy.target.view(factor)
        pieces.append(
            ShardedTensor(
                key=copy.source.tensor,
                data=view,
                dtype=view.dtype,
                local_shape=tuple(view.shape),
                global_shape=rule.hf_shapes[copy.source.tensor],
                global_offset=(copy.source.row0, copy.source.col0),
                axis_fragmentations=None,
                replica_id=(0, copy_of_tp, shard.copy_rank),
            )
        )
    return pieces


def own_share(
    model_state: dict[str, Any],
    optimizer: ChainedOptimizer,
    *,
    is_loading: bool,
    stored: Whereabouts = in_place,
) -> list[ShardedTensor]:
    """Return this rank's rectangles of weights, main weights and moments, views of live memory.

    Keys: Megatron's own key K for a weight, `optimizer.state.fp32_param.K` for its main weight
    unless the weight is float32 itself, and `optimizer.state.exp_avg.K` for a moment.

    model_state: from `describe_models`. is_loading: leave out the weights that follow from main
    weights. stored: finds the values of a tensor; `Offload.stored` while the trainer sleeps.
    """
    described = {
        value.data: value for value in nested_values(model_state) if is_tensor(value)
    }
    share: list[ShardedTensor] = []
    for owned in owned_ranges(optimizer):
        weight, main = stored(owned.weight), stored(owned.main)
        values_of = {
            f"optimizer.state.{name}.": stored(owned.moments[name]) for name in MOMENTS
        }
        if weight.dtype is torch.float32:
            values_of[""] = main  # a view of the weight
        else:
            values_of["optimizer.state.fp32_param."] = main
            if not is_loading:
                values_of[""] = weight.detach().view(-1)[owned.start : owned.end]
        # A checkpoint may have axes of layers and experts before those of the parameter.
        row_axis = -weight.dim() if weight.dim() > 1 else None
        for tensor in sharded_tensors(described[owned.weight], weight):
            view: Any = tensor.data
            first = view.storage_offset() - weight.storage_offset()
            for prefix, values in values_of.items():
                share += _rectangles(
                    tensor, row_axis, first, values, owned.start, prefix
                )
    return share


@torch.no_grad()
def gather_weights(optimizer: ChainedOptimizer) -> None:
    """Make the weights from loaded main weights; collective over data-parallel ranks."""
    for owned in owned_ranges(optimizer):
        owned.weight.view(-1)[owned.start : owned.end].copy_(owned.main)
    chunks: list[Any] = _distributed_optimizers(optimizer)[0].model_chunks
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def sharded_tensors(description: Any, values: Tensor) -> list[ShardedTensor]:
    """Return the ShardedTensors of one parameter, over `values`: one, or several views if Megatron
    fuses several tensors in the parameter. description: the parameter's, from `describe_models`.
    """
    description = replace(description, data=values)
    if isinstance(description, ShardedTensor):
        return [description]
    return list(nested_values(description.build()))


def is_tensor(value: Any) -> bool:
    """True if a value of `describe_models` describes a parameter."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)


class OwnedRange(NamedTuple):
    """The range of a parameter `weight`, flattened, that this rank updates, and its state."""

    weight: Tensor
    start: int
    end: int
    main: Tensor
    moments: dict[str, Tensor]
    """The moments of the range, by the names in `MOMENTS`; any other state of the optimizer too."""


def owned_ranges(optimizer: ChainedOptimizer) -> Iterator[OwnedRange]:
    """Yield the range of each parameter of which this rank updates any."""
    for member in _distributed_optimizers(optimizer):
        for buffer in member.gbuf_ranges:
            for bucket in chain.from_iterable(buffer.values()):
                for weight, ranges in bucket["param_map"].items():
                    group, order = member.model_param_group_index_map[weight]
                    main = member.optimizer.param_groups[group]["params"][order]
                    owned = ranges["param"]
                    moments = member.optimizer.state[main]
                    yield OwnedRange(
                        weight, owned.start, owned.end, main.detach(), moments
                    )


def _distributed_optimizers(optimizer: ChainedOptimizer) -> list[DistributedOptimizer]:
    """Return one optimizer, or with expert parallelism two."""
    return cast("list[DistributedOptimizer]", optimizer.chained_optimizers)


def _rectangles(
    tensor: ShardedTensor,
    row_axis: int | None,
    first: int,
    values: Tensor,
    start: int,
    prefix: str,
) -> Iterator[ShardedTensor]:
    """Yield the rectangles of `tensor` that `values` covers.

    row_axis: the axis of rows, counted from the end; None: it has none.
    values: flat, from element `start` of a flattened parameter, in which `tensor` begins at element
    `first`. prefix: what the rectangles' keys begin with.
    """
    width = tensor.local_shape[-1]
    num_axes = len(tensor.global_shape)
    begin = max(start, first)
    end = min(start + values.numel(), first + prod(tensor.local_shape))
    for low, high in flat_rectangles(begin - first, end - first, width):
        num_rows = max(1, (high - low) // width)
        # All axes but that of rows and the last have size 1; a vector has no axis of rows.
        shape = [1] * num_axes
        shape[-1] = (high - low) // num_rows
        row, column = divmod(low, width)
        offset = list(tensor.global_offset)
        offset[-1] += column
        if row_axis is not None:
            shape[row_axis] = num_rows
            offset[row_axis] += row
        yield replace(
            tensor,
            key=prefix + tensor.key,
            data=values[first + low - start : first + high - start].view(shape),
            dtype=values.dtype,
            local_shape=tuple(shape),
            global_offset=tuple(offset),
            axis_fragmentations=None,  # rectangles are no grid
            prepend_axis_num=0,
            # Data-parallel ranks hold different rectangles: none is a copy.
            replica_id=(*tensor.replica_id[:2], 0),
        )


def flat_rectangles(low: int, high: int, width: int) -> list[tuple[int, int]]:
    """Cut a range of a flattened matrix with rows of `width` into consecutive rectangles: some of a
    row, whole rows, some of a row. Empty ones are left out.
    """
    rows_begin = min(high, round_up(low, width))
    rows_end = max(rows_begin, high // width * width)
    borders = pairwise([low, rows_begin, rows_end, high])
    return [(begin, end) for begin, end in borders if begin < end]


class _TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only: to read an object would unpickle it."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is an object, not a tensor")


def read_tensors(wanted: list[ShardedTensor], directory: Path) -> None:
    """Fill the tensors' memory from a checkpoint. Every rank reads by itself: no collectives.

    Nothing in the files is run, while Megatron's `load` unpickles them and so may call anything.
    Errors: `UserError` naming the file.
    """
    metadata = unpickle_metadata(directory)
    reader = FileSystemReader(directory)
    planner = _TensorPlanner()
    items_of_file: dict[str, list[ReadItem]] = defaultdict(list)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys({"": wanted})
    with damage_named(directory / METADATA_NAME):
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key, True), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        for item in planner.create_local_plan().items:
            name = metadata.storage_data[item.storage_index].relative_path
            items_of_file[name].append(item)
    for name, items in items_of_file.items():
        with damage_named(directory / name):
            reader.read_data(LoadPlan(items), planner).wait()
