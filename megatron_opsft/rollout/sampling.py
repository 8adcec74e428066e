"""Sampling whose outcome depends on (response seed, position) and the logits, and on nothing else.

Each token of a response is drawn by inverting the cumulative distribution at a uniform number that
is a pure function of the response's seed and the token's position. It does not depend on the other
responses of the batch, the device, or the number of ranks. Rounding of the logits changes it only
if it moves a border of the distribution across the uniform number. Borders are in the order of
token ids, so two tokens of almost equal probability that swap ranks do not change the outcome.

Shapes: N rows, V vocabulary, K candidates, L positions.
"""

import hashlib

import torch
from torch import Tensor

from megatron_opsft.runtime.splitmix import STEP64, mix64, shift_right

# Enough for the nucleus of a trained model at almost every token.
_FIRST_CANDIDATES = 64

EVAL_STEP = 0  # training steps count from 1, so no training response shares an evaluation's seed


def response_seed(run_seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """Return the seed of a response, in [0, 2^63): the same in every process and Python version."""
    key = f"{run_seed}\0{step}\0{sample_index}\0{problem_id}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seeds_N: Tensor, num_positions: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [N, L]: the first L outputs of SplitMix64 from each
    seed.

    seeds_N: int64 [N]. The same bits on every device: 64-bit integer arithmetic that wraps around.
    """
    positions_L = torch.arange(1, num_positions + 1, device=seeds_N.device)
    outputs = mix64(seeds_N[:, None] + positions_L * STEP64)
    return shift_right(outputs, 11).double() * 2.0**-53


def sample_tokens(
    logits_NV: Tensor, uniforms_N: Tensor, temperature: float, top_p: float
) -> Tensor:
    """Draw a token for each row, int64 [N], from softmax(logits / temperature) inside its nucleus.

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
    """Divide logits [N, V] by the temperature, in at least float32.

    Except at temperatures 0 and 1 the largest is subtracted first, so that the most probable token
    has a finite value however small the temperature is.
    """
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if temperature in (0.0, 1.0):
        return logits_NV
    # A smaller divisor may be taken for 0.
    smallest = torch.finfo(logits_NV.dtype).tiny
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    return (logits_NV - largest_N1) / max(temperature, smallest)


def _sample_nucleus(
    scaled_NV: Tensor, uniforms_N: Tensor, top_p: float, k: int
) -> Tensor:
    """Sample from the nucleus, which is searched among the k most probable tokens first.

    Sorting 152k logits costs more than everything else of the step, and a nucleus rarely has 64
    tokens. Rows whose nucleus may have more tokens than the candidates are sampled again among
    eight times as many.
    """
    k = min(k, scaled_NV.shape[-1])
    candidates_NK = torch.topk(scaled_NV, k, dim=-1, sorted=False).indices
    # In id order, so that a stable sort breaks ties by id whatever order topk left them in.
    ids_NK = candidates_NK.sort(dim=-1).values
    values_NK = scaled_NV.gather(-1, ids_NK)
    top_N1 = values_NK.amax(dim=-1, keepdim=True)
    total_N1 = torch.exp(scaled_NV - top_N1).sum(
        dim=-1, keepdim=True, dtype=torch.float64
    )
    weights_NK = torch.exp(values_NK - top_N1).double()

    # A token is in the nucleus if the more probable ones do not reach top_p.
    sorted_NK, order_NK = weights_NK.sort(dim=-1, descending=True, stable=True)
    more_probable_NK = sorted_NK.cumsum(dim=-1) - sorted_NK
    sorted_mask_NK = more_probable_NK < top_p * total_N1
    mask_NK = torch.zeros_like(sorted_mask_NK).scatter(-1, order_NK, sorted_mask_NK)
    picked_N = _invert_cdf(weights_NK * mask_NK, uniforms_N)
    tokens_N = ids_NK.gather(-1, picked_N[:, None]).squeeze(-1)

    # If the nucleus has a candidate as small as the smallest, it may have more tokens outside.
    beyond_N = (sorted_mask_NK & (sorted_NK <= sorted_NK[:, -1:])).any(dim=-1)
    if k < scaled_NV.shape[-1] and bool(beyond_N.any()):
        rows = beyond_N.nonzero().squeeze(-1)
        tokens_N[rows] = _sample_nucleus(
            scaled_NV[rows], uniforms_N[rows], top_p, 8 * k
        )
    return tokens_N


def _invert_cdf(weights_NK: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the first index where the cumulative weight exceeds uniform * total, int64 [N]."""
    cdf_NK = weights_NK.cumsum(dim=-1, dtype=torch.float64)
    total_N = cdf_NK[:, -1]
    # Rounding may lift uniform * total to the total itself, which nothing exceeds.
    below_total_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    target_N = torch.minimum(uniforms_N * total_N, below_total_N)
    picked_N = torch.searchsorted(cdf_NK, target_N[:, None], right=True).squeeze(-1)
    # The index is too large in a row without any positive weight.
    return picked_N.clamp_max(weights_NK.shape[-1] - 1)
