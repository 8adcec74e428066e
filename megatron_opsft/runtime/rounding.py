"""Integer division and multiples, rounded up."""


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up to an integer."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return ceil_div(number, multiple) * multiple
