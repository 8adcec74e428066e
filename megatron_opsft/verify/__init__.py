"""The judges: they say whether a response is right, in worker processes with a time limit.

In go a response and the gold answer. Out comes a verdict: correct, wrong, without an answer, or
unfinished, and the answer that was read.
"""
