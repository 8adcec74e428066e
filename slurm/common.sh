# shellcheck shell=bash
# What the job scripts of this folder share: the settings of a site, and how ranks are started, watched,
# started again and requeued. Sourced, not run. docs/cluster.md explains it from the user's side.
#
# Settings: environment variables, read when the job runs (sbatch hands its environment on).
#
#   PROJECT_DIR        where relative paths start and the log goes; by default where sbatch was called
#   VENV               virtual environment of the ranks, on a file system that every node sees
#   CONTAINER_IMAGE    run the ranks in it instead: a .sif file (Apptainer), or a .sqsh file or an
#                      image name (Enroot through Pyxis)
#   CONTAINER_MOUNTS   from:to[,from:to...]; by default the project at its own path
#   PYTHON             interpreter of the ranks; by default VENV's, in a container python3
#   LOG_DIR            holds NAME-JOBID/node-0.log, node-1.log, ...; by default PROJECT_DIR/logs
#   MAX_RESTARTS       after a failure ranks start again on the same nodes at most so often; once in its
#                      life the job is requeued away from a node whose GPU failed
#   MASTER_ADDR        by default the address at which SLURM itself reaches the job's first node
#   MASTER_PORT        by default one that follows from the job's id
#   HF_HOME            cache of models and data sets, on a file system that every node sees
#   HF_HUB_OFFLINE     1 where compute nodes have no network; `megatron-opsft fetch CONFIG` fills HF_HOME
#   NODE_CACHE         kernels that vLLM, Triton, Inductor and FlashInfer compile, on a disk of each
#                      node: on a shared one all ranks of a job write the same files at once
#   OMP_NUM_THREADS    by default the CPUs of a task: --cpus-per-task, or its share of the smallest node's
#   NCCL_SOCKET_IFNAME network interface of NCCL's bootstrap, such as ib0 or eth0; Gloo takes the same
#   NCCL_*             whatever the fabric needs (NCCL_IB_HCA, NCCL_DEBUG=INFO, ...) reaches the ranks
#
# Whatever sbatch takes (partition, account, time, nodes) is given to sbatch, or to its own variables:
# SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_QOS, SBATCH_TIMELIMIT, SBATCH_RESERVATION, SBATCH_SIGNAL.

PROJECT_DIR=${PROJECT_DIR:-${SLURM_SUBMIT_DIR:-$PWD}}
SCRIPT_DIR=${SCRIPT_DIR:-$PROJECT_DIR/slurm}
VENV=${VENV:-$PROJECT_DIR/.venv}
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$PROJECT_DIR:$PROJECT_DIR}
MAX_RESTARTS=${MAX_RESTARTS:-3}
SET_ADDR=${MASTER_ADDR:-} SET_PORT=${MASTER_PORT:-}
export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-0}
export NODE_CACHE=${NODE_CACHE:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/opsft-cache-$(id -u)}

# Of an array, this task alone: the bare id of one of its tasks is the id of the whole array.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-${SLURM_JOB_ID:?is not set: submit this script with sbatch}}

