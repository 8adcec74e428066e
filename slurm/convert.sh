#!/usr/bin/env bash
# Converts a checkpoint between Hugging Face and Megatron-Core, on CPUs. From the project's root:
#
#   sbatch slurm/convert.sh to-megatron --hf DIR --out DIR --verify
#   sbatch slurm/convert.sh to-hf --megatron runs/x/checkpoints/step_000300 --config-from DIR --out DIR
#
# The arguments are those of tools/convert_hf.py; a conversion that is stopped begins anew, so the
# time limit must hold a whole one, and the job gives up after a few that were stopped.
# All other settings: slurm/common.sh.
#
#SBATCH --job-name=opsft-convert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@60
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# shellcheck source=slurm/common.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/common.sh"
run_ranks "$PYTHON" -m megatron_opsft convert "$@"
