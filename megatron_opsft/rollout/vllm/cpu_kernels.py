"""A kernel of vLLM's CPU build that its check of drafts needs; imported on a CPU alone.

Of vLLM 0.32.0 `expand_kernel`, which gives every draft token its request's temperature and top-p,
converts values that are not int64 into a copy and fills that: what is read afterwards was never
written, and drafts are accepted from a wrong distribution.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler


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
    """From now on in this process; after vLLM has registered its own.

    vLLM's `register_kernels` would look through every loaded module, and fails on numba's.
    """
    corrected: Any = KernelOverride(rejection_sampler.expand_kernel, expand)
    rejection_sampler.expand_kernel = corrected
    rejection_sampler._expand.kernel = corrected
