#!/usr/bin/env bash
# Usage: borrowed_card.sh [--vllm] DIR - make or renew DIR, a folder that proves this checkout on a borrowed machine with
# a GPU and no network (docs/gpu.md):
#
#   DIR/project   what git tracks here, with the changes that are not committed
#   DIR/wheels    packages that such a machine lacks: constraints/borrowed-card.txt
#   DIR/run.sh    what to call there; its --help lists the parts
#   DIR/vllm      with --vllm: what a dense model needs of vLLM, in pieces of 40 MB; takes minutes
#
# Everything but DIR/vllm has at most 30 MB. Wheels and pieces that are right already stay.
#
#   PYTHON    interpreter with pip (default: .venv/bin/python, else python3)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
exec "$python" "$root/tools/borrowed_card.py" "$@"
