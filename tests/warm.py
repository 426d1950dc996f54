"""Processes that start at once: forked from one that has imported torch and nsa and done nothing else.

They are real processes with their own environment, signals and exit code, as `python -m MODULE` or `python SCRIPT`
would start them, less three seconds of imports each. One starter serves a test process.
"""

import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.02


class Process:
    """What tests use of subprocess.Popen, for a child of the starter; its output is text."""

    def __init__(self, pid: int, output: int):
        self.pid, self.returncode = pid, None
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Output goes to a file, so nobody has to drain a pipe while the process runs."""
        self.wait(timeout)
        self.stdout.seek(0)
        return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(program: str, *arguments: str, env: dict[str, str], cwd: Path = ROOT, console: int | None = None) -> Process:
    """`python -m program arguments`, or `python program arguments` where it ends in .py, in the folder `cwd`.

    Standard output and standard error are read together, or go to the descriptor `console`.
    """
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    asked = {"argv": [program, *arguments], "env": env, "cwd": str(cwd)}
    return Process(_ask(asked, output if console is None else console)["pid"], output)


def _ask(message: dict, *handles: int) -> dict:
    starter = _starter(os.getpid())
    socket.send_fds(starter, [json.dumps(message).encode()], list(handles))
    return json.loads(starter.recv(1 << 16))


@functools.cache
def _starter(owner: int) -> socket.socket:
    """The starter of this process, `owner`; it ends when its socket closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def _serve(handle: int) -> None:
    """In the starter: forks children and reports how they ended. Returns in a child, with everything set for it."""
    asked = socket.socket(fileno=handle)
    while True:
        text, handles, _, _ = socket.recv_fds(asked, 1 << 20, 1)
        if not text:
            sys.exit(0)
        message = json.loads(text)
        if "poll" in message:
            ended, status = os.waitpid(message["poll"], os.WNOHANG)
            asked.send(json.dumps({"code": os.waitstatus_to_exitcode(status) if ended else None}).encode())
            continue
        assert not _threads(), "a thread would not survive the fork"
        pid = os.fork()
        if pid:
            os.close(handles[0])
            asked.send(json.dumps({"pid": pid}).encode())
            continue
        asked.close()
        # Ignored where the tests themselves run under nohup, or in the background of a shell.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (1, 2):
            os.dup2(handles[0], stream)
        os.close(handles[0])
        os.environ.clear()
        os.environ.update(message["env"])
        os.chdir(message["cwd"])
        sys.argv = message["argv"]
        return


def _threads() -> list[str]:
    """Names of the threads beside the main one, without that of pyarrow's allocator, which handles forks."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return [name for task in others if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]


def _main() -> None:
    import torch._inductor  # noqa: F401 (deterministic mode imports it)

    import nsa.cli.main
    import nsa.train.loop  # noqa: F401

    # What is imported is no garbage: a child that looked through it would copy every page, a second's work as it ends.
    gc.collect()
    gc.freeze()
    _serve(int(sys.argv[1]))
    program = sys.argv[0]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
