"""Tracing of the backward pass, to find out why a job hangs or why its ranks diverge.

`trace_rank{r}.jsonl` gets one JSON object a line, each written at once: what is in the file has happened, and a hang
leaves what happened before it. On a GPU every line waits for the device, so that a line means computed and not just
queued: a traced run is slower. `nsa trace` (trace_report.py) explains the files of all ranks. Events:

    start       what is traced, by how many ranks, names of the trainable parameters
    note        something that could not be traced, and why
    step_begin, step_end (with the loss)
    grad        a parameter's gradient was added up on this rank: name, order in the step
    missing     at the end of a step: trainable parameters that got no gradient
    digest      sum, norm and checksum of every gradient (as it is at the end of the step: summed over ranks, clipped)
                and of every parameter; once before the first step
    module_bwd  backward came to a module: the gradient of its output is there
    bucket      a DDP bucket goes to the other ranks (`done` is null), and the same again when it is summed

Nothing is attached for what is not traced. No event calls a collective, and none stops a run: failures are counted.
"""

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.files import lacks_final_newline, regular
from nsa.formatting import plain
from nsa.nn.block import DecoderBlock
from nsa.record.failures import Failures
from nsa.run_folder import OLDER_TRACE, TRACE

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

_LARGEST_FILE = 64 * 2**20  # bytes; then the file becomes the older one and a new one begins
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPILED = "_torchdynamo_orig_callable"  # an attribute of what torch.compile returns
_CHECKSUM_BITS = 2**52 - 1  # what a float64 holds exactly


