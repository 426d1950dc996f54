#!/usr/bin/env bash
# The 125M-class model on one A100, for a run of days. The same command again goes on from the newest checkpoint.
#   scripts/run_m7c_1xa100_production.sh                          as the file says, on FineWeb-Edu
#   scripts/run_m7c_1xa100_production.sh --dataset synthetic --steps 100
# Arguments are those of train_showcase.py. CONFIG names another file, PYTHON the interpreter that has torch,
# CUDA_VISIBLE_DEVICES the GPU (0 when unset: the others are left to others).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG="${CONFIG:-configs/m7c_125m_1xa100_production.yaml}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
exec "${PYTHON:-python3}" "$root/scripts/train_showcase.py" "$@"
