#!/usr/bin/env bash
# Usage: run.sh PART [EARLIER.json] - prove a part of megatron_opsft on this machine, in less than ten minutes. It needs a
# GPU, python3 with PyTorch, and no network. Exit codes: those of project/tools/gpu_proof.sh.
#
#   a      what the rest stands on: losses, kernels, training steps, a checkpoint, the quickstart's first steps
#   b      mixtures of experts, recomputation, pushes, speeds, a killed run, an evaluation
#   c      the quickstart in bfloat16 to its end: are the answers shorter?
#   d      vLLM: the quickstart's first steps, speed; joins its pieces first
#   e      vLLM: sleeps and pushes
#   join   only joins them. Pieces that came are kept, so they may come one at a time.
#
# EARLIER.json: the gpu_proof.json of an earlier call, whose results stay in the table.
#
#   OUT         where gpu_proof.json and proof_PART.tgz go (default: results, beside this file)
#   PROOF_DIR   where the proof works (default: /tmp/proof): some machines empty OUT before each command
#   VLLM_DIR    where vLLM's pieces are kept and joined (default: /tmp/vllm)
#   PYTHON      interpreter (default: python3)
#   DEVICE      cuda or cpu (default: cuda)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "error: $1" >&2
  exit 2
}

# The proof runs in another folder.
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$PWD/$1"; }

out=$(absolute "${OUT:-$here/results}")
proof=$(absolute "${PROOF_DIR:-/tmp/proof}")
vllm=$(absolute "${VLLM_DIR:-/tmp/vllm}")
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(absolute "$python")

join_vllm() { "$python" "$here/project/tools/card/pieces.py" join "$here/vllm" "$vllm"; }

part=${1:-}
options=()
case $part in
a) options=(--quick) ;;
b) options=(--only "moe_steps,step_tests,push_and_rollouts,loss_speed,push_speed,save_speed,kill_and_resume,evaluation") ;;
c) options=(--only shorter_answers) ;;
d | e)
  options=(--only "vllm_quickstart,vllm_speed")
  [[ $part == d ]] || options=(--only "vllm_push,vllm_sleeps")
  join_vllm
  # FlashInfer is not among the pieces.
  export PYTHONPATH=$vllm/tree${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0
  ;;
join)
  join_vllm
  exit
  ;;
*) fail "there is no part '$part'; there are a, b, c, d, e and join" ;;
esac
if [[ -n ${2:-} ]]; then
  [[ -f $2 ]] || fail "there is no $2; name the gpu_proof.json of an earlier call"
  options+=(--continue "$(absolute "$2")")
fi

cat "$here/made.txt"
mkdir -p "$out" "$proof"
code=0
OUT=$proof PYTHON=$python WHEELS=$here/wheels bash "$here/project/tools/gpu_proof.sh" \
  --device "${DEVICE:-cuda}" --minutes 9 --bundle "$out/proof_$part.tgz" "${options[@]}" || code=$?
[[ ! -f $proof/gpu_proof.json ]] || cp "$proof/gpu_proof.json" "$out"
echo "results: $out/gpu_proof.json, $out/proof_$part.tgz"
exit "$code"
