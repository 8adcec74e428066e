#!/usr/bin/env bash
# Usage: make_venv.sh EXTRAS - make a virtual environment in the project's root and install the project with these extras,
# in the versions of constraints/. Quick when nothing changed since the last time. EXTRAS torch: PyTorch alone.
# What to type next goes to standard output, and everything else to standard error.
#
#   PYTHON           interpreter to make it with, of Python 3.11, 3.12 or 3.13 (default: python3)
#   VENV             its folder (default: .venv)
#   TORCH_INDEX_URL  index that is asked first for PyTorch's CPU build (default: PyTorch's own; empty: none)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/.."
source tools/find_python.sh
extras=$1
venv=${VENV:-.venv}
index=${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}
torch=torch==2.13.0
if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
python=$venv/bin/python

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Does pip's own index give a build of torch that needs CUDA's libraries?
brings_cuda() {
  pip_install --dry-run --no-deps --report - "$torch" | "$python" -c '
import json, sys
[torch] = json.load(sys.stdin)["install"]
sys.exit(not any("nvidia" in need or "cuda" in need for need in torch["metadata"].get("requires_dist", [])))'
}

# torch first: with the pinned one there, no other request of a dependency can pull another build.
install_torch() {
  "$python" -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '2.13.0'" 2>/dev/null && return
  if [ -n "$index" ]; then
    echo "step 1 of 2: PyTorch's CPU build, 0.2 GB, from $index" >&2
    pip_install --no-deps --timeout 3 --retries 0 --index-url "$index" "$torch" 2>/dev/null && return
    echo "  it does not answer; TORCH_INDEX_URL names another" >&2
  fi
  if brings_cuda; then
    echo "step 1 of 2: PyTorch's CUDA build, which runs on a CPU too, from pip's own index: 5 GB with CUDA's libraries" >&2
  else
    echo "step 1 of 2: PyTorch's CPU build, 0.2 GB, from pip's own index" >&2
  fi
  pip_install "$torch"
}

if [ "$extras" = torch ]; then
  install_torch
  exit
fi
pinned=constraints/cpu-$(python_name "$python").txt
stamp=$venv/.installed-${extras//,/-}
wanted=$(cat pyproject.toml "$pinned" 2>/dev/null | cksum; echo "$extras"; "$python" --version)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  echo "installing .[$extras] into $venv" >&2
  install_torch
  echo "step 2 of 2: Megatron-Core, transformers and the rest, 1 GB" >&2
  if [ -f "$pinned" ]; then
    pip_install -c "$pinned" -e ".[$extras]"
  else
    echo "  there is no $pinned: the newest versions that pyproject.toml allows are taken, untested" >&2
    pip_install -e ".[$extras]"
  fi
  echo "$wanted" > "$stamp"
fi
echo "next, in $PWD: source $venv/bin/activate; megatron-opsft train examples/configs/quickstart.yaml"
