#!/usr/bin/env bash
# On-policy SFT of Qwen3-30B-A3B on nodes of 8 H100, one rank for each GPU. From the project's root:
#
#   sbatch slurm/train_30b_a3b.sh                           the paper's settings
#   sbatch --nodes=2 --partition=gpu slurm/train_30b_a3b.sh run.dir=runs/b optimizer.lr=1e-6
#
# What `megatron-opsft plan` expects, at $3 for an hour of a GPU:
#
#   1 node:   does not fit
#   2 nodes:  119.8 s a step, 21.0 hours, $1,006 for the run
#   4 nodes:  102.8 s a step, 18.0 hours, $1,728 for the run
#
# Another configuration, an array of several, and all settings: slurm/train.sh.
#
#SBATCH --job-name=opsft-30b-a3b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@900
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

CONFIG=${CONFIG:-examples/configs/qwen3_30b_a3b.yaml}
# shellcheck source=slurm/train.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/train.sh" "$CONFIG" "$@"
