"""What TransformerEngine's kernels compute, in torch: names and arguments are its extension's."""

import functools
from typing import Any

import torch
from torch import Tensor

# TransformerEngine's DType -> torch's.
_DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def plain(**values: Any) -> None:
    """Errors: NotImplementedError where a call asks for more than is pretended."""
    asked = {name: value for name, value in values.items() if value not in (None, False)}
    if asked:
        raise NotImplementedError(f"not pretended: {asked}")


def _product(a: Tensor, trans_a: bool, b: Tensor, trans_b: bool) -> Tensor:
    """Row-major: op(B) op(A); inputs of more axes than two are rows of the last one."""
    left, right = b.reshape(-1, b.shape[-1]).float(), a.reshape(-1, a.shape[-1]).float()
    result = (left.T if trans_b else left) @ (right.T if trans_a else right)
    return result if trans_b else result.view(*b.shape[:-1], result.shape[-1])


def _store(result: Tensor, out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
    if out is None:
        return result.to(dtype)
    result = result.view(out.shape)
    return out.add_(result) if accumulate else out.copy_(result)


def generic_gemm(*args: Any) -> list[Any]:
    a, trans_a, b, trans_b, out, quantizer, dtype, bias, _, gelu, gelu_in, grad, *more = args
    _, _, accumulate, _, overlap, _, extra, bulk, alpha, beta = more
    plain(quantizer=quantizer, gelu=gelu, gelu_in=gelu_in, overlap=overlap, extra=extra, bulk=bulk)
    plain(beta=beta not in (None, float(accumulate)))
    result = alpha * _product(a, trans_a, b, trans_b)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    stored = _store(result, out, a.dtype if dtype is None else _DTYPES[int(dtype)], accumulate)
    return [stored, bias_grad, None, None]


def te_general_grouped_gemm(*args: Any) -> list[Tensor]:
    a, trans_a, b, trans_b, outs, _, splits, biases, _, single, gelu_in, *more = args
    _, _, _, accumulate, _, _ = more
    plain(biases=any(bias.numel() for bias in biases), gelu=any(t.numel() for t in gelu_in))
    if single:
        assert splits is not None and sum(splits) == len(outs[0])
        outs = list(outs[0].split(splits))
    for left, right, out in zip(a, b, outs, strict=True):
        _store(_product(left, trans_a, right, trans_b), out, out.dtype, accumulate)
    return biases


def rmsnorm_fwd(*args: Any) -> list[Any]:
    x, weight, eps, out, quantizer, dtype, _, zero_centered = args
    plain(quantizer=quantizer)
    inverse = (x.float().square().mean(-1) + eps).rsqrt()
    result = x.float() * inverse[:, None] * (weight.float() + zero_centered)
    return [_store(result, out, _DTYPES[int(dtype)], False), None, inverse]


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> list[Any]:
    normed = x.float() * inverse[:, None]
    scaled = grad.float() * (weight.float() + zero_centered)
    to_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * inverse[:, None]
    return [to_x.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)]


def _angles(freqs: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """[T, 1, D] of this rank's tokens: of each sequence the cp_rank-th chunk of 2 cp_size, and the
    cp_rank-th from behind.
    """
    places = []
    for first, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        chunks = torch.arange(end - first, device=freqs.device).chunk(2 * cp_size)
        places += [chunks[cp_rank], chunks[-1 - cp_rank]] if cp_size > 1 else chunks
    return freqs[torch.cat(places), :, 0] if places else freqs[:0, :, 0]


def _rope(backward: bool, *args: Any) -> Tensor:
    x, freqs, start, layout, interleaved, cu_seqlens, cp_size, cp_rank = args
    plain(start=start, interleaved=interleaved, layout=layout.name != "NVTE_THD")
    angles = _angles(freqs, cu_seqlens, cp_size, cp_rank)
    turned, kept = x.float().split([freqs.shape[-1], x.shape[-1] - freqs.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    sign = -1.0 if backward else 1.0
    half = torch.cat([-second, first], dim=-1) * sign
    return torch.cat([turned * angles.cos() + half * angles.sin(), kept], dim=-1).to(x.dtype)


def multi_tensor_adam(*args: Any) -> None:
    """lists: gradients, weights, moments, squares and, where weights are rounded, main weights."""
    _, noop, lists, lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay = args
    plain(noop=bool(noop), coupled=not decoupled, uncorrected=not bias_correction)
    for grad, weight, moment, square, *main in zip(*lists, strict=True):
        moment.lerp_(grad.float(), 1 - beta1)
        square.mul_(beta2).addcmul_(grad.float(), grad.float(), value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt() + eps
        target = main[0] if main else weight
        change = moment / (1 - beta1**step) / scale + weight_decay * target
        target.sub_(change, alpha=lr)
        if main:
            weight.copy_(target)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: Any, scale: float | Tensor) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: Any, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    (tensors,) = lists
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm().view(1), norms if per_tensor else norms[:0]


fused_rope_forward = functools.partial(_rope, False)
fused_rope_backward = functools.partial(_rope, True)
multi_tensor_scale_tensor = multi_tensor_scale
