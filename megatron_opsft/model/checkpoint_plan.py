"""What a rank writes of a checkpoint, planned by the rank alone.

Megatron's own strategy gathers all ranks' plans on rank 0 and makes the metadata of them before
anything is written; who writes what does not depend on it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.planner import WriteItem


class OwnPlan(TorchDistSaveShardedStrategy):
    """Megatron's strategy without its collectives; the metadata is left to the caller.

    items: what this rank writes, once `async_save` was called.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.items: Sequence[WriteItem] = ()

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Path,
        async_strategy: object = None,
    ) -> AsyncRequest:
        """Plan and, of tensors that are views on a CPU, copy. No collectives.

        async_strategy: one of Megatron's writers, from its 0.18 on; none of them writes.
        """
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(state), is_coordinator=False)
        writer = FileSystemWriterAsync(checkpoint_dir, thread_count=self.thread_count)
        writer.set_up_storage_writer(False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plan = writer.prepare_decentralized_global_plan(plan)
        writer.prepare_write_data(plan, planner)
        self.items = plan.items
        write, preload, arguments = writer.get_save_function_and_args()
        return AsyncRequest(write, arguments, [], preload_fn=preload)
