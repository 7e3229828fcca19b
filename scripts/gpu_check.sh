#!/usr/bin/env bash
# Checks and measures everything on one GPU, in under 8 minutes, and prints one table: scripts/gpu_check.sh [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/gpu_check.py "$@"
