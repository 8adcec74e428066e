#!/usr/bin/env bash
# Installs into .venv and makes the paper's study with the shipped tiny reasoner: tables, figures, one page.
#   bash examples/paper.sh           about an hour on two cores
#   bash examples/paper.sh --quick   two minutes
# The same command again continues. Other arguments are those of `megatron-opsft study`.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
study=paper_tiny
if [[ ${1:-} == --quick ]]; then
  study=tiny_quick
  shift
fi
bash tools/make_venv.sh cpu >/dev/null
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/megatron-opsft study "examples/studies/$study.yaml" --out "runs/$study" "$@"
