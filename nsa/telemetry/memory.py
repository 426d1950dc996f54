"""Memory in use: of the GPU where there is one, else the process's resident size."""

import psutil
import torch


def memory_gib(device: torch.device) -> float:
    """Highest GPU memory of this process so far, or its resident size now, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30
