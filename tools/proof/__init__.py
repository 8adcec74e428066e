"""What `tools/gpu_proof.sh` runs: the table of stages, its runner and the stages of its own."""
