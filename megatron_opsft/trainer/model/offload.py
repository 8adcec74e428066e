"""The trainer's sleep: what of its memory is on the device, and what waits elsewhere.

The one place that knows. Gradients are lost in a sleep, because every update sets them to zero
first; main weights, moments and weights come back bit for bit. While they are away, `stored` and
`on_device` give what reads or writes some of them, such as a checkpoint, without waking the rest.
"""

from typing import Any

from torch import Tensor

from megatron_opsft.config.training import OffloadLevel, gives_up
from megatron_opsft.runtime.parked import ParkedMemory
from megatron_opsft.trainer.model.checkpoint_share import MOMENTS, owned_ranges
from megatron_opsft.trainer.model.step import Trainer


class Offload:
    """The memory of one trainer, awake at first."""

    def __init__(self, trainer: Trainer, level: OffloadLevel) -> None:
        """level: `train.offload`, what a sleep gives up."""
        self._trainer = trainer
        self._gives_gradients = gives_up(level, "gradients")
        self._gives_optimizer = gives_up(level, "optimizer")
        self._gives_weights = gives_up(level, "all")
        self._gradients = ParkedMemory(keeps=False)
        self._optimizer = ParkedMemory(keeps=True)
        self._weights = ParkedMemory(keeps=True)

    @property
    def is_used(self) -> bool:
        """True if a sleep gives up anything."""
        return self._gives_gradients

    @property
    def bytes_away(self) -> dict[str, int]:
        """Bytes of this rank that are not on the device now, by what they hold."""
        return {
            "gradients": self._gradients.num_bytes,
            "optimizer": self._optimizer.num_bytes,
            "weights": self._weights.num_bytes,
        }

    def begin_sleep(self) -> None:
        """Give up the gradients, and begin to copy the optimizer beside what follows, which may
        read the weights and write nothing.
        """
        if self._gives_gradients:
            self._gradients.park([buffer.grad_data for buffer in self._buffers()])
        if self._gives_optimizer:
            self._optimizer.begin(self._optimizer_tensors())

    def sleep(self) -> None:
        """Give up all that the level says; the optimizer first, so that weights are read longest.

        Afterwards only `stored` and `on_device` read what is away.
        """
        self.begin_sleep()
        if self._gives_optimizer:
            self._optimizer.park(self._optimizer_tensors())
        if self._gives_weights:
            self._weights.park(self._weight_tensors())

    def wake(self) -> None:
        """Bring everything back, for training or any other pass of the model."""
        self.wake_state()
        self._gradients.wake()

    def wake_state(self) -> None:
        """Bring weights and optimizer back, to load values into them."""
        self._weights.wake()
        self._optimizer.wake()

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a weight, main weight or moment: itself, or while it is away its values in host
        memory, to be read and written there until the trainer wakes. A part of it must be cut from
        what this returns, since torch cuts nothing from memory that is not there.
        """
        for memory in (self._optimizer, self._weights):
            found = memory.stored(tensor)
            if found is not None:
                return found
        return tensor

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return what `stored` returns on the trainer's device: a copy while it is away."""
        return self.stored(tensor).to(tensor.device)

    def _weight_tensors(self) -> list[Tensor]:
        """All weights: the buffers of those that are trained, and the frozen ones."""
        weights = [buffer.param_data for buffer in self._buffers()]
        for model in self._trainer.models:
            weights += [p.data for p in model.parameters() if not p.requires_grad]
        return weights

    def _buffers(self) -> list[Any]:
        """Megatron's buffers, in which all trained weights and their gradients are."""
        buffers: list[Any] = []
        for chunk in self._trainer.chunks:
            buffers += [*chunk.buffers, *chunk.expert_parallel_buffers]
        return buffers

    def _optimizer_tensors(self) -> list[Tensor]:
        """Main weights and moments that this rank updates. They are looked up every time, since
        loading a checkpoint replaces them. Main weights of a float32 model are its weights.
        """
        of_weights = {
            buffer.param_data.untyped_storage()._cdata for buffer in self._buffers()
        }
        tensors = []
        for owned in owned_ranges(self._trainer.optimizer):
            tensors += [owned.main, *(owned.moments[name] for name in MOMENTS)]
        return [
            tensor
            for tensor in tensors
            if tensor.untyped_storage()._cdata not in of_weights
        ]
