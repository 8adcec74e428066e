#!/usr/bin/env bash
# Usage: make_venv.sh EXTRAS - make .venv in the project's root and install the project with these extras.
# Quick when nothing changed: the install is repeated only if setup.py, the extras or Python changed since.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
  "$python" -m venv .venv
fi
stamp=".venv/.installed-${extras//,/-}"
wanted=$(cksum setup.py; echo "$extras"; .venv/bin/python --version)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  echo "installing .[$extras] into .venv, 1 to 2 GB; step 1 of 2: PyTorch" >&2
  # torch first: with the pinned one there, no other request of a dependency can pull a CUDA build.
  .venv/bin/python -m pip install -q "torch==2.13.0"
  echo "step 2 of 2: Megatron-Core, transformers and the rest" >&2
  .venv/bin/python -m pip install -q -e ".[$extras]"
  echo "$wanted" > "$stamp"
fi
