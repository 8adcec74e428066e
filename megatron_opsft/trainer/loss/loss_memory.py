"""Formulas for the losses: how many tokens a chunk of logits has, which cross-entropy fits, and how
much memory it takes.

A run decides by them, and a plan computes with them before it runs; Megatron is not needed.
"""

from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.records import record

CrossEntropyKind = Literal["te", "fused_linear"]

BLOCK_ROWS = 8192  # of an output weight, which a CPU converts to float32 at a time

# Every chunk reads and writes the whole gradient of its rows: many small ones would cost more than
# their GEMMs. A CPU's GEMMs are slow compared with its memory, so fewer tokens are enough there.
_GPU_CHUNK_BYTES = 512 * 2**20
_CPU_CHUNK_BYTES = 128 * 2**20
# TransformerEngine's kernel needs all logits at once. Up to this size that is cheap.
_MAX_TE_LOGIT_BYTES = 4 * 2**30


def tokens_per_chunk(
    rows_per_rank: int, *, on_cuda: bool, with_teacher: bool = False
) -> int:
    """Return how many tokens make 512 MiB of float32 logits (128 MiB on a CPU), the teacher's
    logits included; at least 16. rows_per_rank: rows of the output weight on a rank, padding
    included.
    """
    chunk_bytes = _GPU_CHUNK_BYTES if on_cuda else _CPU_CHUNK_BYTES
    bytes_per_logit = 8 if with_teacher else 4
    return max(16, chunk_bytes // (bytes_per_logit * rows_per_rank))


@record
class CrossEntropy:
    """The way in which a run computes its token losses."""

    kind: CrossEntropyKind
    reason: str
    """Why this kind was chosen, for the log."""


def choose_cross_entropy(
    wanted: Literal["auto", "te", "fused_linear"],
    te_problem: str,
    *,
    max_tokens: int,
    rows_per_rank: int,
    with_teacher: bool = False,
) -> CrossEntropy:
    """Return the kind that `train.cross_entropy` (`wanted`) names; for "auto" the fastest that
    fits.

    te_problem: why this run cannot use TransformerEngine's kernel, or "". max_tokens: most tokens
    of a micro-batch. rows_per_rank: rows of the output layer on a rank. with_teacher: the loss
    compares the logits with a teacher's. Errors: `UserError` if `te` is wanted but not possible.
    """
    if with_teacher:
        te_problem = "the divergence from a teacher is computed chunk by chunk"
    if wanted == "te" and te_problem:
        raise UserError(
            f"train.cross_entropy=te: {te_problem}; use train.cross_entropy=auto or fused_linear"
        )
    if wanted != "auto":
        return CrossEntropy(kind=wanted, reason="as train.cross_entropy says")
    logit_bytes = 2 * max_tokens * rows_per_rank
    size = f"{logit_bytes / 1e9:.1f} GB"
    if not te_problem and logit_bytes > _MAX_TE_LOGIT_BYTES:
        te_problem = f"all logits of a micro-batch would take {size}"
    if te_problem:
        return CrossEntropy(kind="fused_linear", reason=te_problem)
    return CrossEntropy(
        kind="te", reason=f"TransformerEngine is there, and all logits take {size}"
    )


def fused_linear_bytes(
    num_tokens: int,
    hidden_size: int,
    rows_per_rank: int,
    *,
    dtype_bytes: int,
    on_cuda: bool = True,
    sequence_parallel: bool = False,
    with_teacher: bool = False,
    chunk_tokens: int | None = None,
) -> int:
    """Return the most bytes that `fused_linear` takes on one rank, beside the model, its main
    gradients and the incoming hidden states.

    num_tokens: tokens of the micro-batch, all in responses; rows_per_rank: rows of the output
    weight, padding included; chunk_tokens: by default `tokens_per_chunk`. On a GPU the peak is a
    chunk in the forward pass, or a placeholder for the weight's gradient in the backward pass,
    which a CPU never touches.
    """
    if chunk_tokens is None:
        chunk_tokens = tokens_per_chunk(
            rows_per_rank, on_cuda=on_cuda, with_teacher=with_teacher
        )
    chunk_tokens = min(chunk_tokens, num_tokens)
    num_logits = chunk_tokens * rows_per_rank
    chunk_hidden = chunk_tokens * hidden_size
    hidden_bytes = num_tokens * hidden_size * dtype_bytes
    is_half = dtype_bytes < 4
    always = {
        "gradient of the hidden states": hidden_bytes,
        "values of each response token": 24 * num_tokens,
    }
    chunk = {
        "logits": 4 * num_logits,
        "hidden states": chunk_hidden * dtype_bytes,
        "float32 gradient of the hidden states": 4 * chunk_hidden,
    }
    if sequence_parallel:
        always["hidden states of all ranks"] = hidden_bytes
    if with_teacher:
        always["teacher's states and values"] = hidden_bytes + 8 * num_tokens
        chunk["teacher's logits"] = 4 * num_logits
    if on_cuda:
        if is_half:
            chunk["gradient of the logits"] = num_logits * dtype_bytes
        placeholder = rows_per_rank * hidden_size * dtype_bytes
        return sum(always.values()) + max(sum(chunk.values()), placeholder)
    # Needed one after the other: buffers for a group of logits, then operands of a GEMM.
    scratch = 4 * min(2**20, num_logits)
    if with_teacher:
        scratch *= 3
    if is_half:
        chunk["hidden states as float32"] = 4 * chunk_hidden
        block_rows = min(BLOCK_ROWS, rows_per_rank)
        converted_weight_and_product = 4 * block_rows * (hidden_size + chunk_tokens)
        scratch = max(scratch, converted_weight_and_product)
    chunk["buffers"] = scratch
    return sum((always | chunk).values())


def whole_logits_bytes(
    num_tokens: int,
    hidden_size: int,
    rows_per_rank: int,
    *,
    dtype_bytes: int,
) -> int:
    """Return the most bytes that `te` takes, which computes all logits at once; parameters as for
    `fused_linear_bytes`.
    """
    logits = num_tokens * rows_per_rank  # then their gradient
    hidden_and_gradient = 2 * num_tokens * hidden_size
    weight_gradient = rows_per_rank * hidden_size
    numbers = logits + hidden_and_gradient + weight_gradient
    return numbers * dtype_bytes + 24 * num_tokens
