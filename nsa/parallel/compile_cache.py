"""The folder where torch.compile keeps compiled code, so that the next start of a configuration does not compile again.

PyTorch looks up graphs and kernels in the folder by itself, but its default is a folder in /tmp, which a reboot
empties, and it never removes a file.
"""

import os
from pathlib import Path

MAX_BYTES = 4 * 2**30


def use_compile_cache() -> None:
    """Makes PyTorch keep compiled code in `nsa/compiled` of the user's cache folder, and bounds the size of this
    folder. A folder that TORCHINDUCTOR_CACHE_DIR names belongs to the user: it is used as it is."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "nsa", "compiled")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return
    if is_writable:  # else PyTorch's default
        _remove_oldest(folder, MAX_BYTES)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        # Triton's default is ~/.triton until PyTorch compiles its first kernel, and then a folder in this one: a start
        # that finds its graphs would look for the kernels of this package elsewhere than the start that compiled them.
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _remove_oldest(folder: Path, max_bytes: int) -> None:
    """Removes the files that were unused for longest until the others fit. Other processes may do so at the same time;
    PyTorch compiles again where it does not find a file."""
    found = []
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if not path.is_dir():
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in found) - max_bytes
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        excess -= size
        path.unlink(missing_ok=True)
