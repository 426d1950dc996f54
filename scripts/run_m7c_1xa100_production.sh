#!/usr/bin/env bash
# Trains the 125M-class model on one A100 for days. The same command resumes from the newest checkpoint.
#   scripts/run_m7c_1xa100_production.sh                as configured, on FineWeb-Edu
#   scripts/run_m7c_1xa100_production.sh --dataset synthetic --steps 100
# Takes the arguments of train_showcase.py. CONFIG names another file, PYTHON the interpreter that has torch,
# CUDA_VISIBLE_DEVICES the GPU (0 when unset, so that the others stay free).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG="${CONFIG:-configs/m7c_125m_1xa100_production.yaml}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
exec "${PYTHON:-python3}" "$root/scripts/train_showcase.py" "$@"
