#!/usr/bin/env bash
# Installs into .venv, trains the shipped tiny reasoner on the CPU, and shows how much shorter it answers.
# Arguments are passed on as overrides, for example: bash examples/quickstart.sh run.steps=10
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
bash tools/make_venv.sh cpu >/dev/null
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # so small a model is slower on two threads than on one
.venv/bin/megatron-opsft train examples/configs/quickstart.yaml "$@" --overwrite
.venv/bin/megatron-opsft report runs/quickstart
