"""One training run: what it checks and reads (`start`), its steps, its weight syncs, its records.

In go a configuration and a directory. Out come metrics, rollouts, checkpoints and the trained
model in that directory.
"""
