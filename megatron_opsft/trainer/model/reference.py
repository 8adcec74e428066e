"""The reference model: the one that the trained model must stay close to, or its teacher.

A frozen copy of this rank's trained weights (with LoRA of its adapters alone) that takes their
place during a pass. Contents are exchanged, not tensors: the weights are views of Megatron's
buffers, and the optimizer's tensors are views of them. So no second model is needed, whatever the
layout, and the weights come back bit for bit.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.device import Device, has_room_for_good
from megatron_opsft.runtime.pinned import PinnedBlock, packed_bytes
from megatron_opsft.trainer.model.build import output_weight
from megatron_opsft.trainer.model.checkpoint_share import (
    describe_models,
    is_tensor,
    sharded_tensors,
)
from megatron_opsft.trainer.model.offload import Offload
from megatron_opsft.trainer.model.passes import with_log_probs
from megatron_opsft.trainer.model.step import Trainer

PREFIX = "reference."  # of the keys of its tensors in a checkpoint


class ReferenceModel:
    """The weights that `trainer` has when this is built; every rank calls every method.

    They lie in the CPU's memory (pinned, for a GPU), or on the GPU if it has room for them
    permanently. To resume, build it before the checkpoint is loaded; only a reference that
    `is_replaced` is in the checkpoint itself.
    """

    def __init__(
        self, trainer: Trainer, device: Device, offload: Offload | None = None
    ) -> None:
        """offload: the trainer's. If it is used, the GPU's memory is scarce, and the copy never
        stays there.
        """
        self._trainer = trainer
        self._offload = offload or Offload(trainer, "none")
        self._device = device
        self.is_replaced = False
        live: list[Tensor] = []
        for model in trainer.models:
            # What is frozen in the trainer is the same in the reference.
            live += [weight for weight in model.parameters() if weight.requires_grad]
        detached = [weight.detach() for weight in live]
        num_bytes = sum(weight.nbytes for weight in live)
        stays = not device.is_cuda or (
            not self._offload.is_used and has_room_for_good(device, num_bytes)
        )
        if stays:
            frozen = [weight.clone() for weight in detached]
        else:
            # An attribute, because memory stays pinned only while the block exists.
            self._block = PinnedBlock(packed_bytes(detached))
            frozen = self._block.copies_of(detached)
        # Each weight of the trainer -> its frozen copy.
        self._frozen_of = dict(zip(live, frozen, strict=True))

    def with_log_probs(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the reference's log-probs, which only ranks of the last
        stage have and need. The reference's own routers choose experts: a recorded routing is the
        trained model's.
        """
        unrouted = [dataclasses.replace(batch, routing_TW=None) for batch in batches]
        with self.in_place():
            log_probs = self._trainer.score_batches(unrouted)
        return with_log_probs(batches, log_probs, "reference_log_probs_R")

    def with_teacher(
        self, batches: Sequence[MicroBatch], prompted: Sequence[MicroBatch]
    ) -> list[MicroBatch]:
        """Return the micro-batches with this model as their teacher, which only ranks of the last
        stage have and need.

        prompted: the same responses in the same packs, under the teacher's prompts.
        """
        with self.in_place():
            states = self._trainer.hidden_states(prompted)
        if not states:
            return list(batches)
        weight = output_weight(self._trainer.models[-1])
        teacher_VH = self._frozen_of.get(weight, weight.detach()).to(weight.device)
        taught = []
        for batch, states_RH in zip(batches, states, strict=True):
            if batch.response_indices_R is not None:
                # States are of the whole pack, in the order of the responses under either prompt:
                # keep those of this rank of the context-parallel group.
                states_RH = states_RH[batch.response_indices_R.cpu()]
            taught.append(
                dataclasses.replace(batch, teacher_RH=states_RH, teacher_VH=teacher_VH)
            )
        return taught

    def replace(self) -> None:
        """Make the current model the reference."""
        for live, frozen in self._frozen_of.items():
            frozen.copy_(self._offload.stored(live.data))
        self.is_replaced = True

    def share(self) -> list[ShardedTensor]:
        """Return the reference's weights as ShardedTensors, for saving and loading in any layout.

        They are views of its memory, which `in_place` exchanges.
        """
        share: list[ShardedTensor] = []
        for value in nested_values(describe_models(self._trainer.models)):
            if is_tensor(value):
                for tensor in sharded_tensors(value, self._frozen_of[value.data]):
                    share.append(dataclasses.replace(tensor, key=PREFIX + tensor.key))
        return share

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the trainer the reference's weights while the context lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for live, frozen in self._frozen_of.items():
            live_before = live.data.clone()
            live.data.copy_(frozen, non_blocking=True)
            frozen.copy_(live_before, non_blocking=True)
        self._device.synchronize()  # before anyone reads the CPU's memory
