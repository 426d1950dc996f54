"""Saving in the background: a copy is taken between two steps, a thread writes and commits it.

The order of a commit: shards and state are written beside their place and flushed, the manifest with size and
SHA-256 of every file follows, the folder is renamed, `latest` moves, old checkpoints go. A kill anywhere leaves the
checkpoint before it or this one, whole.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nsa import faults
from nsa.checkpoint import layout
from nsa.checkpoint.files import flush_folder, write_flushed
from nsa.checkpoint.manifest import FileEntry, entry_of, verify, write_manifest
from nsa.checkpoint.shards import METADATA_FILE, save_tensors, shard_names
from nsa.errors import CheckpointError

STATE_FILE = "state.json"
T = TypeVar("T")


def random_file(rank: int) -> str:
    return f"random_rank{rank}.json"


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves. `state` is the same on every rank, `random` each rank's own; both are JSON."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    random: dict[str, Any]
    is_best: bool = False


class Saver:
    """One save at a time. `begin` and `finish` are called by all ranks at the same step."""

    def __init__(
        self,
        root: Path,
        keep: int,
        *,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.root, self.keep = root, keep
        self.rank, self.size, self.group, self.mesh = rank, size, group, mesh
        self.last_good: str | None = None
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._hurry = threading.Event()  # somebody waits: no more pauses
        self._sound: set[Path] = set()  # verified by this process
        self._own: set[Path] = set()  # written by it

    @property
    def busy(self) -> bool:
        return self._thread is not None

    @property
    def written(self) -> bool:
        """Whether this rank's thread is through; the others may not be."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, snapshot: Snapshot, *, pause_s: float = 0.0) -> None:
        """Copies the tensors to host memory and starts writing them; training may go on at once.

        `pause_s` before each tensor leaves the interpreter to the thread that trains, until `finish` is called.
        """
        assert self._thread is None, "finish() the save before"
        faults.point("save.begin")
        copy = Snapshot(snapshot.step, self._stage(snapshot.tensors), snapshot.state, snapshot.random, snapshot.is_best)
        faults.point("save.staged")
        self._failure = None
        self._hurry.clear()
        # A daemon: a run that ends by an error does not wait for a save that may never end.
        self._thread = threading.Thread(target=self._run, args=(copy, pause_s), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str | None:
        """Waits for the save. None, or why it failed, the same on every rank."""
        assert self._thread is not None
        self._hurry.set()
        self._thread.join()
        self._thread = None
        return self._failure

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part: its shards, and of what all ranks hold whole its share, so that no copy is made twice."""
        staged = {}
        owners = _share_out({n: t for n, t in tensors.items() if not isinstance(t, DTensor)}, self.size)
        for name, tensor in tensors.items():
            if owners.get(name, self.rank) != self.rank:
                continue
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local, non_blocking=True)
            staged[name] = buffer
            if isinstance(tensor, DTensor):
                assert self.mesh is not None
                staged[name] = DTensor.from_local(
                    buffer, self.mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return staged

    def _run(self, snapshot: Snapshot, pause_s: float) -> None:
        try:
            self._write(snapshot, pause_s)
            self.last_good = layout.name_of(snapshot.step)
        except BaseException as error:  # torch reports a failure of any rank as a BaseException
            self._failure = _reason(error)

    def _write(self, snapshot: Snapshot, pause_s: float) -> None:
        aside = layout.aside_of(self.root, snapshot.step)
        self._together(lambda: self._prepare(aside), first_only=True)
        save_tensors(snapshot.tensors, aside, self.group, pause=lambda: self._hurry.wait(pause_s))
        mine = self._together(lambda: self._write_own(aside, snapshot))
        files = {name: entry for part in mine for name, entry in part.items()}
        self._together(lambda: self._commit(aside, snapshot, files), first_only=True)

    def _prepare(self, aside: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        layout.sweep_asides(self.root)
        faults.point("save.prepare")
        aside.mkdir()

    def _write_own(self, aside: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
        """This rank's small files, and the entries of all its files, read back from where they lie."""
        faults.point("save.own")
        names = [*shard_names(aside, self.rank), random_file(self.rank)]
        write_flushed(aside / random_file(self.rank), json.dumps(snapshot.random).encode())
        if self.rank == 0:
            faults.point("save.state")
            write_flushed(aside / STATE_FILE, json.dumps(snapshot.state, indent=1).encode())
            names += [STATE_FILE, METADATA_FILE]
        return {name: entry_of(aside / name) for name in names}

    def _commit(self, aside: Path, snapshot: Snapshot, files: dict[str, FileEntry]) -> None:
        faults.point("save.manifest")
        write_manifest(aside, files)
        flush_folder(aside)
        place = self.root / layout.name_of(snapshot.step)
        faults.point("save.rename")
        if place not in self._own:  # one of the same step that this process wrote is the same
            if place.exists():
                place.rename(place.with_name(f".writing-damaged-{place.name}"))
            aside.rename(place)
        faults.point("save.renamed")
        flush_folder(self.root)
        self._sound.add(place)
        self._own.add(place)
        self.last_good = place.name  # whatever becomes of the rest: this one is there
        faults.point("save.latest")
        layout.point_to(self.root, layout.LATEST, place.name)
        if snapshot.is_best:
            faults.point("save.best")
            layout.point_to(self.root, layout.BEST, place.name)
        faults.point("save.retention")
        layout.retain(self.root, self.keep, self._is_sound)
        layout.sweep_asides(self.root)
        faults.point("save.done")

    def _is_sound(self, checkpoint: Path) -> bool:
        """Verified once by this process. What is too new to be deleted anyway is still worth knowing."""
        if checkpoint not in self._sound:
            try:
                verify(checkpoint)
            except CheckpointError:
                return False
            self._sound.add(checkpoint)
        return True

    def _together(self, function: Callable[[], T], *, first_only: bool = False) -> list[T]:
        """Runs on every rank, or on the first alone, and fails on all if it failed on one."""
        value: T | None = None
        failure: str | None = None
        if self.rank == 0 or not first_only:
            try:
                value = function()
            except Exception as error:  # whatever it is, the others must hear of it
                failure = _reason(error)
        if self.group is None:
            results = [(value, failure)]
        else:
            gathered: list[Any] = [None] * self.size
            dist.all_gather_object(gathered, (value, failure), group=self.group)
            results = gathered
        for rank, (_, failed) in enumerate(results):
            if failed is not None:
                raise CheckpointError(failed if self.size == 1 else f"rank {rank}: {failed}")
        return [v for v, _ in results]  # type: ignore[misc]


def _share_out(tensors: dict[str, Tensor], size: int) -> dict[str, int]:
    """A rank for every tensor, the same on all of them, with about as many bytes for each."""
    loads = [0] * size
    owners = {}
    for name, tensor in tensors.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += tensor.numel() * tensor.element_size()
    return owners


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:  # torch's CheckpointException: by rank, with a traceback each
        return "; ".join(f"rank {rank}: {_reason(cause[0])}" for rank, cause in failures.items())
    return str(error) or type(error).__name__
