"""Memory in use, and the tensors that use it: GPU memory, or the resident size of the process on a CPU.

`mem_{label}.txt` and `.json` show it at chosen steps, `oom_rank{r}.json` after an out-of-memory error. Tensors have the
names "kind/name" of `run_tensors`. Only sizes and addresses are read, which does not synchronize the device.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.config import Config
from nsa.files import write_whole
from nsa.run_folder import OUT_OF_MEMORY, memory_files

KINDS = ("parameters", "gradients", "optimizer state", "buffers")
UNACCOUNTED = "activations and others"
LARGEST_TENSORS = 20

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
TensorInfo = dict[str, Any]  # kind, name, shape, dtype and bytes of a tensor; local_shape of a sharded one

# Messages of errors without a type of their own. Triton's "out of resource" is about shared memory and not listed.
_HOST_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")
_GPU_TEXTS = ("CUDA error: out of memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def memory_gib(device: torch.device) -> float:
    """Peak GPU memory of this process, or its current resident size on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30


def run_tensors(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a run keeps between steps, in the order of the model: "parameters/NAME", "gradients/NAME",
    "optimizer state/NAME/SLOT", "buffers/NAME"."""
    yield from ((f"parameters/{name}", parameter) for name, parameter in parameters.items())
    yield from ((f"gradients/{name}", p.grad) for name, p in parameters.items() if p.grad is not None)
    for name, parameter in parameters.items():
        for slot, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"optimizer state/{name}/{slot}", value
    yield from ((f"buffers/{name}", buffer) for name, buffer in buffers.items())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else the shard would become part of the autograd graph
        return tensor.to_local()


def local_bytes(tensor: Tensor) -> int:
    """Bytes of this rank's part of a tensor, at most those of its storage: it may be expanded or freed."""
    local = local_part(tensor)
    return min(local.numel() * local.element_size(), local.untyped_storage().nbytes())


def list_tensors(named: Iterable[tuple[str, Tensor]], device: torch.device) -> list[TensorInfo]:
    """The tensors on this type of device. A tensor with several names is listed once, under the first."""
    found: list[TensorInfo] = []
    seen: set[int] = set()
    for full_name, tensor in named:
        local = local_part(tensor)
        first = local.data_ptr()  # not the storage: gradients in one DDP bucket share it
        if local.device.type != device.type or first in seen:
            continue
        if first:  # an empty shard has no address
            seen.add(first)
        kind, _, name = full_name.partition("/")
        dtype = str(local.dtype).removeprefix("torch.")
        row = {"kind": kind, "name": name, "shape": tuple(tensor.shape), "dtype": dtype, "bytes": local_bytes(local)}
        found.append(row | {"local_shape": tuple(local.shape)} if isinstance(tensor, DTensor) else row)
    return found


def dump_memory(folder: Path, label: str, device: torch.device, rank: int, named_tensors: NamedTensors) -> None:
    """Writes `mem_{label}.txt` for people and `mem_{label}.json` for programs; ranks above 0 add `_rank{r}`."""
    snapshot = {"label": label, **_snapshot(rank, device, named_tensors)}
    write_whole(memory_files(label, ".txt").path(folder, rank), "\n".join(_format_dump(snapshot, device)) + "\n")
    write_whole(memory_files(label, ".json").path(folder, rank), json.dumps(snapshot, indent=1) + "\n")


def memory_usage(device: torch.device) -> dict[str, int]:
    """Current and peak bytes: of PyTorch's allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    resident = psutil.Process().memory_info().rss
    # Not getrusage: a process inherits its peak from its parent.
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")  # Linux only
    return {"resident_bytes": resident, "peak_bytes": max(resident, int(peak[1]) * 1024 if peak else 0)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or an error that it was raised from, says that a GPU or the host ran out of memory."""
    return _memory_error(error) is not None


def oom_report(
    folder: Path,
    rank: int,
    device: torch.device,
    error: BaseException,
    named_tensors: NamedTensors,
    advice: Sequence[str] = (),
) -> str:
    """Writes `oom_rank{r}.json` and returns one line: memory in use, the largest tensors, settings to try.

    Never raises. Call it while the error is being handled: its traceback keeps the tensors alive.
    """
    cause = _memory_error(error) or error
    on_host = isinstance(cause, MemoryError) or any(text in str(cause) for text in _HOST_TEXTS)
    if on_host and device.type != "cpu":  # the host ran out of memory: batches and saves use it
        device = torch.device("cpu")
        advice = ("fewer data.workers", "a smaller data.prefetch", "more host memory, for saves")
    remedy = f"; try {', '.join(advice)}" if advice else ""
    try:
        report = _oom_state(rank, device, cause, named_tensors)
    except Exception:  # the device does not answer, or there is no memory for the report
        reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        return f"out of memory on rank {rank}: {reason}{remedy}"
    with suppress(Exception):
        write_whole(OUT_OF_MEMORY.path(folder, rank), json.dumps(report, indent=1) + "\n")
    requested = report["requested_bytes"]
    more = f" and {format_bytes(requested)} more requested" if requested else ""
    used = f"{format_bytes(report['in_use_bytes'])} of {format_bytes(report['total_bytes'])} in use{more}"
    kinds = Counter({kind: entry["bytes"] for kind, entry in report["owners"].items()})
    kinds[UNACCOUNTED] = report["unaccounted_bytes"]
    largest = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.most_common() if size)
    return f"out of memory on rank {rank}: {used}; largest: {largest}{remedy}"


