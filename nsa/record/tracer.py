"""Tracing of the backward pass, to find out why a job hangs or why its ranks diverge.

`trace_rank{r}.jsonl` has one JSON object per line. Each line is written immediately, so after a hang the file has every
event before it. On a GPU each event first synchronizes the device, so that a line means computed and not just queued:
a traced run is slower. `nsa trace` (trace_report.py) explains the files of all ranks. Events:

    start       traced kinds of events, number of ranks, names of the trainable parameters
    note        an event that could not be traced, and why
    step_begin, step_end (with the loss)
    grad        a parameter's gradient was accumulated on this rank: name, order in the step
    missing     at the end of a step: trainable parameters that got no gradient
    digest      sum, norm and checksum of every gradient (at the end of the step: summed over ranks and clipped) and of
                every parameter; also once before the first step
    module_bwd  backward reached a module: the gradient of its output is computed
    bucket      the reduction of a DDP bucket started (`done` is null); again when it is done

The tracer registers hooks only for the kinds of events that are enabled. It calls no collective and never stops a run:
failures are counted.
"""

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.formatting import plain
from nsa.nn.block import DecoderBlock
from nsa.record.events import FileSink
from nsa.record.failures import Failures
from nsa.run_folder import OLDER_TRACE, TRACE

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

_LARGEST_FILE = 64 * 2**20  # bytes; a larger file is rotated
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPILED = "_torchdynamo_orig_callable"  # an attribute of functions that torch.compile returns
_CHECKSUM_BITS = 2**52 - 1  # integers that a float64 represents exactly


