"""Training runs in separate processes with a time limit: the building block of `nsa ready` and `nsa doctor`.

A trial starts in the same way as a user's run, with `nsa train` alone or under `torchrun`, from a configuration file
next to its folder. When `run_trial` returns, all processes of the trial have ended, however the trial ended.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from nsa.config import Config, parse_config
from nsa.errors import CheckpointError, HangError, LaunchError, reworded
from nsa.files import locked, make_folder, read_regular, regular, replace_file, write_whole
from nsa.inspect.reading import RunView, read_run
from nsa.plain_yaml import dump_yaml
from nsa.run_folder import (
    CHECKPOINTS_FOLDER,
    HEARTBEAT,
    LOCK_FILE,
    NONFINITE_FOLDER,
    WEIGHTS_FILE,
    read_events,
    stack_dumps,
)

POLL_S = 0.25
DUMP_S = 3.0  # time for the ranks to write their stacks before they are killed
LAUNCHER_REPORT = "torch/distributed/elastic/multiprocessing/api.py"  # in torchrun's lines about a failed process
TIMER_LINE = re.compile(rb"^Timeout \(\d", re.MULTILINE)  # first line of faulthandler.dump_traceback_later
# Prefixes of variables whose values are in the trial's file or that its launcher sets.
OWN_VARIABLES = ("NSA_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "MASTER_")

# Overrides for runs that need no data files and no network.
SYNTHETIC: Mapping[str, Any] = {
    "data.source": "synthetic",
    "data.paths": [],
    "data.mixture": [],
    "telemetry.tracker": "none",
}

OnProgress = Callable[[RunView | None, float], None]  # the state of the run, and seconds since its start


@dataclass(frozen=True)
class Trial:
    """Trains `config` in `folder` with `nproc` processes, which arm `faults` (nsa.faults)."""

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
        """The output of all processes and their launcher."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def command(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.nproc)]
        launcher = torchrun if self.nproc > 1 else []
        return [sys.executable, *launcher, "-m", "nsa", "train", str(self.config_file), *self.arguments]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `exit_code` is HangError's after a hang, otherwise the exit code in metrics.json, or the
    launcher's if there is none."""

    trial: Trial
    exit_code: int
    timed_out: bool
    seconds: float
    reason: str  # why the trial failed; empty if it passed
    view: RunView | None = None  # its folder at the end; None if it wrote nothing
    last_lines: tuple[str, ...] = ()  # of its output

    @property
    def passed(self) -> bool:
        return not self.reason


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the configuration with other values, by `section.key`. With another number of steps, the warm-up of an
    index lasts the same share of them."""
    if "train.steps" in changes and config.msa.warmup_steps:
        warmup_steps = -(-config.msa.warmup_steps * changes["train.steps"] // config.train.steps)
        changes = {**changes, "msa.warmup_steps": warmup_steps}
    return parse_config(config.to_dict(), "trial", [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def format_command(config_file: Path, nproc: int, overrides: tuple[str, ...] = ()) -> str:
    """Returns the command line of a run for the user."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(nproc), "-m", "nsa"] if nproc > 1 else ["nsa"]
    return shlex.join([*start, "train", str(config_file), *overrides])


def write_trial_config(trial: Trial) -> None:
    tree = trial.config.to_dict()
    tree["train"]["out_dir"] = str(trial.folder)
    with reworded(LaunchError, f"{trial.config_file}: cannot be written", "choose another --out"):
        make_folder(trial.folder.parent)
        write_whole(trial.config_file, dump_yaml(tree))


def run_trial(trial: Trial, on_progress: OnProgress = lambda view, seconds: None) -> Outcome:
    """Runs the trial until it ends or reaches its time limit."""
    write_trial_config(trial)
    began = time.monotonic()
    with _started(trial) as (process, members):
        while (code := process.poll()) is None and time.monotonic() - began <= trial.limit_s:
            members.update(_process_tree(process.pid))
            on_progress(_read(trial.folder), time.monotonic() - began)
            time.sleep(POLL_S)
        if code is None:
            _dump_stacks(trial, process)
    seconds, view = time.monotonic() - began, _read(trial.folder)
    on_progress(view, seconds)
    return outcome_of(trial, view, code, seconds)