# The CPUs that the job has on its smallest node: srun takes one number of CPUs for the tasks of all nodes.
# SLURM lists them as 128(x3),64.
fewest_cpus() {
  local count fewest=""
  for count in ${SLURM_JOB_CPUS_PER_NODE//,/ }; do
    count=${count%%(*}
    if [[ -z $fewest ]] || ((count < fewest)); then fewest=$count; fi
  done
  echo "$fewest"
}

# By default those CPUs, shared out. srun does not take --cpus-per-task from sbatch.
SHARE=$(($(fewest_cpus) * SLURM_JOB_NUM_NODES / SLURM_NTASKS))
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$((SHARE > 0 ? SHARE : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONUNBUFFERED=1
if [[ -n ${NCCL_SOCKET_IFNAME:-} ]]; then
  export NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}
fi

# Exit codes of the ranks (docs/cluster.md): 75 asks for a requeue; 2 and 3 would only come again. 76 is
# rank.sh's for a rank that a signal ended: in training it had saved nothing, and the job is requeued, but
# not for ever. What saves as it goes (eval.sh, convert.sh) may be stopped like that at every time limit.
REQUEUE_CODE=75
EARLY_CODE=76
MAX_EARLY_STOPS=${MAX_EARLY_STOPS:-3}
FINAL_CODES=" 2 3 "
JOB_LOGS=${LOG_DIR:-$PROJECT_DIR/logs}/$SLURM_JOB_NAME-$JOB

say() {
  echo "[$(date +%H:%M:%S) job $JOB] $*"
}

fail() {
  echo "error: $1" >&2
  exit 2
}

# This job's configuration: the only one of CONFIG, or the one of this array task. CONFIG holds file
# names and patterns, separated by blanks.
choose_config() {
  local files task=${SLURM_ARRAY_TASK_ID:-0}
  # shellcheck disable=SC2206 # patterns are to be expanded
  files=($CONFIG)
  if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] && ((${#files[@]} > 1)); then
    fail "CONFIG names ${#files[@]} files: submit with --array=0-$((${#files[@]} - 1)), or name one"
  fi
  ((task < ${#files[@]})) || fail "array task $task, but CONFIG names ${#files[@]} files, numbered from 0"
  CONFIG=${files[task]}
  [[ -f $CONFIG ]] || fail "CONFIG=$CONFIG does not exist below PROJECT_DIR=$PROJECT_DIR"
}

# MASTER_ADDR and MASTER_PORT. The port lies below those that systems hand out (from 32768), follows from
# the job, and differs from one start of a job to the next: a rank left over cannot join.
choose_rendezvous() {
  local first node
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # into `head` it could die of SIGPIPE
  first=${first%%$'\n'*}
  node=$(scontrol show node --oneliner "$first")
  [[ $node =~ NodeAddr=([^ ]+) ]] || fail "scontrol show node $first names no NodeAddr; set MASTER_ADDR"
  export MASTER_ADDR=${SET_ADDR:-${BASH_REMATCH[1]}}
  export MASTER_PORT=${SET_PORT:-$((15000 + (SLURM_JOB_ID * 31 + 10#${ATTEMPT/./} * 7) % 17000))}
}

# The ranks' command line: `COMMAND` behind what the container needs. Sets SRUN_OPTIONS and PREFIX.
choose_environment() {
  SRUN_OPTIONS=() PREFIX=()
  case $CONTAINER_IMAGE in
    "")
      PYTHON=${PYTHON:-$VENV/bin/python}
      [[ -x $(command -v "$PYTHON") ]] || fail "there is no $PYTHON: set VENV, PYTHON or CONTAINER_IMAGE"
      ;;
    *.sif)
      PYTHON=${PYTHON:-python3}
      PREFIX=(apptainer exec --bind "$CONTAINER_MOUNTS" --pwd "$PROJECT_DIR")
      [[ ${SLURM_GPUS_PER_NODE:-0} == 0 ]] || PREFIX+=(--nv)
      PREFIX+=("$CONTAINER_IMAGE")
      ;;
    *)
      PYTHON=${PYTHON:-python3}
      SRUN_OPTIONS=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PROJECT_DIR")
      SRUN_OPTIONS+=(--container-mounts="$CONTAINER_MOUNTS,$SCRIPT_DIR:$SCRIPT_DIR,$JOB_LOGS:$JOB_LOGS")
      ;;
  esac
}

# One start of all ranks. Sets OUTCOME to the first rank's word (rank.sh), or srun's exit code.
start_ranks() {
  local code pid interrupted
  choose_rendezvous
  export OUTCOME_FILE=$JOB_LOGS/outcome-$ATTEMPT
  rm -f "$OUTCOME_FILE"
  mapfile -t LOG_SIZES < <(stat --format=%s "${LOGS[@]}")
  say "start $ATTEMPT: $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, rendezvous at $MASTER_ADDR:$MASTER_PORT"
  srun --kill-on-bad-exit=1 --label --open-mode=append --output="$JOB_LOGS/node-%n.log" \
    "${SRUN_OPTIONS[@]}" bash "$SCRIPT_DIR/rank.sh" "${PREFIX[@]}" "$@" &
  pid=$!
  # SLURM signals steps (--signal=USR1@..., scancel --signal) or the script (B:USR1@..., scancel --batch).
  # The first reaches the ranks without us; the second goes on through srun.
  trap 'interrupted=yes; kill -USR1 "$pid" 2>/dev/null || true' USR1
  trap 'interrupted=yes' TERM # the job ends: srun is told by SLURM itself
  interrupted=yes
  while [[ -n $interrupted ]]; do
    interrupted="" code=0
    wait "$pid" || code=$?
  done
  trap - USR1 TERM
  ls "$JOB_LOGS" >/dev/null # on a network file system: sees what other nodes have just written
  OUTCOME="0 every rank is done"
  if ((code != 0)); then OUTCOME="$code srun ended with exit code $code"; fi
  # Empty: the disk was full.
  if [[ -s $OUTCOME_FILE ]]; then OUTCOME=$(<"$OUTCOME_FILE"); fi
}

# Not while it is being cancelled, out of time, or losing a node (SLURM requeues it itself then).
job_goes_on() {
  [[ $(scontrol show job --oneliner "$JOB") == *" JobState=RUNNING "* ]]
}

# COMMAND... on every task of the job, until it is done; exits with the job's exit code. COMMAND must
# continue what an earlier start of it has left.
run_ranks() {
  local code node failures=0 restarts=${SLURM_RESTART_COUNT:-0}
  mkdir -p "$JOB_LOGS"
  LOGS=()
  for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do LOGS+=("$JOB_LOGS/node-$node.log"); done
  touch "${LOGS[@]}"
  # The job's own output is all nodes' logs, merged.
  tail --quiet --lines=0 --follow=name --retry --sleep-interval=0.2 "${LOGS[@]}" 2>/dev/null &
  MERGER=$!
  trap 'sleep 0.5; kill "$MERGER" 2>/dev/null || true' EXIT
  while :; do
    ATTEMPT=$restarts.$failures
    start_ranks "$@"
    code=${OUTCOME%% *}
    say "start $ATTEMPT ended: ${OUTCOME#* }"
    if [[ $code == 0 ]]; then exit 0; fi
    if ! job_goes_on; then say "the job is ending"; exit "$code"; fi
    if [[ $code == "$EARLY_CODE" ]]; then count_early_stop; fi
    if [[ $code == "$REQUEUE_CODE" ]]; then
      rm -f "$JOB_LOGS/early-stops" # it has saved
      requeue
    fi
    if [[ $code == 2 ]]; then leave_node_that_lost_a_gpu; fi
    if [[ $FINAL_CODES == *" $code "* ]]; then exit "$code"; fi
    failures=$((failures + 1))
    leave_failed_node "$failures"
    if ((failures > MAX_RESTARTS)); then
      say "gave up after $MAX_RESTARTS restarts; the logs are in $JOB_LOGS"
      exit "$code"
    fi
    say "restart $failures of $MAX_RESTARTS, from the newest checkpoint"
  done
}

# Requeues the job, or gives up: starts that end like this one save nothing.
count_early_stop() {
  local stops=1 file=$JOB_LOGS/early-stops
  if [[ -f $file ]]; then stops=$(($(<"$file") + 1)); fi
  if ((stops > MAX_EARLY_STOPS)); then
    say "gave up: $stops starts in a row were stopped before they could save anything; the time limit" \
      "(--time) must be longer than --signal's lead, the start, and a step with its checkpoint"
    exit 1
  fi
  echo "$stops" >"$file"
  requeue
}

requeue() {
  if scontrol requeue "$JOB"; then
    say "requeued; it goes on from its checkpoint"
  else
    say "could not be requeued (does the site allow --requeue?); submit it again, it goes on"
  fi
  exit "$REQUEUE_CODE"
}

# shellcheck source=slurm/failed_node.sh
source "$SCRIPT_DIR/failed_node.sh"
cd "$PROJECT_DIR" || fail "PROJECT_DIR=$PROJECT_DIR is not a directory"
choose_environment
