#!/usr/bin/env bash
# Usage: gpu_proof.sh [--quick] [--device cuda|cpu] [--only STAGE[,STAGE]] [--minutes 34]
#                     [--continue [FILE.json]] [--bundle FILE.tgz]
# Proves on a GPU, stage by stage, what was built without one: docs/gpu.md. Needs no network.
# Exit code 0: nothing failed; 1: a stage did; 2: it cannot be run here.
#
#   --quick      does it train here? 6 minutes, without vLLM and TransformerEngine
#   --minutes    of all stages together; none is begun that would not fit
#   --continue   what has not passed yet by the results in OUT, or in FILE.json
#   --bundle     results and logs as one file too, written anew after every stage
#
#   OUT      where the results go (default: runs/gpu_proof)
#   PYTHON   interpreter (default: .venv/bin/python, else python3)
#   WHEELS   folder of wheels that are used beside that interpreter's own packages (default: wheels)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
here=$PWD
cd "$(dirname "$0")/.."

fail() {
  echo "error: $1" >&2
  exit 2
}

# A path that the caller gave is relative to where the caller is.
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$here/$1"; }

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
elif [[ $python == */* ]]; then
  python=$(absolute "$python")
fi
command -v "$python" >/dev/null || fail "there is no $python; set PYTHON to an interpreter"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is $("$python" --version), this project needs 3.11 or newer; set PYTHON"
if [[ -n ${OUT:-} ]]; then
  OUT=$(absolute "$OUT")
  export OUT
fi
wheels=$PWD/wheels
if [[ -n ${WHEELS:-} ]]; then
  wheels=$(absolute "$WHEELS")
  [[ -d $wheels ]] || fail "WHEELS=$WHEELS is no folder"
fi

packages=
if compgen -G "$wheels/*.whl" >/dev/null; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target "$packages" "$wheels"/*.whl || fail "the wheels in $wheels cannot be installed"
fi
export PYTHONPATH=$PWD:$PWD/tests/gpu:$PWD/tests/support${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import psutil, pytest, tabulate' 2>/dev/null ||
  fail "$python lacks pytest, psutil or tabulate; install them, or put their wheels into $wheels"
CALLED_FROM=$here "$python" tools/gpu_proof.py "$@"
