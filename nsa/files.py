"""Safe file access inside run folders, which may come from anywhere, and atomic writes.

All code that reads or writes inside a run folder opens its files with these functions: only regular files, no links, a
bounded size. The path of the folder itself may contain links. All functions but `locked` raise OSError.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from nsa.errors import NSAError, reworded

LARGEST_DOCUMENT = 64 * 2**20  # bytes of a file that is read whole
LARGEST_LOG = 4 * 2**30  # bytes of a file that is read line by line
# Temporary names of `open_replacement`. Version 0.1 used the process id instead of a random number.
_UNFINISHED = re.compile(r"\..+\.(csv|docs|html|jinja|json|safetensors|tokens|txt|yaml)\.([0-9a-f]{16}|\d+)")


def expand_home(path: str) -> Path:
    """Replaces `~` by the home folder. Keeps the `~name` of an unknown user, for which Path.expanduser would fail."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open` that accepts only regular files. It refuses links, which could lead a write out of the
    folder, and does not block on a pipe. Raises OSError."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if Path(path).is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    os.set_blocking(file, True)
    return file


def open_regular(path: Path, most: int = LARGEST_LOG) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError, also if the file has more than `most` bytes."""
    file = cast(BinaryIO, open(path, "rb", opener=regular))  # noqa: SIM115  (the caller closes it)
    if os.fstat(file.fileno()).st_size > most:
        file.close()
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return file


def read_regular(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """Returns the content of a regular file. Raises OSError."""
    with open_regular(path, most) as file:
        return file.read()


def make_folder(path: Path) -> None:
    """Creates a folder inside a run folder. The folder may exist, but must not be a link. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))


def write_flushed(path: Path, content: bytes) -> None:
    """Writes the file in place and waits until its content is on disk."""
    with open(path, "wb", opener=regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a temporary file, flushes and renames it: readers see the old or the new file, even after a crash."""
    with open_replacement(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Replaces the file without waiting for the disk: a crash of the machine may lose it."""
    with open_replacement(path) as file:
        file.write(text.encode())


@contextmanager
def locked(path: Path, kind: type[NSAError], name: str, busy: str) -> Iterator[IO[str]]:
    """Creates a folder and locks it for this process by the file `path` in it, which it yields. Errors are of this
    `kind`: with the message `busy` if another process holds the lock, else with one that begins with `name`."""
    import fcntl  # Unix only

    caught = (OSError, ValueError)  # ValueError: a name with a NUL character
    with reworded(kind, f"{name} cannot be used", "choose another folder", caught):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a", opener=regular)  # noqa: SIM115  (held below)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise kind(busy) from None
        except OSError as error:
            raise kind(f"{name} cannot be locked: {error.strerror}; choose a folder on another disk") from None
        remove_unfinished(path.parent)
        yield lock


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` for writing. On exit the file replaces `path`; on an error it is removed.

    A process id would not make the temporary name unique: containers that share a volume have the same ids.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = open(aside, "xb", opener=regular)  # noqa: SIM115  (closed below)
    try:
        with file:
            yield file
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of processes that were killed. No other process may be writing to the folder."""
    for path in folder.glob(".*.*"):
        if _UNFINISHED.fullmatch(path.name) and not path.is_dir():
            with suppress(OSError):
                path.unlink()


def flush_folder(folder: Path) -> None:
    """Waits until the entries of the folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
