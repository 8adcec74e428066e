"""What runs inside vLLM's workers: reading their parameters.

vLLM imports it in every worker process, on GPUs before it chooses its device: what it imports must
leave torch as it is (see `cpu_worker`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.weight_utils import (
    pt_weights_iterator,
    safetensors_weights_iterator,
)

from megatron_opsft.rollout.vllm.draft_weights import DraftWeights
from megatron_opsft.rollout.vllm.engine_tensors import EngineTensors
from megatron_opsft.weights.checksum import parameter_checksums
from megatron_opsft.weights.rectangles import Parameter


class OpsftWorker:
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

    def opsft_open_speculative(self) -> bool:
        """Before speculative tokens are used; whether there is a draft model."""
        if self.device.type == "cpu":
            from megatron_opsft.rollout.vllm.cpu_kernels import correct_expansion

            correct_expansion()
        draft = self.model_runner.get_draft_model()
        if draft is None:
            return False
        self._opsft_draft = DraftWeights(draft, self.model_runner.get_model())
        return True

    def opsft_draft_fault(self) -> str:
        """See `DraftWeights.fault`."""
        return self._opsft_draft.fault()

    def opsft_read_files(self, files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of these weight files, all of one format; only for a caller in the same
        process.
        """
        if files[0].endswith(".safetensors"):
            return safetensors_weights_iterator(list(files), use_tqdm_on_load=False)
        return pt_weights_iterator(list(files), use_tqdm_on_load=False)
