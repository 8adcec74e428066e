# shellcheck shell=bash
# Which node's GPU has failed, and how a job leaves that node. Sourced by common.sh, not run.
# docs/cluster.md explains it from the user's side.

# What the driver, CUDA and NCCL say when a GPU has failed, one a line. A full memory, an assertion in a
# kernel, and a peer that is gone read otherwise.
GPU_FAILURES='uncorrectable ECC error
uncorrectable NVLink error
over nvlink or a hardware error
hardware stack error
fallen off the bus
GPU is lost
NVRM: Xid
unspecified launch failure
illegal memory access
illegal instruction was encountered
CUDA-capable device(s) is/are busy or unavailable
no CUDA-capable device is detected
CUDA error: device not available
CUDA error: unknown error
unhandled cuda error'
# The rank that the ranks agree on, in the lines that end a run: it failed, died, or never came.
NAMED_RANK='s/.*: rank ([0-9]+)( and [0-9]+ more)? did not join .*/\1/p; t; s/.*error: rank ([0-9]+) on .*/\1/p'
declare -A FAILED_FIRST=() # the nodes that failed first in a start
STAYS=""                   # set once the job turned out to have to stay where it is

# What the last start has printed on the job's node with this number.
printed_on() {
  tail --bytes=+$((LOG_SIZES[$1] + 1)) "${LOGS[$1]}"
}

# Looks for the cause of a failed start. Sets FAILED_NODE, where the first rank failed (empty: unknown), and
# GPU_FAILURE, what was said of a GPU there (empty: nothing).
find_failed_node() {
  local nodes number rank said
  FAILED_NODE="" GPU_FAILURE=""
  rank=$(sed -nE "$NAMED_RANK" <(for number in "${!LOGS[@]}"; do printed_on "$number"; done))
  rank=${rank%%$'\n'*}
  if [[ -z $rank && $OUTCOME =~ \ rank\ ([0-9]+)\ on\  ]]; then rank=${BASH_REMATCH[1]}; fi
  [[ -n $rank ]] || return 0
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  number=$((rank * SLURM_JOB_NUM_NODES / SLURM_NTASKS)) # ranks are numbered node by node
  FAILED_NODE=${nodes[number]}
  # On the other nodes too: whoever waits for a rank may fail of it before that rank knows.
  for number in "$number" "${!LOGS[@]}"; do
    if said=$(grep --text --ignore-case --only-matching --fixed-strings --max-count=1 "$GPU_FAILURES" \
      <(printed_on "$number")); then
      FAILED_NODE=${nodes[number]} GPU_FAILURE=${said%%$'\n'*}
      return
    fi
  done
}

# FAILURES. After so many failed starts on these nodes: leaves the node whose GPU failed; or, where no restart
# is left, the one that failed first in all of them, unless the program itself ended with an exception (1).
leave_failed_node() {
  find_failed_node
  FAILED_FIRST[${FAILED_NODE:-unknown}]=yes
  if [[ -n $GPU_FAILURE ]]; then
    requeue_elsewhere "$GPU_FAILURE"
  elif (($1 > MAX_RESTARTS && $1 > 1 && ${#FAILED_FIRST[@]} == 1)) && [[ -n $FAILED_NODE && $OUTCOME != "1 "* ]]; then
    requeue_elsewhere "the first to fail in all $1 starts"
  fi
}

# REASON. Requeues the job without FAILED_NODE, once in the job's life: the second node that fails ends it.
# Returns where the job has to stay, and says why.
requeue_elsewhere() {
  local reason=$1 file=$JOB_LOGS/left-node left="" job excluded obstacle
  if [[ -f $file ]]; then left=$(<"$file"); fi
  if [[ -n $STAYS || $left == "$FAILED_NODE" ]]; then return; fi
  if [[ -n $left ]]; then
    say "gave up: $FAILED_NODE failed ($reason), and the job has left $left for such a failure already;" \
      "the logs are in $JOB_LOGS"
    exit "${OUTCOME%% *}"
  fi
  job=$(scontrol show job --oneliner "$JOB")
  excluded=$(nodes_in ExcNodeList "$job") # by the user
  excluded=${excluded:+$excluded,}$FAILED_NODE
  obstacle=$(find_obstacle "$job" "$excluded")
  if [[ -z $obstacle ]]; then
    trap '' TERM # a requeue ends this script too, within seconds
    echo "$FAILED_NODE" >"$file"
    obstacle=$(scontrol requeue "$JOB" 2>&1) || rm "$file"
  fi
  if [[ ! -f $file ]]; then
    trap - TERM
    STAYS=yes
    say "$FAILED_NODE failed ($reason), but the job cannot leave it: $obstacle"
    return
  fi
  # SLURM takes the list of a pending job alone. The job is one now, and starts when this script has ended.
  if scontrol update JobId="$JOB" ExcNodeList="$excluded"; then
    say "$FAILED_NODE failed ($reason); requeued without it, the job goes on from its checkpoint"
  else
    say "$FAILED_NODE failed ($reason); requeued, but SLURM did not exclude it: the job may get it again"
  fi
  exit "$REQUEUE_CODE"
}

# FIELD TEXT. The list of nodes that is a field of what scontrol says; nothing where it has none.
nodes_in() {
  if [[ $2 =~ \ $1=([^ ]+) && ${BASH_REMATCH[1]} != "(null)" ]]; then echo "${BASH_REMATCH[1]}"; fi
}

# JOB EXCLUDED. Prints why the job, as scontrol shows it, cannot go on without these nodes; nothing where it can.
find_obstacle() {
  local asked excluded node state others=0 options=() answer
  asked=$(nodes_in ReqNodeList "$1")
  if [[ -n $asked && $'\n'$(scontrol show hostnames "$asked")$'\n' == *$'\n'$FAILED_NODE$'\n'* ]]; then
    echo "--nodelist asks for it by name"
    return
  fi
  if [[ -n ${SLURM_JOB_RESERVATION:-} ]]; then
    answer=$(scontrol show reservation --oneliner "$SLURM_JOB_RESERVATION")
    options=(--nodes="$(nodes_in Nodes "$answer")")
  fi
  excluded=$'\n'$(scontrol show hostnames "$2")$'\n'
  while read -r node state; do
    case $state in down* | drain* | fail* | inval* | unk*) continue ;; esac
    if [[ $excluded != *$'\n'$node$'\n'* ]]; then others=$((others + 1)); fi
  done < <(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" "${options[@]}" --format="%N %T")
  if ((others < SLURM_JOB_NUM_NODES)); then
    echo "partition $SLURM_JOB_PARTITION has $others other node(s) that are up, and the job needs $SLURM_JOB_NUM_NODES"
    return
  fi
  # Of a running job SLURM never takes the list; where it may not be changed at all it says that first.
  answer=$(scontrol update JobId="$JOB" ExcNodeList="$2" 2>&1) || [[ $answer == *"no longer pending"* ]] ||
    echo "scontrol update says: $answer"
}
