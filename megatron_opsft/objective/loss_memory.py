"""Peak memory of the fused linear loss, by formula: what a plan can count on before it runs."""

from megatron_opsft.objective.fused_linear import DEFAULT_CHUNKS, Chunks
from megatron_opsft.objective.products import BLOCK_ROWS


def fused_linear_bytes(
    num_tokens: int,
    num_loss_tokens: int,
    hidden_size: int,
    rows_per_rank: int,
    *,
    dtype_bytes: int,
    on_cuda: bool = True,
    sequence_parallel: bool = False,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> int:
    """Bytes on one rank above the model, its main gradients and the hidden states that come in.

    num_tokens: of the micro-batch; num_loss_tokens: response tokens among them; rows_per_rank: of
    the output weight, padding included. The larger of two moments: a chunk in the forward pass
    (its logits, their gradient where products take it in the model's dtype, its hidden states and
    their gradient), and the placeholder of the weight's gradient in the backward pass (which a CPU
    never touches). The gradient of the hidden states is there in both, and under sequence
    parallelism all ranks' hidden states.
    """
    tokens, rows = chunks.sizes(rows_per_rank)
    tokens = min(tokens, num_loss_tokens)
    hidden_bytes = num_tokens * hidden_size * dtype_bytes
    held = hidden_bytes * (2 if sequence_parallel else 1) + 24 * num_loss_tokens
    half = dtype_bytes < 4
    chunk = tokens * rows * (4 + dtype_bytes * (half and on_cuda))
    chunk += tokens * hidden_size * (dtype_bytes + 4 + 4 * (half and not on_cuda))
    if on_cuda:
        return held + max(chunk, rows_per_rank * hidden_size * dtype_bytes)
    # A part of the logits once more, and converted factors.
    block = min(BLOCK_ROWS, rows)
    return held + chunk + 8 * 2**20 + half * 4 * block * (hidden_size + tokens)
