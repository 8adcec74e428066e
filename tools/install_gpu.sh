#!/usr/bin/env bash
# Usage: install_gpu.sh [--wheels DIR | --save-wheels DIR] [VENV] - make VENV (default: .venv) with the GPU version set of
# docs/gpu.md, the project included. Wants Python 3.12 and a C++ compiler; neither a GPU nor a CUDA toolkit, since compiler
# and headers come as wheels. Steps that are done are skipped: run it again after a failure.
#
#   --save-wheels DIR   afterwards put all it installed into DIR as wheels, TransformerEngine's compiled part too
#   --wheels DIR        from such a folder: no network, and no C++ compiler
#
#   PYTHON     interpreter to make VENV with (default: python3.12, also pyenv's)
#   EXTRAS     more extras of pyproject.toml, such as test,wandb
#   MAX_JOBS   C++ files of TransformerEngine compiled at once (default: one for each core and each 2 GB of memory
#              that the machine has, or that its container or job allows)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
here=$PWD
cd "$(dirname "$0")/.."

fail() {
  echo "error: $1" >&2
  exit 2
}

save="" wheels=""
while [[ ${1:-} == --* ]]; do
  [[ $1 == --wheels || $1 == --save-wheels ]] || fail "there is no option $1; there are --wheels DIR and --save-wheels DIR"
  folder=${2:?"error: $1 needs a folder"}
  [[ $folder == /* ]] || folder=$here/$folder
  if [[ $1 == --wheels ]]; then wheels=$folder; else save=$folder; fi
  shift 2
done
if [[ -n $wheels ]]; then
  compgen -G "$wheels/torch-*.whl" >/dev/null || fail "--wheels $wheels holds no torch-*.whl; make it with --save-wheels"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels
fi
venv=${1:-.venv}
extras=gpu${EXTRAS:+,$EXTRAS}
bin=$PWD/$venv/bin
[[ $venv != /* ]] || bin=$venv/bin
compiled=${bin%/bin}/wheels/torch-2.13.0 # what was compiled here, against this torch

# step TITLE COMMAND...: once for each state of pyproject.toml, of this file and of the interpreter.
number=0
step() {
  local title=$1 stamp started=$SECONDS wanted
  shift
  number=$((number + 1))
  stamp=$venv/.done-gpu-$number
  wanted="$title; $*; $state"
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "[$number/5] $title: there already"
    return
  fi
  echo "[$number/5] $title ..."
  "$@"
  echo "$wanted" >"$stamp"
  echo "[$number/5] $title: $((SECONDS - started)) s"
}

install() { "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints/gpu-py312.txt "$@"; }

# What is there of CUDA must be one version: torch's.
cuda_version() {
  "$bin/python" -c 'import torch; print(torch.version.cuda or "none")'
}

install_torch() {
  install torch==2.13.0
  [[ $(cuda_version) == 13.* ]] ||
    fail "pip took a torch 2.13.0 without CUDA 13 ($(cuda_version)): it is set up to prefer another build. An empty setup gets the right one: rm -r $venv, then PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= bash tools/install_gpu.sh $venv"
}

cuda_home() { echo "$("$bin/python" -c 'import nvidia; print(next(iter(nvidia.__path__)))')/cu13"; }

# Compiler and headers of torch's CUDA version, all from wheels; and the two names under which a toolkit has its libraries.
install_cuda() {
  local version
  version=$(cuda_version)
  install nvidia-cudnn-frontend "nvidia-cuda-nvcc==$version.*" "nvidia-nvvm==$version.*" "nvidia-cuda-crt==$version.*" \
    "nvidia-cuda-cccl==$version.*" "nvidia-cuda-profiler-api==$version.*"
  ln -sfn lib "$(cuda_home)/lib64"
  ln -sf libcudart.so.13 "$(cuda_home)/lib/libcudart.so"
}

# GB of memory that this process may use: the machine's, or the smallest limit of its control groups, such as a
# container's or a job's.
memory_gb() {
  local root=${SYSTEM_ROOT:-} bytes hierarchies group folder file limit
  bytes=$(($(awk '/MemTotal/ {print $2}' "$root/proc/meminfo") * 1024))
  while IFS=: read -r _ hierarchies group; do
    case ,$hierarchies, in
      ,,) folder=$root/sys/fs/cgroup file=memory.max ;; # version 2
      *,memory,*) folder=$root/sys/fs/cgroup/memory file=memory.limit_in_bytes ;;
      *) continue ;;
    esac
    group=${group%/}
    while :; do
      limit=$(cat "$folder$group/$file" 2>/dev/null || echo max) # a container may not see what lies above its own
      if [[ $limit != max ]] && ((limit < bytes)); then bytes=$limit; fi
      [[ -n $group ]] || break
      group=${group%/*}
    done
  done <"$root/proc/self/cgroup"
  echo $((bytes / 1000000000))
}

# Wheels of what is named, without what that needs. TransformerEngine's torch part is a source distribution: it is
# compiled against the torch that is there, unless it is in $compiled already.
make_wheels() {
  local memory_jobs jobs
  memory_jobs=$(($(memory_gb) / 2)) jobs=$(nproc)
  if ((memory_jobs < jobs)); then jobs=$memory_jobs; fi
  if ((jobs < 1)); then jobs=1; fi
  CUDA_HOME=$(cuda_home) NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=${MAX_JOBS:-$jobs} \
    "$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --find-links "$compiled" "$@"
}

install_transformer_engine() {
  if [[ -z $wheels ]]; then
    command -v c++ >/dev/null || fail "there is no C++ compiler (c++); on Debian and Ubuntu: apt-get install g++"
    make_wheels --wheel-dir "$compiled" transformer-engine-torch==2.20.2
  fi
  install --no-build-isolation --find-links "$compiled" "transformer-engine[core-cu13,pytorch]==2.20.2"
}

save_wheels() {
  mkdir -p "$save"
  "$bin/python" -m pip freeze --all --exclude-editable | sed 's/+cu[0-9]*$//' >"$save/versions.txt"
  make_wheels --wheel-dir "$save" -r "$save/versions.txt"
  echo "      $(find "$save" -name '*.whl' | wc -l) wheels in $save; install_gpu.sh --wheels takes them"
}

check_imports() {
  "$bin/python" - <<'PYTHON'
import torch  # before TransformerEngine, which does not find libnccl without it
import transformer_engine.pytorch
import megatron.core
import vllm
import megatron_opsft

print(f"      torch {torch.__version__}, CUDA {torch.version.cuda}, vLLM {vllm.__version__}")
PYTHON
}

if [[ ! -x $bin/python ]]; then
  source tools/find_python.sh
  python=$(find_python "${PYTHON:-python3.12}")
  "$python" -m venv "$venv"
fi
mkdir -p "$compiled"
"$bin/python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 12))' ||
  fail "$venv has $("$bin/python" --version), the GPU set needs 3.12: rm -r $venv, or name another folder"
state=$(cat pyproject.toml constraints/gpu-py312.txt | cksum; "$bin/python" --version)

# Older pip ignores extras that are spelled in another way than the package does.
step "pip and build tools" install --upgrade "pip>=24.2" "setuptools>=77" wheel ninja packaging pybind11 numpy
step "torch 2.13.0 with CUDA 13" install_torch
step "CUDA compiler and headers of the same version" install_cuda
step "TransformerEngine 2.20.2, compiled" install_transformer_engine
step "this project with [$extras]: Megatron-Core, vLLM" install --no-build-isolation -e ".[$extras]"
echo "      importing everything once"
check_imports
if [[ -n $save ]]; then save_wheels; fi
echo "next, in $PWD: source $venv/bin/activate; megatron-opsft plan CONFIG, then megatron-opsft train CONFIG --check"
