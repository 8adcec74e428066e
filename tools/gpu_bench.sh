#!/usr/bin/env bash
# Usage: gpu_bench.sh [pytest arguments] - test the GPU path against the real packages, on a machine without a GPU:
# installs the GPU version set into .venv-gpu (tools/install_gpu.sh; half an hour and 10 GB the first time, seconds
# later) and runs tests/gpu_contract with it (about ten minutes on two cores): names and types of the packages, models
# without memory, and training on a pretended GPU (tests/gpu_contract/pretend_gpu), TransformerEngine's Python too; the
# planted faults alone, with any torch: pytest tests/unit/test_pretend_gpu.py. Also the proof and vLLM in an environment
# with torch 2.11, as on a borrowed card: .venv-card, 6 GB and about 20 minutes the first time.
#
#   PYTHON    interpreter to make .venv-gpu with (default: python3.12, also pyenv's)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."

# timed TITLE COMMAND...
timed() {
  local title=$1 started=$SECONDS
  shift
  echo "== $title ..."
  "$@"
  echo "== $title: $((SECONDS - started)) s"
}

# An empty pip configuration: a machine that is set up for CPU builds would get those.
PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' EXTRAS=test \
  timed "installing the GPU version set" bash tools/install_gpu.sh .venv-gpu

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=''
timed "tests/gpu_contract" .venv-gpu/bin/pytest -m gpu_contract -W ignore --durations 5 tests/gpu_contract "$@"
