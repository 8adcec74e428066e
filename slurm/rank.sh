#!/usr/bin/env bash
# Usage (by srun, once for each rank): rank.sh COMMAND... - what torch.distributed expects, then COMMAND.
# The first rank to end with anything but 0 writes why into OUTCOME_FILE: "EXITCODE explanation".
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
(umask 077 && mkdir -p "$NODE_CACHE")
if [[ ! -O $NODE_CACHE ]]; then # compiled code is run from there
  echo "error: NODE_CACHE=$NODE_CACHE on ${SLURMD_NODENAME:-$HOSTNAME} belongs to somebody else" >&2
  exit 2
fi
export VLLM_CACHE_ROOT=$NODE_CACHE/vllm TRITON_CACHE_DIR=$NODE_CACHE/triton
export TORCHINDUCTOR_CACHE_DIR=$NODE_CACHE/inductor FLASHINFER_WORKSPACE_BASE=$NODE_CACHE/flashinfer
trap : HUP USR1 TERM # SLURM signals COMMAND as well; this shell stays to see how it ends
code=0
"$@" || code=$?
if [[ $code == 0 ]]; then exit 0; fi

record() {
  (set -o noclobber && echo "$1" >"$OUTCOME_FILE") 2>/dev/null || true
}

where="rank $RANK on ${SLURMD_NODENAME:-$HOSTNAME}"
case $code in
  75) record "75 $where stopped with a checkpoint, as asked" ;;
  129 | 138 | 143) record "76 $where was ended by a signal before it could save" ;;
  69) record "69 $where ended because of a rank that died, hung or failed: the log says which" ;;
  137) record "137 $where was killed (out of memory?)" ;;
  *) record "$code $where ended with exit code $code" ;;
esac
exit "$code"
