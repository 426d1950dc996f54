"""A training run in processes of its own, under a time limit: what `nsa ready` and `nsa doctor` are made of.

A trial is started as a user would start it, `nsa train` alone or under `torchrun`, from a configuration file that lies
beside its folder. Whatever becomes of it, no process of it is left when `run_trial` returns.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil
import yaml

from nsa.config import Config
from nsa.errors import ConfigError, LaunchError
from nsa.inspect.reading import RunView

POLL_S = 0.25
DUMP_S = 3.0  # what ranks get to write their stacks before they are killed
LAUNCHER_SPEAKS = "torch/distributed/elastic/multiprocessing/api.py"
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Trial:
    """`config` trained into `folder` by `nproc` processes. `faults` are armed in them (nsa.faults)."""

    name: str
    config: Config
    folder: Path
    nproc: int
    limit_s: float
    arguments: tuple[str, ...] = ()  # of `nsa train`
    faults: str = ""

    @property
    def config_file(self) -> Path:
        return self.folder.with_name(self.folder.name + ".yaml")

    @property
    def log_file(self) -> Path:
        """Everything the processes and their launcher printed."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def command(self) -> list[str]:
        return train_command(self.config_file, self.nproc, self.arguments)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `exit_code` is the run's own where it left word, else its launcher's."""

    trial: Trial
    exit_code: int
    timed_out: bool
    seconds: float
    reason: str  # empty where it did all it should

    @property
    def passed(self) -> bool:
        return not self.reason

    def last_lines(self, count: int = 20) -> list[str]:
        return _said(self.trial.log_file)[-count:]


def train_command(config_file: Path, nproc: int, arguments: tuple[str, ...] = ()) -> list[str]:
    """What starts the run on this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    return [sys.executable, *launcher, "-m", "nsa", "train", str(config_file), *arguments]


def spelled(config_file: Path | str, nproc: int, overrides: tuple[str, ...] = ()) -> str:
    """The same as a person would type it."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(nproc), "-m", "nsa"] if nproc > 1 else ["nsa"]
    return shlex.join([*start, "train", str(config_file), *overrides])


def write_trial_config(trial: Trial) -> None:
    tree = trial.config.to_dict()
    tree["train"]["out_dir"] = str(trial.folder)
    try:
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        trial.config_file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{trial.config_file}: cannot be written: {error.strerror}; choose another --out") from None


def run_trial(trial: Trial, watch: Callable[[RunView | None, float], None] = lambda view, seconds: None) -> Outcome:
    """Runs it to its end or its limit. `watch` is called again and again with how the run stands."""
    write_trial_config(trial)
    began, timed_out = time.monotonic(), False
    reader = RunView(trial.folder)
    with _started(trial) as (process, members):
        while (code := process.poll()) is None:
            seconds = time.monotonic() - began
            members.update(family(process.pid))
            if seconds > trial.limit_s:
                timed_out = True
                _dump_stacks(process)
                break
            watch(_look(reader), seconds)
            time.sleep(POLL_S)
    seconds = time.monotonic() - began
    view = _look(reader)
    watch(view, seconds)
    return _judge(trial, view, code, seconds, timed_out=timed_out)


def _judge(trial: Trial, view: RunView | None, code: int | None, seconds: float, *, timed_out: bool) -> Outcome:
    if timed_out:
        where = "before its first step" if view is None or not view.step else f"after step {view.step}"
        return Outcome(trial, 6, True, seconds, f"no end after {trial.limit_s:g} s: it stood {where}")
    metrics = view.metrics if view else {}
    assert code is not None
    own = metrics.get("exit_code")
    exit_code = own if code and isinstance(own, int) and own else code
    if exit_code:
        said = str(metrics.get("reason") or _last_error(trial.log_file) or "it said nothing")
        return Outcome(trial, exit_code, False, seconds, f"exit code {exit_code}: {said}")
    wanted, done = trial.config.train.steps, view.step if view else 0
    if done != wanted or metrics.get("status") != "done":
        return Outcome(trial, 0, False, seconds, f"did {done} of {wanted} steps and called itself done")
    return Outcome(trial, 0, False, seconds, "")


@contextlib.contextmanager
def _started(trial: Trial) -> Iterator[tuple[subprocess.Popen[bytes], set[psutil.Process]]]:
    """The process, and a set that takes up whatever it starts: all of it is gone in the end, also when we are
    interrupted or asked to stop ourselves, and also what a launcher that is dead left behind."""
    members: set[psutil.Process] = set()
    with trial.log_file.open("wb") as log, _stoppable():
        process = subprocess.Popen(  # noqa: S603
            trial.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(trial.faults)
        )
        try:
            yield process, members
        finally:
            members.update(family(process.pid))
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM unwinds us like Ctrl-C does, so that nothing we started is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment(faults: str = "") -> dict[str, str]:
    """Ours without what the trial's file says already or its launcher will say."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NSA_", "TORCHELASTIC_")) and name not in LAUNCHER_VARIABLES
    }
    armed = ",".join(filter(None, (os.environ.get("NSA_FAULTS", ""), faults)))
    return {**kept, "PYTHONUNBUFFERED": "1", **({"NSA_FAULTS": armed} if armed else {})}


def refuse_launcher() -> None:
    """A command that starts processes itself must not be started by torchrun."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError("started by torchrun; start it alone, it starts the processes itself: --nproc N")


def default_nproc(config: Config) -> int:
    """A process a GPU; one where there is none, or where the configuration wants one."""
    if config.parallel.strategy == "single" or config.runtime.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def family(pid: int) -> list[psutil.Process]:
    """The process and everything it started, itself last."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _dump_stacks(process: subprocess.Popen[bytes]) -> None:
    """Asks every rank for its stacks. The launcher, which would die of the signal, is not asked."""
    asked = False
    for member in family(process.pid):
        with contextlib.suppress(psutil.Error):
            line = member.cmdline()
            if "train" in line and "torch.distributed.run" not in line:
                member.send_signal(signal.SIGUSR2)
                asked = True
    if asked:
        time.sleep(DUMP_S)


def _look(reader: RunView) -> RunView | None:
    try:
        return reader.refresh()
    except ConfigError:  # the run has written nothing yet
        return None


def _tail(path: Path, count: int) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, count)]
    except OSError:
        return []


def _said(log: Path) -> list[str]:
    """The last lines of the run itself, not those in which torchrun tells that a process has failed."""
    lines = _tail(log, 200)
    own = list(takewhile(lambda line: LAUNCHER_SPEAKS not in line, lines))
    return own or lines


def _last_error(log: Path) -> str | None:
    """The last line that says what went wrong."""
    lines = _said(log)
    marked = [line for line in lines if line.startswith(("error:", "stopped:")) or "Error: " in line]
    spoken = marked or [line for line in lines if line.strip()]
    return spoken[-1] if spoken else None
