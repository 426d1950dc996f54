"""`dtypes_report.txt`: the dtype of every tensor that a run keeps; `opt_state_mb.txt`: the size of the optimizer state.

The functions raise if a file cannot be written; `Monitor` counts such a failure.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.files import write_whole
from nsa.record.memory_dump import local_bytes, local_part, run_tensors
from nsa.run_folder import DTYPES_FILE, OPTIMIZER_STATE_FILE

STEP_COUNTERS = "step counters"

# Master weights are float32 under every precision and strategy: autocast and FSDP cast them where they are used.
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
    """Writes `dtypes_report.txt`: unexpected dtypes first, then the number of tensors of each dtype, then every tensor.

    Call it after a step, when gradients and optimizer state exist.
    """
    order = list(EXPECTED)
    rows = sorted(_rows(parameters, buffers, optimizer), key=lambda row: order.index(row.kind))  # stable
    write_whole(folder / DTYPES_FILE, "\n".join(_format_report(rows)) + "\n")


def optimizer_line(optimizer: torch.optim.Optimizer, rank: int) -> str:
    """Describes the size of this rank's optimizer state, in MB (10^6 bytes)."""
    slots: Counter[str] = Counter()
    tensors = 0
    for state in optimizer.state.values():
        for slot, value in state.items():
            if isinstance(value, Tensor):
                slots[slot] += local_bytes(value)
                tensors += 1
    parts = ", ".join(f"{slot} {size / 1e6:.1f}" for slot, size in sorted(slots.items()))
    return f"rank {rank}: {slots.total() / 1e6:.1f} MB in {tensors} tensors" + (f" ({parts})" if parts else "")


def write_optimizer_state(folder: Path, lines: Sequence[str]) -> None:
    """Writes `opt_state_mb.txt` from the `optimizer_line` of every rank."""
    write_whole(folder / OPTIMIZER_STATE_FILE, "".join(f"{line}\n" for line in lines))


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
