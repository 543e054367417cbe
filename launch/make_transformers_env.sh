#!/usr/bin/env bash
# Makes .venv-transformers, the interpreter that tests compare exports with: Python 3.11, torch for
# CPUs, transformers 5 and, in a folder beside it, transformers 4, at the versions of
# tests/transformers.txt. torch 2.13.0 comes from PyPI with CUDA (several GB) where no CPU wheel is
# at hand; any interpreter that has torch and transformers can be named with
# VHAJAX_TRANSFORMERS_PYTHON instead, and then nothing is made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME

if [ -n "${VHAJAX_TRANSFORMERS_PYTHON:-}" ]; then
  exit 0
fi
venv=.venv-transformers
stamp="$PWD $(cksum <tests/transformers.txt)"
if [ "$(cat "$venv/complete" 2>/dev/null || true)" = "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

found=
for name in python3.11 python3; do
  if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    found=$name
    break
  fi
done
if [ -z "$found" ]; then
  echo "make_transformers_env.sh: no Python 3.11 is on PATH; tests that compare with transformers will\
 be skipped (name an interpreter that has it with VHAJAX_TRANSFORMERS_PYTHON)." >&2
  exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
rm -rf "$venv"
"$found" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" </dev/null; }
old=$(sed -n 's/^# transformers 4: //p' tests/transformers.txt)
echo "Making $venv with $found; this can take minutes."
# shellcheck disable=SC2086 # several requirements
if ! { pip --no-deps -r tests/transformers.txt && pip --no-deps --target "$venv/transformers4" $old; } >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  rm -rf "$venv"
  echo "make_transformers_env.sh: the packages of tests/transformers.txt could not be installed." >&2
  exit 1
fi
echo "$stamp" >"$venv/complete"
