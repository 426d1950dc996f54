"""The kernels' tests run on a GPU, or through Triton's interpreter, which is switched on for a whole process.

Without a GPU, `make test` starts them by themselves with TRITON_INTERPRET=1; elsewhere they are not collected, so
that no other test runs on interpreted kernels.
"""

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