def outcome_of(trial: Trial, view: RunView | None, code: int | None, seconds: float) -> Outcome:
    """Judges a run by its folder and the exit code of its launcher, None after the time limit."""
    metrics, done, wanted = view.metrics if view else {}, view.step if view else 0, trial.config.train.steps
    own, reason = metrics.get("exit_code"), ""
    timer, printed = _dumped_by_timer(trial.folder) if code else "", last_lines(trial.log_file)
    exit_code = HangError.exit_code if code is None or timer else own if code and isinstance(own, int) and own else code
    if timer:
        reason = f"exit code {code}: hang in C code that held the GIL; {timer}"
    elif code is None:
        place = f"after step {done}" if done else "before its first step"
        reason = f"did not end within {trial.limit_s:g} s: it stopped {place}"
    elif exit_code:
        last = next(filter(str.strip, reversed(printed)), "no output")
        reason = f"exit code {exit_code}: {metrics.get('reason') or last}"
    elif done != wanted or metrics.get("status") != "done":
        reason = f"ended with success after {done} of {wanted} steps"
    return Outcome(trial, exit_code, code is None, seconds, reason, view, tuple(printed))


def _dumped_by_timer(folder: Path) -> str:
    """Returns the stack dump of a rank that its C timer ended because the watchdog could not run; empty if none."""
    dumps = stack_dumps().find(folder).values() if folder.is_dir() else ()
    return next((path.name for path in dumps if TIMER_LINE.search(read_regular(path))), "")


def last_lines(log: Path, count: int = 20) -> list[str]:
    """Returns the last lines of a run's output, without torchrun's report of a failed process."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]
    except OSError:
        return []
    own = list(takewhile(lambda line: LAUNCHER_REPORT not in line, lines))
    return (own or lines)[-count:]


@contextlib.contextmanager
def _started(trial: Trial) -> Iterator[tuple[subprocess.Popen[bytes], set[psutil.Process]]]:
    """Yields the process, and a set for its descendants. Kills all of them at the end, also if this process is
    interrupted, even while it starts them, or if the launcher has died."""
    process, members, before = None, set[psutil.Process](), set(_process_tree(os.getpid()))
    with open(trial.log_file, "ab" if trial.folder.exists() else "wb", opener=regular) as log:
        try:
            process = subprocess.Popen(  # noqa: S603
                trial.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment(trial.faults),
            )  # fmt: skip
            yield process, members
        finally:
            members.update(set(_process_tree(os.getpid())) - before)
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            if process is not None:
                process.wait()


def prepare_to_launch() -> None:
    """Prepares a command that starts processes: raises LaunchError under torchrun, and makes SIGTERM unwind the stack
    as Ctrl-C does, so that no process is left running."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError("started by torchrun; start it without torchrun: --nproc N starts the processes")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def hold_results(folder: Path) -> Iterator[None]:
    """Locks the folder of a check, which replaces the trials of an earlier check. Raises LaunchError if the folder
    holds files and was never locked."""
    with reworded(LaunchError, f"--out: {str(folder)!r} cannot be used", "choose another folder"):
        is_foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / LOCK_FILE).exists()
    if is_foreign:
        raise LaunchError(f"--out: {folder} holds files that are not of a check; choose a new or empty folder")
    busy = f"--out: another run is writing into {folder}; wait for it or choose another folder"
    with locked(folder / LOCK_FILE, LaunchError, f"--out: {str(folder)!r}", busy):
        yield


def environment(faults: str = "") -> dict[str, str]:
    """Returns the environment of a trial: that of this process without OWN_VARIABLES."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    armed = ",".join(filter(None, (os.environ.get("NSA_FAULTS", ""), faults)))
    return {**kept, "PYTHONUNBUFFERED": "1", **({"NSA_FAULTS": armed} if armed else {})}


def usable_gpus(config: Config) -> int:
    """Returns the number of GPUs that a run of the configuration could use; 0 if it runs on the CPU."""
    if config.runtime.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _process_tree(pid: int) -> list[psutil.Process]:
    """Returns the process and all its descendants."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _dump_stacks(trial: Trial, process: subprocess.Popen[bytes]) -> None:
    """Signals every rank that has started to dump its stacks. The signal would kill any other process."""
    ranks = HEARTBEAT.find(trial.folder) if trial.folder.is_dir() else {}
    started = {event.get("pid") for rank in ranks for event in read_events(trial.folder, rank)}
    asked = [member for member in _process_tree(process.pid) if member.pid in started]
    for member in asked:
        with contextlib.suppress(psutil.Error):
            member.send_signal(signal.SIGUSR2)
    time.sleep(DUMP_S if asked else 0.0)


def _read(folder: Path) -> RunView | None:
    try:
        return read_run(folder)
    except CheckpointError:  # the run has written nothing yet
        return None


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes each file atomically."""
    for name, text in contents.items():
        with reworded(LaunchError, f"{folder / name}: cannot be written", "choose another folder with --out"):
            replace_file(folder / name, text.encode())


def remove_weights(folder: Path, *, keep_nonfinite: bool = True) -> None:
    """Removes weights, which are large and not evidence, except those of a non-finite step if `keep_nonfinite`."""
    for name in (CHECKPOINTS_FOLDER, *(() if keep_nonfinite else (NONFINITE_FOLDER,))):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
