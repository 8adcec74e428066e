#!/usr/bin/env bash
# On-policy SFT of R1-Distill-Qwen-1.5B on nodes of 8 H100, one rank for each GPU. From the project's root:
#
#   sbatch slurm/train_1p5b.sh                              the paper's settings
#   sbatch --nodes=2 --partition=gpu slurm/train_1p5b.sh run.dir=runs/b optimizer.lr=1e-6
#
# What `megatron-opsft plan` expects, at $3 for an hour of a GPU:
#
#   1 node:    20.3 s a step,  3.5 hours,    $85 for the run
#   2 nodes:   18.8 s a step,  3.3 hours,   $158 for the run
#   4 nodes:   18.0 s a step,  3.2 hours,   $303 for the run
#
# Another configuration, an array of several, and all settings: slurm/train.sh.
#
#SBATCH --job-name=opsft-1p5b
#SBATCH --nodes=1
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

CONFIG=${CONFIG:-examples/configs/r1_distill_1p5b_paper.yaml}
# shellcheck source=slurm/train.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/train.sh" "$CONFIG" "$@"
