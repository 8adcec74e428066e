#!/usr/bin/env bash
# A study, one of its runs each array task, on one node of 8 H100. From the project's root:
#
#   .venv/bin/megatron-opsft study examples/studies/paper_1p5b.yaml --out runs/paper_1p5b --list     numbers of the runs
#   STUDY=examples/studies/paper_1p5b.yaml OUT=runs/paper_1p5b sbatch --array=0-16 slurm/study.sh
#   .venv/bin/megatron-opsft study examples/studies/paper_1p5b.yaml --out runs/paper_1p5b --page     tables and page
#
# STUDY: file of the study; OUT: its directory. The same commands again continue.
# All other settings: slurm/common.sh.
#
#SBATCH --job-name=opsft-study
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@900
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
set -euo pipefail

STUDY=${STUDY:?set STUDY to the YAML file of a study}
OUT=${OUT:?set OUT to the directory of the study}
RUN=${SLURM_ARRAY_TASK_ID:?is not set: submit with --array=0-N, one task for each run of the study}
# shellcheck source=slurm/common.sh
source "${SCRIPT_DIR:-${PROJECT_DIR:-$SLURM_SUBMIT_DIR}/slurm}/common.sh"
# Data, training, evaluation: whatever of them is left, quoted for a shell, one a line.
LEFT=$(srun --nodes=1 --ntasks=1 "${SRUN_OPTIONS[@]}" "${PREFIX[@]}" \
  "$PYTHON" -m megatron_opsft study "$STUDY" --out "$OUT" --only "$RUN" --dry-run)
while IFS= read -r words; do
  [[ -n $words ]] || continue
  eval "command=($words)"
  trap : TERM # a requeue signals this shell too, which must outlast the inner one that asked for it
  # shellcheck disable=SC2154 # eval sets it
  (run_ranks "$PYTHON" -m megatron_opsft "${command[@]}") </dev/null # it leaves the shell with the job's exit code
done <<<"$LEFT"
