"""What Megatron-Core's gated delta net calls of flash-linear-attention, in torch: the functions of
`delta_net` behind flash-linear-attention's signatures.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from pretend_gpu.te_kernels import plain


def causal_conv1d(
    x: Tensor, weight: Tensor, activation: str, cu_seqlens: Tensor, **others: Any
) -> tuple[Tensor, None]:
    """x: [1, T, channels]; weight: [channels, tokens that are seen]."""
    from megatron_opsft.trainer.model.delta_net import causal_convolution

    plain(activation=activation != "silu", **others)
    mixed = causal_convolution(x[0], weight, cu_seqlens.diff().tolist())
    return F.silu(mixed)[None], None


def l2norm(x: Tensor) -> Tensor:
    """Nothing yet: `gated_delta_rule` divides by the norm."""
    return x


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **others: Any
) -> tuple[Tensor, None]:
    """All [1, T, heads, ...]; q and k from `l2norm`."""
    from megatron_opsft.trainer.model.delta_net import gated_delta_rule

    plain(**others)
    lengths = cu_seqlens.diff().tolist()
    return gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], lengths)[None], None


@contextmanager
def replaced() -> Iterator[None]:
    """Inside, Megatron-Core's module calls these, with what the real functions take."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    assert common.HAVE_FLA, "flash-linear-attention cannot be imported"
    with ExitStack() as stack:
        _replace(stack, common, l2norm)
        _replace(stack, gdn, causal_conv1d)
        _replace(stack, gdn, chunk_gated_delta_rule)
        yield


def _replace(stack: ExitStack, module: ModuleType, stand_in: Any) -> None:
    name = stand_in.__name__
    real = getattr(module, name)
    signature = inspect.signature(real)
    unnamed = {p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD}

    @functools.wraps(real)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        assert not unnamed & given.keys(), f"{name} has no {given}"
        return stand_in(**given)

    stack.enter_context(patch.object(module, name, called))
