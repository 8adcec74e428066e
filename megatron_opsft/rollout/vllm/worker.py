"""What runs inside vLLM's workers: reading their parameters, and receiving weights from another
process.

vLLM imports it in every worker process, on GPUs before it chooses its device: what it imports must
leave torch as it is (see `cpu_worker`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.weight_utils import (
    pt_weights_iterator,
    safetensors_weights_iterator,
)

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.vllm.draft_model import DraftWorker
from megatron_opsft.rollout.vllm.engine_tensors import EngineTensors
from megatron_opsft.rollout.vllm.layout import checked_stream
from megatron_opsft.runtime.shared_memory import Address, open_shared
from megatron_opsft.runtime.spanning_group import Meeting
from megatron_opsft.transfer.receiver import Receiver, Way
from megatron_opsft.weights.parameter_checksums import parameter_checksums
from megatron_opsft.weights.rectangles import Parameter

BACKEND = "megatron_opsft_shared_memory"


class OpsftWorker(DraftWorker):
    """Methods that vLLM adds to its worker (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any
    device: torch.device

    def opsft_tensors(self) -> EngineTensors:
        """This worker's parameters; only for a caller in the same process."""
        if not hasattr(self, "_opsft_tensors"):
            self._opsft_tensors = EngineTensors(self.model_runner.get_model())
        return self._opsft_tensors

    def opsft_packs(self) -> tuple[bool, bool]:
        """Whether any weight is packed, and whether the head is."""
        tensors = self.opsft_tensors()
        return tensors.packs, tensors.packs_head

    def opsft_checksums(
        self,
        parameters_of_rank: Sequence[Sequence[Parameter]],
        hf_columns: Mapping[str, int],
        cuts: int,
    ) -> tuple[int, list[int]]:
        """This worker's tensor-parallel rank, and `proof.parameter_checksums` of its parameters."""
        tensors = self.opsft_tensors()
        tensors.forget()
        tp_rank = get_tensor_model_parallel_rank()
        sums = parameter_checksums(
            parameters_of_rank[tp_rank],
            tensors,
            hf_columns=hf_columns,
            cuts=cuts,
            signed_zeros=not tensors.packs,
        )
        return tp_rank, sums

    def opsft_open_drafts(self) -> None:
        """Show the proposer, which vLLM made, the batch that its drafts are for."""
        self.model_runner.drafter.runner = self.model_runner
        self.opsft_correct_drafts()

    def opsft_correct_drafts(self) -> None:
        """Drafts of any kind are checked as they should be."""
        if self.device.type == "cpu":
            from megatron_opsft.rollout.vllm.cpu_kernels import correct_expansion

            correct_expansion()

    def opsft_draft_counts(self) -> DraftCounts:
        """What drafts have brought since this was asked before."""
        counts: DraftCounts = self.model_runner.drafter.take_counts()
        return counts

    def opsft_read_files(self, files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of these weight files, all of one format; only for a caller in the same
        process.
        """
        if files[0].endswith(".safetensors"):
            return safetensors_weights_iterator(list(files), use_tqdm_on_load=False)
        return pt_weights_iterator(list(files), use_tqdm_on_load=False)

    def opsft_read_shared(self, address: Address) -> bytes | str:
        """What stands there, or why this worker cannot read it."""
        try:
            return open_shared(address, self.device).cpu().numpy().tobytes()
        except (RuntimeError, OSError) as error:  # the driver's: no way between the two GPUs
            return str(error).partition("\n")[0]

    def opsft_join(self, meeting: Meeting, first_rank: int, own_host: str) -> str:
        """See `Receiver.join`; first_rank: that of the first worker."""
        if not hasattr(self, "_opsft_receiver"):
            dtype = self.model_runner.model_config.dtype
            self._opsft_receiver = Receiver(self.device, dtype)
        rank = first_rank + get_tensor_model_parallel_rank()
        return self._opsft_receiver.join(meeting, rank, own_host)

    def opsft_plan(self, ways: Sequence[Way]) -> None:
        """See `Receiver.plan`; ways: of all workers."""
        way = ways[get_tensor_model_parallel_rank()]
        self._opsft_receiver.plan(way, self.opsft_tensors())

    def opsft_receive(self, hf_names: Sequence[str]) -> str:
        """See `Receiver.receive`; hf_names: of all tensors that vLLM is given, where it is."""
        model = self.model_runner.get_model()

        def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
            initialize_layerwise_reload(model)
            model.load_weights(checked_stream(tensors, hf_names))
            finalize_layerwise_reload(model, self.model_runner.model_config)

        with torch.no_grad():
            reason = self._opsft_receiver.receive(load)
        self.opsft_tensors().forget()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return reason

    def opsft_why_not_in_place(self, parameters_of_rank: Sequence[Sequence[Parameter]]) -> str:
        """Why this worker's parameters cannot be written as they are; "" where they can."""
        expected = parameters_of_rank[get_tensor_model_parallel_rank()]
        tensors = self.opsft_tensors()
        if reason := tensors.packed(expected):
            return reason
        dtype = self.model_runner.model_config.dtype
        other = next((p.name for p in expected if tensors[p.name].dtype != dtype), None)
        return f"vLLM holds {other} in another dtype" if other else ""

    def opsft_parameter(self, name: str) -> Tensor:
        """A copy of one parameter, on the CPU."""
        return self.opsft_tensors()[name].detach().cpu().clone()


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A bucket of whole HF tensors, one behind the other in memory that both processes can read.

    slot: of the sender's two buckets; offsets: in bytes.
    """

    slot: int
    address: Address
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryEngine(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """vLLM's weight-transfer API over memory shared on one machine, on any device.

    vLLM's own back ends need CUDA on both sides, and its IPC the same GPU on both.
    """

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._opened: dict[int, tuple[Address, Tensor]] = {}

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Layers are rebuilt one by one as their tensors arrive."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; the tensors are copied before it returns."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load one bucket into the model."""
        memory = self._open(update_info.slot, update_info.address)
        tensors = []
        for name, dtype_name, shape, offset in zip(
            update_info.names,
            update_info.dtypes,
            update_info.shapes,
            update_info.offsets,
            strict=True,
        ):
            dtype = getattr(torch, dtype_name)
            raw = memory[offset : offset + prod(shape) * dtype.itemsize]
            # A layer keeps what it is given until it is complete, which may be in the next bucket.
            tensors.append((name, raw.view(dtype).view(shape).to(self.device, copy=True)))
        model: Any = self.model
        model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        """All tensors have come."""
        finalize_layerwise_reload(self.model, self.model_config)

    def _open(self, slot: int, address: Address) -> Tensor:
        """The sender's bucket, opened once for as long as it is the same."""
        if slot not in self._opened or self._opened[slot][0] != address:
            self._opened.pop(slot, None)  # before its successor comes
            self._opened[slot] = (address, open_shared(address, self.device))
        return self._opened[slot][1]

    def shutdown(self) -> None:
        """Let go of the sender's memory."""
        self._opened.clear()


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
