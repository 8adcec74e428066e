#!/usr/bin/env bash
# Trains one configuration, or one of several in each task of an array. From the project's root:
#
#   sbatch slurm/train.sh my.yaml optimizer.lr=1e-6 run.dir=runs/b
#   sbatch --nodes=4 --partition=gpu --account=me slurm/train.sh my.yaml
#   sbatch --array=0-3 slurm/train.sh 'sweep/*.yaml'       each file with a run.dir of its own
#
# The first argument is the configuration file, or names and patterns for an array. A rank is started for
# each GPU, with an equal share of its node's CPUs (or sbatch's --cpus-per-task).
# All other settings (virtual environment or container, caches, network): slurm/common.sh.
# The same command again resumes the run in run.dir.
#
#SBATCH --job-name=opsft-train
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

if (($# == 0)); then
  echo "error: name a configuration: sbatch [--SBATCH-OPTION...] slurm/train.sh CONFIG [key=value...]" >&2
  exit 2
fi
CONFIG=$1
shift
# shellcheck source=slurm/common.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/common.sh"
choose_config
run_ranks "$PYTHON" -m megatron_opsft train "$CONFIG" "$@" --resume=auto
