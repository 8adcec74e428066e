"""Sampling whose outcome depends on (response seed, position) and the logits, and on nothing else.

Each token of a response is drawn by inverting the cumulative distribution at a uniform number that
is a pure function of the response's seed and the token's position. Neither the batch a response
shares, nor the device, nor the number of ranks enters; rounding of the logits does, but only if it
moves a border of the distribution across the uniform number. Borders are laid out in token-id
order, so two tokens of almost equal probability that swap ranks do not change the outcome.

Shapes: N rows, V vocabulary, K candidates, L positions.
"""

import hashlib

import torch
from torch import Tensor

from megatron_opsft.models.weights.checksum import STEP64, mix64, shift_right

_FIRST_CANDIDATES = (
    64  # enough for the nucleus of a trained model at almost every token
)

EVAL_STEP = 0  # training steps count from 1, so no training response shares an evaluation's seed


def response_seed(run_seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """The seed of one response, in [0, 2^63): the same in every process and Python version."""
    key = f"{run_seed}\0{step}\0{sample_index}\0{problem_id}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seeds_N: Tensor, num_positions: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [N, L]: the first L outputs of SplitMix64 from each seed.

    seeds_N: int64 [N]. The same bits on every device: 64-bit integer arithmetic that wraps around.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    positions_L = torch.arange(
        1, num_positions + 1, dtype=torch.int64, device=seeds_N.device
    )
    outputs = mix64(seeds_N[:, None] + positions_L * STEP64)
    return shift_right(outputs, 11).double() * 2.0**-53


def sample_tokens(
    logits_NV: Tensor, uniforms_N: Tensor, temperature: float, top_p: float
) -> Tensor:
    """One token per row, int64 [N], from softmax(logits / temperature) restricted to its nucleus.

    The nucleus is the smallest set of most probable tokens whose probabilities reach top_p; among
    equally probable tokens the lower id comes first. Temperature 0 takes the most probable token.
    uniforms_N: float64 in [0, 1).
    """
    scaled_NV = _scale(logits_NV, temperature)
    if temperature == 0:
        return scaled_NV.argmax(dim=-1)
    if top_p < 1.0:
        return _sample_nucleus(scaled_NV, uniforms_N, top_p, _FIRST_CANDIDATES)
    weights_NV = torch.exp(scaled_NV - scaled_NV.amax(dim=-1, keepdim=True))
    return _invert_cdf(weights_NV, uniforms_N)


def _scale(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits over temperature in at least float32, [N, V]; but for 0 and 1 less the largest, so
    that however small the temperature is, the most probable token has a finite value.
    """
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if temperature in (0.0, 1.0):
        return logits_NV
    smallest = torch.finfo(
        logits_NV.dtype
    ).tiny  # below it, a divisor may be taken for 0
    return (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / max(
        temperature, smallest
    )


def _sample_nucleus(
    scaled_NV: Tensor, uniforms_N: Tensor, top_p: float, k: int
) -> Tensor:
    """Sample from the nucleus, looking for it among the k most probable tokens first.

    Sorting 152k logits costs more than the rest of the step, and a nucleus rarely has 64 tokens.
    Rows whose nucleus may reach beyond the candidates are sampled again among eight times as many.
    """
    if exhaustive := 2 * k >= scaled_NV.shape[-1]:
        values_NK = scaled_NV
    else:
        # In id order, so that a stable sort breaks ties by id whatever order topk left them in.
        ids_NK = (
            torch.topk(scaled_NV, k, dim=-1, sorted=False).indices.sort(dim=-1).values
        )
        values_NK = scaled_NV.gather(-1, ids_NK)
    top_N1 = values_NK.amax(dim=-1, keepdim=True)
    total_N1 = torch.exp(scaled_NV - top_N1).sum(
        dim=-1, keepdim=True, dtype=torch.float64
    )
    weights_NK = torch.exp(values_NK - top_N1).double()

    sorted_NK, order_NK = weights_NK.sort(dim=-1, descending=True, stable=True)
    kept_sorted_NK = sorted_NK.cumsum(dim=-1) - sorted_NK < top_p * total_N1
    kept_NK = torch.zeros_like(kept_sorted_NK).scatter(-1, order_NK, kept_sorted_NK)
    picked_N = _invert_cdf(weights_NK * kept_NK, uniforms_N)
    if exhaustive:
        return picked_N
    tokens_N = ids_NK.gather(-1, picked_N[:, None]).squeeze(-1)

    # A kept candidate as small as the smallest may have equals or successors outside.
    beyond_N = (kept_sorted_NK & (sorted_NK <= sorted_NK[:, -1:])).any(dim=-1)
    if bool(beyond_N.any()):
        rows = beyond_N.nonzero().squeeze(-1)
        tokens_N[rows] = _sample_nucleus(
            scaled_NV[rows], uniforms_N[rows], top_p, 8 * k
        )
    return tokens_N


def _invert_cdf(weights_NK: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first index at which the cumulative weight exceeds uniform * total weight, int64 [N]."""
    cdf_NK = weights_NK.cumsum(dim=-1, dtype=torch.float64)
    total_N = cdf_NK[:, -1]
    # Rounding may lift uniform * total to the total itself, which nothing exceeds.
    target_N = torch.minimum(
        uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N))
    )
    picked_N = torch.searchsorted(cdf_NK, target_N[:, None], right=True).squeeze(-1)
    return picked_N.clamp_max(weights_NK.shape[-1] - 1)  # where no weight is above 0
