#!/usr/bin/env bash
# Usage (by srun, once for each engine of a rollout node): engine.sh FIRST TP COMMAND... - keeps COMMAND, an
# engine of TP GPUs, running at its address of ENGINE_ADDRESSES until the job's step is ended. FIRST: number of
# the node's first engine.
set -euo pipefail
number=$(($1 + SLURM_LOCALID)) tp=$2
shift 2
IFS=, read -ra addresses <<<"$ENGINE_ADDRESSES"
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:SLURM_LOCALID * tp:tp}")
  export CUDA_VISIBLE_DEVICES
fi
(umask 077 && mkdir -p "$NODE_CACHE")
export VLLM_CACHE_ROOT=$NODE_CACHE/vllm TRITON_CACHE_DIR=$NODE_CACHE/triton
export TORCHINDUCTOR_CACHE_DIR=$NODE_CACHE/inductor FLASHINFER_WORKSPACE_BASE=$NODE_CACHE/flashinfer
trap 'exit 0' TERM
while :; do
  "$@" --listen "${addresses[number]}" --token-file "$ENGINE_TOKEN_FILE" --log-dir "$JOB_LOGS" &
  wait $! || true
  sleep 1
done
