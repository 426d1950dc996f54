"""The folder of a run: whether a run may use it, its lock, whether the run is finished, and how it ended.
nsa/run_folder.py names its files."""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nsa.checkpoint.format import BEST, LATEST, MANIFEST_FILE, committed, write_atomically
from nsa.config import Config, differences, load_config
from nsa.config.schema import TrainConfig
from nsa.data.chat import CHAT_TEMPLATE_FILE, chat_template_of
from nsa.data.tokenizers import TOKENIZER_FILE, JsonTokenizer, Tokenizer
from nsa.errors import (
    CheckpointError,
    ConfigError,
    FirstRankFailedError,
    LaunchError,
    NSAError,
    Preempted,
    RankLostError,
    reworded,
)
from nsa.files import expand_home, locked, write_flushed
from nsa.formatting import listed
from nsa.parallel.collectives import gather_objects, on_first_rank
from nsa.parallel.world import World
from nsa.plain_yaml import dump_yaml
from nsa.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FOLDERS,
    HEARTBEAT,
    LOCK_FILE,
    METRICS_FILE,
    REMOVED_BY_FRESH,
    REPLACED,
    TABLES,
    WEIGHTS_FILE,
    RunStatus,
    read_json,
)

SHARED_S = 90.0  # until a new file is visible on other machines, at most; NFS caches a minute
REMOVED = ".removed"  # temporary name of a folder that is being deleted
# Files that a run would replace or remove, and those of a Hugging Face model, which would load the run's weights.
_AT_RISK = (
    *(*REPLACED, *REMOVED_BY_FRESH, TOKENIZER_FILE, CHAT_TEMPLATE_FILE, *(table.files.pattern for table in TABLES)),
    *("config.json", "*.safetensors"),
)


def refuse_foreign(folder: Path, *, fresh: bool) -> None:
    """Refuses a folder that holds files at risk and is not a run folder. A run starts with a lock and a heartbeat; a
    copied run may lack the lock, which is a hidden file, or have only the checkpoints."""
    with reworded(LaunchError, f"train.out_dir: {str(folder)!r} cannot be used", "choose another folder"):
        if not folder.is_dir():
            return
        _refuse_links(folder)
    root = folder / CHECKPOINTS_FOLDER
    saved = committed(root)
    known = {LATEST, BEST, *(path.name for path in saved)}
    others = {path.name for path in root.glob("[!.]*")} - known
    if fresh and others:
        raise LaunchError(
            f"train.out_dir: {root} holds {listed(sorted(others), 5)}, which no run wrote and --fresh would delete; "
            "move that away or choose another folder"
        )
    found = {path.name for pattern in _AT_RISK for path in folder.glob(pattern)}
    is_run = (folder / LOCK_FILE).exists() or any(folder.glob(HEARTBEAT.pattern))
    if not found or is_run or any((path / MANIFEST_FILE).exists() for path in saved):
        return
    remedy = "did you mean train.init_from? Otherwise " if {CONFIG_FILE, WEIGHTS_FILE} <= found else ""
    raise LaunchError(
        f"train.out_dir: {folder} is not the folder of a run and holds {listed(sorted(found), 5)}, which a run would "
        f"replace, remove or mix with its own files; {remedy}choose another folder"
    )


def refuse_own_weights(folder: Path, config: TrainConfig, *, is_new: bool) -> None:
    """Refuses an initialization or a teacher from the files that the run replaces. Resuming does not initialize."""
    own = folder.resolve()
    for name in ("init_from", "teacher") if is_new else ("teacher",):
        if (given := getattr(config, name)) is None:
            continue
        source = expand_home(given).resolve()
        if source in (own, own / WEIGHTS_FILE) or source.is_relative_to(own / CHECKPOINTS_FOLDER):
            raise ConfigError(
                f"train.{name}: {source} belongs to train.out_dir, and the run would replace it; choose another "
                "train.out_dir"
            )


