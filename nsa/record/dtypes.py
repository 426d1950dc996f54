"""`dtypes_report.txt`: the type of everything a run keeps; `opt_state_mb.txt`: how large the optimizer's part of it is.

Whoever writes them goes on where that fails.
"""

import errno
import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.files import regular, write_whole
from nsa.record.memory_dump import local_bytes, local_part, run_tensors
from nsa.record.schema import DTYPES_FILE, OPTIMIZER_STATE_FILE

LOCK_TIMEOUT_S = 2.0
STEP_COUNTERS = "step counters"

# Master copies are float32 under every precision and strategy: autocast and FSDP make the smaller types on the way.
EXPECTED = {
    "parameters": ("float32",),
    "gradients": ("float32", "absent"),
    "optimizer state": ("float32",),
    STEP_COUNTERS: ("float32",),
    "buffers": ("float32", "int64", "int32", "bool"),
}


class Row(NamedTuple):
    kind: str
    dtype: str  # "absent": a gradient that does not exist
    shape: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind:<16} {self.dtype:<10} {self.shape:<16} {self.name}"


def write_dtypes_report(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Writes `dtypes_report.txt`: unexpected types first, then how many there are of each, then every tensor.

    Useful after a step, when gradients and state exist.
    """
    order = list(EXPECTED)
    rows = sorted(_rows(parameters, buffers, optimizer), key=lambda row: order.index(row.kind))  # stable
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / DTYPES_FILE, "\n".join(_format_report(rows)) + "\n")


def write_optimizer_state(folder: Path, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    """Puts this rank's line into `opt_state_mb.txt`, in MB (10^6 bytes) that this rank holds.

    All ranks share the file and come in any order, without waiting for each other: each one locks the file, reads
    it, replaces its own line, drops lines of ranks that a run of `size` does not have, and writes it back sorted.
    So a rerun never doubles a line, and once every rank was here there is exactly one of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / OPTIMIZER_STATE_FILE) as file:
        lines = _lines_by_rank(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
        lines[rank] = _state_line(optimizer, rank)
        content = "".join(f"{lines[r]}\n" for r in sorted(lines) if r < size).encode()
        if os.pwrite(file, content, 0) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), OPTIMIZER_STATE_FILE)
        os.ftruncate(file, len(content))  # after the write, so that no reader finds the file empty


def _rows(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[Row]:
    for full_name, tensor in run_tensors(parameters, buffers, optimizer):
        kind, _, name = full_name.partition("/")
        if kind == "optimizer state" and name.endswith("/step"):
            kind = STEP_COUNTERS
        yield Row(kind, str(tensor.dtype).removeprefix("torch."), _format_shape(tensor), name)
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.grad is None:
            yield Row("gradients", "absent", "-", name)


def _format_report(rows: list[Row]) -> Iterator[str]:
    unexpected = [row for row in rows if row.dtype not in EXPECTED[row.kind]]
    yield f"unexpected types: {len(unexpected) or 'none'}"
    for row in unexpected:
        yield f"{row}  (expected {' or '.join(name for name in EXPECTED[row.kind] if name != 'absent')})"
    yield from ("", f"{'kind':<16} {'type':<10} tensors")
    for (kind, dtype), count in Counter((row.kind, row.dtype) for row in rows).items():
        yield f"{kind:<16} {dtype:<10} {count}"
    yield from ("", f"{'kind':<16} {'type':<10} {'shape':<16} name")
    yield from map(str, rows)


def _format_shape(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    if not isinstance(tensor, DTensor):
        return shape
    local = "x".join(map(str, local_part(tensor).shape)) or "scalar"
    return f"{shape} (local {local}, {', '.join(map(repr, tensor.placements))})"


def _state_line(optimizer: torch.optim.Optimizer, rank: int) -> str:
    slots: Counter[str] = Counter()
    tensors = 0
    for state in optimizer.state.values():
        for slot, value in state.items():
            if isinstance(value, Tensor):
                slots[slot] += local_bytes(value)
                tensors += 1
    parts = ", ".join(f"{slot} {size / 1e6:.1f}" for slot, size in sorted(slots.items()))
    return f"rank {rank}: {slots.total() / 1e6:.1f} MB in {tensors} tensors" + (f" ({parts})" if parts else "")


def _lines_by_rank(text: str) -> dict[int, str]:
    """The first whole line of each rank; what a full disk or a crash left behind is dropped."""
    lines: dict[int, str] = {}
    for match in re.finditer(r"^rank (\d+): [\d.]+ MB in \d+ tensors(?: \(.*\))?$", text, re.MULTILINE):
        lines.setdefault(int(match[1]), match[0])
    return lines


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The open file, for this process alone. Raises BlockingIOError if another one holds it for too long."""
    file = regular(path, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield file
    finally:
        os.close(file)  # and with it the lock
