#!/usr/bin/env bash
# Installs Chromium and its driver from Debian's packages, for the tests in tests/browser: they open reports in it.
# Needs root; does nothing where both are there. Exit code 1: it cannot be done here.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
there() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }
if there; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "error: there is no apt-get here; install chromium and chromedriver by other means" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "error: chromium and chromedriver are missing, and only root can install them: sudo bash tools/install_chromium.sh" >&2
  exit 1
fi
echo "installing chromium and chromium-driver with apt-get" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
there
