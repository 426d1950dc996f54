"""How busy the GPUs are while a phase trains, as NVML tells it; nothing where there is no NVML."""

import contextlib
import os
import time
from collections import defaultdict
from typing import Any

EVERY_S = 0.5


class Utilisation:
    """Samples every GPU of the run. NVML's own window is a fraction of a second, so samples are averaged."""

    def __init__(self, nproc: int):
        self._handles: dict[int, Any] = {}
        self._samples: dict[int, list[float]] = defaultdict(list)
        self._last = 0.0
        try:
            import pynvml

            pynvml.nvmlInit()
            self._read = pynvml.nvmlDeviceGetUtilizationRates
            self._handles = {index: _handle(pynvml, name) for index, name in enumerate(_visible(pynvml)[:nproc])}
        except Exception:  # no driver, no library: utilisation is then not measured
            self._handles = {}

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._last < EVERY_S:
            return
        self._last = now
        for index, handle in self._handles.items():
            with contextlib.suppress(Exception):  # a card that does not tell
                self._samples[index].append(float(self._read(handle).gpu))

    @property
    def percent(self) -> float | None:
        """The mean of the GPU that was least busy."""
        means = [sum(samples) / len(samples) for samples in self._samples.values() if samples]
        return min(means) if means and len(means) == len(self._handles) else None


def _visible(pynvml: Any) -> list[str]:
    """Indices or UUIDs of the GPUs that a run would see, in its order."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _handle(pynvml: Any, name: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
