#!/usr/bin/env bash
# Makes or updates the virtual environment: environment.sh FOLDER. PYTHON chooses the interpreter.
set -euo pipefail

venv=$1
here=$(dirname "$0")
fits='import sys; sys.exit(sys.version_info < (3, 11))'

interpreter() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    command -v "$candidate" >/dev/null && "$candidate" -c "$fits" 2>/dev/null && echo "$candidate" && return
  done
  echo "error: Pagewire needs Python 3.11 or newer; set PYTHON= to one" >&2
  return 1
}

if ! "$venv/bin/python" -c "$fits" 2>/dev/null || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(interpreter)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || "$here/debian-packages.sh" python3-venv
  echo "making the environment in $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
# The C++ kernels are compiled while the package is installed; without a compiler workers compute with torch alone.
command -v g++ clang++ >/dev/null || "$here/debian-packages.sh" g++ || echo "going on without a C++ compiler" >&2
echo "installing what pyproject.toml and constraints.txt name (the first time takes a few minutes)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
