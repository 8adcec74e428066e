#!/usr/bin/env bash
# On-policy SFT of Qwen3-30B-A3B on 4 nodes of 8 H100, one rank for each GPU. From the project's root:
#
#   sbatch slurm/train_30b_a3b.sh                                           the paper's settings
#   sbatch --partition=gpu --account=me slurm/train_30b_a3b.sh run.dir=runs/b optimizer.lr=1e-6
#   CONFIG='sweep/*.yaml' sbatch --array=0-3 slurm/train_30b_a3b.sh         one configuration a task
#
# CONFIG: configuration file, or several names and patterns for an array (each with a run.dir of its own).
# All other settings (virtual environment or container, caches, network): slurm/common.sh.
# The same command again goes on where the run in run.dir stopped.
#
#SBATCH --job-name=opsft-30b-a3b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@900
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

CONFIG=${CONFIG:-examples/configs/qwen3_30b_a3b.yaml}
# shellcheck source=slurm/common.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/common.sh"
choose_config
run_ranks "$PYTHON" -m megatron_opsft train "$CONFIG" "$@" --resume=auto
