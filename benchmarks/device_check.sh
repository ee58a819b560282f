#!/usr/bin/env bash
# Checks and times everything on this machine's GPU: see benchmarks/device_check.py. PYTHON=... names another Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -m benchmarks.device_check "$@"
