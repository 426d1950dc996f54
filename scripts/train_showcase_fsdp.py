"""Like train_showcase.py, with the model sharded over the ranks.

    torchrun --standalone --nproc_per_node=2 scripts/train_showcase_fsdp.py --dataset synthetic --steps 10

The old name of `nsa train CONFIG parallel.strategy=fsdp`: "Old commands" in docs/many-gpus.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, installed or not

from nsa.cli.start import main

main("nsa.cli.legacy_commands", fsdp=True)