class Claim:
    """The folder of a run, which rank 0 locks. Rank 0 tells the other ranks if the folder is lost."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: IO[str] | None = None
        self._lost = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Locks the folder for this process. A second run in the folder is refused while the first is alive."""
        busy = f"train.out_dir: another run is writing into {self.folder}; wait for it or choose another folder"
        with locked(self.folder / LOCK_FILE, LaunchError, f"train.out_dir: {str(self.folder)!r}", busy) as self._lock:
            shutil.rmtree(self.folder / REMOVED, ignore_errors=True)
            yield

    def refuse_unshared(self, world: World, timeout_s: float) -> None:
        """Refuses a path that leads other ranks to another folder than rank 0: checkpoints would lack their shards. All
        ranks call it together, while rank 0 holds the folder."""
        if world.size == 1:
            return
        probe = self.folder / on_first_rank(world, self._write_probe)
        deadline = time.monotonic() + min(SHARED_S, timeout_s / 2)
        while not (found := os.path.exists(probe)) and time.monotonic() < deadline:  # noqa: PTH110  (no OSError)
            time.sleep(0.1)
        place = f"rank {world.rank} on {socket.gethostname()} ({self.folder.absolute()})"
        others = list(filter(None, gather_objects("" if found else place, world)))
        on_first_rank(world, lambda: probe.unlink(missing_ok=True))
        if others:
            raise LaunchError(
                f"train.out_dir: {', '.join(others[:3])} and rank 0 do not share a folder, into which every rank "
                "writes its part of a checkpoint; choose one folder for all, on a file system that the machines share"
            )

    def _write_probe(self) -> str:
        """Writes a file with a new name, for which a network file system asks its server. A leftover of it is one of
        those that `remove_unfinished` removes."""
        name = f".shared.txt.{secrets.token_hex(8)}"
        with reworded(LaunchError, f"train.out_dir: {self.folder} cannot be used", "choose another folder"):
            write_flushed(self.folder / name, b"")
        return name

    def is_lost(self) -> bool:
        """Whether the path no longer leads to the folder: it was renamed, deleted or replaced, and another run may own
        the path now. Storage that does not answer is not a loss."""
        if self._lock is not None and not self._lost:
            try:
                found = (self.folder / LOCK_FILE).lstat()
                self._lost = not os.path.samestat(found, os.fstat(self._lock.fileno()))
            except (FileNotFoundError, NotADirectoryError):
                self._lost = True
            except OSError:
                pass
        return self._lost

    def check(self, world: World) -> None:
        """Call before an irreversible write. All ranks call it together, and all raise if the folder is lost."""
        if on_first_rank(world, self.is_lost):
            self._lost = True
            raise LaunchError(
                f"train.out_dir: {self.folder} was renamed, deleted or replaced while the run wrote into it; nothing "
                "was written to the path since. Rename the folder back, or set train.out_dir to its new name, and the "
                "run resumes from its last checkpoint"
            )


def _refuse_links(folder: Path) -> None:
    """Refuses symbolic links that a run would write through."""
    for path in (*(folder / name for name in FOLDERS), *folder.glob("data_index_[0-9]*")):
        if path.is_symlink():
            raise LaunchError(
                f"train.out_dir: {path} is a symbolic link and would lead files out of the folder; "
                "remove it, or make train.out_dir itself the link"
            )


def is_finished(folder: Path, config: Config, accept_changes: bool) -> bool:
    """Whether the folder holds this run, finished. A finished run with another configuration is refused, or resumed
    with `accept_changes`."""
    metrics = read_metrics(folder)
    if metrics.get("status") != "done":
        return False
    changed = differences(load_config(folder / CONFIG_FILE, in_run=True).to_dict(), config)
    if changed and not accept_changes:
        raise ConfigError(
            f"{'; '.join(changed)}: {folder} holds a finished run; choose another train.out_dir, "
            "--accept-changes to resume from its last checkpoint, or --fresh to train over it from the start"
        )
    return not changed and metrics.get("steps", 0) >= config.train.steps


def write_config(folder: Path, config: Config, tokenizer: Tokenizer | None = None) -> None:
    """Writes the configuration, and copies of the tokenizer's file and the chat template if there are any, so that the
    folder can be used without the originals."""
    write_atomically(folder / CONFIG_FILE, dump_yaml(config.to_dict()).encode())
    if tokenizer is None:
        return
    if isinstance(tokenizer, JsonTokenizer):
        write_atomically(folder / TOKENIZER_FILE, tokenizer.text.encode())
    if (template := chat_template_of(config.data)) is not None:
        write_atomically(folder / CHAT_TEMPLATE_FILE, template.encode())
    else:
        (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)  # of an earlier run in the folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def read_metrics(folder: Path) -> dict[str, Any]:
    """The summary of the run, empty if there is none; `status` is one of run_folder.RunStatus."""
    try:
        return read_json(folder / METRICS_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / METRICS_FILE}: cannot be read: {error}") from None


def start_over(folder: Path) -> None:
    """Removes the files of an earlier run: first the summary that says it is finished, then its results."""
    write_json(folder / METRICS_FILE, {"status": "running", "steps": 0})
    for path in [path for pattern in REMOVED_BY_FRESH for path in folder.glob(pattern)]:
        what = f"{path}: cannot be moved to {folder / REMOVED} and removed"
        with reworded(LaunchError, what, "look at both, or choose another train.out_dir"):
            if path.is_dir() and not path.is_symlink():
                path.rename(folder / REMOVED)  # atomic: a half-deleted run must not be resumed
                shutil.rmtree(folder / REMOVED)
            else:
                path.unlink(missing_ok=True)


def record_end(claim: Claim, error: BaseException, step: int | None, telemetry: Mapping[str, Any]) -> None:
    """Writes why the run ended, with `telemetry`. The reason of the rank that failed takes precedence.

    The summary of a finished run is kept. Without a `step` the run never started, and the step of an unfinished one is
    kept.
    """
    folder = claim.folder
    if claim.is_lost() or isinstance(error, FirstRankFailedError):
        return
    try:
        now = read_metrics(folder)
        if isinstance(error, RankLostError) and now.get("status") not in ("running", None):
            return
        if now.get("status") == "done":  # a start that failed, or a rank of an earlier start that was frozen until now
            return
        status: RunStatus = "preempted" if isinstance(error, Preempted) else "failed"
        write_json(
            folder / METRICS_FILE,
            {
                "status": status,
                "exit_code": error.exit_code if isinstance(error, NSAError) else 1,
                "reason": str(error) or type(error).__name__,
                "steps": now.get("steps", 0) if step is None else step,
                **telemetry,
            },
        )
    except NSAError:
        pass  # a full disk must not hide the error that is being reported
