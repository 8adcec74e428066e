"""Integer division and multiples, rounded up."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the smallest integer that is not below `dividend / divisor`; divisor > 0."""
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return ceil_div(number, multiple) * multiple
