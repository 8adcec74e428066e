"""vLLM on a CPU: the worker that this project starts (by name, `worker_cls`), plain linear weights,
and a corrected kernel for the check of drafts.

Importing vLLM's CPU worker replaces streams, events and memory functions of `torch.cuda`,
`torch.accelerator` and `torch.Tensor` in the whole process, on any platform: so no module that
a GPU run imports may import this one.
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
    """vLLM's worker under a launcher, with shared memory that no other job uses.

    vLLM derives the name of that memory from the address of the job's store, which it does not know
    under a launcher: all such jobs on a machine would share it, and use leftovers of killed ones.
    """

    def init_device(self) -> None:
        """Set the address, which is only used as a name: the process group exists already."""
        self.distributed_init_method = f"env://:{os.environ[JOB_ID_VARIABLE]}"
        super().init_device()


def keep_weights_plain() -> None:
    """Make linear layers of this process use torch's own product from now on. vLLM would pack their
    weights into a form that only its kernels read, and that no weight sync reaches.
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
    replacement = torch.full_like(values, replace_to)
    replaced = torch.where(values == replace_from, replacement, values)
    output.copy_(replaced.repeat_interleave(counts))


def correct_expansion() -> None:
    """Make this process use `expand` from now on; to be called after vLLM has registered its own.

    `expand_kernel` gives every draft token its request's temperature and top-p. In vLLM 0.32.0 it
    converts values that are not int64 into a copy and fills that copy, so vLLM then reads values
    that were never written, and accepts drafts from a wrong distribution.

    vLLM's `register_kernels` cannot be used: it looks through every loaded module, and fails on
    numba's.
    """
    corrected: Any = KernelOverride(rejection_sampler.expand_kernel, expand)
    rejection_sampler.expand_kernel = corrected
    rejection_sampler._expand.kernel = corrected
