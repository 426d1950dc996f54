"""Opening files that somebody else may have prepared (a run folder may come from anywhere), and writing them whole.

Whoever reads or writes inside a run folder opens its files here: only regular files, no links, a bounded size. The
folder itself may be reached through links. All functions raise OSError.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

LARGEST_DOCUMENT = 64 * 2**20  # bytes of a file that is read whole
LARGEST_LOG = 4 * 2**30  # of one that is read line by line
# Names of `open_replacement`; version 0.1 put the process id in place of the random part.
_UNFINISHED = re.compile(r"\..+\.(docs|json|safetensors|txt|yaml)\.([0-9a-f]{16}|\d+)")


def expand_home(path: str) -> Path:
    """The path with `~` as the home folder. An unknown user's `~name` stays, where Path.expanduser would fail."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open`: a regular file, never one behind a link, which could lead a write out of the folder.
    A pipe does not block it. Raises OSError."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if Path(path).is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise OSError(errno.EINVAL, "it is no regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    os.set_blocking(file, True)
    return file


def open_regular(path: Path, most: int = LARGEST_LOG) -> BinaryIO:
    """For reading. Raises OSError, also where the file has more than `most` bytes."""
    file = cast(BinaryIO, open(path, "rb", opener=regular))  # noqa: SIM115  (the caller closes it)
    if os.fstat(file.fileno()).st_size > most:
        file.close()
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return file


def read_regular(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """The whole file. Raises OSError."""
    with open_regular(path, most) as file:
        return file.read()


def make_folder(path: Path) -> None:
    """A folder inside a run folder; it may be there already, but not as a link. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))


def write_flushed(path: Path, content: bytes) -> None:
    """Writes in place and waits until it is on disk."""
    with open(path, "wb", opener=regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes beside the place, flushes, renames: a reader sees the old file or the new one, after a crash too."""
    with open_replacement(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(path.parent)


def write_whole(path: Path, text: str) -> None:
    """The same without waiting for the disk: after a crash of the machine the file may be lost."""
    with open_replacement(path) as file:
        file.write(text.encode())


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file beside `path` for writing. At the end it replaces `path`; if anything raises, it is removed.

    A process id would not make the name unique: containers that share a volume have the same ids.
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


def ends_amid_line(file: FileIO) -> bool:
    """Whether a file that was opened to append ("a+b") has a last line without an end."""
    size = os.fstat(file.fileno()).st_size
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"


def remove_unfinished(folder: Path) -> None:
    """Removes what `replace_file` left in a process that was killed. No other may be writing there now."""
    for path in folder.glob(".*.*"):
        if _UNFINISHED.fullmatch(path.name) and not path.is_dir():
            with suppress(OSError):
                path.unlink()


def flush_folder(folder: Path) -> None:
    """Waits until the folder's names are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