class Tracer:
    """Writes trace_rank{r}.jsonl. Events that could not be recorded are counted in `failures`.

    Call `traced_hook` while the model is being wrapped, `attach` afterwards, then run steps, then call `close`.
    """

    def __init__(
        self, folder: Path, rank: int, *, grads: bool, modules: bool, buckets: bool, failures: Failures | None = None
    ):
        self.rank, self.grads, self.modules, self.buckets = rank, grads, modules, buckets
        self.on, self.failures = grads or modules or buckets, failures or Failures()
        self._file = TraceFile(folder, rank)
        self._step: int | None = None  # None: outside a step, where no events are recorded
        self._has_begun = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._arrived: dict[str, list[str]] = {"grad": [], "module_bwd": []}  # names in this step, in order
        self._handles: list[Any] = []
        self._watched: dict[str, weakref.ref[Tensor]] = {}
        self._gpu: torch.device | None = None
        self._sharded = False
        self._header: dict[str, Any] = {}  # of this start
        self._notes: list[str] = []

    def attach(self, model: nn.Module, module: nn.Module) -> None:
        """Registers hooks on `model`, the decoder; `module` is the decoder wrapped for its strategy. Call it after
        recomputation, compilation, wrapping and sharding."""
        if not self.on:
            return
        with self.failures.counted():
            self._parameters = dict(model.named_parameters())
            self._gpu = next((p.device for p in self._parameters.values() if p.device.type == "cuda"), None)
            self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
            self._header = {
                "rank": self.rank,
                "world_size": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
                "kinds": [kind for kind in ("grads", "modules", "buckets") if getattr(self, kind)],
                "trainable": [name for name, parameter in self._parameters.items() if parameter.requires_grad],
            }
            if self.grads:
                self._attach_grads(model)
            if self.modules:
                self._attach_modules(model)
            if self.buckets and not isinstance(module, DistributedDataParallel):
                self._notes.append("buckets: only DDP has buckets")

    def traced_hook(self, inner: Hook) -> Hook:
        """Wraps the DDP communication hook `inner` in one that also records when buckets start and are done."""
        if not self.buckets:
            return inner

        def traced(
            state: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            record = self._bucket_started(bucket)
            return inner(state, bucket).then(functools.partial(self._bucket_done, record))

        return traced

    def step_begin(self, step: int) -> None:
        with self.failures.counted():
            self._step = step
            self._arrived = {event: [] for event in self._arrived}
            if self.on and not self._has_begun:
                self._has_begun = True
                self._file.begin(self._header)
                for text in self._notes:
                    self._emit("note", text=text)
                if self.grads:
                    self._digest(before=True)
            self._emit("step_begin")

    def step_end(self, step: int, loss: float) -> None:
        """Call before gradients are cleared. A skipped step has cleared them already, which the digest records."""
        with self.failures.counted():
            if self.grads:
                arrived = set(self._arrived["grad"])
                missing = [n for n, p in self._parameters.items() if p.requires_grad and n not in arrived]
                if missing:
                    self._emit("missing", names=missing)
                self._digest()
        self._emit("step_end", loss=plain(loss))  # the step is done even if recording failed above
        self._step = None

    def close(self) -> None:
        """Removes every hook. Records the event `end`, unless the rank stopped inside a step or before the first one:
        the file then ends with the trace of an earlier start, which `nsa trace` still explains."""
        with self.failures.counted():
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            if self._has_begun and self._step is None:
                self._emit("end", failures=self.failures.count)
            self.on = False
            self._file.close()

    def _attach_grads(self, model: nn.Module) -> None:
        """Under FSDP autograd accumulates into the unsharded parameters, which exist only while their module computes.
        A forward pre-hook of the module sees them and registers the gradient hooks."""
        for prefix, module in model.named_modules():
            if module is model or issubclass(type(module), FSDPModule):
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._watch, prefix)))
        if self._sharded:
            self._notes.append("digests: not recorded for sharded tensors, of which each rank holds another shard")

    def _watch(self, prefix: str, module: nn.Module, _: Any) -> None:
        with self.failures.counted():
            for name, parameter in module.named_parameters(prefix):
                known = self._watched.get(name, lambda: None)()
                if parameter.requires_grad and known is not parameter and not isinstance(parameter, DTensor):
                    self._watched[name] = weakref.ref(parameter)
                    hook = functools.partial(self._record, "grad", name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _attach_modules(self, model: nn.Module) -> None:
        """Registers hooks on the model's children, its blocks and their children. torch's full backward hooks would
        turn every output into a view, which FSDP warns about."""
        blocks = {name: module for name, module in model.named_modules() if isinstance(module, DecoderBlock)}
        methods = {name: (block.forward, block.compute) for name, block in blocks.items()}
        compiled = {name for name, both in methods.items() if any(hasattr(m, _COMPILED) for m in both)}
        for name, module in model.named_modules():
            is_traced = name in blocks or name.rpartition(".")[0] in {"", *blocks} - compiled
            if name and is_traced and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                hook = functools.partial(self._after_forward, name)
                self._handles.append(module.register_forward_hook(hook))
        if compiled:
            self._notes.append("modules: blocks are compiled, so modules inside them are not traced")

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        with self.failures.counted():
            outputs = output if isinstance(output, tuple | list) else (output,)
            tensor = next((x for x in outputs if isinstance(x, Tensor) and x.requires_grad), None)
            if tensor is not None and self._step is not None:
                tensor.register_hook(functools.partial(self._record, "module_bwd", name))

    def _record(self, event: str, name: str, _: Tensor) -> None:
        """Records that a gradient was accumulated, or that backward reached a module."""
        with self.failures.counted():
            if self._step is not None:
                self._wait_for_device()
                self._emit(event, name=name, order=len(self._arrived[event]))
                self._arrived[event].append(name)

    def _bucket_started(self, bucket: Any) -> dict[str, Any]:
        """Records the start of a bucket and returns its fields, for the event when it is done; empty outside a step."""
        if self._step is None:
            return {}
        with self.failures.counted():
            buffer, names = bucket.buffer(), {id(parameter): name for name, parameter in self._parameters.items()}
            record = {
                "step": self._step,
                "index": bucket.index(),
                "bytes": buffer.numel() * buffer.element_size(),
                "parameters": [names.get(id(parameter), "?") for parameter in bucket.parameters()],
                "started": time.time(),
            }
            self._emit("bucket", **record, done=None)
            return record
        return {}

    def _bucket_done(self, record: dict[str, Any], future: torch.futures.Future[Tensor]) -> Tensor:
        value = future.value()  # raises if the reduction failed; then the bucket is never recorded as done
        if record:
            with self.failures.counted():
                self._wait_for_device()
                self._emit("bucket", **record, done=time.time())
        return value

    def _digest(self, *, before: bool = False) -> None:
        if self._sharded:
            return
        with torch.no_grad():
            parameters = {name: parameter.detach() for name, parameter in self._parameters.items()}
            gradients = {} if before else {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
            values = _digests([*gradients.values(), *parameters.values()])
        self._emit(
            "digest",
            before=before,
            cleared=bool(self._arrived["grad"]) and not gradients,
            gradients=dict(zip(gradients, values, strict=False)),
            parameters=dict(zip(parameters, values[len(gradients) :], strict=True)),
        )

    def _emit(self, /, event: str, **values: Any) -> None:
        """Writes an event if tracing is on. Never raises: a failed write is counted, and the next event is tried."""
        with self.failures.counted():
            if self.on:
                self._file.write(event, **{"step": self._step, **values})

    def _wait_for_device(self) -> None:
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


def _digests(tensors: list[Tensor]) -> list[list[float | str]]:
    """Sum, norm and checksum of each tensor, computed on its device; one copy to the host for all.

    Sum and norm are for people. The checksum sums the bits as integers, which is exact in any order of summation: it
    differs only where the tensors differ.
    """
    if not tensors:
        return []
    rows = [
        torch.stack([x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64), _checksum(x)])
        for x in tensors
    ]
    return [[plain(value) for value in row] for row in torch.stack(rows).tolist()]


def _checksum(x: Tensor) -> Tensor:
    bits = x.view(_INTEGERS[x.element_size()])
    return (bits.sum(dtype=torch.int64) & _CHECKSUM_BITS).double()


class TraceFile:
    """Appends whole lines, each written immediately, on a disk that may be full. Opening the file, also again after a
    failed write, adds the event `start` with the values of the header on a new line."""

    def __init__(self, folder: Path, rank: int):
        self._path, self._older = TRACE.path(folder, rank), OLDER_TRACE.path(folder, rank)
        self._file = FileSink(self._path)
        self._header: dict[str, Any] = {}
        self._lock = threading.Lock()  # buckets complete in another thread

    def begin(self, header: dict[str, Any]) -> None:
        self._header = header
        with self._lock:
            self._append(b"")

    def write(self, event: str, step: int | None, **values: Any) -> None:
        """Raises OSError, or ValueError for a value that JSON cannot represent. A large file is rotated at the start of
        a step, so that no step is in two files; one older file is kept."""
        line = _format_line(event, step, values)
        with self._lock:
            if event == "step_begin" and (self._file.size or 0) > _LARGEST_FILE:
                self._path.replace(self._older)
                self._file.close()
            self._append(line)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, text: bytes) -> None:
        is_closed = self._file.size is None
        start = _format_line("start", None, self._header) if is_closed else b""
        self._file.append(start + text, on_new_line=is_closed)
        self._header["continued"] = True


def _format_line(event: str, step: int | None, values: dict[str, Any]) -> bytes:
    line = {"time": time.time(), "step": step, "event": event, **values}
    return json.dumps(line, allow_nan=False).encode() + b"\n"
