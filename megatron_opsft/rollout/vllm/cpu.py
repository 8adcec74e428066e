"""vLLM on a CPU: the worker that this project starts (by name, `worker_cls`), plain linear weights,
what hybrid models need, and a corrected kernel for the check of drafts.

Importing vLLM's CPU worker replaces streams, events and memory functions of `torch.cuda`,
`torch.accelerator` and `torch.Tensor` in the whole process, on any platform: so no module that
a GPU run imports may import this one.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.import_utils import is_torchvision_available
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_opsft.rollout.engine import JOB_ID_VARIABLE

_VLLM_CONVOLVE_PROMPTS = gdn_attention._causal_conv1d_fwd_cpu
_VLLM_CONVOLVE_STEP = gdn_attention._causal_conv1d_update_cpu


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


def keep_convolutions_plain() -> None:
    """Make gated delta nets of this process read their convolutions' weights as they are, with
    `keep_weights_plain`. vLLM would say that they are packed.
    """
    gdn_attention._causal_conv1d_fwd_cpu = _convolve_prompts
    gdn_attention._causal_conv1d_update_cpu = partial(_convolve, _VLLM_CONVOLVE_STEP)


def _convolve(
    kernel: Any, *, weight: Tensor, is_weight_packed: bool, **arguments: Any
) -> Tensor:
    """Call one of vLLM's two functions. weight: [channels, 1, tokens]."""
    return kernel(weight=weight.flatten(1), is_weight_packed=False, **arguments)


def _convolve_prompts(*, x: Tensor, **arguments: Any) -> Tensor:
    """Convolve prompts. x: [channels, tokens], which has to lie in memory token after token.

    vLLM 0.32's own does not if there is one token: it is a part of a row of projected values.
    """
    tokens = x.t().clone(memory_format=torch.contiguous_format)
    return _convolve(_VLLM_CONVOLVE_PROMPTS, x=tokens.t(), **arguments)


def register_hybrid(name: str) -> None:
    """Let vLLM find the class `name` of Qwen3.5's family without torchvision, which no CPU
    installation has: vLLM's module for the family imports it for the images of other classes.
    """
    if is_torchvision_available():
        return
    from vllm import ModelRegistry

    with _stand_ins("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        from vllm.model_executor.models import qwen3_5
    ModelRegistry.register_model(name, getattr(qwen3_5, name))


@contextmanager
def _stand_ins(*suffixes: str) -> Iterator[None]:
    """Have empty modules of these names behind "torchvision" meanwhile, and no warning from
    transformers that the package is not installed.
    """
    modules = {f"torchvision{suffix}": ModuleType(suffix) for suffix in suffixes}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        for name in modules:
            del sys.modules[name]


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
