"""The padding of sequences that a context-parallel group cuts; plans count it without torch."""

from megatron_opsft.runtime.rounding import round_up


def padded(num_tokens: int, cp_size: int, align: int = 1) -> int:
    """Return the length of a sequence with the padding that lets a context-parallel group cut it;
    without a group nothing is padded.

    align: the tensor-parallel size if sequence parallelism cuts the tokens of a rank again.
    """
    if cp_size == 1:
        return num_tokens
    return round_up(num_tokens, 2 * cp_size * align)
