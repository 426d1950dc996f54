"""A process that writes weights into the file that its argument names. It prints their bytes, and how many more bytes
it had resident at the peak than before: in a process of its own, no other test allocates meanwhile."""

import re
import sys
from pathlib import Path

import torch

from nsa.checkpoint.export import write_weights


def peak_memory() -> int:
    """The most bytes that this process had resident since the peak was reset."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def main(path: Path) -> None:
    tensors = {str(number): torch.ones(2048, 1024).t() for number in range(16)}  # 8 MiB each, copied to be contiguous
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_memory()
    write_weights(path, tensors, step=1)
    print(sum(tensor.nbytes for tensor in tensors.values()), peak_memory() - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
