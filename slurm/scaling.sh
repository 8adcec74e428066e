#!/usr/bin/env bash
# Scaling: one configuration on 1, 2, 4, ... nodes, one job each, for a few steps. From the project's root:
#
#   sbatch slurm/scaling.sh CONFIG                                  or bash, on a login node
#   NODES="1 2 4 8 16" STEPS=20 bash slurm/scaling.sh --account=me --time=02:00:00 CONFIG optimizer.lr=1e-6
#   .venv/bin/megatron-opsft report runs/scaling/NAME               table, the plan beside each
#
# Words that begin with -- are sbatch's options for every job (or SBATCH_PARTITION, SBATCH_ACCOUNT, ...),
# what follows CONFIG goes to `train`. NODES: how many, of 8 H100. STEPS: of each run, of which the first
# two are not counted. OUT: directory of the runs nodes_1, nodes_2, ...; by default runs/scaling/NAME with
# CONFIG's name. The same command again goes on with what is left. All other settings: slurm/common.sh.
#
#SBATCH --job-name=opsft-scaling
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=00:05:00
#SBATCH --output=%x-%j.out
set -euo pipefail

OPTIONS=()
while [[ ${1:-} == --* ]]; do
  OPTIONS+=("$1")
  shift
done
if (($# == 0)); then
  echo "error: name a configuration: bash slurm/scaling.sh [--SBATCH-OPTION...] CONFIG [key=value...]" >&2
  exit 2
fi
CONFIG=$1
shift
NODES=${NODES:-1 2 4}
STEPS=${STEPS:-10}
OUT=${OUT:-runs/scaling/$(basename "$CONFIG" .yaml)}
export PROJECT_DIR=${PROJECT_DIR:-${SLURM_SUBMIT_DIR:-$PWD}}
SCRIPT_DIR=${SCRIPT_DIR:-$PROJECT_DIR/slurm}
cd "$PROJECT_DIR"
if [[ ! -f $CONFIG ]]; then
  echo "error: CONFIG=$CONFIG does not exist below PROJECT_DIR=$PROJECT_DIR" >&2
  exit 2
fi
if [[ ! $NODES =~ ^\ *([1-9][0-9]*\ *)+$ ]]; then
  echo "error: NODES=$NODES must be numbers with blanks between them, such as \"1 2 4\"" >&2
  exit 2
fi
if [[ ! $STEPS =~ ^[1-9][0-9]*$ ]] || ((STEPS < 3)); then
  echo "error: STEPS=$STEPS leaves nothing to count: the first two steps are the start" >&2
  exit 2
fi
# What this job was given is not for those that it submits.
for variable in "${!SLURM_@}"; do
  [[ $variable == SLURM_CONF ]] || unset "$variable"
done
export SCRIPT_DIR
# Nothing but steps, as far as that can be said: no checkpoint before the end, one response of an evaluation.
ONLY_STEPS=(run.steps="$STEPS" run.eval_every=0 checkpoint.every=0 eval.num_problems=1
  eval.samples_per_problem=1 eval.more=[] eval.export_best=false)
for count in $NODES; do
  job=$(sbatch --parsable --nodes="$count" --job-name="opsft-scaling-$count" "${OPTIONS[@]}" \
    "$SCRIPT_DIR/train.sh" "$CONFIG" "${ONLY_STEPS[@]}" "$@" run.dir="$OUT/nodes_$count")
  echo "$count nodes: job $job"
done
echo "when they are done: ${VENV:-.venv}/bin/megatron-opsft report $OUT"
