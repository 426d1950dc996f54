"""Saves checkpoints in the background: the saver copies the state between two steps, and a thread writes and commits
the copy.

The order of a commit: write shards and state into a temporary folder and flush them, write the manifest with the size
and SHA-256 of every file, rename the folder, update `latest`, delete old checkpoints. A kill at any point leaves either
the previous checkpoint or this one complete.

Why a thread instead of torch's saver process: the thread of a killed rank dies with it, while a separate process would
survive and could still commit into a folder that the restarted run already owns.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from nsa import faults
from nsa.checkpoint import format as names
from nsa.checkpoint.format import FileEntry, entry_of, verify, write_atomically, write_manifest
from nsa.checkpoint.restore import read_back, silence_torch
from nsa.checkpoint.storage import ShardWriter
from nsa.errors import CheckpointError
from nsa.files import flush_folder, make_folder, write_flushed

NEVER_DELETED = 2  # newest verified checkpoints, whatever `keep` is


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves. `state` is the same on every rank, `random` differs by rank; both are JSON data."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    random: dict[str, Any]
    is_best: bool = False


class Saver:
    """Runs one save at a time. All ranks of `group`, which nothing else uses, call `begin` and `finish` at the same
    step. `resumed` names the checkpoint that the run resumed from, whose files the ranks have verified together."""

    def __init__(self, root: Path, keep: int, group: dist.ProcessGroup | None = None, resumed: str | None = None):
        self.root, self.keep, self.group = root, keep, group
        # Runs a function on every rank or on rank 0 alone. An error of one rank is raised on all.
        self._ranks = _DistWrapper(group, group is not None, 0)
        self.rank, self.size = self._ranks.get_rank(), self._ranks.get_world_size()
        self.last_good = resumed
        self.undeleted: str | None = None  # what the newest save could not delete, and why
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._is_awaited = threading.Event()  # `finish` waits: the thread makes no more pauses
        # Not hashed again: rank 0 alone may take longer for a large checkpoint than the others wait.
        self._verified = set[Path]() if resumed is None else {root / resumed}
        self._own: set[Path] = set()  # checkpoints that this process wrote

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """A CPU mesh of all ranks for the host copies of sharded tensors."""
        return init_device_mesh("cpu", (self.size,))

    @property
    def busy(self) -> bool:
        return self._thread is not None

    @property
    def written(self) -> bool:
        """Whether the thread of this rank has finished; other ranks may still be writing."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, snapshot: Snapshot, *, pause_s: float = 0.0) -> None:
        """Copies the tensors to host memory and starts writing them; training may continue at once.

        Until `finish` is called, the thread waits `pause_s` before each tensor, to leave the interpreter to training.
        """
        assert self._thread is None, "finish() the previous save first"
        faults.point("save.begin")
        copy = replace(snapshot, tensors=self._stage(snapshot.tensors))
        faults.point("save.staged")
        self._failure = None
        self._is_awaited.clear()
        # A daemon thread: a run that fails does not wait for a save that may never end.
        self._thread = threading.Thread(target=self._run, args=(copy, pause_s), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str | None:
        """Waits for the save. Returns None or why it failed, the same on every rank."""
        assert self._thread is not None
        self._is_awaited.set()
        self._thread.join()
        self._thread = None
        return self._failure

    def settle(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the save, if any, of a process that is about to end without `finish`."""
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join(timeout_s)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies this rank's part to host memory: its shards, and its share of the tensors that all ranks have."""
        staged = {}
        owners = _assign_ranks({n: t for n, t in tensors.items() if not isinstance(t, DTensor)}, self.size)
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
                staged[name] = DTensor.from_local(
                    buffer, self._mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return staged

    def _run(self, snapshot: Snapshot, pause_s: float) -> None:
        try:
            self._write(snapshot, pause_s)
        except CheckpointException as error:  # contains the errors of all ranks, each with a traceback
            reasons = {rank: _reason(cause[0]) for rank, cause in error.failures.items()}
            self._failure = "; ".join(f"rank {rank}: {why}" if self.size > 1 else why for rank, why in reasons.items())
            # No rank writes any more; these files would take the room of rows and of the summary.
            if self.rank == 0:
                with suppress(OSError):  # the next save tries again
                    self._remove_leftovers()
        except BaseException as error:
            self._failure = _reason(error)

    def _write(self, snapshot: Snapshot, pause_s: float) -> None:
        aside = self.root / f"{names.WRITING}{names.name_of(snapshot.step)}"
        self._ranks.broadcast("prepare", lambda: self._prepare(aside))
        silence_torch()
        save(
            snapshot.tensors,
            # A pause before each tensor: writing one runs Python code, which would delay the training thread.
            storage_writer=ShardWriter(aside, self.rank, lambda: self._is_awaited.wait(pause_s)),
            process_group=self.group,
            no_dist=self.group is None,
        )
        parts = self._ranks.all_gather("own files", lambda: self._write_own(aside, snapshot))
        files = {name: entry for part in parts for name, entry in part.items()}
        self._ranks.broadcast("commit", lambda: self._commit(aside, snapshot, files))
        self.last_good = names.name_of(snapshot.step)

    def _prepare(self, aside: Path) -> None:
        make_folder(self.root)
        self.undeleted = None
        self._remove_leftovers()
        faults.point("save.prepare")
        if aside.exists() and self.undeleted:
            raise CheckpointError(f"cannot be deleted: {self.undeleted}")
        aside.mkdir()

    def _write_own(self, aside: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
        """Writes this rank's small files. Returns the manifest entries of all its files, read back from disk."""
        faults.point("save.own")
        random_file = names.random_file(self.rank)
        write_flushed(aside / random_file, json.dumps(snapshot.random).encode())
        own = [names.shard_file(self.rank), random_file]
        if self.rank == 0:
            faults.point("save.state")
            write_flushed(aside / names.STATE_FILE, json.dumps(snapshot.state, indent=1).encode())
            own += [names.STATE_FILE, names.INDEX_FILE]
        return {name: entry_of(aside / name) for name in own}

    def _commit(self, aside: Path, snapshot: Snapshot, files: dict[str, FileEntry]) -> None:
        faults.point("save.manifest")
        write_manifest(aside, files)
        flush_folder(aside)
        if not self._own:  # the first save checks that this installation can read what it writes
            read_back(aside, names.shard_file(0))
        checkpoint = self.root / names.name_of(snapshot.step)
        faults.point("save.rename")
        if checkpoint not in self._own:  # this process already wrote the same content for this step
            if checkpoint.exists() or checkpoint.is_symlink():
                checkpoint.rename(self.root / f"{names.WRITING}damaged-{checkpoint.name}")
            aside.rename(checkpoint)
        faults.point("save.renamed")
        flush_folder(self.root)
        self._verified.add(checkpoint)
        self._own.add(checkpoint)
        self.last_good = checkpoint.name  # even if a later line fails
        pointer = checkpoint.name.encode() + b"\n"
        faults.point("save.latest")
        write_atomically(self.root / names.LATEST, pointer)
        if snapshot.is_best:
            faults.point("save.best")
            write_atomically(self.root / names.BEST, pointer)
        faults.point("save.retention")
        for old in list(self._deletable()):
            # Renamed first: an interrupted deletion leaves nothing that looks like a checkpoint.
            with self._deleting(old):
                old.rename(self.root / f"{names.WRITING}deleted-{old.name}")
                flush_folder(self.root)
        self._remove_leftovers()
        faults.point("save.done")

    def _remove_leftovers(self) -> None:
        """Removes the leftovers of an interrupted save or deletion."""
        pointers = [path for name in (names.LATEST, names.BEST) for path in self.root.glob(f".{name}.*")]
        for path in [*self.root.glob(f"{names.WRITING}*"), *pointers]:
            with self._deleting(path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    @contextmanager
    def _deleting(self, path: Path) -> Iterator[None]:
        """A save has succeeded even if an older folder cannot be deleted. The next save tries again."""
        try:
            yield
        except OSError as error:
            self.undeleted = f"{path}: {error.strerror or error}"

    def _deletable(self) -> Iterator[Path]:
        """Yields all checkpoints but the newest `keep`, the best, and the newest two that verify."""
        best, verified = names.read_pointer(self.root, names.BEST), 0
        for number, checkpoint in enumerate(names.committed(self.root)):
            if verified < NEVER_DELETED and self._verifies(checkpoint):
                verified += 1
            elif number >= self.keep and checkpoint.name != best:
                yield checkpoint

    def _verifies(self, checkpoint: Path) -> bool:
        """Whether the checkpoint is undamaged. Each process verifies a checkpoint once."""
        if checkpoint not in self._verified:
            try:
                verify(checkpoint)
            except CheckpointError:
                return False
            self._verified.add(checkpoint)
        return True


def _assign_ranks(tensors: dict[str, Tensor], size: int) -> dict[str, int]:
    """Assigns every tensor to a rank, with about as many bytes for each rank. The result is the same on all ranks."""
    loads = [0] * size
    owners = {}
    for name, tensor in tensors.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += tensor.numel() * tensor.element_size()
    return owners


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
