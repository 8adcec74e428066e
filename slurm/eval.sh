#!/usr/bin/env bash
# Evaluates a model on the benchmarks of the paper, one engine for each of 8 GPUs. From the project's root:
#
#   MODEL=runs/r1_distill_7b_paper/hf OUT=results/opsft_7b sbatch slurm/eval.sh
#   MODEL=... OUT=... BENCHMARKS=gsm8k,math500 sbatch --nodes=2 slurm/eval.sh      more settings at the end
#
# MODEL: Hugging Face directory or hub name. OUT: directory of the results; the same command again continues.
# BENCHMARKS, ENGINE: see below. All other settings: slurm/common.sh.
#
#SBATCH --job-name=opsft-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

MODEL=${MODEL:?set MODEL to a Hugging Face directory or hub name}
OUT=${OUT:?set OUT to the directory of the results}
BENCHMARKS=${BENCHMARKS:-gsm8k,math500,amc23,aime24,aime25}
ENGINE=${ENGINE:-vllm}
MAX_EARLY_STOPS=100 # each start has saved what it did
# shellcheck source=slurm/common.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/common.sh"
run_ranks "$PYTHON" -m megatron_opsft eval --model "$MODEL" --benchmarks "$BENCHMARKS" \
  --out "$OUT" engine="$ENGINE" "$@"
