#!/usr/bin/env bash
# Usage: venv.sh - make .venv-card, an environment with the packages of a borrowed machine (section "has" of
# constraints/borrowed-card.txt) and none of those that must be brought there: Python 3.12 and torch's CUDA build, 6 GB.
# Quick when nothing changed since the last time.
#
#   PYTHON    interpreter to make it with (default: python3.12, also pyenv's)
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"
cd "$(dirname "$0")/../.."
source tools/find_python.sh
# An empty pip configuration: a machine that is set up for CPU builds would get those.
export PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=''
python=$(find_python "${PYTHON:-python3.12}")
has=$("$python" tools/card/pins.py has)
stamp=.venv-card/.installed
wanted=$(echo "$has" | cat - tools/card/venv.sh | cksum; "$python" --version)
[[ $(cat "$stamp" 2>/dev/null || true) != "$wanted" ]] || exit 0
echo "installing the packages of a borrowed machine into .venv-card: 6 GB" >&2
"$python" -m venv --clear .venv-card
python=.venv-card/bin/python
# The names of packages have no spaces.
# shellcheck disable=SC2086
"$python" -m pip install --quiet --disable-pip-version-check $has
# The newest version of some package asks for one of these, that machine's does not.
"$python" tools/card/pins.py brought | sed 's/==.*//' |
  xargs "$python" -m pip uninstall --quiet --quiet --disable-pip-version-check --yes
[[ $("$python" -c 'import torch; print(torch.version.cuda or "none")') == 13.* ]] || {
  echo "error: pip took a torch without CUDA 13" >&2
  exit 2
}
echo "$wanted" >"$stamp"
