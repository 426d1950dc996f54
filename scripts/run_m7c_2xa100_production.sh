#!/usr/bin/env bash
# The 125M-class model on two A100, for a run of days. The same command again goes on from the newest checkpoint.
#   scripts/run_m7c_2xa100_production.sh                          as the file says, on FineWeb-Edu
#   scripts/run_m7c_2xa100_production.sh --dataset synthetic --steps 100
# Arguments are those of train_showcase.py. CONFIG names another file, PYTHON the interpreter that has torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG="${CONFIG:-configs/m7c_125m_2xa100_production.yaml}"
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc_per_node=2 "$root/scripts/train_showcase.py" "$@"
