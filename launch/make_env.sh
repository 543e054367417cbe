#!/usr/bin/env bash
# Makes .venv, the environment that every make target runs in, or brings it up to date:
# Python 3.12 to 3.14, and the packages of pyproject.toml at the versions of constraints.txt.
#   launch/make_env.sh           returns at once when nothing changed since the last time
#   launch/make_env.sh --which   prints the interpreter that .venv would be made with, and stops
# PYTHON=/path/to/python names an interpreter to try first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME

fail() {
  echo "make_env.sh: $1" >&2
  exit 1
}

# Every place where a Python may stand, whether or not it runs.
candidates() {
  local name
  for name in python3.13 python3.12 python3.14 python3; do
    type -aP "$name" || true
  done
  for name in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python; do
    echo "$name"
  done
}

# A name on PATH proves nothing: pyenv keeps shims for versions that are switched off, and some
# distributions leave ensurepip out. So a candidate counts once it has run.
works() { # PYTHON CONDITION-ON-v
  "$1" -c "import sys, venv, ensurepip; v = sys.version_info[:2]; sys.exit(not ($2))" \
    </dev/null >/dev/null 2>&1
}

# Hands each interpreter that works to COMMAND, best first, until COMMAND succeeds with one.
with_python() { # COMMAND...
  local condition python
  if works "${PYTHON:-}" "(3, 12) <= v <= (3, 14)" && "$@" "$(command -v "$PYTHON")"; then
    return 0
  fi
  for condition in "(3, 12) <= v <= (3, 13)" "v == (3, 14)"; do # the former are tested
    while IFS= read -r python <&3; do
      if works "$python" "$condition" && "$@" "$python"; then
        return 0
      fi
    done 3< <(candidates)
  done
  fail "no working Python 3.12 to 3.14 with its venv module is on PATH or under pyenv; install\
 Python 3.12 or 3.13, or name one with PYTHON=/path/to/python."
}

make_venv() { # PYTHON
  half_made=true
  rm -rf .venv
  "$1" -m venv .venv </dev/null >/dev/null 2>&1 && echo "Making .venv with $1; this can take minutes."
}

# With uv where it is installed; pip also knows package indexes that only its own settings name.
install_packages() {
  if command -v uv >/dev/null && uv pip install --python .venv/bin/python -c constraints.txt -e '.[dev]'; then
    return 0
  fi
  .venv/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
}

if [ "${1:-}" = --which ]; then
  with_python echo
  exit
fi

# A virtual environment holds absolute paths, so one that was copied or moved here is made anew, as
# is one whose development tools another program took away.
stamp="$PWD $(cat pyproject.toml constraints.txt | cksum)"
made_for=$(cat .venv/stamp 2>/dev/null || true)
keep=false
if [ "${made_for% * *}" = "$PWD" ] && [ -x .venv/bin/pytest ] && .venv/bin/python -c '' 2>/dev/null; then
  keep=true
  if [ "$made_for" = "$stamp" ]; then
    exit 0
  fi
fi

half_made=false
log=$(mktemp)
clean_up() {
  rm -f "$log"
  if [ "$half_made" = true ]; then
    rm -rf .venv
  fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

if [ "$keep" = false ]; then
  with_python make_venv
fi
if ! install_packages </dev/null >"$log" 2>&1; then
  if grep -qE 'connection broken|error \(Connect\)' "$log"; then
    fail "the packages of constraints.txt could not be installed because no package index answers; run\
 this again with a network connection."
  fi
  reason=$(grep -iEm1 '^ *(error|×)' "$log" | cut -c1-200 || true)
  fail "the packages of constraints.txt could not be installed; the installer's own reason, to be mended\
 before this is run again, is: ${reason:-none given}."
fi
echo "$stamp" >.venv/stamp
half_made=false