class Tracer:
    """Writes trace_rank{r}.jsonl. What could not be recorded is counted in `failures`.

    Order of use: `traced_hook` while the model is wrapped, `attach` when it is, then steps, then `close`.
    """

    def __init__(
        self, folder: Path, rank: int, *, grads: bool, modules: bool, buckets: bool, failures: Failures | None = None
    ):
        self.rank, self.grads, self.modules, self.buckets = rank, grads, modules, buckets
        self.on, self.failures = grads or modules or buckets, failures or Failures()
        self._file = TraceFile(folder, rank)
        self._step: int | None = None  # None: not in a step, nothing is recorded
        self._has_digest = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._arrived: dict[str, list[str]] = {"grad": [], "module_bwd": []}  # names in this step, in order
        self._handles: list[Any] = []
        self._watched: dict[str, weakref.ref[Tensor]] = {}
        self._gpu: torch.device | None = None
        self._sharded = False
        self._header: dict[str, Any] | None = None  # of this start; None once it is written
        self._notes: list[str] = []

    def attach(self, model: nn.Module, module: nn.Module) -> None:
        """Hooks onto `model`, the decoder; `module` is the same, wrapped for its strategy. Call it when blocks are
        compiled, recomputed, wrapped and sharded as they will be."""
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
                self._notes.append("buckets: there are none without DDP")

    def traced_hook(self, inner: Hook) -> Hook:
        """A communication hook of DDP that does what `inner` does and records when buckets start and are done."""
        if not self.buckets:
            return inner

        def traced(
            state: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            record = self._bucket_begins(bucket)
            return inner(state, bucket).then(functools.partial(self._pass_on, record))

        return traced

    def step_begin(self, step: int) -> None:
        with self.failures.counted():
            self._step = step
            self._arrived = {event: [] for event in self._arrived}
            if self._header is not None:
                header, self._header = self._header, None
                self._file.begin(header)
                for text in self._notes:
                    self._emit("note", text=text)
            if self.grads and not self._has_digest:
                self._has_digest = True
                self._digest(before=True)
            self._emit("step_begin")

    def step_end(self, step: int, loss: float) -> None:
        """Call before gradients are cleared; those of a skipped step are, which the digest records."""
        with self.failures.counted():
            if self.grads:
                arrived = set(self._arrived["grad"])
                missing = [n for n, p in self._parameters.items() if p.requires_grad and n not in arrived]
                if missing:
                    self._emit("missing", names=missing)
                self._digest()
        self._emit("step_end", loss=plain(loss))  # whatever failed above, the step is done
        self._step = None

    def close(self) -> None:
        """Removes every hook. Between steps it also records the end of this rank; inside a step there was none."""
        with self.failures.counted():
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            if self._step is None:
                self._emit("end", failures=self.failures.count)
            self.on = False
            self._file.close()

    def _attach_grads(self, model: nn.Module) -> None:
        """A shard's gradient is put there by the strategy. Autograd's goes to the gathered parameter, which takes the
        shard's place in its module while that is computed: it is there when the module's own hooks are called."""
        for prefix, module in model.named_modules():
            if module is model or issubclass(type(module), FSDPModule):
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._watch, prefix)))
        if self._sharded:
            self._notes.append("digests: none of sharded tensors, every rank holds its own part of each")

    def _watch(self, prefix: str, module: nn.Module, _: Any) -> None:
        with self.failures.counted():
            for name, parameter in module.named_parameters(prefix):
                known = self._watched.get(name, lambda: None)()
                if parameter.requires_grad and known is not parameter and not isinstance(parameter, DTensor):
                    self._watched[name] = weakref.ref(parameter)
                    hook = functools.partial(self._record, "grad", name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _attach_modules(self, model: nn.Module) -> None:
        """Onto the model's parts, its blocks and their parts. Not torch's full backward hooks: they put a view around
        every output, which FSDP warns of."""
        blocks = {name: module for name, module in model.named_modules() if isinstance(module, DecoderBlock)}
        methods = {name: (block.forward, block.compute) for name, block in blocks.items()}
        compiled = {name for name, both in methods.items() if any(hasattr(m, _COMPILED) for m in both)}
        for name, module in model.named_modules():
            is_traced = name in blocks or name.rpartition(".")[0] in {"", *blocks} - compiled
            if name and is_traced and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                hook = functools.partial(self._after_forward, name)
                self._handles.append(module.register_forward_hook(hook))
        if compiled:
            self._notes.append("modules: blocks are compiled, what is inside them is not seen")

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        with self.failures.counted():
            outputs = output if isinstance(output, tuple | list) else (output,)
            tensor = next((x for x in outputs if isinstance(x, Tensor) and x.requires_grad), None)
            if tensor is not None and self._step is not None:
                tensor.register_hook(functools.partial(self._record, "module_bwd", name))

    def _record(self, event: str, name: str, _: Tensor) -> None:
        """A gradient was added up, or backward came to a module."""
        with self.failures.counted():
            if self._step is not None:
                self._wait_for_device()
                self._emit(event, name=name, order=len(self._arrived[event]))
                self._arrived[event].append(name)

    def _bucket_begins(self, bucket: Any) -> dict[str, Any]:
        """What is recorded of it again when it is done; nothing outside of a step."""
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

    def _pass_on(self, record: dict[str, Any], future: torch.futures.Future[Tensor]) -> Tensor:
        value = future.value()  # raises if the reduction failed: such a bucket is never done
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
        """Never raises: after a line that could not be written the next is tried. Nothing where tracing is off."""
        with self.failures.counted():
            if self.on:
                self._file.write(event, **{"step": self._step, **values})

    def _wait_for_device(self) -> None:
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


def _digests(tensors: list[Tensor]) -> list[list[float | str]]:
    """Sum, norm and checksum of each, computed on their device and copied to the host in one piece.

    Sum and norm are for people. The checksum adds up the bits as whole numbers: the same in any order of adding, so it
    differs only where the tensors do.
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
    """Whole lines, each written at once, into a file that may be full.

    Where this process opens a file, it writes the event `start` with the values of the header. A line that could not
    be written closes it: the next line opens it again and does not continue what was written of the one before.
    """

    def __init__(self, folder: Path, rank: int):
        self._path, self._older = TRACE.path(folder, rank), OLDER_TRACE.path(folder, rank)
        self._header: dict[str, Any] = {}
        self._file: FileIO | None = None
        self._lock = threading.Lock()  # buckets are done in a thread of their own

    def begin(self, header: dict[str, Any]) -> None:
        self._header = header
        with self._lock:
            self._write(b"")

    def write(self, event: str, step: int | None, **values: Any) -> None:
        """Raises OSError, or ValueError for a value that is no JSON. A step that begins rotates a large file, of which
        one older is kept: no step is in two files."""
        line = _format_line(event, step, values)
        with self._lock:
            if event == "step_begin" and self._file is not None and self._file.tell() > _LARGEST_FILE:
                self._path.replace(self._older)
                self._close()
            self._write(line)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _write(self, text: bytes) -> None:
        if self._file is None:
            self._file = open(self._path, "a+b", buffering=0, opener=regular)  # noqa: SIM115  (until close)
            text = b"\n" * lacks_final_newline(self._file) + _format_line("start", None, self._header) + text
        try:
            written = self._file.write(text)
            if written < len(text):
                raise OSError(f"{self._path}: only {written} of {len(text)} bytes could be written")
        except OSError:
            self._close()
            raise
        self._header["continued"] = True

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _format_line(event: str, step: int | None, values: dict[str, Any]) -> bytes:
    line = {"time": time.time(), "step": step, "event": event, **values}
    return json.dumps(line, allow_nan=False).encode() + b"\n"
