"""The reference model: what the trained one must not drift away from, or its teacher.

A frozen copy of this rank's weights that takes their place for a pass. Contents are exchanged, not
tensors: the weights are views of Megatron's buffers, on which the optimizer's are views again. So
the copy needs no second model, whatever the layout, and the weights come back bit for bit.
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
    pieces_of,
)
from megatron_opsft.trainer.model.passes import with_log_probs
from megatron_opsft.trainer.model.step import Trainer

PREFIX = "reference."  # of its tensors' names in a checkpoint


class ReferenceModel:
    """The weights that `trainer` has when this is built; every rank calls every method.

    In the CPU's memory (pinned, for a GPU), or on the GPU where that has room for them for good.
    Resuming needs no more than to build it before the checkpoint is loaded; only a reference that
    `is_replaced` is in the checkpoint itself.
    """

    def __init__(self, trainer: Trainer, device: Device) -> None:
        self._trainer = trainer
        self._device = device
        self.is_replaced = False
        live = [weight.detach() for weight in self._live()]
        num_bytes = sum(weight.nbytes for weight in live)
        if not device.is_cuda or has_room_for_good(device, num_bytes):
            self._frozen = [weight.clone() for weight in live]
        else:
            self._block = PinnedBlock(
                packed_bytes(live)
            )  # pinned for as long as it is held
            self._frozen = self._block.copies_of(live)

    def _live(self) -> list[Tensor]:
        return [
            weight for model in self._trainer.models for weight in model.parameters()
        ]

    def with_log_probs(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the reference's log-probs, on the ranks of the last stage, which
        alone read them. Its own routers choose: others than the trained model's.
        """
        unrouted = [dataclasses.replace(batch, routing_TW=None) for batch in batches]
        with self.in_place():
            log_probs = self._trainer.score_batches(unrouted)
        return with_log_probs(batches, log_probs, "reference_log_probs_R")

    def with_teacher(
        self, batches: Sequence[MicroBatch], prompted: Sequence[MicroBatch]
    ) -> list[MicroBatch]:
        """The micro-batches with this model as their teacher, on the ranks of the last stage, which
        alone read it.

        prompted: the same responses in the same packs, under the teacher's prompts.
        """
        with self.in_place():
            found = self._trainer.hidden_states(prompted)
        if not found:
            return list(batches)
        weight = output_weight(self._trainer.models[-1])
        (own,) = [
            f
            for f, live in zip(self._frozen, self._live(), strict=True)
            if live is weight
        ]
        teacher_VH = own.to(weight.device)
        return [
            dataclasses.replace(
                batch,
                teacher_RH=states_RH
                if batch.response_indices_R is None
                else states_RH[batch.response_indices_R.cpu()],
                teacher_VH=teacher_VH,
            )
            for batch, states_RH in zip(batches, found, strict=True)
        ]

    def replace(self) -> None:
        """From now on the reference is the model as it is."""
        for frozen, live in zip(self._frozen, self._live(), strict=True):
            frozen.copy_(live.data)
        self.is_replaced = True

    def share(self) -> list[ShardedTensor]:
        """Its tensors as a checkpoint names them, in any layout: its own memory, which a pass
        exchanges.
        """
        own = {
            id(live): frozen
            for live, frozen in zip(self._live(), self._frozen, strict=True)
        }
        return [
            dataclasses.replace(piece, key=PREFIX + piece.key)
            for value in nested_values(describe_models(self._trainer.models))
            if is_tensor(value)
            for piece in pieces_of(value, own[id(value.data)])
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the trainer's weights are the reference's."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for frozen, live in zip(self._frozen, self._live(), strict=True):
            kept = live.data.clone()
            live.data.copy_(frozen, non_blocking=True)
            frozen.copy_(kept, non_blocking=True)
        self._device.synchronize()  # before anyone reads the CPU's memory
