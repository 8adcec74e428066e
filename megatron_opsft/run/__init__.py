"""One training run: its checks and its input (`start`), its steps, weight syncs and records.

A run takes a configuration and a directory. It writes metrics, rollouts, checkpoints and the
trained model into that directory.
"""
