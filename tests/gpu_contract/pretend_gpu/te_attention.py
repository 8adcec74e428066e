"""TransformerEngine's fused attention over packed sequences, as its extension has it, in torch, and
what its context parallelism puts together from steps.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretend_gpu.te_kernels import plain


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """cuDNN's kernel for sequences of any length, which Hopper has for packed causal attention."""
    from transformer_engine_torch import NVTE_Fused_Attn_Backend

    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Cumulated lengths of Q's and of K's sequences, and where they begin, if not there."""


def _sequences(
    q: Tensor, k: Tensor, places: Places, mask: Any, scale: float
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence its rows of Q, of K, and the masked scores [heads, Q, K]. mask: causal
    counts from the first query and the first key.
    """
    cu_q, cu_k, padded_q, padded_k = places
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    starts_q = (cu_q if padded_q is None else padded_q).tolist()
    starts_k = (cu_k if padded_k is None else padded_k).tolist()
    for (num_q, num_k), start_q, start_k in zip(lengths, starts_q, starts_k, strict=False):
        rows, keys = slice(start_q, start_q + num_q), slice(start_k, start_k + num_k)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * scale
        if mask.name == "NVTE_PADDING_CAUSAL_MASK":
            ahead = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(ahead, -math.inf)
        yield rows, keys, scores


def _repeated(kv: Tensor, num_heads: int) -> Tensor:
    return kv.float().repeat_interleave(num_heads // kv.shape[1], dim=1)


def _check_attention(
    layouts: Any, bias: Any, mask: Any, softmax: Any, dropout: float, window: Any, bottom: bool
) -> None:
    names = {layout.name for layout in layouts}
    plain(
        layouts=not names <= {"NVTE_THD_THD_THD", "NVTE_THD"},
        bias=bias.name != "NVTE_NO_BIAS",
        mask=mask.name not in ("NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_MASK"),
        softmax=softmax.name != "NVTE_VANILLA_SOFTMAX",
        dropout=dropout != 0.0,
        window=tuple(window) not in ((-1, -1), (-1, 0)),
        bottom_right=bottom,
    )


def fused_attn_fwd(*args: Any) -> list[Any]:
    """[out, log-sum-exp of scores [T, heads, 1], state of the random numbers]."""
    _, _, _, scale, dropout, _, layout, out_format, _, bias, mask, softmax, window, *more = args
    bottom_right, cu_q, cu_k, q, k, v, _, padded_q, padded_k, *others = more
    _check_attention([layout, out_format], bias, mask, softmax, dropout, window, bottom_right)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    sums = q.new_zeros(len(q), q.shape[1], 1, dtype=torch.float32)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    places = cu_q, cu_k, padded_q, padded_k
    for rows, columns, scores in _sequences(q.float(), keys, places, mask, scale):
        sums[rows] = scores.logsumexp(-1).T[..., None]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[columns]).to(q.dtype)
    return [out, sums, torch.zeros(2, dtype=torch.int64, device=q.device)]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """Gradients of Q, K, V; none of a bias or of the softmax's offset.

    Autograd's of a sum whose derivative by the scores is that of the attention: scores know only
    this step's keys, sums and outputs those of all steps.
    """
    _, _, scale, dropout, _, layout, out_format, grad_format, grads_layout, _, _, *more = args
    bias, mask, softmax, window, bottom_right, _, cu_q, cu_k, q, k, v, out, grad, *more = more
    _, (sums, *_), padded_q, padded_k, *others = more
    layouts = [layout, out_format, grad_format, grads_layout]
    _check_attention(layouts, bias, mask, softmax, dropout, window, bottom_right)
    grad = grad.float()
    means = (grad * out.float()).sum(-1)
    places = cu_q, cu_k, padded_q, padded_k
    with torch.enable_grad():
        inputs = [each.detach().float().requires_grad_() for each in (q, k, v)]
        queries, keys, values = inputs[0], *(_repeated(kv, q.shape[1]) for kv in inputs[1:])
        total = queries.new_zeros(())
        for rows, columns, scores in _sequences(queries, keys, places, mask, scale):
            weights = (scores - sums[rows, :, 0].T[..., None]).exp()
            to_weights = torch.einsum("qhd,khd->hqk", grad[rows], values[columns])
            total = total + (weights * (to_weights - means[rows].T[..., None])).sum()
    found = torch.autograd.grad(total, inputs)
    return [*(each.to(q.dtype) for each in found), None, None]


def _second_halves(cu_seqlens: Tensor) -> Tensor:
    """Which rows are in the second half of their sequence."""
    ends = zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)
    rows = [row >= (first + end) // 2 for first, end in ends for row in range(first, end)]
    return torch.tensor(rows, device=cu_seqlens.device)


def thd_read_half_tensor(x: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    second = _second_halves(cu_seqlens)
    return x[second if half else ~second]


def thd_read_second_half_lse(sums: Tensor, cu_seqlens: Tensor, packed: bool, size: int) -> Tensor:
    """sums: [heads, T], as of all that follow."""
    plain(unpacked=not packed)
    return sums[:, _second_halves(cu_seqlens)]


def thd_second_half_lse_correction(
    sums: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool
) -> None:
    plain(unpacked=not packed)
    second = _second_halves(cu_seqlens)
    sums[:, second] = sums[:, second].logaddexp(step)


def thd_out_correction(*args: Any) -> None:
    out, step_out, old, new, step, cu_seqlens, second_half, packed = args
    plain(unpacked=not packed)
    rows = _second_halves(cu_seqlens)
    rows = rows if second_half else torch.ones_like(rows)
    before, after = (old - new)[:, rows].exp(), (step - new[:, rows]).exp()
    corrected = out[rows] * before.T[..., None] + step_out * after.T[..., None]
    out[rows] = corrected.to(out.dtype)


def thd_grad_correction(
    grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str
) -> None:
    """first, second: what becomes of either half: none, zero, copy, add."""
    seconds = _second_halves(cu_seqlens)
    whole = "none" not in (first, second) and "zero" not in (first, second)
    for rows, what in ((~seconds, first), (seconds, second)):
        if what == "zero":
            grad[rows] = 0
        elif what != "none":
            given = step[rows] if whole else step
            grad[rows] = given if what == "copy" else grad[rows] + given
