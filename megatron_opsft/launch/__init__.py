"""Starts runs: on this machine through torchrun, on a cluster through SLURM."""
