"""The folder of a run: who owns it, whether it is done, how it ended, what lies in it."""

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from nsa.checkpoint import layout
from nsa.checkpoint.files import write_atomically
from nsa.checkpoint.weights import WEIGHTS_FILE
from nsa.config import Config, differences, load_config
from nsa.errors import CheckpointError, ConfigError, LaunchError, NSAError, Preempted, RankLostError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
ENVIRONMENT_FILE = "env.json"
NONFINITE_FOLDER = "nonfinite"
# What a run may leave that would mislead in the next one's folder.
LEFT_BEHIND = ("oom_rank*.json", "mem_*")


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. A second run in it is refused while the first lives."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        raise LaunchError(f"train.out_dir: {str(folder)!r} cannot be used: {error}; choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"train.out_dir: another run is writing into {folder}; wait for it or choose another folder"
            ) from None
        except OSError as error:
            raise LaunchError(f"train.out_dir: {folder} cannot be locked: {error.strerror}") from None
        yield


def changed_keys(folder: Path, config: Config) -> list[str]:
    """How the configuration differs from the one that the folder was written with, a line a key."""
    return differences(load_config(folder / CONFIG_FILE).to_dict(), config)


def refuse_other_config(folder: Path, config: Config) -> None:
    """A finished run answers for its own configuration only."""
    changed = changed_keys(folder, config)
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}: {folder} holds a finished run; choose another train.out_dir, "
            "--accept-changes to go on from its last checkpoint, or --fresh to train anew over it"
        )


def write_config(folder: Path, config: Config) -> None:
    write_atomically(folder / CONFIG_FILE, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def write_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    write_json(folder / METRICS_FILE, metrics)


def read_metrics(folder: Path) -> dict[str, Any] | None:
    try:
        metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / METRICS_FILE}: cannot be read: {error}") from None
    return metrics if isinstance(metrics, dict) else None


def start_over(folder: Path) -> None:
    """Removes what an earlier run left: first its claim to be finished, then its results."""
    write_metrics(folder, {"status": "running", "steps": 0})
    old = [folder / name for name in (layout.FOLDER, NONFINITE_FOLDER, WEIGHTS_FILE)]
    old += [path for pattern in LEFT_BEHIND for path in folder.glob(pattern)]
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finished_metrics(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None where the folder holds none."""
    metrics = read_metrics(folder)
    return metrics if metrics is not None and metrics.get("status") == "done" else None


def record_end(folder: Path, error: BaseException, step: int | None, telemetry: Mapping[str, Any]) -> None:
    """Why the run ended, for whoever finds it, and what `telemetry` has to say. The rank that failed knows better than
    those that lost it.

    Without a `step` it never began: what a finished run left stays, and of an unfinished one how far it was.
    """
    try:
        now = read_metrics(folder) or {}
        if isinstance(error, RankLostError) and now.get("status") not in ("running", None):
            return
        if step is None and now.get("status") == "done":
            return
        write_metrics(
            folder,
            {
                "status": "preempted" if isinstance(error, Preempted) else "failed",
                "exit_code": error.exit_code if isinstance(error, NSAError) else 1,
                "reason": str(error) or type(error).__name__,
                "steps": now.get("steps", 0) if step is None else step,
                **telemetry,
            },
        )
    except NSAError:
        pass  # a full disk must not hide the error that is being reported
