#!/usr/bin/env bash
# Trains the 125M-class model on two A100 for days. The same command resumes from the newest checkpoint.
#   scripts/run_m7c_2xa100_production.sh                as configured, on FineWeb-Edu
#   scripts/run_m7c_2xa100_production.sh --dataset synthetic --steps 100
# Takes the arguments of train_showcase.py. CONFIG names another file, PYTHON the interpreter that has torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG="${CONFIG:-configs/m7c_125m_2xa100_production.yaml}"
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc_per_node=2 "$root/scripts/train_showcase.py" "$@"
