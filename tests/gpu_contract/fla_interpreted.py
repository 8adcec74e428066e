"""flash-linear-attention's kernels in Triton's interpreter, in float32, beside `delta_net`.

Called as Megatron-Core's gated delta net calls them. Prints JSON: function -> relative differences
of its output and of its gradients. Usage: TRITON_INTERPRET=1 python fla_interpreted.py
"""

import builtins
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fla.modules.convolution import causal_conv1d
from fla.modules.l2norm import l2norm
from fla.ops.common import chunk_delta_h
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import _implicit_cvt

from megatron_opsft.trainer.model.delta_net import causal_convolution, gated_delta_rule

LENGTHS = [1, 5, 64, 130]
BORDERS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
HEADS, KEY, VALUE = 2, 16, 24


def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of `Autotuner.run`, which measures times on a GPU."""
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


def tensor_range(*borders: Any) -> Iterator[Any]:
    """A kernel's `range`: its numbers are Triton's tensors, as in a compiled one."""
    for number in builtins.range(*map(int, borders)):
        yield _implicit_cvt(number)


def results(function: Callable[..., Tensor], *values: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum of it by `values`."""
    inputs = [value.clone().requires_grad_() for value in values]
    output = function(*inputs)
    weights = torch.arange(output.numel()).view(output.shape).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def differences(theirs: Any, ours: Any, *values: Tensor) -> list[float]:
    pairs = zip(results(theirs, *values), results(ours, *values), strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


def their_convolution(x: Tensor, weight: Tensor) -> Tensor:
    given = {"initial_state": None, "output_final_state": False, "cu_seqlens": BORDERS}
    mixed, _ = causal_conv1d(x=x[None], weight=weight, bias=None, activation="silu", **given)
    return mixed[0]


def their_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    outputs, _ = chunk_gated_delta_rule(
        l2norm(q[None]),
        l2norm(k[None]),
        v[None],
        g=g[None],
        beta=beta[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=BORDERS,
    )
    return outputs[0]


def our_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule(q, k, v, g, beta, LENGTHS)


def our_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(causal_convolution(x, weight, LENGTHS))


def main() -> None:
    """Compare, print."""
    tuner, kernels = Autotuner, chunk_delta_h
    tuner.run = run_first
    kernels.range = tensor_range
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), *shape, generator=generator)

    filters = torch.randn(48, 4, generator=generator)
    q, k, v = drawn(HEADS, KEY), drawn(HEADS, KEY), drawn(HEADS, VALUE)
    log_decay, beta = -0.2 * drawn(HEADS).sigmoid(), drawn(HEADS).sigmoid()
    convolved = differences(their_convolution, our_convolution, drawn(48), filters)
    ruled = differences(their_rule, our_rule, q, k, v, log_decay, beta)
    told = {"causal_conv1d": convolved, "chunk_gated_delta_rule": ruled}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
