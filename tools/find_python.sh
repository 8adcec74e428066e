# shellcheck shell=bash
# Sourced by install scripts. find_python NAME - print the first interpreter that runs: NAME, or pyenv's of that version
# (pyenv's own python3.12 on the path runs only where it is the chosen version).
find_python() {
  local candidate
  for candidate in "$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${1#python}"*/bin/python; do
    if "$candidate" --version >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "error: $1 does not run here; install it, or name another interpreter of that version" >&2
  return 2
}

# python_name INTERPRETER - such as py311, as constraints/ and environments are named
python_name() { "$1" -c 'import sys; print("py{}{}".format(*sys.version_info))'; }
