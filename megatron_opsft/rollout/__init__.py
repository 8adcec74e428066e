"""The engines that write responses.

In go prompts, sampling settings and weights. Out come responses with the log-prob of every token,
the same ones for the same seeds.
"""
