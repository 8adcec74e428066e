# shellcheck shell=bash
# Which node's GPU has failed, and how a job leaves that node. Sourced by common.sh, not run.
# docs/cluster.md explains it from the user's side.

# What a run says where SLURM has given it GPUs that torch does not see (runtime/device.py).
LOST_GPU='a GPU of this node has failed'
# What it, the driver, CUDA and NCCL say when a GPU has failed, one a line. A full memory, an assertion in a
# kernel, and a peer that is gone read otherwise.
GPU_FAILURES="$LOST_GPU"'
uncorrectable ECC error
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
CUDA error: device not available
CUDA error: unknown error
unhandled cuda error'
# For sed: prints the number of the rank that a run's last line, its `error:`, blames.
NAMED_RANK='s/.*: rank ([0-9]+)( and [0-9]+ more)? did not join .*/\1/p; t; s/.*error: rank ([0-9]+) on .*/\1/p'
declare -A FAILED_FIRST=() # the nodes that failed first in a start
STAYS=""                   # set once the job turned out to have to stay where it is

# What the last start has printed on the job's node with this number.
printed_on() {
  tail --bytes=+$((LOG_SIZES[$1] + 1)) "${LOGS[$1]}"
}

# find_failed_node TEXTS: looks for the cause of a failed start. Sets FAILED_NODE, where the first rank failed
# (empty: unknown), and GPU_FAILURE, which of the TEXTS was said of a GPU there (empty: none).
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
    if said=$(grep --text --ignore-case --only-matching --fixed-strings --max-count=1 "$1" \
      <(printed_on "$number")); then
      FAILED_NODE=${nodes[number]} GPU_FAILURE=${said%%$'\n'*}
      return
    fi
  done
}

# leave_failed_node FAILURES: after this many failed starts on these nodes, requeues the job without the node
# whose GPU failed. Where no restart is left, in a job of several nodes, also without the node that failed first
# in all of them, unless the program itself ended with an exception (1). Returns where the job stays.
leave_failed_node() {
  find_failed_node "$GPU_FAILURES"
  FAILED_FIRST[${FAILED_NODE:-unknown}]=yes
  if [[ -n $GPU_FAILURE ]]; then
    requeue_elsewhere "$GPU_FAILURE"
  elif (($1 > MAX_RESTARTS && SLURM_JOB_NUM_NODES > 1 && ${#FAILED_FIRST[@]} == 1)) &&
    [[ -n $FAILED_NODE && $OUTCOME != "1 "* ]]; then
    requeue_elsewhere "the first to fail in all $1 starts"
  fi
}

# The same for a start that ended with wrong input, as which a GPU that is gone counts.
leave_node_that_lost_a_gpu() {
  find_failed_node "$LOST_GPU"
  if [[ -n $GPU_FAILURE ]]; then requeue_elsewhere "$GPU_FAILURE"; fi
}

# requeue_elsewhere REASON: requeues the job without FAILED_NODE, once in the job's life. Returns where the job
# has to stay, and says why.
requeue_elsewhere() {
  local reason=$1 file=$JOB_LOGS/left-node left="" job excluded obstacle
  if [[ -f $file ]]; then left=$(<"$file"); fi
  if [[ -n $STAYS || $left == "$FAILED_NODE" ]]; then return; fi
  if [[ -n $left ]]; then
    STAYS=yes
    say "$FAILED_NODE failed ($reason), and the job has left $left for such a failure already: it stays"
    return
  fi
  job=$(scontrol show job --oneliner "$JOB")
  excluded=$(nodes_in ExcNodeList "$job") # by the user
  excluded=${excluded:+$excluded,}$FAILED_NODE
  obstacle=$(find_obstacle "$job" "$excluded")
  if [[ -z $obstacle ]]; then
    trap '' TERM # a requeue ends this script too, within seconds
    if echo "$FAILED_NODE" >"$file"; then
      obstacle=$(scontrol requeue "$JOB" 2>&1) || rm "$file"
    else
      rm -f "$file"
      obstacle="$file cannot be written"
    fi
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

# nodes_in FIELD TEXT: prints the list of nodes in a field of what scontrol says; nothing where it has none.
nodes_in() {
  if [[ $2 =~ \ $1=([^ ]+) && ${BASH_REMATCH[1]} != "(null)" ]]; then echo "${BASH_REMATCH[1]}"; fi
}

# find_obstacle JOB EXCLUDED: prints why the job, as scontrol shows it, cannot go on without these nodes; nothing
# where it can.
find_obstacle() {
  local asked excluded node state gpus wanted others=0 options=() answer
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
  wanted=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --nodes="$FAILED_NODE" --format="%G")
  while read -r node state gpus; do
    case $state in down* | drain* | fail* | inval* | unk* | *\*) continue ;; esac # *: it does not answer
    if [[ $gpus == "$wanted" && $excluded != *$'\n'$node$'\n'* ]]; then others=$((others + 1)); fi
  done < <(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" "${options[@]}" --format="%N %T %G")
  if ((others < SLURM_JOB_NUM_NODES)); then
    echo "partition $SLURM_JOB_PARTITION has $others other node(s) that are up with such GPUs," \
      "and the job needs $SLURM_JOB_NUM_NODES"
    return
  fi
  # SLURM refuses to change the list of a running job ("no longer pending"). Any other refusal means that this
  # user may never change it.
  answer=$(scontrol update JobId="$JOB" ExcNodeList="$2" 2>&1) || [[ $answer == *"no longer pending"* ]] ||
    echo "scontrol update says: $answer"
}
