"""How the losses cut their logits, which of them fits, and what memory it takes, by formula.

What a run decides by, and what a plan can count on before it runs: nothing of Megatron is needed.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_opsft.errors import UserError

Method = Literal["te", "fused_linear"]

BLOCK_ROWS = 8192  # of an output weight, which a CPU converts to float32 at a time

# Every chunk reads and writes the whole gradient of its rows: many small ones would cost more than
# their GEMMs. A CPU, slower at these than its memory is, needs fewer tokens for that.
_GPU_CHUNK_BYTES = 512 * 2**20
_CPU_CHUNK_BYTES = 128 * 2**20
# TransformerEngine's kernel wants every logit at once. Up to here that is cheap.
_MAX_TE_LOGIT_BYTES = 4 * 2**30


def tokens_per_chunk(
    rows_per_rank: int, *, on_cuda: bool, with_teacher: bool = False
) -> int:
    """As many as make 512 MiB of float32 logits, on a CPU 128, a teacher's included; rows_per_rank:
    of this rank, with padding.
    """
    chunk_bytes = _GPU_CHUNK_BYTES if on_cuda else _CPU_CHUNK_BYTES
    return max(16, chunk_bytes // ((8 if with_teacher else 4) * rows_per_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """How this run computes its token losses, and why so: one line for the log."""

    method: Method
    reason: str


def choose_cross_entropy(
    wanted: Literal["auto", "te", "fused_linear"],
    te_problem: str,
    *,
    max_tokens: int,
    rows_per_rank: int,
    with_teacher: bool = False,
) -> CrossEntropy:
    """wanted: `train.cross_entropy`, of which auto is the fastest that fits; te_problem: why
    TransformerEngine's kernel is not for this run, empty where it is; max_tokens: of a micro-batch;
    rows_per_rank: of the output layer; with_teacher: whose logits a chunk is compared with.

    Errors: `UserError` when `te` is asked for and cannot be had.
    """
    if with_teacher:
        te_problem = "the divergence from a teacher is computed chunk by chunk"
    if wanted == "te" and te_problem:
        raise UserError(
            f"train.cross_entropy=te: {te_problem}; use train.cross_entropy=auto or fused_linear"
        )
    if wanted != "auto":
        return CrossEntropy(method=wanted, reason="as train.cross_entropy says")
    if te_problem:
        return CrossEntropy(method="fused_linear", reason=te_problem)
    logit_bytes = 2 * max_tokens * rows_per_rank
    size = f"{logit_bytes / 1e9:.1f} GB"
    if logit_bytes > _MAX_TE_LOGIT_BYTES:
        reason = f"all logits of a micro-batch would take {size}"
        return CrossEntropy(method="fused_linear", reason=reason)
    reason = f"TransformerEngine is there, and all logits take {size}"
    return CrossEntropy(method="te", reason=reason)


def fused_linear_bytes(
    num_tokens: int,
    num_loss_tokens: int,
    hidden_size: int,
    rows_per_rank: int,
    *,
    dtype_bytes: int,
    on_cuda: bool = True,
    sequence_parallel: bool = False,
    with_teacher: bool = False,
    chunk_tokens: int | None = None,
) -> int:
    """Bytes on one rank above the model, its main gradients and the hidden states that come in.

    num_tokens: of the micro-batch; num_loss_tokens: response tokens among them; rows_per_rank: of
    the output weight, padding included; chunk_tokens: by default `tokens_per_chunk`. The larger of
    two moments: a chunk in the forward pass (its logits, their gradient where GEMMs take it in the
    model's dtype, its hidden states and their gradient), and the placeholder of the weight's
    gradient in the backward pass (which a CPU never touches). The gradient of the hidden states is
    there in both, and under sequence parallelism all ranks' hidden states. with_teacher: its hidden
    states of the response tokens and its logits too, and on a CPU what operations on both take.
    """
    most = chunk_tokens or tokens_per_chunk(
        rows_per_rank, on_cuda=on_cuda, with_teacher=with_teacher
    )
    tokens = min(most, num_loss_tokens)
    hidden_bytes = num_tokens * hidden_size * dtype_bytes
    held = hidden_bytes * (2 if sequence_parallel else 1) + 24 * num_loss_tokens
    half = dtype_bytes < 4
    chunk = tokens * rows_per_rank * (4 + dtype_bytes * (half and on_cuda))
    chunk += tokens * hidden_size * (dtype_bytes + 4 + 4 * (half and not on_cuda))
    if with_teacher:
        held += num_loss_tokens * (hidden_size * dtype_bytes + 8)
        chunk += 4 * tokens * rows_per_rank
    if on_cuda:
        return held + max(chunk, rows_per_rank * hidden_size * dtype_bytes)
    # One after the other: a part of the logits once more, then converted factors and their product.
    block = min(BLOCK_ROWS, rows_per_rank)
    scratch = 4 * min(2**20, tokens * rows_per_rank) * (3 if with_teacher else 1)
    return held + chunk + max(scratch, half * 4 * block * (hidden_size + tokens))


def whole_logits_bytes(
    num_loss_tokens: int,
    hidden_size: int,
    rows_per_rank: int,
    *,
    dtype_bytes: int,
) -> int:
    """The same for `te`, which computes all logits of the response tokens at once.

    The logits, overwritten by their gradient; hidden states of the response tokens, and their
    gradient; the weight's gradient.
    """
    logits = num_loss_tokens * rows_per_rank * dtype_bytes
    hidden = 2 * num_loss_tokens * hidden_size * dtype_bytes
    weight = rows_per_rank * hidden_size * dtype_bytes
    return logits + hidden + weight + 24 * num_loss_tokens
