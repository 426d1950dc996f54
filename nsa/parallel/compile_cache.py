"""The folder where torch.compile keeps compiled code, so that the next start of a configuration does not compile again.

PyTorch looks up graphs and kernels in the folder by itself, but its default is a folder in /tmp, which a reboot
empties, and it never removes a file.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

MAX_BYTES = 4 * 2**30
ROOM = 2**24  # bytes; PyTorch ends the run where it cannot write a file
WRITTEN_S = 60.0  # another process may still write an empty file that is younger


def use_compile_cache() -> None:
    """Makes PyTorch keep compiled code in `nsa/compiled` of the user's cache folder, and bounds the size of this
    folder. A folder that TORCHINDUCTOR_CACHE_DIR names belongs to the user: it is used as it is."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "nsa", "compiled")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(folder, MAX_BYTES)
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(ROOM))
    except (OSError, RuntimeError):  # not writable, no room, or (RuntimeError) the user has no home: PyTorch's default
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # Triton's default is ~/.triton until PyTorch compiles its first kernel, and then a folder in this one: a start
    # that finds its graphs would look for the kernels of this package elsewhere than the start that compiled them.
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _remove_oldest(root: Path, max_bytes: int) -> None:
    """Empties the folders that were unused for longest until the others fit, and those with an empty file. A folder has
    all files of a kernel, and Triton fails where it finds some of them. A power failure leaves empty files, with which
    PyTorch fails. Other processes may compile or remove files at the same time."""
    found: list[tuple[float, int, list[Path]]] = []
    for folder, _, names in os.walk(root):  # ignores folders that vanish
        used, size, paths, is_damaged = 0.0, 0, [Path(folder, name) for name in names], False
        for path in paths:
            with suppress(OSError):
                status = path.lstat()
                used, size = max(used, status.st_atime, status.st_mtime), size + status.st_size
                is_written = time.time() - status.st_mtime > WRITTEN_S
                is_damaged |= is_written and not status.st_size and path.suffix != ".lock"
        found.append((0.0 if is_damaged else used, size, paths))
    excess = sum(size for _, size, _ in found) - max_bytes
    for used, size, paths in sorted(found):
        if excess <= 0 < used:
            return
        excess -= size
        for path in paths:
            with suppress(OSError):
                path.unlink()
