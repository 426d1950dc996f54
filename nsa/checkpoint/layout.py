"""Where checkpoints lie in a run's folder, which there are, and which may go.

checkpoints/step_00000500/   a committed checkpoint: shards, state.json, random state, manifest.json
checkpoints/latest           name of the newest, for people and scripts
checkpoints/best             name of the one with the lowest validation loss
checkpoints/.writing-*       one that is being written; swept away when the next one starts
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from nsa.checkpoint.files import flush_folder, write_atomically
from nsa.checkpoint.manifest import verify
from nsa.errors import CheckpointError
from nsa.record.schema import CHECKPOINTS_FOLDER

FOLDER = CHECKPOINTS_FOLDER
LATEST, BEST = "latest", "best"
NEVER_DELETED = 2  # newest verified checkpoints
_NAME = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None
    return int(found[1])


def aside_of(root: Path, step: int) -> Path:
    return root / f".writing-{name_of(step)}"


def committed(root: Path) -> list[Path]:
    """Every checkpoint that was renamed into place, the newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=step_of, reverse=True)


def newest_verified(root: Path, on_damage: Callable[[CheckpointError], None]) -> Path | None:
    """The newest checkpoint whose every byte is as written. Damaged ones are reported and passed over."""
    for checkpoint in committed(root):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            on_damage(error)
        else:
            return checkpoint
    return None


def point_to(root: Path, pointer: str, checkpoint: str) -> None:
    write_atomically(root / pointer, checkpoint.encode() + b"\n")


def pointed(root: Path, pointer: str) -> str | None:
    try:
        name = (root / pointer).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return name if _NAME.fullmatch(name) else None


def sweep_asides(root: Path) -> None:
    for path in root.glob(".writing-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for pointer in (LATEST, BEST):
        for path in root.glob(f".{pointer}.*"):
            path.unlink()


def retain(root: Path, keep: int, is_sound: Callable[[Path], bool]) -> None:
    """Deletes what is older than the newest `keep`, except the best and the newest two that are sound."""
    best = pointed(root, BEST)
    for checkpoint in _expendable(committed(root), keep, best, is_sound):
        # Renamed first: a deletion that is cut short leaves nothing that looks like a checkpoint.
        gone = checkpoint.with_name(f".writing-deleted-{checkpoint.name}")
        checkpoint.rename(gone)
        flush_folder(root)
        shutil.rmtree(gone)


def _expendable(
    newest_first: list[Path], keep: int, best: str | None, is_sound: Callable[[Path], bool]
) -> Iterator[Path]:
    sound = 0
    for place, checkpoint in enumerate(newest_first):
        wanted = place < keep or checkpoint.name == best
        if sound < NEVER_DELETED and is_sound(checkpoint):
            sound += 1
            continue
        if not wanted:
            yield checkpoint
