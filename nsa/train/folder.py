"""The folder of a run: who owns it, whether it is done, what lies in it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from nsa.checkpoint.weights import write_atomically
from nsa.config import Config, load_config
from nsa.errors import CheckpointError, ConfigError, LaunchError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"


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
        except OSError:
            raise LaunchError(
                f"train.out_dir: another run is writing into {folder}; wait for it or choose another folder"
            ) from None
        yield


def refuse_other_config(folder: Path, config: Config) -> None:
    """A finished run answers for its own configuration only."""
    stored = load_config(folder / CONFIG_FILE).to_dict()
    wanted = config.to_dict()
    changed = [
        f"{section}.{key}" for section, keys in wanted.items() for key in keys if stored[section][key] != keys[key]
    ]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: {folder} holds a finished run with another value; "
            "choose another train.out_dir, or --fresh to train anew over it"
        )


def write_config(folder: Path, config: Config) -> None:
    write_atomically(folder / CONFIG_FILE, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())


def write_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    write_atomically(folder / METRICS_FILE, json.dumps(metrics, indent=2).encode() + b"\n")


def finished_metrics(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None where the folder holds none."""
    try:
        metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / METRICS_FILE}: cannot be read: {error}") from None
    return metrics if isinstance(metrics, dict) and metrics.get("status") == "done" else None
