"""vLLM's CPU worker as this project starts it (by name, `worker_cls`), plain linear weights, and a
kernel that its check of drafts needs; imported on a CPU alone.

Importing vLLM's CPU worker replaces streams, events and memory functions of `torch.cuda`,
`torch.accelerator` and `torch.Tensor` in the whole process, on any platform: nothing that a GPU
run imports may import this module.
"""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_opsft.rollout.engine import JOB_ID_VARIABLE


class LaunchedCpuWorker(CPUWorker):
    """vLLM's worker under a launcher, with shared memory that no other job can have taken.

    The name of that memory comes from the address of the job's store, which vLLM does not know
    under a launcher: every such job on a machine, and what a killed one left, would share it.
    """

    def init_device(self) -> None:
        """The process group is there already, so the address serves as a name only."""
        self.distributed_init_method = f"env://:{os.environ[JOB_ID_VARIABLE]}"
        super().init_device()


def keep_weights_plain() -> None:
    """Take torch's own product of linear layers from now on in this process. vLLM would pack their
    weights into a form that only its kernels read, and that no push reaches.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def expand(
    output: Tensor,
    values: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803  the kernel's name for it
) -> None:
    """Write each request's value to all of its tokens, and `replace_to` where it is `replace_from`.

    output: [tokens]; values, cu_num_tokens: [requests].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    other = torch.full_like(values, replace_to)
    chosen = torch.where(values == replace_from, other, values)
    output.copy_(chosen.repeat_interleave(counts))


def correct_expansion() -> None:
    """Take `expand` from now on in this process; after vLLM has registered its own.

    Of vLLM 0.32.0 `expand_kernel`, which gives every draft token its request's temperature and
    top-p, converts values that are not int64 into a copy and fills that: what is read afterwards
    was never written, and drafts are accepted from a wrong distribution.

    vLLM's `register_kernels` would look through every loaded module, and fails on numba's.
    """
    corrected: Any = KernelOverride(rejection_sampler.expand_kernel, expand)
    rejection_sampler.expand_kernel = corrected
    rejection_sampler._expand.kernel = corrected
