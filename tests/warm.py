"""Processes that start at once: forked from one that has imported torch and nsa and done nothing else.

They are real processes with their own environment, signals and exit code, as `python -m MODULE` or `python SCRIPT`
would start them, less three seconds of imports each, and half a second in which Python frees its objects at the end:
tests of the end of a process start Python themselves. One starter serves a test process. A command may have a starter
of its own, for the Python programs that it starts in turn.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.02
_ColdPopen = subprocess.Popen


class Process:
    """What tests use of subprocess.Popen, for a child of the starter; its output is text."""

    def __init__(self, pid: int, stdout: int | None = None, stderr: int | None = None):
        self.pid, self.returncode, self.args = pid, None, f"process {pid}"
        self.stdout, self.stderr = (
            None if output is None else os.fdopen(output, encoding="utf-8", errors="replace")
            for output in (stdout, stderr)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and (status := _ask({"poll": self.pid})["status"]) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Output goes to a file, so nobody has to drain a pipe while the process runs."""
        self.wait(timeout)
        found = []
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.seek(0)
            found.append(None if stream is None else stream.read())
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    program: str,
    *arguments: str,
    env: dict[str, str],
    cwd: Path = ROOT,
    console: int | None = None,
    starts_others: bool = False,
) -> Process:
    """`python -m program arguments`, or `python program arguments` where it ends in .py, in the folder `cwd`.

    Standard output and standard error are read together, or go to the descriptor `console`. What a program that
    `starts_others` starts with `python -m` starts at once, too.
    """
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    written = output if console is None else console
    asked = {"argv": [program, *arguments], "env": env, "cwd": str(cwd), "starts_others": starts_others}
    with Path(os.devnull).open() as nothing:
        return Process(_ask(asked, nothing.fileno(), written, written)["pid"], output)


_ASKING = threading.Lock()
_own: socket.socket | None = None  # of the starter that a program which `starts_others` has


def _ask(message: dict, *handles: int) -> dict:
    with _ASKING:
        starter = _own or _starter(os.getpid())
        socket.send_fds(starter, [json.dumps(message).encode()], list(handles))
        return json.loads(starter.recv(1 << 16))


@functools.cache
def _starter(owner: int) -> socket.socket:
    """The starter of this process, `owner`; it ends when its socket closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def _serve(handle: int) -> None:
    """In the starter: forks children and reports how they ended. Returns in a child, with everything set for it."""
    asked = socket.socket(fileno=handle)
    while True:
        text, handles, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        if not text:
            os._exit(0)
        message = json.loads(text)
        if "poll" in message:
            ended, status = os.waitpid(message["poll"], os.WNOHANG)
            asked.send(json.dumps({"status": status if ended else None}).encode())
            continue
        assert not _threads(), "a thread would not survive the fork"
        pid = os.fork()
        if pid:
            for handle in handles:
                os.close(handle)
            asked.send(json.dumps({"pid": pid}).encode())
            continue
        asked.close()
        # Ignored where the tests themselves run under nohup, or in the background of a shell.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, handle in enumerate(handles):
            os.dup2(handle, stream)
            os.close(handle)
        if message.get("new_session"):
            os.setsid()
        os.environ.clear()
        os.environ.update(message["env"])
        sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)
        os.chdir(message["cwd"])
        sys.argv = message["argv"]
        if message.get("starts_others"):
            asked = _own_starter()
            if asked is not None:
                continue
        return


def _own_starter() -> socket.socket | None:
    """In a child: forks a starter for what the child starts with `python -m`; its socket, in the starter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        return theirs
    theirs.close()
    global _own
    _own = ours
    return None


class Popen(_ColdPopen):
    """`subprocess.Popen` in a program that `starts_others`: its own starter starts `python -m`. The arguments
    are given by name, as `subprocess` documents them."""

    def __new__(cls, args, **options):
        words = [str(word) for word in args]
        if words[1:2] == ["-u"]:  # torchrun's
            del words[1]
        streams = [options.get(name) for name in ("stdin", "stdout", "stderr")]
        pipes = [stream == subprocess.PIPE for stream in streams]
        if _own is None or words[:2] != [sys.executable, "-m"] or pipes[0] or (any(pipes) and not options.get("text")):
            return _ColdPopen(args, **options)
        files = [os.memfd_create("output", os.MFD_CLOEXEC) if is_pipe else None for is_pipe in pipes[1:]]
        streams[1:] = [stream if file is None else file for stream, file in zip(streams[1:], files, strict=True)]
        with Path(os.devnull).open("r+b") as nothing:
            handles = [_handle(stream, default, nothing) for default, stream in enumerate(streams)]
            if streams[2] == subprocess.STDOUT:
                handles[2] = handles[1]
            asked = {
                "argv": words[2:],
                "env": dict(options.get("env") or os.environ),
                "cwd": str(options.get("cwd") or Path.cwd()),
                "new_session": options.get("start_new_session", False),
            }
            return Process(_ask(asked, *handles)["pid"], *files)


def _handle(stream, default: int, nothing) -> int:
    if stream in (None, subprocess.STDOUT):
        return default
    if stream == subprocess.DEVNULL:
        return nothing.fileno()
    return stream if isinstance(stream, int) else stream.fileno()


def _threads() -> list[str]:
    """Names of the threads beside the main one, without that of pyarrow's allocator, which handles forks."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return [name for task in others if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]


def _end(codes: list[int]) -> None:
    """Ends a process that exits with a code. It has waited for its threads and called all other exit functions; Python
    would still free every object, which copies the pages of the starter: as much work as a short run."""
    with suppress(OSError, ValueError):  # Python reports output that cannot be written
        for stream in (sys.stdout, sys.stderr) if codes else ():
            stream.flush()
        if codes:
            os._exit(codes[0])


def _main() -> None:
    codes: list[int] = []
    atexit.register(_end, codes)  # before all others, and so called after them
    subprocess.Popen = Popen  # before torch takes the name from there
    import torch._inductor  # noqa: F401 (deterministic mode imports it)

    import nsa.cli.main
    import nsa.train.loop  # noqa: F401

    # What is imported is no garbage: a child that looked through it would copy every page, a second's work as it ends.
    gc.collect()
    gc.freeze()
    _serve(int(sys.argv[1]))
    program = sys.argv[0]
    try:
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        codes.append(0)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            codes.append(error.code or 0)
        raise


if __name__ == "__main__":
    _main()
