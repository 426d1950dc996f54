"""Processes that start at once: forked from one that has imported torch and nsa and done nothing else.

They are real processes with their own environment, signals and exit code, as `python -m MODULE` or `python SCRIPT`
would start them, less three seconds of imports each. One starter serves a test process. A command may have a starter
of its own, for the Python programs that it starts in turn.
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
import threading
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
        if self.returncode is None and (status := _ask({"poll": self.pid})["status"]) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
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


def _ask(message: dict, *handles: int) -> dict:
    with _ASKING:
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
    global _starter
    _starter = lambda owner: ours  # noqa: E731
    popen = subprocess.Popen
    really_execute, really_wait, really_poll = popen._execute_child, popen._try_wait, popen._internal_poll

    def execute(self, args, *options):
        words = [str(word) for word in args]
        if words[1:2] == ["-u"]:  # torchrun's
            del words[1]
        self.is_warm = words[:2] == [sys.executable, "-m"]
        if not self.is_warm:
            really_execute(self, args, *options)
            return
        cwd, env, pipes, new_session = options[4], options[5], options[9:15], options[20]
        handles = [stream if pipe == -1 else pipe for stream, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        known = {**(os.environ if env is None else env)}
        asked = {"argv": words[2:], "env": known, "cwd": str(cwd or Path.cwd()), "new_session": new_session}
        self.pid = _ask(asked, *handles)["pid"]
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def wait(self, flags):
        if not self.is_warm:
            return really_wait(self, flags)
        while (status := _ask({"poll": self.pid})["status"]) is None and not flags:
            time.sleep(POLL_S)
        return (0, 0) if status is None else (self.pid, status)

    def poll(self, _deadstate=None):
        return really_poll(self, _deadstate, lambda pid, flags: self._try_wait(flags))

    popen._execute_child, popen._try_wait, popen._internal_poll = execute, wait, poll
    return None


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
