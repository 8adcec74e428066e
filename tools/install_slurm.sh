#!/usr/bin/env bash
# Installs SLURM and munge from Debian's or Ubuntu's packages, for the tests in tests/slurm: they start a cluster of
# three nodes on this machine. Needs root; does nothing where both are there. Exit code 1: it cannot be done here.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
PATH=$PATH:/usr/sbin
there() {
  local name
  for name in sbatch slurmctld slurmd munged; do command -v "$name" >/dev/null || return 1; done
}
if there; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "error: there is no apt-get here; install slurm-wlm and munge by other means" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "error: slurm-wlm and munge are missing, and only root can install them: sudo bash tools/install_slurm.sh" >&2
  exit 1
fi
echo "installing slurm-wlm and munge with apt-get" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
there
