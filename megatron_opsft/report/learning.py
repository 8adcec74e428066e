"""Whether a run learned anything, in one line."""


def describe_skipped(skipped: int, steps: int) -> str:
    """skipped: steps that accepted no response, of so many; "" where there is none."""
    if not skipped:
        return ""
    if skipped < steps:
        return f"{skipped} of {steps} steps accepted no response and learned nothing"
    return (
        f"NOTHING WAS LEARNED: none of {steps} steps accepted a response, and hf/ holds the "
        "weights that the run began with"
    )
