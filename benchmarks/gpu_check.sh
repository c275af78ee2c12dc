#!/usr/bin/env bash
# One command on one NVIDIA GPU: builds, tests and measures. docs/gpu_check.md
#
#   bash benchmarks/gpu_check.sh [--budget SECONDS] [--only STEP ...] [--list]
#
# PYTHON names the interpreter; by default .venv's, or python3.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [[ -z $python ]]; then
  if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi
if ! command -v "$python" >/dev/null; then
  echo "lowtide: gpu_check: expected Python >= 3.10, got no $python. Set PYTHON to" \
    "the interpreter that has torch 2.11." >&2
  exit 2
fi
exec "$python" -u benchmarks/gpu/check.py "$@"
