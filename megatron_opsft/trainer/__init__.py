"""Megatron's side: the model, the losses, and how sequences are packed for them.

In go responses with the weight of each token, and weights from disk. Out come an optimizer step,
log-probs of tokens, this rank's shards, and checkpoints.
"""