def remedies(config: Config, micro_batch: int, world_size: int, strategy: str) -> list[str]:
    """Overrides that reduce the memory of this run, the cheapest first."""
    one_pass = config.parallel.ddp.static_graph and not config.parallel.ddp.safe_mode
    found = []
    if micro_batch > 1 and not one_pass:
        smaller = max(n for n in range(1, micro_batch) if micro_batch % n == 0)
        found.append(f"train.micro_batch={smaller}")
    if config.runtime.gradient_checkpointing == "none":
        found.append("runtime.gradient_checkpointing=block")
    if world_size > 1 and strategy != "fsdp":
        found.append("parallel.strategy=fsdp")
    return found or ["a shorter train.seq_len", "a smaller model"]


def format_bytes(count: float) -> str:
    """For example 38.9 GiB."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} bytes"


def _snapshot(rank: int, device: torch.device, named_tensors: NamedTensors, were_in_use: int = 0) -> dict[str, Any]:
    """Memory in use and its owners. `were_in_use`: bytes in use at the time of an error, some of them freed since."""
    tensors, usage = list_tensors(named_tensors(), device), memory_usage(device)
    in_use = max(were_in_use, usage["allocated_bytes" if device.type == "cuda" else "resident_bytes"])
    largest = sorted(tensors, key=lambda tensor: (-tensor["bytes"], tensor["kind"], tensor["name"]))
    return {
        "time": time.time(),
        "rank": rank,
        "device": str(device),
        **usage,
        "unaccounted_bytes": max(0, in_use - sum(tensor["bytes"] for tensor in tensors)),
        "owners": _owners(tensors),
        "largest_tensors": largest[:LARGEST_TENSORS],
    }


def _owners(tensors: list[TensorInfo]) -> dict[str, dict[str, Any]]:
    """For each kind of tensor: bytes, number of tensors, and bytes of every top-level module, such as `blocks`."""
    kinds: dict[str, dict[str, Any]] = {kind: {"bytes": 0, "tensors": 0, "modules": Counter()} for kind in KINDS}
    for tensor in tensors:
        entry = kinds[tensor["kind"]]
        entry["bytes"] += tensor["bytes"]
        entry["tensors"] += 1
        entry["modules"][re.split("[./]", tensor["name"])[0]] += tensor["bytes"]
    return kinds


def _format_dump(snapshot: Mapping[str, Any], device: torch.device) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot["time"]))
    yield from (f"memory of rank {snapshot['rank']} at {snapshot['label']} on {device}, {when}", "")
    for key, value in snapshot.items():
        if key.endswith("_bytes"):
            yield f"{key.removesuffix('_bytes').replace('_', ' '):<16} {format_bytes(value):>12}"
    yield from ("", f"{'held by':<28} {'tensors':>8} {'size':>12}")
    for kind, entry in snapshot["owners"].items():
        yield f"{kind:<28} {entry['tensors']:>8} {format_bytes(entry['bytes']):>12}"
        for name, size in entry["modules"].items():
            yield f"  {name:<26} {'':>8} {format_bytes(size):>12}"
    yield from ("", f"the {len(snapshot['largest_tensors'])} largest tensors")
    for tensor in snapshot["largest_tensors"]:
        shape = "x".join(map(str, tensor.get("local_shape", tensor["shape"]))) or "scalar"
        size = format_bytes(tensor["bytes"])
        yield f"{size:>12}  {tensor['dtype']:<9} {shape:<16} {tensor['kind']} {tensor['name']}"
    if device.type == "cuda":
        yield from ("", torch.cuda.memory_summary(device))


def _memory_error(error: BaseException | None) -> BaseException | None:
    """The allocator's error in the chain of errors that `error` was raised from, itself included."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
            return error
        if isinstance(error, RuntimeError) and any(text in str(error) for text in (*_HOST_TEXTS, *_GPU_TEXTS)):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _oom_state(rank: int, device: torch.device, error: BaseException, named_tensors: NamedTensors) -> dict[str, Any]:
    # Some memory is free again by now; PyTorch's message has the amount at the time of the error.
    snapshot = _snapshot(rank, device, named_tensors, _bytes_in(error, "Of the allocated memory"))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        in_use = total - free  # includes other processes and CUDA itself
    else:
        in_use, total = snapshot["resident_bytes"], psutil.virtual_memory().total
    return {
        **snapshot,
        "error": str(error)[:2000] or type(error).__name__,
        "requested_bytes": _bytes_in(error, "ried to allocate"),
        "in_use_bytes": in_use,
        "total_bytes": total,
        "allocator": torch.cuda.memory_stats(device) if device.type == "cuda" else None,
    }


def _bytes_in(error: BaseException, before: str) -> int:
    """The number of bytes that follows the text `before` in an allocator's message, or 0."""
    found = re.search(rf"{before} ([\d.]+) ({'|'.join(_UNITS)})", str(error))
    return int(float(found[1]) * 1024 ** _UNITS.index(found[2])) if found else 0
