"""A GPU that is not there, for code that computes on it: each "CUDA" tensor is a tensor of the CPU
whose memory carries a mark.

Values, gradients and views are real. What CUDA would refuse, or get wrong, is a `Fault`: tensors of
two devices in one operation (forward and backward), `.numpy()` of a CUDA tensor, a CPU tensor in an
NCCL group, host memory that is read or written while a copy is under way, the wrong generator.
torch's own Python code answers for `torch.cuda` down to its C functions, which are replaced.

Triton's kernels run with TRITON_INTERPRET=1, set before Triton is imported; TransformerEngine's C++
extension is replaced (`te_extension`). Not pretended: vLLM's kernels, a second stream, CUDA's IPC.
A process has one GPU, that of `torch.cuda.set_device`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

# It keeps torch's functions as they are now, and could not be imported later.
import torch._dynamo  # noqa: F401

from pretend_gpu.collectives import collective_stand_ins
from pretend_gpu.dispatch import Checked, checking_new_threads
from pretend_gpu.marks import Fault, Gpu
from pretend_gpu.tensors import tensor_stand_ins
from pretend_gpu.torch_cuda import cuda_stand_ins

__all__ = ["Fault", "Gpu", "active", "pretended"]

active: list[Gpu] = []
"""The GPU that is pretended now, for a program that did not begin it."""


@contextmanager
def pretended(num_gpus: int = 1) -> Iterator[Gpu]:
    """Inside, torch has so many H100s; afterwards it is as before. Tensors "on the GPU" must not be
    used any more then.
    """
    gpu = Gpu(num_gpus)
    with ExitStack() as stack:
        replaced = [*cuda_stand_ins(gpu), *tensor_stand_ins(gpu), *collective_stand_ins(gpu)]
        for owner, name, value in [*replaced, *checking_new_threads(gpu)]:
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(Checked(gpu))
        active.append(gpu)
        stack.callback(active.remove, gpu)
        yield gpu
