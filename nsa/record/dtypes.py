"""`dtypes_report.txt`: the type of everything a run keeps; `opt_state_mb.txt`: how large the optimizer's part of it is.

Neither raises: what cannot be written is said by a False, and training goes on.
"""

import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.record.memory import local_bytes, local_part, run_tensors, write_whole
from nsa.record.schema import DTYPES_FILE, OPTIMIZER_STATE_FILE

LOCK_WAIT_S = 2.0
STEP_COUNTERS = "step counters"

Expected = Mapping[str, tuple[torch.dtype, ...]]

# Master copies are float32 under every precision and strategy: autocast and FSDP make the smaller types on the way.
EXPECTED: Expected = {
    "parameters": (torch.float32,),
    "gradients": (torch.float32,),
    "optimizer state": (torch.float32,),
    STEP_COUNTERS: (torch.float32,),
    "buffers": (torch.float32, torch.int64, torch.int32, torch.bool),
}


class Row(NamedTuple):
    kind: str
    name: str
    dtype: torch.dtype | None  # None: a gradient that is not there
    shape: str

    def spell(self) -> str:
        return f"{self.kind:<16} {_short(self.dtype):<10} {self.shape:<16} {self.name}"


def write_dtypes_report(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    expected: Expected = EXPECTED,
) -> bool:
    """Writes `dtypes_report.txt`: unexpected types first, then how many there are of each, then every tensor.

    A kind that `expected` does not name may have any type. Useful after a step, when gradients and state exist.
    """
    try:
        rows = list(_rows(parameters, run_tensors(parameters, buffers, optimizer)))
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / DTYPES_FILE, "\n".join(_spell_report(rows, expected)) + "\n")
    except Exception:  # a report is no reason to stop
        return False
    return True


def write_optimizer_state(folder: Path, optimizer: torch.optim.Optimizer, rank: int, size: int) -> bool:
    """Puts this rank's line into `opt_state_mb.txt`, in MB (10^6 bytes) that this rank holds.

    All ranks share the file and come in any order, without waiting for each other: each one locks the file, reads
    it, replaces its own line, drops lines of ranks that a run of `size` does not have, and writes it back sorted.
    So a rerun never doubles a line, and once every rank was here there is exactly one of each. A lock that somebody
    keeps for longer than two seconds is given up on.
    """
    try:
        line = _state_line(optimizer, rank)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / OPTIMIZER_STATE_FILE) as file:
            lines = _lines_by_rank(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
            lines[rank] = line
            content = "".join(f"{lines[r]}\n" for r in sorted(lines) if r < size or r == rank).encode()
            if os.pwrite(file, content, 0) != len(content):
                return False
            os.ftruncate(file, len(content))  # after the write, so that no reader finds the file empty
    except Exception:
        return False
    return True


def _rows(parameters: Mapping[str, nn.Parameter], named: Iterable[tuple[str, Tensor]]) -> Iterator[Row]:
    for full_name, tensor in named:
        kind, _, name = full_name.partition("/")
        if kind == "optimizer state" and name.endswith("/step"):
            kind = STEP_COUNTERS
        yield Row(kind, name, tensor.dtype, _spell_shape(tensor))
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.grad is None:
            yield Row("gradients", name, None, "-")


def _spell_report(rows: list[Row], expected: Expected) -> Iterator[str]:
    order = list(EXPECTED)
    rows = sorted(rows, key=lambda row: order.index(row.kind))  # stable: inside a kind the model's own order
    odd = [row for row in rows if row.dtype is not None and row.dtype not in expected.get(row.kind, (row.dtype,))]
    yield f"unexpected types: {len(odd) or 'none'}"
    for row in odd:
        yield f"{row.spell()}  (expected {' or '.join(map(_short, expected[row.kind]))})"
    yield ""
    yield f"{'kind':<16} {'type':<10} tensors"
    counts = Counter((row.kind, row.dtype) for row in rows)
    for (kind, dtype), count in sorted(counts.items(), key=lambda item: (order.index(item[0][0]), _short(item[0][1]))):
        yield f"{kind:<16} {_short(dtype):<10} {count}"
    yield ""
    yield f"{'kind':<16} {'type':<10} {'shape':<16} name"
    yield from (row.spell() for row in rows)


def _short(dtype: torch.dtype | None) -> str:
    return "absent" if dtype is None else str(dtype).removeprefix("torch.")


def _spell_shape(tensor: Tensor) -> str:
    spelled = "x".join(map(str, tensor.shape)) or "scalar"
    if not isinstance(tensor, DTensor):
        return spelled
    local = "x".join(map(str, local_part(tensor).shape)) or "scalar"
    placements = ", ".join(map(repr, tensor.placements))
    return f"{spelled} (local {local}, {placements})"


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
    """The first whole line of each rank: what a full disk or a crash left behind them is not taken over."""
    lines: dict[int, str] = {}
    for match in re.finditer(r"^rank (\d+): [\d.]+ MB in \d+ tensors(?: \(.*\))?$", text, re.MULTILINE):
        lines.setdefault(int(match[1]), match[0])
    return lines


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The open file, for this process alone. Raises OSError where it cannot be had in time."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
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
