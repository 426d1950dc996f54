"""`train.profile_steps`: PyTorch's profiler over some steps, as a trace file and a table of the costliest operators."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nsa.files import open_replacement, write_whole
from nsa.run_folder import PROFILE_TABLE, PROFILE_TRACE


class StepProfiler:
    """Records steps first..last (counted from 1) into `profile_rank{r}.json` and `.txt`."""

    def __init__(self, folder: Path, rank: int, steps: list[int] | None, device: torch.device):
        self.steps = steps
        self._trace, self._table = PROFILE_TRACE.path(folder, rank), PROFILE_TABLE.path(folder, rank)
        self._device = device
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        if self.steps and self._profile is None and self.steps[0] <= step <= self.steps[1]:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> Path | None:
        """Returns the trace file after the last profiled step."""
        return None if self.steps is None or step < self.steps[1] else self.close()

    def close(self) -> Path | None:
        """Writes what was recorded, also if the run ends before the last step to profile. Returns the trace file, or
        None if nothing was left to write."""
        recorded = self.drop()
        if recorded is None:
            return None
        key = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=key, row_limit=10)
        write_whole(self._table, table)
        with open_replacement(self._trace) as file:  # torch would follow a symbolic link
            recorded.export_chrome_trace(str(file.name))
        return self._trace

    def drop(self) -> profile | None:
        """Stops recording, without writing anything. Returns what was recorded."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded
