"""The gated delta rule of packed sequences, computed chunk by chunk, and the convolution before it.

A value head has a state S [K, V]. At each token it fades, and the value that S has for the token's
key moves towards the token's value; the token's query reads it:

    S = exp(g) S;   S = S + beta k (v - k S);   o = q S

Plain torch, in float32. Memory and time grow with the length, not with its square.

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464); chunks as in Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484).

Shapes: T tokens of a pack, C chunks of it with L tokens each, H value heads of this rank, K and V
numbers of a key and of a value.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_opsft.models.architectures.shape import CHUNK_LENGTH

# Added to the square of a query's or key's norm, as in transformers.
_SMALLEST_NORM = 1e-6


def causal_convolution(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return for each token and channel the weighted sum of the last tokens of its sequence, [T,
    channels], computed in float32.

    x: [T, channels]; weight: [channels, tokens that are seen], the token's own last; lengths:
    tokens of each sequence.
    """
    positions = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
    weights = weight.float().T  # [tokens that are seen, channels]
    rows = x.float()
    total = rows * weights[-1]
    for distance in range(1, len(weights)):
        earlier = F.pad(rows, (0, 0, distance, 0))[: len(rows)]
        is_inside = (positions >= distance)[:, None]
        total = total + torch.where(is_inside, earlier, 0.0) * weights[-1 - distance]
    return total.to(x.dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Return the outputs o of a pack, [T, H, V] in the dtype of v; computed in float32.

    q, k: [T, H, K], of any norm: they are divided by it, and q by sqrt(K) too. v: [T, H, V].
    log_decay, the g above, and beta: [T, H]. lengths: tokens of each sequence; every one begins
    with a state of zeros.

    Inside a chunk, the differences v - k S of all tokens solve one triangular system. From chunk to
    chunk only the states pass, those of all sequences at once.
    """
    dtype = v.dtype
    num_chunks = [-(-length // CHUNK_LENGTH) for length in lengths]
    rows = _rows_in_chunks(lengths, num_chunks).to(q.device)
    scale = q.shape[-1] ** -0.5

    def in_chunks(x: Tensor) -> Tensor:
        """Lay [T, H, ...] out as [C, H, L, ...], with zeros behind the end of each sequence."""
        padded = x.new_zeros(sum(num_chunks) * CHUNK_LENGTH, *x.shape[1:])
        padded = padded.index_copy(0, rows, x)
        return padded.unflatten(0, (-1, CHUNK_LENGTH)).transpose(1, 2)

    q, k, v = in_chunks(_unit(q) * scale), in_chunks(_unit(k)), in_chunks(v.float())
    log_decay, beta = in_chunks(log_decay.float()), in_chunks(beta.float())[..., None]
    faded = log_decay.cumsum(-1)  # since the beginning of the chunk
    # From token j to a later token i of the chunk, [C, H, i, j].
    between = (faded[..., :, None] - faded[..., None, :]).tril().exp().tril()
    until = faded.exp()[..., None]
    system = (beta * k @ k.mT) * between
    differences = _solve(system, beta * v)
    of_state = _solve(system, beta * k * until)
    inside = (q @ k.mT) * between
    total = faded[..., -1:]
    to_the_end = k * (total - faded).exp()[..., None]

    states = v.new_zeros(len(lengths), v.shape[1], q.shape[-1], v.shape[-1])
    sequences = torch.arange(len(lengths))  # those that go on
    numbers = torch.tensor(num_chunks)
    first_chunk = numbers.cumsum(0) - numbers
    outputs, order = [], []
    # The first chunk of every sequence, then the second of those that have one, and so on.
    for step in range(max(num_chunks)):
        goes_on = numbers[sequences] > step
        states, sequences = states[goes_on.to(states.device)], sequences[goes_on]
        chunks = (first_chunk[sequences] + step).to(states.device)
        news = differences[chunks] - of_state[chunks] @ states
        outputs.append(q[chunks] * until[chunks] @ states + inside[chunks] @ news)
        order.append(chunks)
        states = states * total[chunks].exp()[..., None] + to_the_end[chunks].mT @ news
    in_order = torch.cat(outputs)[torch.cat(order).argsort()]
    return in_order.transpose(1, 2).flatten(0, 1)[rows].to(dtype)


def _rows_in_chunks(lengths: Sequence[int], num_chunks: Sequence[int]) -> Tensor:
    """Return for each token its row in the pack whose sequences are padded to whole chunks, [T]."""
    rows, start = [], 0
    for length, number in zip(lengths, num_chunks, strict=True):
        rows.append(torch.arange(start, start + length))
        start += number * CHUNK_LENGTH
    return torch.cat(rows)


def _unit(x: Tensor) -> Tensor:
    """Divide queries or keys by their norm, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALLEST_NORM)


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve (1 + the part of `system` below its diagonal) x = right."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
