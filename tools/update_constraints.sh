#!/usr/bin/env bash
# Usage: update_constraints.sh VENV NAME - write constraints/NAME.txt: the version of every package in VENV, for
# install scripts to take. Run it on an environment whose tests have just passed (CONTRIBUTING.md).
#
#   update_constraints.sh .venv cpu-py311          after tests/run.sh
#   update_constraints.sh .venv-py312 cpu-py312    after tests/run.sh --python python3.12
#   update_constraints.sh .venv-py313 cpu-py313    after tests/run.sh --python python3.13 --quick
#   update_constraints.sh .venv-gpu gpu-py312      after tools/gpu_bench.sh
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
venv=${1:?a virtual environment} name=${2:?a name such as cpu-py311}
mkdir -p constraints
{
  echo "# Written by tools/update_constraints.sh from an environment that was tested. $("$venv/bin/python" --version)."
  # Without the local part of a version (+cpu): another build of the same version is as good.
  "$venv/bin/python" -m pip freeze --exclude-editable --exclude megatron-opsft | sed -E 's/\+[a-z0-9.]+$//' | grep -E '^[A-Za-z0-9._-]+=='
} >"constraints/$name.txt"
echo "constraints/$name.txt: $(($(wc -l <"constraints/$name.txt") - 1)) packages"
